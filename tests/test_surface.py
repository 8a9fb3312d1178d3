"""The public surface, as an installed package has it: these tests also run against a wheel, with no checkout on the path."""

import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys

import pytest

import funcga
import jax_backend
import torch_backend
from funcga import checks, observers, statistics, transforms, trees

MODULES = [checks, observers, statistics, transforms, trees]
NAMES = """accumulate coupled stream windows grad value_and_grad Accumulator to_torch to_jax to_numpy FuncgaError CARRY
           Fold Reducer Monoid mean per_weight sum max min logsumexp moments pooled ratio concat carry reproducible reducers normalizers
           monoids compare verify multi_steps check_replicas pack plan watch gradient_noise gradient_norms dropped"""  # fmt: skip


def test_the_contract_is_there():
    assert not [name for name in NAMES.split() if not hasattr(funcga, name)]
    parameters = list(inspect.signature(funcga.accumulate).parameters.values())
    names = "grad_fn n microbatch_size fold weight in_axes across totals observe drop drop_if"
    assert [p.name for p in parameters] == names.split()
    assert [p.kind is p.KEYWORD_ONLY for p in parameters] == [False, False, *[True] * 9]


def test_there_are_few_names():
    """What fewer people need is in modules; a name that is added here takes another one's place."""
    count, most = len(dir(funcga)), 45
    assert count <= most, f"{count} names, at most {most}: put it into a module; for a fold raise the limit, and say so"
    for module in MODULES:
        assert not [name for name in module.__all__ if not hasattr(module, name)], module
        assert inspect.getdoc(module), module


@pytest.mark.parametrize("package", [funcga, torch_backend, jax_backend, *MODULES])
def test_public_names_have_docstrings_and_types(package):
    for name in package.__all__ if package in MODULES else dir(package):
        value = getattr(package, name)
        if name.startswith("_") or inspect.ismodule(value) or name in ("CARRY", "BACKEND"):
            continue
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            assert all(p.annotation is not p.empty for p in inspect.signature(value).parameters.values()), name


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_call(framework):
    if framework == "torch":
        import torch as xp
    else:
        import jax.numpy as xp
    step = funcga.accumulate(funcga.value_and_grad(lambda p, x: ((x - p["w"]) ** 2).mean()), 3)
    loss, grads = step({"w": xp.ones(())}, xp.arange(7.0))
    assert float(loss) == pytest.approx(sum((x - 1) ** 2 for x in range(7)) / 7)
    assert float(grads["w"]) == pytest.approx(-2 * sum(x - 1 for x in range(7)) / 7)


def test_what_is_installed_has_its_data():
    for package in ("funcga", "torch_backend", "jax_backend"):
        assert importlib.resources.files(package).joinpath("py.typed").is_file(), package
    assert importlib.resources.files("funcga.tools.verify.causes").joinpath("causes.toml").is_file()
    assert importlib.metadata.version("funcga") == funcga.__version__


def test_the_command_line_is_installed():
    done = subprocess.run(
        [sys.executable, "-m", "funcga", "verify", "--help"], capture_output=True, text=True, check=True
    )
    assert "grad_fn" in done.stdout
