"""What the design promises of the code itself: who imports whom, laziness, mirror images; each check can fail."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jax_backend
import torch_backend
from funcga._backend import Arrays, Gradients, Loop, States, Transforms, Trees
from tests import house

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"torch", "jax", "optax", "numpy"}
# Folder by folder; each may import those before it, and itself. Public mathematics stands in the root.
LAYERS = ["errors", "_tools", "monoids", "reducers", "normalizers", "folds", "_backend", "_replicas", "_fold", "_call", "_grad", "_accumulate",
          "_transform", "transforms", "statistics", "tools", "_pytest", "checks", "__init__", "__main__"]  # fmt: skip
# What a backend may import of the core: its types. It never imports what is built on a backend. Of tools it may know types
# alone: tests/test_removable.py takes them away.
TYPES = {
    "", "errors", "_tools", "monoids", "reducers", "normalizers", "folds", "_backend", "_replicas", "_fold",
    "_call", "_grad", "_transform", "statistics", "tools",
}  # fmt: skip

# Inside of these, numbers are looked at, so that they import NumPy; and each has one file for each framework.
PACKAGES = {"parity", "compare", "verify", "commands"}


def imported(source, for_types=True):
    """Every module that a source imports anywhere, also inside functions, with `from a import b` as a and a.b."""
    tree, found, left_out = ast.parse(source), set(), set()
    for node in () if for_types else ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left_out |= {id(inner) for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources(package):
    return {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / package).rglob("*.py"))}


def foreign_imports(source, allowed=()):
    tops = {name.split(".")[0] for name in imported(source)}
    return tops & ({*FRAMEWORKS, "torch_backend", "jax_backend"} - set(allowed))


def room(module):
    """The folder, or the file in the root, that a module of the core lies in; "" for the package itself."""
    name = module.removeprefix("funcga").removeprefix(".").split(".")[0]
    return "tools" if name in ("trees", "observers") else name  # their public modules


def upward_imports(own, source):
    modules = imported(source, for_types=False)
    used = {room(module) for module in modules if module.split(".")[0] == "funcga"}
    return {other for other in used if other in LAYERS and LAYERS.index(other) > LAYERS.index(own)}


# The one tool whose file for torch imports the other framework, inside of functions: it runs what optax makes on tensors.
BRIDGE = "optax_on_tensors"


def test_the_core_imports_no_framework():
    for path, source in sources("funcga").items():
        own = {"numpy"} if PACKAGES & {*path.parts} else {"jax", "optax"} if BRIDGE in path.parts else set()
        for framework in ("torch", "jax"):
            if path.stem.endswith(f"in_{framework}"):
                own |= {"numpy", framework, f"{framework}_backend"} | ({"optax"} if framework == "jax" else set())
        assert not foreign_imports(source, own), path
    assert foreign_imports("def f():\n    from jax import numpy") == {"jax"}


def test_imports_point_one_way():
    for path, source in sources("funcga").items():
        own = room(".".join(path.with_suffix("").parts))
        assert not upward_imports(own, source), path
    assert upward_imports("folds", "from funcga._accumulate import accumulate") == {"_accumulate"}


def packages_in_both_directions(imports):
    """The pairs of packages of the torch backend that import each other."""
    folder = lambda module: ".".join(module.split(".")[:2])
    folders = {folder(module) for module in imports if module.startswith("torch_backend.") and module.count(".") > 1}
    pairs = {(folder(module), folder(used)) for module, all_used in imports.items() for used in all_used}
    return {(a, b) for a, b in pairs if a < b and (b, a) in pairs and {a, b} <= folders}


def test_packages_of_torch_import_one_way():
    assert packages_in_both_directions(house.imports()) == set()
    graph = {"torch_backend.a.x": {"torch_backend.b.y"}, "torch_backend.b.y": {"torch_backend.c"}}
    assert packages_in_both_directions(graph) == set()
    graph["torch_backend.b.z"] = {"torch_backend.a"}
    assert packages_in_both_directions(graph) == {("torch_backend.a", "torch_backend.b")}


def test_backends_import_core_types_only_and_never_each_other():
    for own, other in (("torch", "jax"), ("jax", "torch")):
        for path, source in sources(f"{own}_backend").items():
            both = {"jax", "optax"} if own == "jax" else set()
            assert not foreign_imports(source, {own, "numpy", f"{own}_backend", *both}), path
            rooms = {room(module) for module in imported(source) if module.split(".")[0] == "funcga"}
            assert {name for name in rooms if name in LAYERS} <= TYPES, (path, other)


def loaded_after(code):
    program = f"import sys\n{code}\nprint(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_importing_funcga_imports_no_framework():
    assert not loaded_after("import funcga") & {*FRAMEWORKS, "rich", "sklearn", "torch_backend", "jax_backend"}
    compared = "import funcga, numpy\nstr(funcga.compare({'a.0': numpy.ones(2), 'a.1': 3}, {'a': [numpy.ones(2), 3]}))"
    assert not loaded_after(compared) & {"torch", "jax", "rich", "matplotlib"}


STEPS = """
x = ones(4)
value, grad = funcga.accumulate(funcga.value_and_grad(lambda p, x: (p * x).sum()), 2)(x[0], x)
assert float(value) == float(grad) == 2
assert float(funcga.stream(funcga.grad(lambda p, x: (p * x).sum()))(x[0], [x, x])) == 4
assert type(funcga.to_numpy(x)).__name__ == "ndarray"
assert funcga.compare(x, x).ok
"""
# Verify and transforms import no other framework either.
VERIFIED = """
import torch_backend
funcga.verify(funcga.grad(lambda p, x: (p * x).mean()), torch.ones(()), torch.ones(4))
tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 1)
params = {"w": torch.ones(2)}
tx.update(params, tx.init(params), params)
"""


@pytest.mark.parametrize(
    ("own", "others", "start"),
    [
        ("torch", {"jax", "optax", "jax_backend", "rich"}, "import funcga, torch\nones = torch.ones" + VERIFIED),
        ("jax", {"torch", "torch_backend", "rich"}, "import funcga, jax\nones = jax.numpy.ones"),
    ],
    ids=["torch", "jax"],
)
def test_one_framework_is_enough(own, others, start):
    """The other is never imported; and where it is not installed, so that importing it fails, all works as well."""
    code = f"{start}{STEPS}found = {others} & {{*sys.modules}}\nassert not found, found\n"
    code += "".join(f"sys.modules['{name}'] = None\n" for name in others)
    assert {own, f"{own}_backend"} <= loaded_after(code + STEPS)


def summary(described):
    """The first paragraph of a docstring, however its lines are broken."""
    return " ".join((described.__doc__ or "").split("\n\n")[0].split())


@pytest.mark.parametrize("backend", [torch_backend, jax_backend])
def test_backends_supply_what_the_core_asks_for(backend):
    for protocol in (Arrays, Trees, Gradients, Loop, States, Transforms):
        check_supplied(getattr(backend.BACKEND, protocol.__name__.lower()), protocol)


def check_supplied(part, protocol):
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            own = getattr(part, name)
            assert list(inspect.signature(own).parameters) == list(inspect.signature(member).parameters)[1:]
            assert summary(own) == summary(member)


@pytest.mark.parametrize("tool", ["trees", "plan"])
def test_both_sides_of_a_tool_have_the_same_functions(tool):
    sides = [importlib.import_module(f"funcga.tools.{tool}.in_{framework}") for framework in ("torch", "jax")]
    for side, other in (sides, sides[::-1]):
        for name, function in vars(side).items():
            if inspect.isfunction(function) and function.__module__ == side.__name__ and name[0] != "_":
                same = getattr(other, name)
                assert list(inspect.signature(same).parameters) == list(inspect.signature(function).parameters)
                assert summary(same) == summary(function)


# Where CUDA alone is meant, and no device of another kind would do.
CUDA_ALONE = {
    "funcga/tools/trees/in_torch.py": "the devices of which JAX's `gpu` is one",
    "funcga/tools/compiled/in_torch.py": "CUDA graphs",
    "funcga/tools/fused/in_torch.py": "products that add in another dtype",
    "funcga/tools/verify/in_torch.py": "cuDNN, and whether CUDA has been used",
}


def names_cuda(source):
    """The lines that name CUDA: a string that is no docstring, an attribute of torch, or that of a tensor."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    is_name = lambda node: isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")
    is_text = lambda node: (
        isinstance(node, ast.Constant) and str(node.value).startswith("cuda") and id(node) not in docstrings
    )
    return {node.lineno for node in ast.walk(tree) if is_name(node) or is_text(node)}


def test_no_device_is_named_that_torch_could_have_said():
    of_all = {**sources("torch_backend"), **sources("funcga")}
    assert {str(path) for path, text in of_all.items() if names_cuda(text)} == {*CUDA_ALONE}
    text = '"""cuda"""\nx = torch.device("cuda:1")\ny = x.is_cuda\ntorch.cuda.Stream()\nz = f"cuda:{x}"'
    assert names_cuda(text) == {2, 3, 4, 5}
