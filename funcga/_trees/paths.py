"""Dotted paths: the leaves of any tree by one spelling, so that trees of different frameworks and containers match."""

import ast
from collections.abc import Callable, Iterator, Mapping, MappingView

from funcga._backend.dispatch import load_imported
from funcga._backend.protocols import ExportError
from funcga._trees.interop import owner_of
from funcga._types import Array, Tree
from funcga.errors import FuncgaError

Children = Callable[[Tree], list[tuple[str, Tree]] | None]
"""The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""


def by_path(tree: Tree, name: str) -> dict[str, Array]:
    """The leaves of a tree by their dotted paths, such as `hidden.weight`; that of a single array is empty.

    A flat dict {"hidden.weight": array} has the same paths as the nested one; dicts keep their order. None and
    functions, as equinox modules hold for an activation, are no leaves; a box with a `.value` alone, as flax puts
    around a parameter, is its value. Raises FuncgaError, which calls the tree by `name`, for a torch module, a DTensor,
    an iterator or a view of a dict, and two leaves of one path.
    """
    leaves: dict[str, Array] = {}
    for path, leaf in paths_and_leaves(tree, _children_in(tree)):
        if path in leaves:
            raise FuncgaError(
                f"two leaves of {name} have the path `{path}`, as a key with a dot in it and as nested keys, so that "
                f"it does not say which is meant. Rename one of the two."
            )
        _check_leaf(leaf, f"`{path}` of {name}" if path else name, name)
        if leaf is not None and not callable(leaf):
            leaves[path] = leaf
    return leaves


def _children_in(tree: Tree) -> Children:
    """How a tree is walked: the usual containers in their own order, all others as the framework of the tree has them.

    Unlike in a fold, a tree may hold arrays of several frameworks, or of NumPy alone: it is only looked at.
    """
    # The framework that owns an array knows the containers best; without arrays any one is asked.
    loaded = load_imported()
    owners = [b for b in loaded if any(map(b.arrays.owns, b.trees.flatten(tree, _is_pathless)[0]))]
    backend = [*loaded, *owners][-1] if loaded else None

    def children(node: Tree) -> list[tuple[str, Tree]] | None:
        # JAX would sort the keys of a dict, and NumPy's trees need no framework.
        if isinstance(node, Mapping):
            return [(f"[{key!r}]", child) for key, child in node.items()]
        if isinstance(node, tuple | list):
            fields = getattr(node, "_fields", None)
            keys = [f".{field}" for field in fields] if fields else [f"[{index}]" for index in range(len(node))]
            return list(zip(keys, node, strict=True))
        return backend.trees.children(node) if backend and not _is_pathless(node) else None

    return children


def _is_pathless(node: object) -> bool:
    """Whether a node gives its items one by one, without saying what they are called."""
    return isinstance(node, Iterator | MappingView)


def _check_leaf(leaf: object, where: str, name: str) -> None:
    """Raises FuncgaError for what looks like a tree of arrays and is none."""
    if hasattr(leaf, "named_parameters"):
        raise FuncgaError(
            f"{where} is the module {type(leaf).__name__}, which is no tree of arrays. Pass its parameters, "
            f"dict(module.named_parameters()), or its buffers too: module.state_dict()."
        )
    if _is_pathless(leaf):
        raise FuncgaError(
            f"{where} is a {type(leaf).__name__}, whose items have no paths. Pass a dict: "
            f"dict(module.named_parameters()) instead of module.parameters(), tree instead of tree.values(); or a list "
            f"of the items."
        )
    if hasattr(leaf, "full_tensor"):
        raise FuncgaError(
            f"{where} is a DTensor, of which this process holds a part. Gather it first, on every rank of "
            f"its mesh: {{name: tensor.full_tensor() for name, tensor in {name}.items()}}."
        )


def paths_and_leaves(tree: Tree, children: Children, path: str = "") -> list[tuple[str, Array]]:
    """(dotted path, leaf) of every leaf, in the order of `children`; of a backend's trees that is also None's."""
    below = children(tree)
    if below is None:
        return [(path, tree)]
    # A box such as flax's Param has one child, and its path is the box's own.
    if [key for key, _ in below] == [".value"]:
        return paths_and_leaves(below[0][1], children, path)
    leaves = []
    for key, child in below:
        leaves += paths_and_leaves(child, children, f"{path}.{_dotted(key)}".removeprefix("."))
    return leaves


def _dotted(key: str) -> str:
    """`['a']`, `[0]` and `.a`, as one would write them in code, without what is around the name."""
    if key.startswith("."):
        return key[1:]
    # A key in quotes is Python's spelling of a string, and an index is a number as it stands.
    inner = key[1:-1]
    return str(ast.literal_eval(inner)) if inner[:1] in "'\"" else inner


def as_numpy(leaf: Array, path: str) -> Array:
    """An array of any framework as one of NumPy, in the same memory if it can be; another leaf as it is.

    Raises FuncgaError, which calls the array by its path, for one without numbers that NumPy could have.
    """
    owner = owner_of(leaf)
    if owner is None:
        return leaf
    try:
        return owner.dlpack.export_array(leaf, set()).array
    except ExportError as error:
        raise FuncgaError(f"{f'`{path}`' if path else 'the array'} is {error}.") from error
