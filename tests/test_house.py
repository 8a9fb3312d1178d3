"""The structural rows of the table that `python -m tests.house` prints: what must not grow again.

Each limit is the size of the library: lower it when the library shrinks. No row is raised.
"""

import ast
import subprocess
import sys

from tests import house

MOST = {
    "files": 146,
    "tokens": 218_192,
    # What is left when all tools are taken away: with parameters, containers and statistics, once counted as tools.
    "tokens of the core": 148_397,
    "tokens of the core, torch": 61_167,
    "tokens of tools": 69_795,
    "tokens of the doctor": 7_986,
    "tokens of packs": 1_025,
    "attributes of a class": 16,
    "fmt: skip": 0,
    "Any": 588,
    "getattr": 97,
    "lines of tests": 31_759,
    "files of tests that import what is private": 13,
}
# Functions entered, calls of them, and files that they are in.
CALLS = {"torch, warm": (54, 116, 15), "JAX, first": (116, 217, 21), "torch multi_steps, warm": (47, 91, 10)}


def test_the_library_stays_small():
    sizes = house.sizes()
    assert {name: sizes[name] for name, most in MOST.items() if sizes[name] > most} == {}


def test_no_function_is_hard_to_follow():
    assert {name: complexity for name, complexity in house.complexities().items() if complexity > 15} == {}


def test_no_module_imports_what_imports_it():
    assert house.cycles(house.imports()) == []


def test_a_call_runs_through_few_functions():
    """In a process of its own: what other tests have imported and configured adds to what a call looks at."""
    program = "from tests import house; print({name: house.trace(make()) for name, make in house.TRACES.items()})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=house.ROOT)
    entered = ast.literal_eval(done.stdout)
    beyond = {
        name: counts for name, counts in entered.items() if any(a > b for a, b in zip(counts, CALLS[name], strict=True))
    }
    assert beyond == {}


def test_the_counters_can_see():
    source = '"""Docstring."""\n# a comment\nfrom typing import Any\n\n\ndef f(x: Any) -> Any:\n    """Docstring."""\n    return getattr(x, "y")  # not a full line\n'
    assert house.code_tokens(source) == 4 + 10 + 7
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert house.trace(lambda: None) == (0, 0, 0)
