"""Leaves: what autograd differentiates by in place of arguments, and arguments without graphs.

For each parameter among the arguments there is a leaf, `p.detach().requires_grad_()`, which shares
its memory. So arguments, modules and their `.grad`s stay as they are, and everything that autograd
can do works.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga._types import Tree
from torch_backend import arrays
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


def copied_leaves(originals: Sequence[Any]) -> list[torch.Tensor]:
    """Copies that can be differentiated, of numbers and of tensors made in inference mode."""
    return [arrays.as_array(o).detach().clone().requires_grad_() for o in originals]


def any_requires_grad(leaves: Iterable[Any]) -> bool:
    """Whether one of these is a tensor that requires grad."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
