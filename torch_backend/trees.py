"""Trees, as this framework walks them."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from funcga._backend.containers import Mapped, container_children, is_container, rebuilt
from funcga._types import Structure, Tree
from torch_backend import arrays
from torch_backend._private import pytree

pytree.register_pytree_node(
    Mapped, lambda node: (node.values, node.kind), lambda values, kind: rebuilt(kind, values)
)
_LEAF = pytree.tree_structure(0)
PLAIN = {torch.Tensor, torch.nn.Parameter}


# Typed, because 1 and True are equal, and are different keys.
@lru_cache(maxsize=64, typed=True)
def _dict_of_leaves(*keys: object) -> Structure:
    return pytree.tree_structure(dict.fromkeys(keys, 0))


def flatten(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Structure]:
    """The leaves, in the framework's order, and the structure that puts them back."""
    # Two shortcuts, much faster than pytree: a single tensor, and a dict of tensors, as parameters
    # usually are.
    if type(tree) is torch.Tensor:
        return [tree], _LEAF
    if (
        type(tree) is dict
        and PLAIN.issuperset(map(type, tree.values()))
        and not torch.compiler.is_compiling()
    ):
        return [*tree.values()], _dict_of_leaves(*tree)
    leaves, structure = pytree.tree_flatten(tree, is_leaf)
    if torch.compiler.is_compiling() or not any(
        issubclass(kind, Mapping) or is_dataclass(kind) for kind in {*map(type, leaves)}
    ):
        return leaves, structure

    # Torch takes unregistered mappings and dataclasses for leaves. They become nodes that it knows,
    # also inside of one another.
    def with_nodes(node: Tree) -> Tree:
        return pytree.tree_map(as_node, node, is_leaf=is_leaf)

    def as_node(leaf: Any) -> Any:
        stays = not is_container(leaf) or (is_leaf is not None and is_leaf(leaf))
        return leaf if stays else Mapped(leaf, with_nodes)

    return pytree.tree_flatten(with_nodes(tree), is_leaf)


def tensors_in(tree: Tree) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Tree:
    """The tree of this structure with these leaves."""
    if structure is _LEAF:
        return leaves[0]
    # The same shortcuts: a dict of leaves, and a tuple of what has a shortcut, such as a loss with
    # its gradients.
    if structure.type is dict and structure.num_nodes == structure.num_leaves + 1:
        return dict(zip(structure.context, leaves, strict=True))
    if structure.type is tuple and len(leaves) == structure.num_leaves:
        remaining = iter(leaves)
        return tuple(
            [
                unflatten(child, [*islice(remaining, child.num_leaves)])
                for child in structure.children()
            ]
        )
    return pytree.tree_unflatten(leaves, structure)


def children(tree: Tree) -> list[tuple[str, Tree]] | None:
    """The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""
    # The usual ones first, in a way that torch.compile can trace.
    if tree is None or isinstance(tree, torch.Tensor | int | float | str):
        return None
    if type(tree) in (tuple, list):
        return [(f"[{index}]", child) for index, child in enumerate(tree)]
    if type(tree) in (dict, OrderedDict):
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    # Any other node that torch knows, and containers that it does not.
    is_below = lambda node: node is not tree
    try:
        pairs = pytree.tree_flatten_with_path(tree, is_leaf=is_below)[0]
    except ValueError:  # a registered node without keys
        subtrees = pytree.tree_flatten(tree, is_leaf=is_below)[0]
        return [(f"[{index}]", child) for index, child in enumerate(subtrees)]
    if [path for path, _ in pairs] == [()]:  # a leaf
        return container_children(tree)
    return [(str(path[0]), child) for path, child in pairs]


# --- Graphs


def detached(tree: Tree, recorded: bool = False) -> Tree:
    """The tree without the graphs of its tensors.

    `recorded`: autograd will record them, outside of every transform. Tensors made in inference
    mode are copied then.
    """
    leaves, structure = flatten(tree)
    without = detached_leaves(leaves, recorded)
    return tree if without is leaves else unflatten(structure, without)


def detached_leaves(leaves: list[Any], recorded: bool = False) -> list[Any]:
    """The same of leaves; these themselves, if none has a graph."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not any(leaf.requires_grad or (recorded and leaf.is_inference()) for leaf in tensors):
        return leaves
    if not recorded and arrays.in_transform():
        return leaves
    return [_without_graph(leaf, recorded) for leaf in leaves]


def _without_graph(leaf: Any, recorded: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if recorded and leaf.is_inference():
        with torch.inference_mode(False):
            return leaf.clone()
    return leaf.detach() if leaf.requires_grad else leaf
