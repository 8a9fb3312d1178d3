"""Trees, as this framework walks them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves, in the framework's order, and the structure that puts them back."""
    return jax.tree.flatten(tree, is_leaf)


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    return jax.tree.unflatten(structure, leaves)


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if [path for path, _ in found] == [()]:
        return None
    return [(str(path[0]), subtree) for path, subtree in found]
