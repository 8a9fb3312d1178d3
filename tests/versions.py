"""The promised versions, each tried: `python -m tests.versions` writes the table of docs/reference/versions.md.

A row is one Python, with the oldest packages that pyproject.toml promises or with the newest that pip finds for it. Each
gets an environment of its own, in which the core suite runs. That takes 6 GB, as most wheels of torch are built for CUDA,
and some ten minutes; the environment is deleted before the next.

    python -m tests.versions                    # all rows
    python -m tests.versions 3.13 newest        # only this one: the other rows of the table stay
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- python -m tests.versions -->\n", "<!-- end -->\n"

ROWS = (("3.11", "oldest"), ("3.11", "newest"), ("3.12", "newest"), ("3.13", "newest"))
PYTHONS = tuple(dict(ROWS))
FRAMEWORKS = ("torch", "jax", "optax", "flax")
TOOLS = ("equinox", "hypothesis", "pytest")

# Every engine, every private name and every kind of wrapper, in some minutes.
CORE = (
    "tests/call/test_accumulate.py", "tests/call/test_grad.py", "tests/coupled/test_coupled_torch.py",
    "tests/transform/test_multi_steps.py", "tests/torch_backend/test_private.py",
    "tests/torch_backend/test_private_wrapped.py", "tests/torch_backend/wrapped", "tests/torch_backend/reduce",
    "tests/torch_backend/engine/test_compiled_loss.py",
    "tests/jax_backend/test_private.py", "tests/jax_backend/test_nnx.py",
)  # fmt: skip


def floors():
    """(name, oldest version) of each framework, as the extras promise."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    promised = dict(each.split(">=") for extra in extras.values() for each in extra if ">=" in each)
    return [(name, promised[name]) for name in FRAMEWORKS]


def rows(page):
    """The lines of the table, by (Python, "oldest" or "newest")."""
    lines = page.split(BEGIN)[1].split(END)[0].splitlines()
    return {tuple(cells(line)[:2]): line for line in lines if cells(line)[:1] and cells(line)[0] in PYTHONS}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def with_rows(page, lines):
    before, rest = page.split(BEGIN)
    header = ["Python", "packages", *FRAMEWORKS, "core suite"]
    table = [
        "| " + " | ".join(header) + " |",
        "|---" * len(header) + "|",
        *(lines[row] for row in ROWS if row in lines),
    ]
    return "\n".join([f"{before}{BEGIN}", *table, "", f"{END}{rest.split(END)[1]}"])


def tried(python, age):
    """The line of a row, or an error that has the output of what failed."""
    packages = [f"{name}=={version}" for name, version in floors()] if age == "oldest" else FRAMEWORKS
    with tempfile.TemporaryDirectory(prefix="funcga-versions-") as folder:
        run(f"python{python}", "-m", "venv", folder, PYENV_VERSION=python)
        inside = f"{folder}/bin/python"
        run(inside, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages, *TOOLS)
        show = f"from importlib.metadata import version; print(*map(version, {FRAMEWORKS}))"
        versions = [version.split("+")[0] for version in run(inside, "-c", show).split()]
        outcome = run(inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE).splitlines()[-1]
    passed = re.search(r"\d+ passed", outcome)[0]
    return "| " + " | ".join([python, age, *versions, passed]) + " |"


def run(*command, **environment):
    """What a command prints; it is an error if it fails."""
    print("$", *command, flush=True)
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(command)} failed")
    return done.stdout


if __name__ == "__main__":
    for row in ROWS:
        if {*sys.argv[1:]} <= {*row}:
            line = tried(*row)
            page = PAGE.read_text()
            PAGE.write_text(with_rows(page, rows(page) | {row: line}))
            print(line, flush=True)
