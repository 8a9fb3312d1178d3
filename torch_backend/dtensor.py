"""DTensors: tensors that lie on the devices of a mesh are cut, added and reduced there.

A gradient comes with the placement `Partial`, a sum that is not reduced yet. Partial gradients are
added as they are, so there is one reduction for each leaf, at the end, to the placements of its
parameter.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_backend import _private


def is_dtensor(leaf: object) -> bool:
    """Whether this is a DTensor."""
    # By an attribute that DTensors alone have: importing their module takes time, and most programs
    # have none.
    return type(leaf) is not torch.Tensor and hasattr(leaf, "device_mesh")


def local(tensor: Any) -> Any:
    """The shard that this process has of a tensor, or of each tensor in a tuple; in its memory, and
    in no graph.
    """
    if isinstance(tensor, tuple):
        return tuple(map(local, tensor))
    return _private.local_tensor(tensor) if is_dtensor(tensor) else tensor


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The shard that this process has of each tensor, in the same memory, so that it can be
    written to in place.
    """
    # Partial sums too are added shard by shard, without a collective. Usually no tensor is a
    # DTensor.
    if {*map(type, tensors)} == {torch.Tensor}:
        return [*tensors]
    return [*map(local, tensors)]


@dataclass(frozen=True)
class Spec:
    """The mesh and the placements of a DTensor without Partial sums, and its global shape and
    strides.
    """

    device_mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    strides: tuple[int, ...]

    def stride(self) -> tuple[int, ...]:
        """The global strides, as a tensor has them."""
        return self.strides


def spec_of(tensor: Any) -> Any:
    """The Spec of a DTensor, None of another tensor; of a tuple, one of each."""
    if isinstance(tensor, tuple):
        return tuple(map(spec_of, tensor))
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor import Partial, Replicate

    placements = tuple([Replicate() if isinstance(p, Partial) else p for p in tensor.placements])
    return Spec(tensor.device_mesh, placements, tensor.shape, tensor.stride())


def without_partials(tensor: Any, like: Any = None) -> Any:
    """The tensor with all Partial sums reduced, in the placements of `like`: the one collective
    of a Partial.
    """
    if isinstance(tensor, tuple):
        return tuple(map(without_partials, tensor))
    return redistributed(tensor, spec_of(tensor if like is None else like))


def redistributed(value: Any, accumulator: Any) -> Any:
    """The value in the placements of its accumulator, Partial included. Usually it has them
    already.
    """
    if not is_dtensor(value) or value.placements == accumulator.placements:
        return value
    return value.redistribute(placements=accumulator.placements)


def settle(sums: dict[int, Any], likes: Mapping[int, torch.Tensor]) -> None:
    """Reduces Partial sums, to the placements of `likes`, by leaf."""
    for index, value in sums.items():
        if type(value) is not torch.Tensor:
            sums[index] = without_partials(value, likes.get(index))


def as_dtensor(local_tensor: Any, like: Any) -> Any:
    """The DTensor of this local shard, in the placements of a DTensor or Spec; of tuples, one of
    each.
    """
    if isinstance(like, tuple):
        return tuple(map(as_dtensor, local_tensor, like))
    if not is_dtensor(like):
        return local_tensor
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(
        local_tensor, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def ranks_with_other_shards(tensor: Any, ranks: Collection[int]) -> list[int]:
    """The ranks, this process among them, that have different shards of a DTensor; sorted, [] if
    none do, as of any other tensor.
    """
    for mesh_dim, placement in enumerate(tensor.placements if is_dtensor(tensor) else ()):
        along_dim = {*ranks} & {
            *dist.get_process_group_ranks(tensor.device_mesh.get_group(mesh_dim))
        }
        # The placement that fully_shard and tensor parallelism make together is cut too, and is no
        # Shard. So the test is for the two placements that are not cut.
        if len(along_dim) > 1 and not (placement.is_replicate() or placement.is_partial()):
            return sorted(along_dim)
    return []
