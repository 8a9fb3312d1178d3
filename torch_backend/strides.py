"""Layouts: in which strides a tensor lies, and whether memory is another's, for what is written in place.

Only torch has this file: an array of JAX has no strides, and no memory that one could write to.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torch_backend.dtensor import locals_of, rewrapped


def laid_as(tensor: Any, like: Any) -> Any:
    """The tensor in the strides of another one of its shape; itself if it has them, or one of the two is sparse.

    A kernel that runs through the memory of several tensors at once, as those of `fused=True` do, needs them alike.
    Where `like` is no dense one, such as an expanded or sliced tensor, the strides are those of its clone.
    """
    held, wanted = locals_of([tensor, like])
    if held.layout is not torch.strided or wanted.layout is not torch.strided or held.shape != wanted.shape:
        return tensor
    if held.stride() == wanted.stride():
        return tensor
    with torch.no_grad():
        return rewrapped(torch.empty_like(wanted, dtype=held.dtype).copy_(held), like)


def apart(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, cloned where memory is that of another one, or several numbers' of one; None stays None."""
    found = list(tensors)
    known = sorted((*_extent(tensor), place) for place, tensor in enumerate(found) if tensor is not None)
    reached: dict[str, int] = {}
    for device, start, end, size, place in known:
        if start < reached.get(device, 0) or end - start < size:
            found[place] = found[place].clone()
        else:
            reached[device] = end
    return found


def _extent(tensor: Any) -> tuple[str, int, int, int]:
    """The device, there the first byte of what a tensor holds and the one after its last, and how many it has."""
    held = locals_of([tensor])[0]
    if held.layout is not torch.strided or not held.numel():
        return str(held.device), 0, 0, 0
    width, start = held.element_size(), held.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(held.shape, held.stride(), strict=True))
    return str(held.device), start, start + (last + 1) * width, held.numel() * width
