"""The state of a torch optimizer as a tree of tensors."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from funcga.errors import FuncgaError
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


def check_state(state: object, params: Tree) -> None:
    """Raises FuncgaError for anything but a state of from_optimizer, or if params are missing."""
    if params is None:
        raise FuncgaError(
            "params are missing, and the step of a torch optimizer starts from them: "
            "tx.update(grads, state, params)."
        )
    if not isinstance(state, OptimizerState):
        raise FuncgaError(
            f"state is {arrays.describe(state)}, and should be what init or the update before "
            "returned: state = tx.init(params); updates, state = tx.update(grads, state, params). "
            "A chain has it at the optimizer's position, and multi_steps in `inner`: "
            "state.inner[1]."
        )


def order_of_paths(flags: list[bool], params: Tree) -> Sequence[int]:
    """The indices of the leaves in the order of their paths, as far as it matters for flags.

    It does not change if a file changes the order of a dict.
    """
    if len({*flags}) < 2:  # as usual
        return range(len(flags))
    paths = leaf_paths(params, trees)
    return sorted(range(len(paths)), key=paths.__getitem__)


def stored(slot: Slot) -> Slot:
    """What an optimizer keeps for a parameter, with Numbers for numbers; tensors are not copied."""
    are_tensors = {*map(type, slot.values())} <= {torch.Tensor}
    return slot if are_tensors else pytree.tree_map(_as_tensor, slot)


def _as_tensor(leaf: object) -> object:
    if leaf is None or isinstance(leaf, torch.Tensor):
        return leaf
    dtype = {float: torch.float64, complex: torch.complex128}.get(type(leaf))
    return Number(torch.tensor(leaf, dtype=dtype, device="cpu"))


def writable(slots: list[Slot], parameters: list[torch.Tensor], owned: bool) -> list[Slot]:
    """The inverse of `stored` for each slot and its parameter, in new memory, or in that of the
    slots if they are `owned`.

    Tensors with the shape of the parameter are returned with its strides.
    """
    values = [value for slot in slots for value in slot.values()]
    if are_plain(values) and are_plain(parameters):  # as most are
        remaining = iter(values if owned else copies(values))
        return [{name: next(remaining) for name in slot} for slot in slots]
    return [
        pytree.tree_map(partial(_restored, owned, parameter), slot, is_leaf=_is_number)
        for slot, parameter in zip(slots, parameters, strict=True)
    ]


def _restored(owned: bool, parameter: torch.Tensor, leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf.value.item() if isinstance(leaf, Number) else leaf
    laid = arrays.with_strides_of(leaf, parameter)
    return laid if owned or laid is not leaf else leaf.clone()


def _is_number(value: object) -> bool:
    return isinstance(value, Number)


def all_with_strides_of(tensors: Sequence[Any], likes: Sequence[torch.Tensor]) -> list[Any]:
    """Each tensor `with_strides_of` another one. None stays None."""
    # Usually all are contiguous, which no sparse tensor is, so that they have strides.
    if (
        are_plain(tensors)
        and are_plain(likes)
        and [*map(_STRIDE, tensors)] == [*map(_STRIDE, likes)]
    ):
        return [*tensors]
    return [
        None if tensor is None else arrays.with_strides_of(tensor, like)
        for tensor, like in zip(tensors, likes, strict=True)
    ]


def are_plain(values: Sequence[Any]) -> bool:
    """Whether all of these are contiguous tensors and of no other type, as most are."""
    return {*map(type, values)} <= _PLAIN and all(map(torch.Tensor.is_contiguous, values))


_PLAIN, _STRIDE = {torch.Tensor}, torch.Tensor.stride


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in memory of their own; on a device one kernel copies many tensors."""
    copied, there = list[torch.Tensor](), list[int]()
    for index, tensor in enumerate(tensors):
        is_there = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_cpu
        copied.append(torch.empty_like(tensor, requires_grad=False) if is_there else tensor.clone())
        if is_there:
            there.append(index)
    if there:
        torch._foreach_copy_(
            [copied[index] for index in there], [tensors[index] for index in there]
        )
    return copied
