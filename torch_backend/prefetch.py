"""Prefetching: each micro-batch of a stream is copied to the device while the one before it is
computed with.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from funcga._types import Args
from torch_backend import trees


def moved(items: Iterator[Args], device: Any) -> Iterator[Args]:
    """The items of a stream with their arrays on a device, each copied while the one before it is
    computed with.

    Where the device has streams, a second one copies while kernels for the last item still run.
    From pinned memory the host does not wait for the copy either.
    """
    device = torch.device(device)
    # The host has no streams to copy in, and some devices, such as Apple's, have one alone.
    is_host = device.type in ("cpu", "meta")
    has_streams = not is_host and hasattr(torch.get_device_module(device), "Stream")
    copies = torch.Stream(device) if has_streams else None

    def put(item: Args) -> Args:
        leaves, structure = trees.flatten(item)
        with copies or nullcontext():
            leaves = [
                leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
        if copies is not None:
            computing = torch.accelerator.current_stream(device)
            computing.wait_stream(copies)
            # The memory was allocated on the copying stream. The allocator must not reuse it while
            # the computing one still reads it.
            for leaf in filter(torch.is_tensor, leaves):
                leaf.record_stream(computing)
        return trees.unflatten(structure, leaves)  # type: ignore[no-any-return]

    return map(put, items)  # a generator's frame would keep a reference to its last item
