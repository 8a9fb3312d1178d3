"""Seeded faults: small patches of the library, each a mistake that was made or could be, and the tests that notice it.

A file of this folder has the faults of one area. `python -m tests.faults` runs the tests that are named with each fault
against a copy of the library that has it.

    [[fault]]
    id = "mean-divides-by-n"             # unique, short words
    file = "funcga/normalizers.py"
    old = '''total.weight'''             # stands exactly once in the file
    new = '''total.steps'''
    why = "Uneven micro-batches are averaged as if they were even."
    killed_by = ["tests/core/test_table.py::test_gradient"]    # files, or names of tests with or without parameters
"""

import ast
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("funcga", "torch_backend", "jax_backend")


@dataclass(frozen=True)
class Fault:
    area: str
    id: str
    file: str
    old: str
    new: str
    why: str
    killed_by: tuple[str, ...]

    def patched(self):
        """The text of the file with the fault in it, or None if it does not apply (any more)."""
        path = ROOT / self.file
        text = path.read_text() if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 and self.old != self.new else None


def areas():
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def faults(area):
    rows = tomllib.loads((Path(__file__).parent / f"{area}.toml").read_text())["fault"]
    return [Fault(**{**row, "area": area, "killed_by": tuple(row["killed_by"])}) for row in rows]


def exists(test):
    """Whether there is such a folder, file or test; parameters are not looked at."""
    path, _, name = test.partition("[")[0].partition("::")
    return name in tests_in(path) if name else (ROOT / path).exists()


@functools.cache
def tests_in(path):
    """The names of a file's tests; those of a class after its own name."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {f"{c.name}::{node.name}" for c in classes for node in c.body if isinstance(node, ast.FunctionDef)}
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | methods
