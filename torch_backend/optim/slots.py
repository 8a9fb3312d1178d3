"""Slots: what an optimizer of torch keeps for a parameter, as a tree of tensors.

Only torch has this file: a state of optax is such a tree already.
"""

from typing import Any, NamedTuple

import torch

from funcga.errors import FuncgaError
from torch_backend.strides import laid_as


class Number(NamedTuple):
    """A Python number, as a 0-d tensor on the CPU: int64, float64, bool or complex128."""

    value: torch.Tensor


_DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}


def to_slot(value: Any, name: str = "state") -> Any:
    """What an optimizer keeps, with tensors for its numbers; its own tensors are those given.

    Raises FuncgaError for what is neither a tensor, a number, None nor a list, tuple or dict of these.
    """
    if isinstance(value, torch.Tensor) or value is None:
        return value
    if isinstance(value, dict):
        return {k: v if type(v) is torch.Tensor else to_slot(v, k) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)([to_slot(item, name) for item in value])
    if type(value) in _DTYPES:
        return Number(torch.tensor(value, dtype=_DTYPES[type(value)]))
    raise FuncgaError(
        f"the optimizer keeps `{name}` of type {type(value).__name__} for a parameter, which is no tensor and cannot "
        f"be put into a state. Keep optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads)."
    )


def from_slot(slot: Any, owned: bool, like: Any = None) -> Any:
    """What `to_slot` was given; in memory of its own, unless the slot's is `owned` by the caller.

    like: the parameter. What has its shape comes back in its strides.
    """
    if isinstance(slot, torch.Tensor):
        laid = slot if like is None or slot.shape != like.shape else laid_as(slot, like)
        return laid if owned or laid is not slot else slot.clone()
    if isinstance(slot, Number):
        return slot.value.item()
    if isinstance(slot, dict):
        return {key: from_slot(item, owned, like) for key, item in slot.items()}
    if type(slot) in (list, tuple):
        return type(slot)([from_slot(item, owned, like) for item in slot])
    return slot


def mapped(function: Any, slot: Any) -> Any:
    """A slot of what the function makes of each tensor."""
    if isinstance(slot, torch.Tensor):
        return function(slot)
    if isinstance(slot, Number):
        return Number(function(slot.value))
    if type(slot) in (list, tuple):
        return type(slot)([mapped(function, item) for item in slot])
    if isinstance(slot, dict):
        return {key: mapped(function, item) for key, item in slot.items()}
    return slot
