"""What the design promises of the code itself: who imports whom, laziness, mirror images; each check can fail."""

import ast
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import funcga
import jax_backend
import torch_backend
from funcga.backend import Arrays, Gradients, Handover, Loop, Replicas, Transforms, Trees

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"torch", "jax", "optax", "numpy"}
TYPES = {"funcga.accumulator", "funcga.arguments", "funcga.backend", "funcga.errors", "funcga.folds", "funcga.gradients", "funcga.leaves", "funcga.loss_scaling", "funcga.mappings", "funcga.normalizers", "funcga.outputs", "funcga.prefixes",
         "funcga.program", "funcga.reducers", "funcga.scales", "funcga.statistics", "funcga.tally", "funcga.transforms", "funcga.weights", "funcga.window", "funcga"}  # fmt: skip
# Lower imports higher nowhere: each name may import those before it.
LAYERS = ["errors", "quantities", "backend", "learning_rates", "mappings", "prefixes", "monoids", "reducers", "normalizers", "folds", "statistics", "tally", "weights", "leaves",
          "outputs", "examples", "arguments", "scales", "gradients", "program", "fitting", "accumulation", "targets", "streaming", "accumulator", "window",
          "transforms", "binding", "windowing", "dropping", "widening", "stepping", "loss_scaling", "replicas", "interop", "state_dicts", "paths", "rules", "matching", "comparison", "comparing", "problem",
          "verification", "verifying", "__init__", "loading", "information", "parity", "__main__"]  # fmt: skip


# Inside of these numbers are looked at, so that they import NumPy; and each is a layer as a whole.
PACKAGES = {"parity", "comparison", "verification"}


def imported(source):
    """Every module that a source imports anywhere, also inside functions, with `from a import b` as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
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


def upward_imports(name, source):
    place = LAYERS.index(name)
    used = {module.split(".")[1] for module in imported(source) if module.startswith("funcga.")}
    return {module for module in used if module in LAYERS and LAYERS.index(module) > place}


def test_the_core_imports_no_framework():
    for path, source in sources("funcga").items():
        allowed = {"numpy"} if PACKAGES & {*path.parts} else set()
        assert not foreign_imports(source, allowed), path


def test_imports_point_one_way():
    for path, source in sources("funcga").items():
        if not PACKAGES & {*path.parts}:
            # backend_of names the path of what it refuses, and the others are types of its protocols
            lazily = {"backend": {"prefixes", "program", "leaves", "outputs", "tally"}}.get(path.stem, set())
            assert upward_imports(path.stem, source) <= lazily, path


# Files that import the other framework, inside of functions, each with its reason.
BRIDGES = {
    "bridge": "it runs transforms of optax on torch tensors, for those who have both",
    "crossing": "the same: it calls a function of JAX arrays",
}


def test_backends_import_core_types_only_and_never_each_other():
    for own, other in (("torch", "jax"), ("jax", "torch")):
        for path, source in sources(f"{own}_backend").items():
            both = {"jax", "optax"} if own == "jax" or path.stem in BRIDGES else set()
            assert not foreign_imports(source, {own, "numpy", f"{own}_backend", *both}), path
            core = {".".join(m.split(".")[:2]) for m in imported(source) if m.split(".")[0] == "funcga"}
            modules = {m for m in core if m == "funcga" or (ROOT / "funcga" / f"{m.split('.')[1]}.py").exists()}
            assert modules <= TYPES, (path, other)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch", {"torch"}),
        ("def f():\n    from jax import numpy", {"jax"}),
        ("import funcga.folds, os", set()),
        ("from torch_backend import arrays", {"torch_backend"}),
    ],
)
def test_the_import_check_can_fail(source, found):
    assert foreign_imports(source) == found


def test_the_layer_check_can_fail():
    assert upward_imports("folds", "from funcga.accumulation import accumulate") == {"accumulation"}
    assert upward_imports("folds", "from funcga import reducers") == set()


def loaded_after(code):
    program = f"import sys\n{code}\nprint(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_importing_funcga_imports_no_framework():
    assert not loaded_after("import funcga") & {*FRAMEWORKS, "rich", "sklearn", "torch_backend", "jax_backend"}


def test_verify_imports_numpy_when_it_is_called():
    code = "import funcga, sys\nassert 'numpy' not in sys.modules and 'funcga.verification' not in sys.modules"
    loaded_after(code)


CALL = "import funcga, {0}\nfuncga.accumulate(funcga.grad(lambda p, x: (p * x).sum()), 2)({1}, {2})\n"


def test_a_torch_user_never_imports_jax():
    """Nor does one of `verify` or of transforms."""
    code = CALL.format("torch", "torch.ones(())", "torch.ones(4)")
    code += """import torch_backend
