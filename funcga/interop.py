"""`to_torch`, `to_jax`, `to_numpy`: whole trees from one framework to another. The results are copies."""

from typing import Any

from funcga.backend import Backend, backend_of, load, load_imported
from funcga.errors import FuncgaError


def to_torch(tree: Any) -> Any:
    """The tree with every array as a torch tensor: a detached copy of the same shape and dtype, on the CPU.

    Arrays may be NumPy's, JAX's or torch's own (which are cloned where they are). Other leaves stay as they are.
    """
    return _convert(tree, load("torch"))


def to_jax(tree: Any) -> Any:
    """The tree with every array as a JAX array: a copy of the same shape and dtype, on the default device.

    Raises FuncgaError for 64-bit values while JAX has them switched off, which would narrow them silently.
    """
    return _convert(tree, load("jax"))


def to_numpy(tree: Any) -> Any:
    """The tree with every array as a NumPy array: a copy of the same shape and dtype (bfloat16 as ml_dtypes has it)."""
    try:
        source = backend_of([tree], lambda: ["tree"])
    except FuncgaError:
        return tree
    return _map(lambda leaf: source.arrays.to_numpy(leaf) if source.arrays.is_array(leaf) else leaf, tree, source)


def _convert(tree: Any, target: Backend) -> Any:
    try:
        source = backend_of([tree], lambda: ["tree"])
    except FuncgaError:
        source = target
    if not any(map(source.arrays.owns, source.trees.flatten(tree)[0])):
        source = target  # NumPy's arrays: a tree as the target walks it

    others = [backend for backend in load_imported() if backend is not target]

    def convert(leaf: Any) -> Any:
        for other in others:
            if other.arrays.owns(leaf):
                leaf = other.arrays.to_numpy(leaf)
        return target.arrays.convert(leaf) if target.arrays.is_array(leaf) or _is_numpy(leaf) else leaf

    return _map(convert, tree, source)


def _is_numpy(leaf: Any) -> bool:
    return type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype")


def _map(function: Any, tree: Any, backend: Backend) -> Any:
    leaves, structure = backend.trees.flatten(tree)
    return backend.trees.unflatten(structure, [function(leaf) for leaf in leaves])
