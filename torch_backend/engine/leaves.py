"""Leaves: what autograd differentiates by in place of arguments, and arguments without graphs.

For each parameter among the arguments there is a leaf, `p.detach().requires_grad_()`, which shares
its memory. So arguments, modules and their `.grad`s stay as they are, and everything that autograd
can do works.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._grad import GradientFunction
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.modules.layers import Parts, Walk

OWN = -1  # in place of the index of an argument: a module's own parameters


class Own(NamedTuple):
    """A module, its parts, its own parameters that are differentiated, and the walk that has found
    them.
    """

    module: nn.Module
    parts: Parts
    params: dict[str, nn.Parameter]
    walk: Walk


class Leaves(NamedTuple):
    """`trees`: the differentiated arguments as the loss is given them, by index; `inputs` are their
    leaves, and `originals` what these are made of.
    """

    trees: dict[int, Tree]
    inputs: list[torch.Tensor]
    originals: list[Any]


def paths_of(tree: Tree, index: int, gradient: GradientFunction) -> list[str]:
    """The paths of the leaves of an argument, for errors."""
    is_own = index == OWN
    name = "parameters" if is_own else argument_names(gradient.loss_fn, index + 1)[index]
    return leaf_paths(tree, trees, name)


def check_dense(gradient: GradientFunction, by_index: dict[int, Tree]) -> None:
    """Raises FuncgaError for a sparse parameter; a sparse gradient of a dense one is summed."""
    for index, tree in by_index.items():
        for position, leaf in enumerate(trees.flatten(tree)[0]):
            if leaf is not None and leaf.layout is not torch.strided:
                raise FuncgaError(
                    f"`{paths_of(tree, index, gradient)[position]}` is a sparse tensor "
                    f"{arrays.describe(leaf)}, and sums of gradients are dense, as parameters have "
                    "to be. Let the values be the parameter, and make the sparse tensor of them in "
                    "loss_fn: torch.sparse_coo_tensor(indices, values, shape)."
                )


def any_requires_grad(leaves: Iterable[Any]) -> bool:
    """Whether one of these is a tensor that requires grad."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
