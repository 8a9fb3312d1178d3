"""Leaves: what autograd differentiates by in place of arguments, and arguments without graphs.

For each parameter among the arguments there is a leaf, `p.detach().requires_grad_()`, which shares
its memory. So arguments, modules and their `.grad`s stay as they are, and everything that autograd
can do works.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import Argument, Arguments, argument_names
from funcga._grad import GradientFunction
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.modules.layers import Walk

OWN = -1  # in place of the index of an argument: a module's own parameters


class Own(NamedTuple):
    """A module, its own parameters that are differentiated, and the walk that has found them."""

    module: nn.Module
    params: dict[str, nn.Parameter]
    walk: Walk


class Leaves(NamedTuple):
    """`trees`: the differentiated arguments as the loss is given them, by index; `inputs` are their
    leaves, and `originals` what these are made of.
    """

    trees: dict[int, Tree]
    inputs: list[torch.Tensor]
    originals: list[Any]


def copied_leaves(originals: Sequence[Any]) -> list[torch.Tensor]:
    """Copies that can be differentiated, of numbers and of tensors made in inference mode."""
    return [arrays.as_array(o).detach().clone().requires_grad_() for o in originals]


def paths_of(tree: Tree, index: int, gradient: GradientFunction) -> list[str]:
    """The paths of the leaves of an argument, for errors."""
    is_own = index == OWN
    name = "parameters" if is_own else argument_names(gradient.loss_fn, index + 1)[index]
    return leaf_paths(tree, trees, name)


def check_dense(tree: Tree, index: int, gradient: GradientFunction) -> None:
    """Raises FuncgaError for a sparse parameter; a sparse gradient of a dense one is summed."""
    for position, leaf in enumerate(trees.flatten(tree)[0]):
        if leaf is not None and leaf.layout is not torch.strided:
            raise FuncgaError(
                f"`{paths_of(tree, index, gradient)[position]}` is a sparse tensor "
                f"{arrays.describe(leaf)}, and sums of gradients are dense, as parameters have to "
                "be. Let the values be the parameter, and make the sparse tensor of them in "
                "loss_fn: torch.sparse_coo_tensor(indices, values, shape)."
            )


def detached(tree: Tree, recorded: bool = False) -> Tree:
    """The tree without the graphs of its tensors.

    `recorded`: autograd will record them, outside of every transform. Tensors made in inference
    mode are copied then.
    """
    leaves, structure = trees.flatten(tree)
    without = detached_leaves(leaves, recorded)
    return tree if without is leaves else trees.unflatten(structure, without)


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


def without_graphs(
    arguments: Arguments, instead: dict[int, Tree], moving: Sequence[int], recorded: bool
) -> list[Argument]:
    """The arguments without graphs, but for `moving` ones; `instead` have leaves already."""
    parts = []
    for index, part in enumerate(arguments.parts):
        if index in instead:
            parts.append(part._replace(value=instead[index]))
        elif index in moving:
            parts.append(part)
        elif part.axes:
            parts.append(part._replace(leaves=detached_leaves(part.leaves, recorded)))
        else:
            parts.append(part._replace(value=detached(part.value, recorded)))
    return parts


def any_requires_grad(leaves: Iterable[Any]) -> bool:
    """Whether one of these is a tensor that requires grad."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