funcga.verify(funcga.grad(lambda p, x: (p * x).mean()), torch.ones(()), torch.ones(4))
tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 1)
params = {"w": torch.ones(2)}
tx.update(params, tx.init(params), params)"""
    loaded = loaded_after(code)
    assert "torch" in loaded
    assert not loaded & {"jax", "optax", "jax_backend", "rich"}


def test_a_jax_user_never_imports_torch():
    loaded = loaded_after(CALL.format("jax", "jax.numpy.ones(())", "jax.numpy.ones(4)"))
    assert "jax" in loaded
    assert not loaded & {"torch", "torch_backend"}


def test_numpy_arrays_are_compared_without_a_framework():
    code = """import collections, funcga, numpy
tree = {"a": [numpy.ones(2), 3], "b": collections.namedtuple("Pair", "x y")(numpy.ones(2), None)}
report = funcga.compare({"a.0": numpy.ones(2), "a.1": 3, "b.x": numpy.ones(2)}, tree)
assert report.ok and [row.path for row in report.rows] == ["a.0", "a.1", "b.x"]
str(report)"""
    assert not loaded_after(code) & {"torch", "jax", "rich", "matplotlib"}


@pytest.mark.parametrize(
    ("missing", "call"), [("jax", "import torch\nx = torch.ones(4)"), ("torch", "import jax\nx = jax.numpy.ones(4)")]
)
def test_one_framework_is_enough(missing, call):
    """As where the other is not installed: importing it fails."""
    step = "funcga.accumulate(funcga.value_and_grad(lambda p, x: (p * x).sum()), 2)(x[0], x)"
    stream = "funcga.stream(funcga.grad(lambda p, x: (p * x).sum()))(x[0], [x, x])"
    loaded_after(
        f"sys.modules['{missing}'] = None\n{call}\nimport funcga\n{step}\n{stream}\nfuncga.to_numpy(x)\nfuncga.compare(x, x)"
    )


# Files and names that only one backend has, each with its reason.
ALONE = {
    "agreement": "torch replicas are processes, which can differ; in JAX one program describes all of them",
    "optimizers": "optimizers of torch change parameters in place, and have to be made functions; those of optax are",
    "optimizer_state": "the same: what a torch optimizer keeps in itself is an argument and a result",
    "slots": "the same: as a tree of tensors",
    "options": "the same: torch optimizers have options, and those of groups of parameters",
    "assignment": "torch parameters have a .grad, where optimizers look; JAX arrays have not",
    "clipping": "optax has clip_by_global_norm and clip; in torch they change .grads in place",
    "chaining": "optax has chain",
    "bridge": "torch has no optax of its own; JAX has nothing to cross",
    "crossing": "the same: how tensors get there",
    "closures": "the same: LBFGS calls back",
    "schedules": "the same: schedulers of torch change optimizers in place; in optax they are functions of a count",
    "matching": "torch's trees keep None and the order of a dict, so leaves are matched by key; JAX has tree.map",
    "comparison": "the same: torch replicas may have to ask each other what they have",
    "layouts": "torch tensors have strides and share memory; JAX arrays have neither to speak of",
    "placements": "torch has arrays over several devices as a type of their own; in JAX every array may be one",
    "buckets": "torch sends pieces of memory that it lays out; XLA lays out what a collective sends",
    "reduction": "torch sends while it computes; in JAX a psum stands after the loop",
    "memory": "the same: arrays as bytes; in JAX that is `bits`",
    "header": "torch replicas tell each other what they are about to merge; in JAX one program describes all of them",
    "channel": "the same: over a process group of their own; XLA keeps the order of collectives",
    "batch_norm": "torch layers keep running statistics in themselves; in JAX they are an argument and a result",
    "buffers": "torch adds in place; XLA does so by itself",
    "backward": "torch adds where autograd computes; XLA fuses the two by itself",
    "engine": "torch has autograd beside torch.func; JAX has one way to a gradient",
    "recording": "torch has autograd and forward-mode AD beside torch.func; JAX has one way to a gradient",
    "guards": "torch losses can write to what is not theirs; JAX arrays cannot be written to",
    "drivers": "torch modules may be wrapped to reduce gradients by themselves; nothing in JAX does",
    "sharded": "the same, of FSDP",
    "driven": "the same: the loop that such a wrapper wants",
    "graphs": "JAX differentiates a program; in torch a pass goes through a graph, which may reach what belongs to others",
    "hooks": "arrays of JAX have no hooks",
    "groups": "torch reduces over process groups, which a wrapper may know of; JAX names the axes of a mesh",
    "wrapped": "the same: the gradient function",
    "transfer": "torch copies on a stream of its own; JAX is asynchronous by itself",
    "modules": "torch has modules, whose parameters must be put in; in JAX they are arguments already",
    "visits": "the same: by one thread at a time",
    "copies": "the same: modules write to their buffers",
    "frozen": "torch parameters say whether they are trained; in JAX what is not trained is another argument",
    "embeddings": "torch embeddings may write to their weights; JAX arrays cannot be written to",
    "stacked": "a loop over layers is part of an XLA program; torch adds where autograd computes, in any loop",
    "compilation": "JAX compiles calls outside of jit; torch runs them as they are",
    "merging": "in JAX the merge over replicas is part of the program; torch sends what is ready while it computes the rest",
    "nnx": "flax has objects with a state in themselves; those of torch have `modules`",
    "exchange": "in JAX collectives are operations; in torch they are calls on a process group",
    "bits": "one reduction of an XLA program has one dtype; a torch bucket has whatever is put in it",
    "blocks": "the rows of a JAX array lie on many devices; in torch those of DTensors do, which `placements` cuts",
    "replication": "one JAX process drives all devices; in torch every replica is a process",
    "accumulators": "the type of a JAX array says how it lies on a mesh; torch adds where autograd has put a gradient",
    "communication": "XLA decides what is reduced where, so one has to look; torch reduces what it is told to",
}
HELPERS = {
    "state_specs": "jax.shard_map is told how a state lies on the devices; each torch process has its own",
    "seeded": "torch has random numbers from generators that are global; in JAX a key is an argument",
    "unmerged": "jax_backend.replicated runs a step on all devices at once; torch replicas are processes",
    "check_step_merges": "the same",
    "listed": "in JAX replicas are named by axes of a mesh; in torch they are a process group",
    "spelled": "the same",
    "in_transform": "torch must not write to the tensors of a running torch.func transform; JAX has no in-place writes",
}


def public(module):
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def modules(package):
    names = {m.name for m in pkgutil.iter_modules(package.__path__)}
    return {name: __import__(f"{package.__name__}.{name}", fromlist=["_"]) for name in names - set(ALONE)}


def differences(left, right):
    """What two modules that should mirror each other do not have in common."""
    a, b = public(left), public(right)
    found = [f"{name} is only in one" for name in (set(a) ^ set(b)) - set(HELPERS)]
    for name in set(a) & set(b):
        if list(inspect.signature(a[name]).parameters) != list(inspect.signature(b[name]).parameters):
            found.append(f"{name} has other parameters")
        if (a[name].__doc__ or "").splitlines()[:1] != (b[name].__doc__ or "").splitlines()[:1]:
            found.append(f"{name} says something else")
    if (left.__doc__ or "").splitlines()[:1] != (right.__doc__ or "").splitlines()[:1]:
        found.append("the modules say something else")
    return found


def test_backends_are_mirror_images():
    torch_modules, jax_modules = modules(torch_backend), modules(jax_backend)
    assert set(torch_modules) == set(jax_modules)
    for name in torch_modules:
        assert differences(torch_modules[name], jax_modules[name]) == [], name


def test_the_mirror_check_can_fail():
    from jax_backend import arrays, trees

    assert differences(arrays, trees)


@pytest.mark.parametrize("backend", [torch_backend, jax_backend])
def test_backends_supply_what_the_core_asks_for(backend):
    for part, protocol in (
        ("arrays", Arrays),
        ("handover", Handover),
        ("trees", Trees),
        ("gradients", Gradients),
        ("loop", Loop),
        ("replicas", Replicas),
        ("transforms", Transforms),
    ):
        for name, member in vars(protocol).items():
            if inspect.isfunction(member) and not name.startswith("_"):
                own = getattr(getattr(backend, part), name)
                assert list(inspect.signature(own).parameters) == list(inspect.signature(member).parameters)[1:]
                assert (own.__doc__ or "").splitlines()[0] == (member.__doc__ or "").splitlines()[0]


def test_public_names_have_docstrings_and_types():
    for name in vars(funcga):
        value = getattr(funcga, name)
        if name.startswith("_") or inspect.ismodule(value) or name == "CARRY":
            continue
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            assert all(p.annotation is not p.empty for p in inspect.signature(value).parameters.values()), name


def test_the_contract_is_there():
    names = """accumulate stream windows grad value_and_grad Accumulator to_torch to_jax to_numpy shares_memory FuncgaError CARRY
               Fold Reducer Monoid mean per_weight sum max min moments pooled concat carry reducers normalizers compare match Rule
               rules verify Problem multi_steps batch_moments running_statistics"""
    assert not [name for name in names.split() if not hasattr(funcga, name)]
    parameters = list(inspect.signature(funcga.accumulate).parameters.values())
    assert [p.name for p in parameters] == ["grad_fn", "n", "microbatch_size", "fold", "weight", "in_axes", "across"]
    assert [p.kind is p.KEYWORD_ONLY for p in parameters] == [False, False, True, True, True, True, True]
