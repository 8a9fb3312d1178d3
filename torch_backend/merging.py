"""What the replicas of a driven module have folded beside the gradients, merged once a window.

Only torch has this file: in JAX the merge is a collective of the program.
"""

from typing import Any

import torch
import torch.distributed as dist

from funcga import tally
from funcga.backend import Backend
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.buffers import Buffers
from torch_backend.drivers import Plain


def groups_of(across: Any, driver: Plain, backend: Backend) -> list[Any]:
    """The process groups to merge over. Raises FuncgaError if `across=` names others than the wrapper reduces over."""
    if not driver.name:
        return [] if across is None else [backend.replicas.replicas_of(across)]
    groups = driver.groups()
    if across is not None and _ranks(across) != _all_ranks(groups):
        raise FuncgaError(
            f"across= names the ranks {_ranks(across)}, and the module is wrapped by {driver.name}, which reduces over "
            f"the ranks {_all_ranks(groups)}. Leave across= out: the wrapper knows its replicas."
        )
    return groups


def _ranks(across: Any) -> list[int]:
    mesh = getattr(across, "mesh", None)
    return sorted(mesh.flatten().tolist()) if mesh is not None else sorted(dist.get_process_group_ranks(across))


def _all_ranks(groups: list[Any]) -> list[int]:
    """The ranks of all replicas: those of an inner group, moved along an outer one."""
    inner, *outer = [sorted(dist.get_process_group_ranks(group)) for group in groups]
    own = dist.get_rank()
    return sorted(rank + other - own for rank in inner for other in (outer[0] if outer else [own]))


def hold_in(buffers: Buffers, unit: float) -> None:
    """Lets the buffers hold weighted sums in this unit."""
    held = [buffers.reduced[k] for k in buffers.layout.scaled if buffers.reduced[k] is not None]
    if held and buffers.unit is not None and buffers.unit != unit:
        torch._foreach_mul_(held, buffers.unit / unit)
    buffers.unit = unit


def merge(buffers: Buffers, state: list[Any], groups: list[Any]) -> list[Any]:
    """Merges the buffers over the replicas, in their order; the state is that of the last one."""
    outputs, lifts = buffers.outputs, buffers.layout.lifts
    held = [k for k, value in enumerate(buffers.reduced) if value is not None]
    if (
        outputs.collected
        or outputs.threads
        or not all(lifts[k] and outputs.reduced_folds[k].accumulator_dtype.is_floating_point for k in held)
    ):
        for group in groups:
            state = _gather(buffers, state, group)
    elif groups:
        _sum(buffers, held, groups)
    return state


def _sum(buffers: Buffers, held: list[int], groups: list[Any]) -> None:
    """One small all-reduce of sums, the weight and the number of micro-batches, which float64 holds exactly."""
    values = [buffers.reduced[k] for k in held]
    device = values[0].device if values else torch.device("cpu")
    counted = tally.total(buffers.tally)
    number = 0.0 if isinstance(counted, torch.Tensor) else counted
    numbers = torch.tensor([number, buffers.steps], dtype=torch.float64, device=device)
    if isinstance(counted, torch.Tensor):
        numbers[0] = counted
    flat = torch.cat([part.reshape(-1).to(device, torch.float64) for part in (numbers, *values)])
    for group in groups:
        dist.all_reduce(flat, group=group)
    numbers, *parts = torch.split(flat, [2, *[value.numel() for value in values]])
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view(value.shape))
    seen = device.type == "cpu"
    buffers.weight, buffers.counted = (numbers[0].item(), None) if seen else (0, tally.of(numbers[0], arrays, steps=0))
    buffers.steps = int(numbers[1].item()) if seen else numbers[1]  # type: ignore[assignment]


def _gather(buffers: Buffers, state: list[Any], group: Any) -> list[Any]:
    flatten = buffers.outputs.backend.trees.flatten
    own = buffers.reduced, buffers.collected, state, buffers.counted
    device = next((leaf.device for leaf in flatten(own)[0] if isinstance(leaf, torch.Tensor)), None)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, (buffers.weight, buffers.steps, _moved(own, "cpu", buffers)), group=group)
    buffers.weight = sum(weight for weight, _, _ in parts)
    buffers.steps = sum(steps for _, steps, _ in parts)
    return _joined(buffers, [_moved(part, device, buffers) for _, _, part in parts])


def _moved(tree: Any, device: Any, buffers: Buffers) -> Any:
    leaves, structure = buffers.outputs.backend.trees.flatten(tree)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return buffers.outputs.backend.trees.unflatten(structure, moved)


def _joined(buffers: Buffers, parts: list[Any]) -> list[Any]:
    """Joins the parts in the buffers, and returns the state of the last."""
    (reduced, collected, state, counted), *others = parts
    for more, chunks, _, count in others:
        reduced = [
            a if a is None else fold.combine(a, b) for fold, a, b in zip(buffers.folds, reduced, more, strict=True)
        ]
        collected = {i: [*before, *chunks[i]] for i, before in collected.items()}
        counted = tally.merge(counted, count) if counted and count else counted or count
    buffers.reduced, buffers.collected, buffers.counted = reduced, collected, counted
    return others[-1][2] if others else state  # type: ignore[no-any-return]
