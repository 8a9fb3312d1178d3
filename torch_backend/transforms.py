"""What `multi_steps` needs of this framework: its conditional, and the params of an update."""

from collections.abc import Callable

import torch

from funcga._types import Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.arrays import without_overlap
from torch_backend.dtensor import local
from torch_backend.parameters import matched, summed
from torch_backend.states import zeros_like

# The dtypes of less than 32 bits, and those that an update has in their place.
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


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
    wide = [
        (leaf if tracked else leaf.detach()).to(_WIDE.get(leaf.dtype, leaf.dtype), copy=copies)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]

    def narrowed(after: Tree) -> Tree:
        narrow = matched(after, params, "params")
        for index, (leaf, updated) in enumerate(zip(leaves, narrow, strict=True)):
            if isinstance(leaf, torch.Tensor) and updated.dtype != leaf.dtype:
                narrow[index] = leaf.detach().copy_(updated) if donate else updated.to(leaf.dtype)
        return trees.unflatten(structure, narrow)

    return trees.unflatten(structure, wide), narrowed


def added(params: Tree, updates: Tree, state: Tree, donate: bool) -> Tree:
    """The params with the updates added; in place if they are donated and share no memory with
    the state.
    """
    in_place = donate and not arrays.in_transform()
    return summed(apart(params, state) if in_place else params, updates, in_place)


def apart(params: Tree, other: Tree) -> Tree:
    """The params, to be written to: copies where they lie in the memory of another one, or of a
    tensor elsewhere.
    """
    leaves, structure = trees.flatten(params)
    separate = without_overlap([None if leaf is None else leaf.detach() for leaf in leaves])
    others = storages(other)
    for index, tensor in enumerate(separate):
        if not others.isdisjoint(storages(tensor)):
            separate[index] = tensor.clone()
    return trees.unflatten(structure, separate)


def storages(tree: Tree) -> set[int]:
    """The addresses of the memory of the dense tensors in a tree."""
    shards = [*map(local, trees.tensors_in(tree))]
    dense = [shard for shard in shards if shard.layout is torch.strided]
    return {shard.untyped_storage().data_ptr() for shard in dense}


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
    nothing = zeros_like(leaves, _WIDE, views=donate)
    return trees.unflatten(structure, nothing), state, False
