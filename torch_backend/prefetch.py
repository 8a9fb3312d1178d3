"""Prefetching: each micro-batch of a stream is copied to the device while the one before it is
computed with.
"""

from collections.abc import Iterator
from functools import cache
from threading import get_ident
from typing import Any

import torch

from funcga._types import Args
from torch_backend import trees


@cache
def _copies(device: torch.device, thread: int) -> tuple[torch.Stream, list[torch.Event]]:
    """(the stream in which a thread copies to a device, what comes before the last item there).

    Always the same stream: CUDA has 32 of them, which take turns, and memory that was freed in one
    is of no use to the others.
    """
    return torch.Stream(device), []


def moved(items: Iterator[Args], device: Any) -> Iterator[Args]:
    """The items of a stream with their arrays on a device, each copied while the one before it is
    computed with.

    Where the device has streams, a second one copies while kernels for the last item still run.
    From pinned memory the host does not wait for the copy either, but it waits for all items before
    the last one: running ahead, it would fill the device with copies.
    """
    device = torch.device(device)

    def put(item: Args) -> Args:
        leaves, structure = trees.flatten(item)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[index] = leaf.to(device, non_blocking=True)
        return trees.unflatten(structure, leaves)  # type: ignore[no-any-return]

    def put_aside(item: Args) -> Args:
        computing = torch.accelerator.current_stream(device)
        copying, before_last = _copies(computing.device, get_ident())
        if before_last and not before_last[0].query():
            before_last[0].synchronize()
        before_last[:] = [computing.record_event()]
        with copying:
            item = put(item)
        computing.wait_stream(copying)
        # The memory was allocated on the copying stream. The allocator must not reuse it while the
        # computing one still reads it.
        for leaf in trees.tensors_in(item):
            leaf.record_stream(computing)
        return item

    # The host has no streams to copy in, and some devices, such as Apple's, have one alone.
    is_host = device.type in ("cpu", "meta")
    has_streams = not is_host and hasattr(torch.get_device_module(device), "Stream")
    # A generator's frame would keep a reference to its last item.
    return map(put_aside if has_streams else put, items)
