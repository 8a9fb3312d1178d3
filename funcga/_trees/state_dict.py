"""State dicts: a tree as a flat dict of arrays by path, which any file format takes, and back, in either framework."""

from collections.abc import Mapping
from typing import Any

from funcga._backend.dispatch import backend_of
from funcga._backend.prefixes import leaf_paths, paths_apart
from funcga._backend.protocols import Backend
from funcga._trees.interop import to_jax, to_numpy, to_torch
from funcga.errors import FuncgaError


def to_state_dict(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by their paths, such as `.window.accumulated['w']`; they are not copied.

    The paths are the same in both frameworks, whatever the order of their dicts. What has no arrays, None and empty
    containers, is left out; from_state_dict takes it from the tree that it fills. Typed keys of JAX are there as their
    data, jax.random.key_data(key), and from_state_dict makes keys of it.

    >>> numpy.savez("state.npz", **funcga.to_numpy(funcga.to_state_dict(state)))
    >>> safetensors.torch.save_file(funcga.to_state_dict(state), "state.safetensors")
    """
    backend = backend_of([tree], lambda: ["tree"])
    return {path: backend.arrays.stored(leaf) for path, leaf in _named(tree, backend) if leaf is not None}


def _named(tree: Any, backend: Backend) -> list[tuple[str, Any]]:
    return list(zip(leaf_paths(tree, backend.trees), backend.trees.flatten(tree)[0], strict=True))


def from_state_dict(like: Any, state_dict: Mapping[str, Any]) -> Any:
    """A tree like this one, with the arrays of a state dict, matched by path: copies, where `like` has its own.

    like: a tree of the same structure, such as tx.init(params); it is left as it is. state_dict: what to_state_dict
    returned, or what was read from a file: arrays of any framework, or of NumPy. Raises FuncgaError, which names the
    paths, if one is missing or new, or has another shape or dtype.

    >>> state = funcga.from_state_dict(tx.init(params), numpy.load("state.npz"))
    """
    if not isinstance(state_dict, Mapping):
        raise FuncgaError(
            f"state_dict is of type {type(state_dict).__name__}; it is a dict of path to array, as "
            f"funcga.to_state_dict(state) returns it."
        )
    backend = backend_of([like], lambda: ["like"])
    named = _named(like, backend)
    _check_paths([path for path, leaf in named if leaf is not None], [*state_dict])
    numbers = {path for path, leaf in named if not backend.arrays.is_array(leaf)}  # NumPy's files make them 64 bits
    arrays = {path: array for path, array in state_dict.items() if path not in numbers}
    given = {**state_dict, **{"torch": to_torch, "jax": to_jax}[backend.name](arrays)}
    leaves = [leaf if leaf is None else _restored(path, given[path], leaf, backend) for path, leaf in named]
    return backend.trees.unflatten(backend.trees.flatten(like)[1], leaves)


def _check_paths(expected: list[str], found: list[str]) -> None:
    missing, new = paths_apart(expected, found)
    if missing or new:
        raise FuncgaError(
            f"the state dict is not of a tree like this one: missing {_some(missing)}; new {_some(new)}. Make `like` "
            f"as the state was made that was saved: the same params, transform and options."
        )


def _some(paths: list[str]) -> str:
    return (", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")) or "nothing"


def _restored(path: str, array: Any, like: Any, backend: Backend) -> Any:
    arrays = backend.arrays
    if not arrays.is_array(like):
        found = to_numpy(array)
        return type(like)(found.item()) if hasattr(found, "item") else found
    if arrays.describe(arrays.stored(array)) != arrays.describe(arrays.stored(arrays.as_array(like))):
        raise FuncgaError(
            f"{path} is {arrays.describe(array)} in the state dict and {arrays.describe(like)} in the tree to fill. "
            f"Nothing is cast: make `like` of params in the shapes and dtypes that were saved."
        )
    return arrays.placed(arrays.restored(array, like), like)
