"""Dotted paths: the leaves of any tree by one spelling, so that trees of different frameworks and containers match."""

import ast
from collections.abc import Callable, Iterator, Mapping, MappingView
from typing import Any

from funcga._backend.dispatch import load_imported
from funcga._trees.interop import to_numpy
from funcga.errors import FuncgaError

Children = Callable[[Any], list[tuple[str, Any]] | None]


def by_path(tree: Any, name: str) -> dict[str, Any]:
    """The leaves of a tree by their dotted paths, such as `hidden.weight`; that of a single array is empty.

    A flat dict {"hidden.weight": array} has the same paths as the nested one; dicts keep their order. None and
    functions, as equinox modules hold for an activation, are no leaves; a box with a `.value` alone, as flax puts
    around a parameter, is its value. Raises FuncgaError, which calls the tree by `name`, for a torch module, a DTensor,
    an iterator or a view of a dict, and two leaves of one path.
    """
    found: dict[str, Any] = {}
    for path, leaf in paths_and_leaves(tree, _walk(tree)):
        if path in found:
            raise FuncgaError(
                f"two leaves of {name} have the path `{path}`, as a key with a dot in it and as nested keys, so that "
                f"it does not say which is meant. Rename one of the two."
            )
        _check(leaf, path, name)
        if leaf is not None and not callable(leaf):
            found[path] = leaf
    return found


def _walk(tree: Any) -> Children:
    """The children of a node: the usual containers in their own order, all others as the framework of the tree has it.

    Unlike in a fold, a tree may hold arrays of several frameworks, or of NumPy alone: it is only looked at.
    """
    loaded = load_imported()
    owners = [b for b in loaded if any(map(b.arrays.owns, b.trees.flatten(tree, _is_pathless)[0]))]
    backend = [*loaded, *owners][-1] if loaded else None

    def children(node: Any) -> list[tuple[str, Any]] | None:
        if isinstance(node, Mapping):
            return [(f"[{key!r}]", child) for key, child in node.items()]
        if isinstance(node, tuple | list):
            fields = getattr(node, "_fields", None)
            keys = [f".{name}" for name in fields] if fields else [f"[{i}]" for i in range(len(node))]
            return list(zip(keys, node, strict=True))
        return backend.trees.children(node) if backend and not _is_pathless(node) else None

    return children


def _is_pathless(node: Any) -> bool:
    """Whether a node gives its items one by one, without saying what they are called."""
    return isinstance(node, Iterator | MappingView)


def _check(leaf: Any, path: str, name: str) -> None:
    if hasattr(leaf, "named_parameters"):
        raise FuncgaError(
            f"{_where(path, name)} is the module {type(leaf).__name__}, which is no tree of arrays. Pass its "
            f"parameters, dict(module.named_parameters()), or its buffers too: module.state_dict()."
        )
    if _is_pathless(leaf):
        raise FuncgaError(
            f"{_where(path, name)} is a {type(leaf).__name__}, whose items have no paths. Pass a dict: "
            f"dict(module.named_parameters()) instead of module.parameters(), tree instead of tree.values(); or a list "
            f"of the items."
        )
    if hasattr(leaf, "full_tensor"):
        raise FuncgaError(
            f"{_where(path, name)} is a DTensor, of which this process holds a part. Gather it first, on every rank of "
            f"its mesh: {{name: tensor.full_tensor() for name, tensor in {name}.items()}}."
        )


def _where(path: str, name: str) -> str:
    return f"`{path}` of {name}" if path else name


def paths_and_leaves(tree: Any, children: Children, path: str = "") -> list[tuple[str, Any]]:
    """(dotted path, leaf) of every leaf, in the order of `children`; of a backend's trees that is also None's."""
    below = children(tree)
    if below is None:
        return [(path, tree)]
    if [key for key, _ in below] == [".value"]:
        return paths_and_leaves(below[0][1], children, path)
    return [
        found
        for key, child in below
        for found in paths_and_leaves(child, children, f"{path}.{_dotted(key)}".removeprefix("."))
    ]


def _dotted(key: str) -> str:
    """`['a']`, `[0]` and `.a`, as one would write them in code, without what is around the name."""
    if key.startswith("."):
        return key[1:]
    inner = key[1:-1]
    return str(ast.literal_eval(inner)) if inner[:1] in "'\"" else inner


def as_numpy(leaf: Any, path: str) -> Any:
    """An array of any framework as one of NumPy; another leaf as it is.

    Raises FuncgaError for what has no numbers: a random key of JAX, and what stands for an array without being one.
    """
    dtype, where = str(getattr(leaf, "dtype", "")), f"`{path}`" if path else "the array"
    if dtype.startswith("key<"):
        raise FuncgaError(
            f"{where} is {dtype}{list(leaf.shape)}, a random key, which has no numbers. Take its bits, "
            f"jax.random.key_data(key), or leave it out: the parameters alone, not the whole state."
        )
    if dtype and (not hasattr(leaf, "__array__") or getattr(leaf, "is_meta", False)):
        raise FuncgaError(
            f"{where} is {type(leaf).__name__} {dtype.removeprefix('torch.')}{list(leaf.shape)}, which stands for an "
            f"array and has no numbers. Pass the arrays themselves."
        )
    owned = any(backend.arrays.owns(leaf) for backend in load_imported())
    try:
        return to_numpy(leaf, copy=None) if owned else leaf
    except FuncgaError as error:  # which calls a leaf by its place in a tree, here none
        raise FuncgaError(str(error).replace("`tree`", where, 1)) from error
