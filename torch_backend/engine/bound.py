"""What becomes of the output of a loss: decided with the first loss of a structure, or of each
window where outputs may differ, as an aux may.

`window` is the engine's Window, of which a plan, the gradient and what watches it are set here.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from funcga._types import Tree
from torch_backend import trees
from torch_backend.dtensor import is_dtensor
from torch_backend.engine.leaves import check_dense
from torch_backend.sums import Folding


def folding_of(window: Any, loss: torch.Tensor, aux: Tree) -> Folding:
    """How each leaf of the output is folded: as the plan knows, or is told now, if it is the same
    in each window.
    """
    if loss.dtype is window.plan.loss_dtype and type(loss) is torch.Tensor:
        known: Folding = window.plan.folding
        return known
    return _new_folding(window, loss, aux)


def _new_folding(window: Any, loss: torch.Tensor, aux: Tree) -> Folding:
    program: Any = window.program
    arguments, gradient, indices = window.arguments, window.gradient, window.plan.indices
    # Before the first backward pass the leaves stand in for their gradients: they are alike.
    grads = [*map(window.leaves.trees.get, indices)]
    aux = trees.detached(aux, True)
    if program.watch is not None:
        readings = program.watch.readings(program, gradient.compose(loss, aux, grads), arguments)
        observed = readings.tool.ObservedGradient(readings, gradient, loss)
        gradient = window.gradient = window.watching = observed
        window.callback(gradient.end)
    outputs, leaves = program.bind(gradient.compose(loss, aux, grads), arguments)
    for index, tree in zip(indices, grads, strict=True):
        check_dense(tree, index, gradient)
    # The gradients follow the value, argument by argument. Without a value they come first.
    counts = [len(trees.flatten(tree)[0]) for tree in grads]
    start = len(leaves) - sum(counts) if gradient.with_value else outputs.before
    ends = [*accumulate(counts, initial=start)]
    of_argument = dict(zip(indices, map(range, ends, ends[1:]), strict=True))
    beside = [leaf for leaf in range(len(leaves)) if not start <= leaf < ends[-1]]

    def present(indices: Sequence[int]) -> tuple[int, ...]:
        found = [leaf for index in indices for leaf in of_argument[index]]
        return tuple([leaf for leaf in found if leaves[leaf] is not None])

    of_inputs = present(window.plan.whole)
    if program.watch is not None:
        gradient.begin(dict(zip(of_inputs, window.arriving, strict=True)))
    rest = gradient.compose(loss, aux, [() for _ in indices])
    folding = Folding(
        outputs,
        grads=of_inputs,
        moved=present(window.plan.moving),
        beside=tuple(beside),
        rest_outputs=outputs.part(beside, trees.flatten(rest)[1]),
        with_loss=gradient.with_value,
        may_be_wide=window.own is None and not any(map(is_dtensor, window.inputs)),
    )
    may_differ = gradient.has_aux or window.plan.moving or window.watching is not None
    dtype = None if may_differ or type(loss) is not torch.Tensor else loss.dtype
    if dtype is not None:
        window.plan = replace(window.plan, folding=folding, loss_dtype=dtype)
    return folding


def with_gradients(program: Any, result: Tree, grads: Tree) -> Tree:
    """The result of a window, (value, gradients), with other gradients."""
    if program.watch is None:
        return result[0], grads
    before, (value, _) = result
    return before, (value, grads)
