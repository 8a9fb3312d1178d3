"""Prefetching: each micro-batch of a stream is copied to the device while the one before it is
computed with.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from funcga._types import Tree
from torch_backend import trees


def _stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device; None if that is the host, or has only one stream, as Apple's
    does.
    """
    if device.type in ("cpu", "meta") or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return torch.Stream(device)


def moved(items: Iterator[tuple[Tree, ...]], device: Any) -> Iterator[tuple[Tree, ...]]:
    """The items of a stream with their arrays on a device, each copied while the one before it is
    computed with.

    Where the device has streams, a second one copies while kernels for the last item still run.
    From pinned memory the host does not wait for the copy either.
    """
    device = torch.device(device)
    copies = _stream(device)

    def begin() -> tuple[Tree, ...] | None:
        item = next(items, None)
        if item is None:
            return None
        leaves, structure = trees.flatten(item)
        with copies or nullcontext():
            leaves = [
                leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
        moved: tuple[Tree, ...] = trees.unflatten(structure, leaves)
        return moved

    item = begin()
    while item is not None:
        if copies is not None:
            computing = torch.accelerator.current_stream(device)
            computing.wait_stream(copies)
            # The memory was allocated on the copying stream. The allocator must not reuse it while
            # the computing one still reads it.
            for leaf in trees.flatten(item)[0]:
                if isinstance(leaf, torch.Tensor):
                    leaf.record_stream(computing)
        # No reference stays in this frame, so the consumer alone decides how long the item lives.
        holder = [item]
        del item
        yield holder.pop()
        item = begin()
