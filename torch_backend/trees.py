"""Trees, as this framework walks them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

# torch has no public pytree module; this file is the only one that knows the private one.
from torch.utils import _pytree

from funcga._trees.mappings import Mapped, is_mapping, rebuilt

_pytree.register_pytree_node(Mapped, lambda node: (node.values, node.kind), lambda values, kind: rebuilt(kind, values))
_LEAF = _pytree.tree_structure(0)
_TENSORS = {torch.Tensor, torch.nn.Parameter}


@lru_cache(maxsize=64, typed=True)  # 1 and True are equal, and no one key
def _dict_of_leaves(*keys: Any) -> Any:
    return _pytree.tree_structure(dict.fromkeys(keys, 0))


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves, in the framework's order, and the structure that puts them back."""
    if type(tree) is torch.Tensor:  # as most often, and much faster
        return [tree], _LEAF
    # a dict of tensors, as parameters are, is next
    if type(tree) is dict and _TENSORS.issuperset(map(type, tree.values())) and not torch.compiler.is_compiling():
        return [*tree.values()], _dict_of_leaves(*tree)
    leaves, structure = _pytree.tree_flatten(tree, is_leaf)
    if torch.compiler.is_compiling() or not any(map(is_mapping, {*map(type, leaves)})):
        return leaves, structure

    def walked(node: Any) -> Any:
        return _pytree.tree_map(known, node, is_leaf=is_leaf)

    def known(leaf: Any) -> Any:
        whole = not is_mapping(type(leaf)) or (is_leaf is not None and is_leaf(leaf))
        return leaf if whole else Mapped(leaf, walked)

    return _pytree.tree_flatten(walked(tree), is_leaf)


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    if structure is _LEAF:
        return leaves[0]
    if structure.type is dict and structure.num_nodes == structure.num_leaves + 1:
        return dict(zip(structure.context, leaves, strict=True))
    if structure.type is tuple and len(leaves) == structure.num_leaves:  # of a loss and such a dict, as most often
        rest = iter(leaves)
        return tuple([unflatten(child, [*islice(rest, child.num_leaves)]) for child in structure.children()])
    return _pytree.tree_unflatten(leaves, structure)


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""
    # The usual ones first, in a way that torch.compile can trace.
    if tree is None or isinstance(tree, torch.Tensor | int | float | str):
        return None
    if type(tree) in (tuple, list):
        return [(f"[{i}]", child) for i, child in enumerate(tree)]
    if type(tree) in (dict, OrderedDict):
        return [(f"[{key!r}]", child) for key, child in tree.items()]

    def below(node: Any) -> bool:
        return node is not tree

    try:
        found, _ = _pytree.tree_flatten_with_path(tree, is_leaf=below)
    except ValueError:  # a registered node without keys
        subtrees, _ = _pytree.tree_flatten(tree, is_leaf=below)
        return [(f"[{i}]", subtree) for i, subtree in enumerate(subtrees)]
    if [path for path, _ in found] == [()]:
        return [(f"[{key!r}]", tree[key]) for key in tree] if is_mapping(type(tree)) else None
    return [(str(path[0]), subtree) for path, subtree in found]
