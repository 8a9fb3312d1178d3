"""What the processes of a pipeline tell each other at the end of a window.

Only torch has this file: in JAX every device runs the same program, and a value is on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from funcga._types import Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import trees
from torch_backend.replicas import channel_of

Values = list[tuple[torch.Tensor, Tree]]  # the loss and the aux of each micro-batch


@dataclass
class Told:
    """What one process has: the weights that it has counted, and on the last stage the values,
    or an error.
    """

    weights: tuple[float | None, ...]
    values: Values | None
    error: Exception | None


def agreed(weights: Sequence[Scalar]) -> tuple[float | None, ...]:
    """The weights that the host sees; None for one that is on a device."""
    return tuple(
        [None if isinstance(weight, torch.Tensor) else float(weight) for weight in weights]
    )


def told_by_last(mine: Told, group: dist.ProcessGroup, device: torch.device) -> Values:
    """The values of the last stage, on this device.

    Raises FuncgaError, in every process, if the loss has raised an error, or if they were given
    different batches.
    """
    if group.size() == 1:
        if mine.error is not None:
            raise mine.error
        assert mine.values is not None
        return mine.values
    text = None if mine.error is None else f"{type(mine.error).__name__}: {mine.error}"
    is_last = mine.values is not None
    # An error itself may not be picklable, and values are of no use beside one.
    values = (
        None
        if mine.values is None or text is not None
        else _moved(mine.values, torch.device("cpu"))
    )
    said = channel_of(group).gathered((mine.weights, is_last, values, text))
    if mine.error is not None:
        raise mine.error
    last = next(rank for rank, (_, is_last, _, _) in enumerate(said) if is_last)
    weights, _, values, text = said[last]
    if text is not None:
        raise FuncgaError(
            f"loss_fn has raised an error in the last stage of the pipeline, on rank {last} of its "
            f"group: {text} Every stage has stopped; see what that process says."
        )
    for rank, (others, _, _, _) in enumerate(said):
        if others != weights:
            raise FuncgaError(
                f"the processes of a pipeline were given different batches: on rank {rank} of its "
                f"group the micro-batches weigh {_shown(others)}, and on rank {last}, which has "
                f"the last stage, {_shown(weights)}. Pass the same batch, inputs and target, in "
                "every process of one pipeline."
            )
    return mine.values if mine.values is not None else _moved(values, device)


def _moved(values: Values, device: torch.device) -> Values:
    """The values, whose tensors are on this device."""
    leaves, structure = trees.flatten(values)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    on_device: Values = trees.unflatten(structure, moved)
    return on_device


def _shown(weights: Sequence[float | None]) -> str:
    shown = ", ".join("?" if weight is None else f"{weight:g}" for weight in weights[:6])
    return f"({shown}{', ...' if len(weights) > 6 else ''})"
