"""Trees, as this framework walks them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from funcga._trees.mappings import Mapped, is_mapping, rebuilt

jax.tree_util.register_pytree_node(Mapped, lambda node: (node.values, node.kind), rebuilt)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves, in the framework's order, and the structure that puts them back."""
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    if not any(map(is_mapping, {*map(type, leaves)})):
        return leaves, structure

    def walked(node: Any) -> Any:
        return jax.tree.map(known, node, is_leaf=is_leaf)

    def known(leaf: Any) -> Any:
        whole = not is_mapping(type(leaf)) or (is_leaf is not None and is_leaf(leaf))
        return leaf if whole else Mapped(leaf, walked)

    return jax.tree.flatten(walked(tree), is_leaf)


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return jax.tree.unflatten(structure, leaves)


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if [path for path, _ in found] == [()]:
        return [(f"[{key!r}]", tree[key]) for key in tree] if is_mapping(type(tree)) else None
    return [(str(path[0]), subtree) for path, subtree in found]
