"""The reference: every public name has an example that runs, and stands on a page."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funcga
import jax_backend
import torch_backend
from funcga import checks, normalizers, observers, statistics, transforms, trees
from tests.core import test_folds
from tests.fold import test_laws

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
# A name that also stands on a package is that package's.
MODULES = [checks, observers, statistics, transforms, trees, jax_backend.hlo]
PUBLIC = [
    (package, name)
    for package, names in (
        (funcga, [*funcga.__all__, "max", "min", "sum"]),
        (torch_backend, torch_backend.__all__),
        (jax_backend, jax_backend.__all__),
        (normalizers, ["Moments", "Normalizer", "Pooled"]),
        *((module, module.__all__) for module in MODULES),
    )
    for name in names
    if package not in MODULES or not hasattr(importlib.import_module(package.__name__.split(".")[0]), name)
]


def test_every_fold_is_exported_and_on_its_pages():
    """A new one in funcga/folds.py is in no list by itself; what is missing says where to add it."""
    reference, howto = (REFERENCE / "folds.md").read_text(), (REFERENCE.parent / "howto" / "folds.md").read_text()
    own = [f for f in vars(funcga.folds).values() if inspect.isfunction(f) and f.__module__ == "funcga.folds"]
    folds = [function.__name__ for function in own if not function.__name__.startswith("_")]
    is_in_table = lambda name: re.search(rf"^\|.*\b{name}\(", howto, re.MULTILINE)
    missing = {
        "the imports of funcga/__init__.py": [name for name in folds if not hasattr(funcga, name)],
        "__all__ in funcga/__init__.py": [name for name in folds if name not in (*funcga.__all__, "max", "min", "sum")],
        "docs/reference/folds.md": [name for name in folds if f"autofunction:: funcga.{name}\n" not in reference],
        "a table of docs/howto/folds.md": [name for name in folds if not is_in_table(name)],
        "FOLDS in tests/problems.py or tests/fold/test_laws.py, or that of tests/core/test_folds.py": [
            name for name in folds if name not in {**test_laws.FOLDS, **test_folds.FOLDS}
        ],
    }
    assert not any(missing.values()), missing
    assert len(folds) >= 11


# The imports that the examples take for granted, as the first page of the reference says.
IMPORTS = {
    "F": F, "dist": dist, "funcga": funcga, "jax": jax, "jax_backend": jax_backend, "jnp": jnp, "nn": nn, "np": np,
    "optax": optax, "torch": torch, "torch_backend": torch_backend,
}  # fmt: skip
FLAGS = doctest.IGNORE_EXCEPTION_DETAIL | doctest.NORMALIZE_WHITESPACE


def examples(value):
    """The docstrings of a public name that have examples: its own first, then those of its methods."""
    methods = vars(value).values() if inspect.isclass(value) else ()
    docs = [inspect.getdoc(item) or "" for item in (value, *methods) if item is value or inspect.isfunction(item)]
    return [doc[doc.index("Example:") :] for doc in docs if "Example:" in doc]


def run(docs, name):
    """Runs the examples one after the other, in one namespace, and returns what failed."""
    names, report = dict(IMPORTS), []
    for doc in docs:
        test = doctest.DocTestParser().get_doctest(inspect.cleandoc(doc), names, name, None, 0)
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
        names = test.globs
    return "".join(report)


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    """For an example with `dist`: a process group of one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# The lists of rules are tuples, whose example is that of their module.
SHOWN = [(package, name) for package, name in PUBLIC if type(getattr(package, name)) is not tuple]


@pytest.mark.parametrize(("package", "name"), SHOWN, ids=[f"{p.__name__}.{name}" for p, name in SHOWN])
@pytest.mark.usefixtures("replica")
def test_it_has_an_example_that_runs(package, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where files are saved
    docs = examples(getattr(package, name))
    assert ">>>" in docs[0] if docs else False, "its docstring has no `Example:` with a line that runs"
    with jax.numpy_dtype_promotion("standard"):
        failures = run(docs, name)
    assert not failures, failures


def watched():
    w = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([w])
    with funcga.watch(optimizer=optimizer) as watched:
        w.mean().backward()
        optimizer.step()
    return watched


RETURNED = {
    "Verdict": lambda: funcga.verify(funcga.grad(lambda w, x: (w * x).sum()), torch.ones(2), torch.ones(4, 2), n=2),
    "Report": lambda: funcga.compare({"w": torch.ones(2)}, {"w": torch.ones(2)}),
    "watch": watched,
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_checks_return_is_as_the_page_says(name):
    value = RETURNED[name]()
    with jax.numpy_dtype_promotion("standard"):
        assert not run(examples(type(value)), name)
    table = (REFERENCE / "checks.md").read_text().split(f"A **{name}** ")[1].split("```")[0]
    attributes = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    assert {attribute for attribute in dir(value) if not attribute.startswith("_")} >= set(attributes)
    assert len(attributes) > 5
    rows, of_rows = re.search(r"^\| `(rows|windows)` (.*)$", table, re.MULTILINE).groups()
    assert all(hasattr(getattr(value, rows)[0], attribute) for attribute in re.findall(r"`\.(\w+)`", of_rows))


def test_an_example_that_is_wrong_is_found():
    assert "Expected" in run(["Example:\n    >>> torch.ones(2).sum()\n    tensor(3.)\n"], "wrong")


def test_every_public_name_stands_on_one_page():
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    documented = re.findall(r"^\.\. auto(?:function|class|data|module):: (\S+)", text, re.MULTILINE)
    assert sorted(documented) == sorted(f"{package.__name__}.{name}" for package, name in PUBLIC)
