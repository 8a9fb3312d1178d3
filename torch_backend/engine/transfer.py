"""Micro-batches on their way to a device, one ahead of the computation.

Only torch has this file: in JAX a transfer is asynchronous by itself.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from funcga._backend.protocols import Backend


def moved(items: Iterator[Any], device: torch.device, backend: Backend) -> Iterator[Any]:
    """The items with their tensors on the device.

    On CUDA each is copied on a stream of its own, while the kernels that the last one has launched still run; from
    pinned memory the host does not wait for it either.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin() -> Any:
        item = next(items, None)
        if item is None:
            return None
        leaves, structure = backend.trees.flatten(item)
        with torch.cuda.stream(copies) if copies is not None else nullcontext():
            found = [leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return backend.trees.unflatten(structure, found)

    item = begin()
    while item is not None:
        if copies is not None:
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(copies)
            for leaf in backend.trees.flatten(item)[0]:
                if isinstance(leaf, torch.Tensor):
                    leaf.record_stream(computing)  # its memory is not given away while a kernel still reads it
        holder = [item]
        del item  # so that no more than one is held while it is computed with
        yield holder.pop()
        item = begin()
