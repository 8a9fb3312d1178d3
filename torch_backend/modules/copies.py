"""Copies of a module's buffers, for a loss that may write to them."""

from collections.abc import Mapping
from typing import Any

import torch


def copied(values: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """A copy for each buffer, by its id, of (the buffer, the value that it is to have).

    Buffers that share memory have copies that share memory likewise. Each micro-batch needs new ones: no counter tells
    of what the last one wrote through `.data` or a NumPy array.
    """
    memories: dict[int, list[torch.Tensor]] = {}
    for buffer, _ in values.values():
        memories.setdefault(_memory(buffer), []).append(buffer)
    made: dict[int, torch.Tensor] = {}
    for sharing in memories.values():
        if len(sharing) == 1:
            made[id(sharing[0])] = values[id(sharing[0])][1].detach().clone()
            continue
        made.update(_together(sharing))
        for buffer in sharing:
            if (value := values[id(buffer)][1]) is not buffer:
                made[id(buffer)].detach().copy_(value)
    return made


def _memory(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory have in common, as far as their copies could share memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_neg():
        return id(tensor)
    try:
        address: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of a torch.func transform
        return id(tensor)
    return address


def _together(sharing: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies in one memory."""
    storage: Any = sharing[0].untyped_storage().clone()  # type: ignore[no-untyped-call]
    made: dict[int, torch.Tensor] = {}
    # recorded as views of one tensor, so that writing to one is seen to change the others
    with torch.inference_mode(False), torch.enable_grad():
        wholes: dict[torch.dtype, torch.Tensor] = {}
        for tensor in sharing:
            whole = wholes.get(tensor.dtype)
            if whole is None:
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                wholes[tensor.dtype] = whole = whole.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))
            view = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            made[id(tensor)] = view.conj() if tensor.is_conj() else view
    return made
