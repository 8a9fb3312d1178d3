"""Updates, applied to parameters."""

from contextlib import nullcontext
from typing import Any

import torch

from funcga._backend.prefixes import leaf_paths
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import is_placed, settled
from torch_backend.optim.match import matched


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters with the updates added, in the parameters' dtypes.

    params: a tree of tensors, as `dict(module.named_parameters())`. What comes back has its structure; the tensors are
        detached, unless it is a part of a loss that is differentiated, and in memory of their own.
    updates: a tree of the same structure and shapes; None leaves a parameter as it is. The sum is computed in the wider
        of the two dtypes and rounded once, so that float32 updates of bfloat16 parameters lose nothing before.

    Raises FuncgaError, with the paths, where the two differ in structure or shape.

    >>> updates, state = tx.update(grads, state, params)
    >>> params = torch_backend.apply_updates(params, updates)
    """
    leaves, structure = trees.flatten(params)
    given = matched(updates, params, "updates")
    _check(leaves, given, params)
    with nullcontext() if arrays.in_transform() else torch.no_grad():
        return trees.unflatten(structure, _sums(leaves, given))


def _check(leaves: list[Any], given: list[Any], params: Any) -> None:
    for place, (leaf, update) in enumerate(zip(leaves, given, strict=True)):
        if update is None or (
            isinstance(leaf, torch.Tensor)
            and isinstance(update, torch.Tensor)
            and leaf.shape == update.shape
            and is_placed(leaf) == is_placed(update)
        ):
            continue
        path = leaf_paths(params, trees)[place]
        raise FuncgaError(
            f"`updates{path}` is {_describe(update)}, and `params{path}` is {_describe(leaf)}. An update is a tensor "
            f"of its parameter's shape, or None: updates, state = tx.update(grads, state, params), of these params."
        )


def _describe(leaf: Any) -> str:
    return f"{'a DTensor ' if is_placed(leaf) else ''}{arrays.describe(leaf)}"


def _sums(leaves: list[Any], given: list[Any]) -> list[Any]:
    """Each leaf plus what is given for it."""
    if leaves and all(map(_is_plain, leaves, given)):
        return list(torch._foreach_add(leaves, given))  # one launch, where a device has that
    return [_sum(leaf, update) for leaf, update in zip(leaves, given, strict=True)]


def _is_plain(leaf: Any, update: Any) -> bool:
    """Whether the sum is what torch makes of the two without more ado."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return type(leaf) in plain and type(update) in plain and bool(leaf.dtype == update.dtype)


def _sum(leaf: Any, update: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if update is None:
        return leaf.clone()
    return (leaf + settled(update, leaf)).to(leaf.dtype)
