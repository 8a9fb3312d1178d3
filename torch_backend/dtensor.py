"""DTensors: tensors that lie on the devices of a mesh are cut, added and reduced there.

A gradient comes with the placement `Partial`, a sum that is not reduced yet. Partial gradients are added as they are,
so there is one reduction for each leaf, at the end, to the placements of its parameter.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funcga._call.arguments import Arguments
from torch_backend import _private


def is_dtensor(leaf: object) -> bool:
    """Whether this is a DTensor; its module need not be imported for that."""
    return type(leaf) is not torch.Tensor and hasattr(leaf, "device_mesh")


def local(tensor: Any) -> Any:
    """What this process holds of a tensor, or of each of a tuple."""
    if isinstance(tensor, tuple):
        return tuple(map(local, tensor))
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What this process holds of each tensor, in the same memory: Partials are added there, without a collective."""
    if all(type(tensor) is torch.Tensor for tensor in tensors):  # as usual
        return [*tensors]
    return [_private.local_tensor(tensor) if is_dtensor(tensor) else tensor for tensor in tensors]


@dataclass(frozen=True)
class Spec:
    """Where a DTensor lies when every sum in it is done, and its global shape and strides."""

    device_mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    strides: tuple[int, ...]

    def stride(self) -> tuple[int, ...]:
        """The global strides, as a tensor has them."""
        return self.strides


def spec_of(tensor: Any) -> Spec:
    """The Spec of a DTensor."""
    from torch.distributed.tensor import Partial, Replicate

    placements = tuple([Replicate() if isinstance(p, Partial) else p for p in tensor.placements])
    return Spec(tensor.device_mesh, placements, tensor.shape, tensor.stride())


def without_partials(tensor: Any, like: Any = None) -> Any:
    """The tensor with every sum done, and the placements of `like`; this is the one collective of a Partial."""
    if not is_dtensor(tensor):
        return tuple(map(without_partials, tensor)) if isinstance(tensor, tuple) else tensor
    placements = spec_of(tensor if like is None else like).placements
    return tensor if placements == tuple(tensor.placements) else tensor.redistribute(placements=placements)


def redistributed(value: Any, accumulator: Any) -> Any:
    """The value with the placements of its accumulator, Partial ones too; usually it has them."""
    if not is_dtensor(value) or value.placements == accumulator.placements:
        return value
    return value.redistribute(placements=accumulator.placements)


def as_dtensor(local_tensor: Any, like: Any) -> Any:
    """The DTensor that lies as another one or its Spec does, of which this process holds this; of a tuple, each."""
    if isinstance(like, tuple):
        return tuple(map(as_dtensor, local_tensor, like))
    if not is_dtensor(like):
        return local_tensor
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local_tensor, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def ranks_with_other_shards(tensor: Any, ranks: Collection[int]) -> list[int]:
    """Of these ranks, with this process, those that hold other shards of a DTensor, or of one with a Spec; sorted."""
    for mesh_dim, placement in enumerate(tensor.placements):
        along_dim = {*ranks} & {*dist.get_process_group_ranks(tensor.device_mesh.get_group(mesh_dim))}
        # what fully_shard and tensor parallelism make together is cut as well, and is no Shard
        if len(along_dim) > 1 and not (placement.is_replicate() or placement.is_partial()):
            return sorted(along_dim)
    return []


def local_rows(array: Any, axis: int, start: int, size: int) -> Any:
    """`size` rows of each device from its `start`-th on, along an axis, as one tensor: none of them travels."""
    from torch.distributed.tensor import DTensor

    rows = local(array).narrow(axis, start, size)
    return DTensor.from_local(rows, array.device_mesh, array.placements, run_check=False)


def devices_of_rows(arguments: Arguments) -> int:
    """On how many devices the rows of all that is split lie, as many on each; 1 if they lie differently."""
    shards = {_shards(leaf, axis) for leaf, axis in arguments if isinstance(axis, int) and leaf is not None}
    alike = shards.pop() if len(shards) == 1 else None
    return 1 if alike is None else alike[2]


def _shards(leaf: Any, axis: int) -> tuple[Any, tuple[int, ...], int] | None:
    """The mesh, its dimensions along which rows are cut, and into how many equal parts; None for any other tensor."""
    if not is_dtensor(leaf):
        return None
    dims = tuple([dim for dim, placement in enumerate(leaf.placements) if placement.is_shard(axis % leaf.ndim)])
    count = torch.Size([leaf.device_mesh.size(dim) for dim in dims]).numel()
    return (leaf.device_mesh, dims, count) if dims and leaf.shape[axis] % count == 0 else None
