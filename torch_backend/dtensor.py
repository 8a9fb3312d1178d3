"""Placements: tensors that lie on the devices of a mesh, DTensors, are cut, added and reduced where they lie.

Only torch has this file: any array of JAX may lie on several devices.

A gradient comes as `Partial`, a sum that is not reduced yet. Partials are added as they are, so there is one reduction
for each leaf, at the end, to where its parameter lies.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funcga._call.arguments import Arguments


def is_placed(leaf: Any) -> bool:
    """Whether this is a DTensor."""
    return type(leaf) is not torch.Tensor and hasattr(leaf, "device_mesh")


def local(tensor: Any) -> Any:
    """What this process holds of a tensor, or of each of a tuple."""
    if isinstance(tensor, tuple):
        return tuple(map(local, tensor))
    return tensor.to_local() if is_placed(tensor) else tensor


def settled(tensor: Any, like: Any = None) -> Any:
    """The tensor with every sum done, and where `like` lies: the one collective of a DTensor that is Partial."""
    if not is_placed(tensor):
        return tuple(map(settled, tensor)) if isinstance(tensor, tuple) else tensor
    wanted = place_of(tensor if like is None else like).placements
    return tensor if wanted == tuple(tensor.placements) else tensor.redistribute(placements=wanted)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies when every sum is done, and what it is as a whole."""

    device_mesh: Any
    placements: tuple[Any, ...]
    shape: Any
    strides: tuple[int, ...]

    def stride(self) -> tuple[int, ...]:
        """As a tensor has them."""
        return self.strides


def place_of(tensor: Any) -> Place:
    """The Place of a tensor that lies on several devices."""
    from torch.distributed.tensor import Partial, Replicate

    placements = tuple([Replicate() if isinstance(p, Partial) else p for p in tensor.placements])
    return Place(tensor.device_mesh, placements, tensor.shape, tensor.stride())


def ranks_apart(tensor: Any, ranks: Collection[int]) -> list[int]:
    """Of these ranks, with this process, those that hold other parts of a DTensor, or of what has a Place; sorted."""
    for dim, placement in enumerate(tensor.placements):
        found = {*ranks} & {*dist.get_process_group_ranks(tensor.device_mesh.get_group(dim))}
        # what fully_shard and tensor parallelism make together is cut as well, and is no Shard
        if len(found) > 1 and not (placement.is_replicate() or placement.is_partial()):
            return sorted(found)
    return []


def rewrapped(held: Any, like: Any) -> Any:
    """What this process holds of a tensor that lies as another one does, as that tensor."""
    if isinstance(like, tuple):
        return tuple(map(rewrapped, held, like))
    if not is_placed(like):
        return held
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(held, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def locals_of(tensors: list[Any]) -> list[Any]:
    """What this process holds of each tensor, in the same memory: Partials are added there, without a collective."""
    if all(type(tensor) is torch.Tensor for tensor in tensors):  # as usual
        return tensors
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def aligned(value: Any, accumulator: Any) -> Any:
    """The value where its accumulator lies; mostly it does."""
    if not is_placed(value) or value.placements == accumulator.placements:
        return value
    return value.redistribute(placements=accumulator.placements)


def narrow(array: Any, axis: int, start: int, size: int) -> Any:
    """`size` rows of each device from its `start`-th on, along an axis, as one tensor: none of them travels."""
    from torch.distributed.tensor import DTensor

    held = local(array).narrow(axis, start, size)
    return DTensor.from_local(held, array.device_mesh, array.placements, run_check=False)


def devices_of(arguments: Arguments) -> int:
    """On how many devices the rows of all that is split lie, as many on each; 1 if they lie unlike."""
    found = {_where(leaf, axis) for leaf, axis in arguments if isinstance(axis, int) and leaf is not None}
    where = found.pop() if len(found) == 1 else None
    return 1 if where is None else where[1]


def _where(leaf: Any, axis: int) -> tuple[Any, int] | None:
    """Where the rows of a tensor lie, and on how many devices, as many on each; None for any other."""
    if not is_placed(leaf):
        return None
    dims = tuple(k for k, placed in enumerate(leaf.placements) if placed.is_shard(axis % leaf.ndim))
    devices = torch.Size([leaf.device_mesh.size(k) for k in dims]).numel()
    return ((leaf.device_mesh, dims), devices) if dims and leaf.shape[axis] % devices == 0 else None
