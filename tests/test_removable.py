"""Every tool can be taken away, with those that stand on it: what is left imports, computes the same, and misses nothing.

The table of tools is that of `tests/house.py`.
"""

import ast
import functools
import os
import shutil
import subprocess
import sys

import pytest

from tests import house

# One process takes all trees in turn, as torch and JAX take longest to import.
SMOKE = """
import importlib.util
import sys
import jax.numpy, torch


def check(folder):
    import funcga, torch_backend, jax_backend

    assert funcga.__file__.startswith(folder), funcga.__file__
    for ones, arange in ((torch.ones, torch.arange), (jax.numpy.ones, jax.numpy.arange)):
        gradient = funcga.value_and_grad(lambda p, x: ((x - p["w"]) ** 2).mean())
        params, x = {"w": ones(())}, arange(6.0)
        whole = sum((i - 1) ** 2 for i in range(6)) / 6
        searches = importlib.util.find_spec("funcga.tools.plan") is not None
        for n in (3, "auto") if searches else (3,):
            loss, grads = funcga.accumulate(gradient, n)(params, x)
            assert abs(float(loss) - whole) < 1e-5 and abs(float(grads["w"]) + 3) < 1e-5, n
        if ones is not torch.ones and folder != sys.argv[-1]:
            continue  # each is a program to compile: the rest without all tools alone
        loss, _ = funcga.stream(gradient, weight=len)(params, [x[:2], x[2:4], x[4:]])
        assert abs(float(loss) - whole) < 1e-5
        sgd = (lambda params: (), lambda grads, state, params=None: ({"w": -0.5 * grads["w"]}, state))
        tx = funcga.multi_steps(sgd, 2)
        state = tx.init(params)
        for gradient_of_part in (1.0, 3.0):
            updates, state = tx.update({"w": gradient_of_part * ones(())}, state, params)
        assert float(updates["w"]) == -1
    model = torch.nn.Linear(1, 1)
    gradient = torch_backend.module_value_and_grad(model, lambda model, x: model(x).square().mean())
    loss, grads = funcga.accumulate(gradient, 2)(torch.ones(4, 1))
    torch_backend.assign_grads(model, grads)
    assert [*grads] == ["weight", "bias"] and model.weight.grad is not None


for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] in ("funcga", "torch_backend", "jax_backend")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        check(folder)
        print(folder, "right")
    except Exception as error:
        print(folder, type(error).__name__, error)
    sys.path.remove(folder)
"""


def standing_on(tool):
    """The modules of a tool and of all tools that stand on it, as prefixes of paths."""
    others = [name for name, (_, below) in house.TOOLS.items() if tool in below]
    return {*house.TOOLS[tool][0], *(prefix for other in others for prefix in standing_on(other))}


@functools.cache
def uses(path):
    """The modules that a file imports anywhere, other than for types."""
    tree = ast.parse((house.ROOT / path).read_text())
    is_for_types = lambda node: isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for_types = [
        inner for node in filter(is_for_types, ast.walk(tree)) for part in node.body for inner in ast.walk(part)
    ]
    left_out = {*map(id, for_types)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in left_out:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import) and id(node) not in left_out:
            found |= {alias.name for alias in node.names}
    return found


def missed(left, gone):
    """Which of the modules that are left import one that is gone."""
    return {(path, name) for path in left for name in uses(path) if is_in(f"{name.replace('.', '/')}/", gone)}


def is_in(path, prefixes):
    return path.startswith(tuple(prefix.removesuffix(".py").removesuffix("/") + "/" for prefix in prefixes))


def files():
    return [path.relative_to(house.ROOT).as_posix() for path in house.files()]


@pytest.mark.parametrize("tool", house.TOOLS)
def test_nothing_that_is_left_imports_what_is_gone(tool):
    gone = standing_on(tool)
    left = [path for path in files() if not is_in(path.removesuffix(".py") + "/", gone)]
    assert len(left) < len(files())
    assert missed(left, gone) == set()


def test_the_check_can_fail():
    assert missed(["funcga/tools/parity/sides.py"], ["funcga/tools/compare/"]) != set()
    assert missed(["funcga/tools/parity/sides.py"], ["funcga/trees.py"]) != set()
    assert missed(["funcga/__init__.py"], ["funcga/tools/compare/"]) == set()  # by name


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """What the core says of itself without each tool, and without all of them."""
    gone = {tool: standing_on(tool) for tool in house.TOOLS}
    gone["all"] = [prefix for prefixes, _ in house.TOOLS.values() for prefix in prefixes]
    folders = {name: tmp_path_factory.mktemp("without") for name in gone}
    for name, folder in folders.items():
        for package in house.PACKAGES:
            shutil.copytree(house.ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        for prefix in gone[name]:
            path = folder / prefix
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Not from this folder, where the tools are.
    argv = [sys.executable, "-P", "-c", SMOKE, *map(str, folders.values())]
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=folder, env=environment, check=True)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return {name: said[str(folder)] for name, folder in folders.items()}


@pytest.mark.parametrize("tool", [*house.TOOLS, "all"])
def test_the_core_computes_without_it(tool, computed):
    assert computed[tool] == "right"
