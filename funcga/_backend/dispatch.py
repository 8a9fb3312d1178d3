"""Which framework owns a call."""

import importlib
import sys
from collections.abc import Callable, Sequence

from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from funcga.errors import FuncgaError, listed

_LOADED: dict[str, Backend] = {}  # as sys.modules would be, but torch.compile guards all of that


def load(framework: str) -> Backend:
    """The backend of a framework. Raises FuncgaError if the framework is not installed."""
    if framework in _LOADED:
        return _LOADED[framework]
    name = f"{framework}_backend"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in (framework, name):
            raise
        raise FuncgaError(
            f"{error.name} is not installed, and this call needs it. Install it: pip install "
            f"'funcga[{framework}]'"
        ) from error
    return _LOADED.setdefault(framework, module.BACKEND)


def load_imported() -> list[Backend]:
    """The backends of the imported frameworks."""
    return [_LOADED[framework] for framework in import_backends()]


def import_backends() -> tuple[str, ...]:
    """Imports the backends of the imported frameworks, whose names come back. Called when a step
    is made, as torch.compile may trace its first call, and cannot trace an import.
    """
    frameworks = tuple(
        [framework for framework in ("torch", "jax") if sys.modules.get(framework) is not None]
    )
    for framework in frameworks:
        if framework not in _LOADED:
            load(framework)
    return frameworks


# torch.compile calls it once.
import_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]


def backend_of(trees: Sequence[Tree], names: Callable[[], Sequence[str]]) -> Backend:
    """The backend that owns the array leaves of some trees, asked only of frameworks already
    imported.

    NumPy arrays belong to nobody: they join the other arrays of the call, or JAX if there are none
    and it is imported. Raises FuncgaError, which calls the trees by their `names()`, if two
    frameworks own leaves, or none does.
    """
    loaded = [_LOADED.get(name) or load(name) for name in ("torch", "jax") if sys.modules.get(name)]
    # With one framework nothing can be mixed.
    if len(loaded) == 1 and any(map(loaded[0].arrays.is_array, trees)):
        return loaded[0]
    for backend in loaded:  # JAX last, as it takes NumPy's arrays, where they join no others
        leaves = [leaf for tree in trees for leaf in backend.trees.flatten(tree)[0]]
        # One leaf of each type is enough.
        of_each_type = dict(zip(map(type, leaves), leaves, strict=True)).values()
        others = [leaf for leaf in of_each_type if not backend.arrays.is_array(leaf)]
        if len(others) < len(of_each_type):
            # By the name of the type, as torch.compile cannot trace another framework.
            if {*map(_framework, others)} - {None, backend.name}:
                raise _mixed(trees, names(), loaded)
            return backend
    where = listed([f"`{name}`" for name in names()])
    raise FuncgaError(
        f"no array was found in {where}. A fold needs torch tensors or JAX arrays, which also say "
        f"in which framework it runs. {_CONVERT} A DataLoader is folded by stream."
    )


_CONVERT = "Convert first: `funcga.to_torch(batch)` or `funcga.to_jax(batch)`."


def is_numpy(leaf: object) -> bool:
    """Whether the leaf is an array or a scalar of NumPy, which need not be imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray | numpy.generic)


def _framework(leaf: object) -> str | None:
    # of an int in its graph torch.compile knows no more
    if isinstance(leaf, int | float) or not hasattr(leaf, "shape"):
        return None
    return {"torch": "torch", "jax": "jax", "jaxlib": "jax"}.get(
        type(leaf).__module__.split(".")[0]
    )


def _mixed(trees: Sequence[Tree], names: Sequence[str], loaded: list[Backend]) -> FuncgaError:
    first: dict[str, str] = {}
    for name, tree in zip(names, trees, strict=True):
        for backend in loaded:
            leaves = backend.trees.flatten(tree)[0]
            for path, leaf in zip(leaf_paths(tree, backend.trees, name), leaves, strict=True):
                if backend.arrays.is_array(leaf) and not is_numpy(leaf):
                    first.setdefault(backend.name, path)
    return FuncgaError(
        f"the arguments mix frameworks: `{first['torch']}` is a torch tensor and `{first['jax']}` "
        f"is a JAX array. One call folds in one framework. {_CONVERT}"
    )
