"""The state of a torch optimizer as a tree, and tensors that a step may write to."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from torch_backend import arrays, trees
from torch_backend._private import pytree

Slot = dict[str, Any]
"""What an optimizer keeps for one parameter: tensors, numbers, None, and containers of these."""


class OptimizerState(NamedTuple):
    """The state of an optimizer between two updates. All leaves are tensors, so it can be saved as
    it is.

    Attributes:
        count: The number of updates; int32[], on the CPU, where reading it waits for nothing.
        slots: The tree of the parameters with a dict for each leaf, such as
            `state.slots["w"]["exp_avg"]`: what the optimizer keeps for that parameter. Zeros before
            the parameter's first update. Python numbers are stored as a Number.
        started: Whether each parameter has had its first update, in the order of their paths;
            bool[parameters], on the CPU.
        weight: If options are functions of it, the weight of the last update's window, NaN before
            the first; float64[], on the CPU. Otherwise (), which has no leaves.
    """

    count: torch.Tensor  # type: ignore[assignment]  # a tuple's own method
    slots: Tree
    started: torch.Tensor
    weight: torch.Tensor | tuple[()] = ()


class Number(NamedTuple):
    """A Python number, as a 0-d tensor on the CPU: int64, float64, bool or complex128."""

    value: torch.Tensor


def with_tensors(slots: list[Slot]) -> list[Slot]:
    """The slots with a Number in place of each Python number; tensors are not copied."""
    dtypes = {float: torch.float64, complex: torch.complex128}

    def number(value: Any) -> Number:
        return Number(torch.tensor(value, dtype=dtypes.get(type(value)), device="cpu"))

    return pytree.tree_map_only((int, float, complex), number, slots)  # type: ignore[no-any-return]


def order_of_paths(flags: list[bool], params: Tree) -> Sequence[int]:
    """The indices of the leaves in the order of their paths, as far as it matters for flags.

    It does not change if a file changes the order of a dict.
    """
    if len({*flags}) < 2:  # as usual
        return range(len(flags))
    paths = leaf_paths(params, trees)
    return sorted(range(len(paths)), key=paths.__getitem__)


def writable(slots: list[Slot], parameters: list[torch.Tensor], owned: bool) -> list[Slot]:
    """The slots in new memory, or in their own if they are `owned`, in the strides of their
    parameters, with Python numbers in place of Numbers.
    """
    values = [value for slot in slots for value in slot.values()]
    if not {*map(type, values)} <= {torch.Tensor}:
        is_number = lambda value: isinstance(value, Number)
        read = lambda value: value.value.item() if isinstance(value, Number) else value
        values = pytree.tree_map(read, values, is_leaf=is_number)
    likes = [like for slot, like in zip(slots, parameters, strict=True) for _ in slot]
    values = with_strides_of(values, likes)
    remaining = iter(values if owned else copies(values))
    return [{name: next(remaining) for name in slot} for slot in slots]


def with_strides_of(values: Sequence[Any], likes: Sequence[torch.Tensor]) -> list[Any]:
    """The values, where each tensor of another one's shape has its strides, too."""
    if _are_contiguous(values) and _are_contiguous(likes):  # as most are
        return [*values]
    return [
        arrays.with_strides_of(value, like) if isinstance(value, torch.Tensor) else value
        for value, like in zip(values, likes, strict=True)
    ]


def _are_contiguous(values: Sequence[Any]) -> bool:
    return {*map(type, values)} == {torch.Tensor} and all(map(torch.Tensor.is_contiguous, values))


def copies(values: Sequence[Any]) -> list[Any]:
    """Copies in memory of their own; on a device one kernel copies many tensors."""
    plain = [value for value in values if type(value) is torch.Tensor]
    copied = [*map(torch.empty_like, plain)]
    pairs = [*zip(copied, plain, strict=True)]
    for device in {tensor.device for tensor in plain}:  # a kernel takes those of one
        new, old = zip(*[pair for pair in pairs if pair[1].device == device], strict=True)
        torch._foreach_copy_(new, old)
    remaining = iter(copied)
    return [next(remaining) if type(value) is torch.Tensor else deepcopy(value) for value in values]
