"""Whether numbers are finite, and sums over their elements, also of DTensors: each process has a
shard of the numbers.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_backend import arrays
from torch_backend.dtensor import is_dtensor, local, without_partials

INFINITY = float("inf")


def measured(
    measure: Callable[[torch.Tensor], torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """`measure(tensor)`, a sum over the elements, of each tensor, over all shards: one reduction a
    mesh.
    """
    if not any(map(is_dtensor, tensors)):
        return [measure(tensor).to(tensors[0].device) for tensor in tensors]
    whole = [without_partials(tensor) for tensor in tensors]
    sums = [measure(local(tensor)) for tensor in whole]
    alike = defaultdict[tuple[Any, ...], list[int]](list)  # by the groups that shards lie on
    for index, tensor in enumerate(whole):
        placements = enumerate(tensor.placements if is_dtensor(tensor) else ())
        dims = [dim for dim, placement in placements if not placement.is_replicate()]
        if dims:
            alike[tuple([tensor.device_mesh.get_group(dim) for dim in dims])].append(index)
    for groups, indices in alike.items():
        together = torch.stack([sums[index] for index in indices])
        for group in groups:
            dist.all_reduce(together, group=group)
        for index, total in zip(indices, together, strict=True):
            sums[index] = total
    return sums


def finite(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Whether all numbers are finite, as a 0-d array; None is skipped."""
    present = [tensor.detach() for tensor in tensors if tensor is not None]
    if any(map(is_dtensor, present)):
        infinite = measured(lambda shard: (~_finite([shard])).float(), present)
        return torch.stack([count.to(infinite[0].device) for count in infinite]).eq(0).all()
    return _finite(present)


def _finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same of what this process holds."""
    # A few numbers, not all of them finite if any number of the leaves is not. One pass, without a
    # mask in memory, and nothing waits for the result here.
    extremes, on_device, wide = list[torch.Tensor](), list[torch.Tensor](), torch.float32
    for tensor in map(arrays.strided, tensors):
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        # On the CPU a norm is twenty times slower than minimum and maximum. On a device it is one
        # kernel for all leaves of a dtype.
        if real.numel() and real.is_cpu:
            extremes += torch.aminmax(real)
        elif real.numel():
            on_device.append(real)
            wide = torch.promote_types(wide, real.dtype)
    extremes += norms(on_device, INFINITY, wide)
    if len({(extreme.device, extreme.dtype) for extreme in extremes}) > 1:
        extremes = [extreme.to(tensors[0].device, torch.float64) for extreme in extremes]
    if not extremes:
        return torch.tensor(True, device="cpu")
    # The norm is NaN if one of them is.
    largest: torch.Tensor = torch.linalg.vector_norm(torch.stack(extremes), INFINITY)
    return largest < INFINITY


def norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, in this dtype; on a device one kernel has all tensors of a dtype,
    and would need one for each if two dtypes came together.
    """
    alike = defaultdict[Any, list[int]](list)
    for index, tensor in enumerate(tensors):
        alike[tensor.device, tensor.dtype].append(index)
    found: list[Any] = [*tensors]
    for indices in alike.values():
        of_kind = torch._foreach_norm([tensors[index] for index in indices], order, dtype=dtype)
        for index, norm in zip(indices, of_kind, strict=True):
            found[index] = norm
    return found
