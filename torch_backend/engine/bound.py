"""What becomes of the output of a loss: decided with the first loss of a structure, or of each
window where outputs may differ, as an aux may.

`window` is the engine's Window, of which a plan, the gradient and what watches it are set here.
"""

from dataclasses import replace
from typing import Any

import torch

from funcga._types import Tree
from torch_backend import trees
from torch_backend.dtensor import is_dtensor
from torch_backend.engine.leaves import check_dense
from torch_backend.sums import Folding


def folding_of(window: Any, loss: torch.Tensor, aux: Tree) -> Folding:
    """How each leaf of the output is folded. The plan knows it from here on, if it stays so."""
    program: Any = window.program
    arguments, gradient, indices = window.arguments, window.gradient, window.plan.indices
    # Before the first backward pass the leaves stand in for their gradients: they are alike.
    grads = [*map(window.leaves.trees.get, indices)]
    aux = trees.detached(aux, True)
    if program.readings is not None:
        readings = program.readings(gradient.compose(loss, aux, grads), arguments)
        measured = readings.tool.MeasuredGradient(readings, gradient, loss)
        gradient = window.gradient = window.measuring = measured
        window.callback(gradient.end)
    outputs, leaves = program.bind(gradient.compose(loss, aux, grads), arguments)
    check_dense(gradient, dict(zip(indices, grads, strict=True)))
    moving = [window.leaves.trees[index] for index in window.plan.moving]
    position = {id(leaf): index for index, leaf in enumerate(leaves)}
    of_inputs = tuple([position[id(leaf)] for leaf in window.inputs])
    of_moving = [position[id(leaf)] for leaf in trees.flatten(moving)[0] if leaf is not None]
    # The gradients follow the value. Without a value they come first.
    rest, structure = trees.flatten(gradient.compose(loss, aux, [() for _ in indices]))
    first = len(rest) if gradient.with_value else outputs.before
    beside = [*range(first), *range(first + len(leaves) - len(rest), len(leaves))]
    if program.readings is not None:
        arriving = window.arriving
        gradient.begin(dict(zip(of_inputs, arriving, strict=True)), arriving is window.inputs)
    folding = Folding(
        outputs,
        grads=of_inputs,
        moved=tuple(of_moving),
        beside=tuple(beside),
        rest_outputs=outputs.part(beside, structure),
        with_loss=gradient.with_value,
        may_be_wide=window.own is None and not any(map(is_dtensor, window.inputs)),
    )
    may_differ = gradient.has_aux or window.plan.moving or window.measuring is not None
    if type(loss) is torch.Tensor and not may_differ:
        window.plan = replace(window.plan, folding=folding, loss_dtype=loss.dtype)
    return folding
