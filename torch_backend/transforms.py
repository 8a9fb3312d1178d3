"""What `multi_steps` needs of this framework: its conditional, and the dtypes of an update."""

from collections.abc import Callable
from typing import Any

import torch

from funcga._types import Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.parameters import added as added
from torch_backend.parameters import narrowed
from torch_backend.states import zeros_of


def widened(
    params: Tree, copies: bool = False, donate: bool = False
) -> tuple[Tree, Callable[[Tree], Tree]]:
    """The params as a wrapped transform sees them, in no graph and in at least 32 bits, and the way
    back.

    `copies`: they have memory of their own. The way back is a function of such params after an
    update: they come in the dtypes of the params, and in the memory of these if that is donated.
    """
    tracked = arrays.in_transform()  # what is differentiated from outside stays in its graph
    leaves, structure = trees.flatten(params)
    for leaf_index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor | int | float | complex):
            continue
        array = arrays.as_array(leaf)
        if array.requires_grad and not tracked:
            array = array.detach()
        wide = array if array.dtype is torch.float32 else array.to(_dtype_of_update(array))
        leaves[leaf_index] = wide.clone() if copies and wide is array else wide
    return trees.unflatten(structure, leaves), lambda after: narrowed(after, params, donate)


def when(
    predicate: Scalar,
    emit: Callable[..., tuple[Tree, Tree]],
    state: Tree,
    operands: Tree,
    like: Tree,
    donate: bool = False,
) -> tuple[Tree, Tree, Scalar]:
    """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros and
    the state.

    The zeros have memory of their own, as other updates do. Where memory is donated, in order to
    save it, they are views of a single 0.
    """
    if predicate:
        return *emit(state, operands), True
    leaves, structure = trees.flatten(like)
    shared: dict[Any, torch.Tensor] | None = {} if donate else None
    nothing = [
        zeros_of(shared, leaf, _dtype_of_update(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return trees.unflatten(structure, nothing), state, False


def _dtype_of_update(like: torch.Tensor) -> torch.dtype:
    dtype = like.dtype
    if dtype is torch.float32:  # the usual case
        return dtype
    return arrays.accumulator_dtype(dtype) if arrays.kind(dtype) in ("float", "complex") else dtype
