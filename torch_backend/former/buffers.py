"""The accumulators of one window, updated in place: what funcga's mathematics says, in one kernel
for all leaves.

Only torch has this file: XLA updates the carry of a loop in place by itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from funcga._fold import Tally, largest
from funcga._fold.outputs import Outputs
from funcga._types import Array, Reduced, Scalar, Tree
from torch_backend import arrays
from torch_backend.dtensor import local, local_tensors, without_partials
from torch_backend.former.layout import Layout
from torch_backend.replicas import Replicas
from torch_backend.sums import Sums


class Merge(Protocol):
    """What merges a window over replicas."""

    replicas: Replicas

    def begin(self, buffers: "Buffers", leaves: Sequence[Array]) -> None:
        """Takes the buffers of a window whose first micro-batch has these leaves."""
        ...

    def take_part(
        self,
        buffers_of: Callable[[Layout], "Buffers"],
        bind: Callable[[Tree], Outputs],
        known: Sequence[Any],
    ) -> "Buffers":
        """The buffers of a replica without any micro-batch."""
        ...

    def finish(self, state: list[Array]) -> list[Array]:
        """Merges the buffers, and returns the state that is threaded on."""
        ...

    def give_up(self) -> None:
        """Tells the other replicas of an error."""
        ...


class Buffers:
    """What one window has folded so far. It is made by the window, owned by it and emptied into the
    result.

    `sums` has the accumulators of what is reduced. `passed` has threaded leaves of the backward
    pass, until `add` returns them. `collected` has the rows of each micro-batch.
    """

    def __init__(self, layout: Layout):
        self.layout, self.outputs, self.folds = layout, layout.outputs, layout.folds
        # The host counts the weights that it can see, and `counted` has those that only a device
        # knows. Nothing waits for the device before the end.
        self.weight: Scalar = 0
        self.steps = 0
        self.counted: Tally | None = None
        self.rejected: Scalar = 0  # micro-batches that are dropped
        # What is held of a weighted sum is the sum divided by the unit. None before the first
        # weight.
        self.unit: float | None = None
        self.unit_is_fixed = False
        self.sums = Sums(layout.folds, [None] * len(layout.kinds), not layout.pure)
        self.passed: dict[int, torch.Tensor] = {}
        self.collected: dict[int, list[torch.Tensor]] = {
            leaf_index: [] for leaf_index in self.outputs.collected
        }

    @property
    def pure(self) -> bool:
        """Whether nothing may be written to, as what is computed can be differentiated."""
        return self.layout.pure

    # --- the unit of weighted sums

    def share(self, weight: Scalar) -> float | None:
        """A weight in the unit that weighted sums are held in, 1 at most; None if only the device
        knows it.

        The unit is the first weight, so micro-batches of equal weight are added as they are. A unit
        that is fixed stays, and shares may then be more than 1.
        """
        if isinstance(weight, torch.Tensor):
            self.unit = self.unit or 1.0
            return None
        if not weight:
            return 0.0
        if self.unit is None:
            self.unit = float(weight)
        if weight == self.unit:
            return 1.0
        # A share that is no power of two may be rounded, as 1/3 is. The unit itself then becomes a
        # power of two: dividing by that is exact. For a heavier micro-batch the unit grows, because
        # a share can be the cotangent of a backward pass in float16, which overflows early.
        is_held = weight <= self.unit and arrays.is_power_of_two(weight / self.unit)
        if not (self.unit_is_fixed or is_held):
            self.hold_in(_power_above(max(float(weight), self.unit)))
        return float(weight / self.unit)

    def hold_in(self, unit: float) -> None:
        """Rescales the weighted sums to this unit."""
        begun = self.begun(self.layout.weighted)
        if begun and self.unit is not None and unit != self.unit:
            torch._foreach_mul_(begun, self.unit / unit)
        self.unit = unit

    def begun(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """The accumulators of these leaves, as far as there are any."""
        sums = map(self.sums.accumulators.__getitem__, indices)
        return local_tensors([accumulator for accumulator in sums if accumulator is not None])

    # --- a micro-batch

    def add(self, leaves: Sequence[Any], weight: Scalar) -> list[Any]:
        """Folds the leaves of one micro-batch in, and returns those that are threaded to the
        next.
        """
        layout, share = self.layout, self.share(weight)
        values = {
            leaf_index: arrays.strided(leaves[leaf_index]) for leaf_index in layout.rest.indices
        }
        self.sums.add(layout.rest.plain, values, 1)
        if share is None:
            self.sums.add_masked(layout.rest.weighted, values, weight, self.unit or 1.0)
        else:
            self.sums.add(layout.rest.weighted, values, share)
        for index in layout.rest.others:
            self.sums.combine(index, values[index], weight)
        for leaf_index in layout.rest.collected:
            # Copied, because grad_fn may reuse its buffer, as a captured CUDA graph does.
            self.collected[leaf_index].append(arrays.strided(leaves[leaf_index]).clone())
        self._count(weight)
        state = [
            self.passed.pop(leaf_index, leaves[leaf_index]) for leaf_index in self.outputs.threads
        ]
        # Copied, because state may be a view of the micro-batch, which is freed next, or of a
        # buffer of grad_fn's.
        return (
            state
            if self.pure
            else [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in state]
        )

    def add_value(self, value: torch.Tensor, weight: Scalar, share: float) -> None:
        """`add` where one sum is all that is added: usually the loss, beside gradients that
        autograd adds.
        """
        index = self.outputs.before
        share = 1.0 if self.layout.kinds[index] == "plain" else share
        # A weight of 0 adds nothing, not even a NaN.
        if self.sums.accumulators[index] is not None:
            if share:
                self.sums.accumulators[index].add_(value, alpha=share)
        elif share:
            begun = value.to(self.folds[index].accumulator_dtype, copy=True)
            self.sums.accumulators[index] = begun if share == 1 else begun.mul_(share)
        else:
            self.sums.accumulators[index] = torch.zeros_like(
                value, dtype=self.folds[index].accumulator_dtype
            )
        self.weight += weight
        self.steps += 1

    def add_leaf(self, leaf_index: int, value: torch.Tensor, weight: Scalar) -> None:
        """Folds in one leaf of the backward pass, whose memory nobody else has."""
        value = arrays.strided(value)
        if leaf_index in self.outputs.threads:
            self.passed[leaf_index] = value
        elif leaf_index in self.collected:
            self.collected[leaf_index].append(value)
        else:
            kind, share = self.layout.kinds[leaf_index], self.share(weight)
            values = {leaf_index: value}
            if kind is None:
                self.sums.combine(leaf_index, value, weight)
            elif kind == "plain":
                self.sums.add([leaf_index], values, 1)
            elif share is None:
                self.sums.add_masked([leaf_index], values, weight, self.unit or 1.0)
            else:
                self.sums.add([leaf_index], values, share)

    def _count(self, weight: Scalar) -> None:
        self.steps += 1
        if not isinstance(weight, torch.Tensor):
            self.weight += weight
            return
        self._count_on_device(arrays.tally(weight, steps=0))

    def _count_on_device(self, more: Tally) -> None:
        self.counted = more if self.counted is None else self.counted.merge(more)
        self.sums.factors_of = None  # the next weight may be the same tensor with another number

    # --- the end of the window

    @property
    def tally(self) -> Tally:
        """How much has been folded."""
        host = arrays.tally(self.weight, self.steps)
        return host if self.counted is None else host.merge(self.counted)

    def settle(self, likes: Mapping[int, torch.Tensor]) -> None:
        """Reduces Partial sums of DTensors, to the placements of `likes`, by leaf index."""
        for leaf_index, value in enumerate(self.sums.accumulators):
            if type(value) is not torch.Tensor:
                self.sums.accumulators[leaf_index] = without_partials(value, likes.get(leaf_index))

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, in the structure of grad_fn's output. The buffers are empty
        afterwards.
        """
        left = self._divide()
        # The result takes the memory over: nothing of it stays here, where a later window could
        # write to it.
        results = self.sums.accumulators
        self.sums.accumulators = [None] * len(results)
        # Leaves that were divided in place only need their dtype. The others are normalised one by
        # one.
        for index in self.layout.cast:
            if index not in left:
                results[index] = results[index].to(self.folds[index].result_dtype)
        if left:
            folded = self.tally
            for index in left:
                results[index] = self._normalized(index, results[index], folded)
        for leaf_index, fold in zip(
            self.outputs.collected, self.outputs.collected_folds, strict=True
        ):
            chunks = self.collected.pop(leaf_index)
            results[leaf_index] = torch.cat(chunks, dim=fold.axis or 0).to(fold.result_dtype)
        for leaf_index, value in zip(self.outputs.threads, state, strict=True):
            results[leaf_index] = value
        return self.outputs.backend.trees.unflatten(self.outputs.structure, results)

    def _check_known(self, index: int, reduced: Reduced, folded: Tally) -> None:
        if not largest(reduced).is_cpu:
            return  # the host sees nothing of it
        path = lambda: self.outputs.paths()[index]
        self.folds[index].check_known(reduced, folded, path)

    def _normalized(self, index: int, reduced: Reduced, folded: Tally) -> Reduced:
        fold = self.folds[index]
        self._check_known(index, reduced, folded)
        return fold.normalize(reduced, folded)

    def _divide(self) -> list[int]:
        """Divides means in place, and takes other weighted sums out of their unit. Returns what is
        still to be normalised, leaf by leaf.
        """
        total, steps, unit = self.weight, self.steps, self.unit or 1.0
        if self.counted is not None:
            folded = self.tally
            total, steps = folded.total, folded.steps
        left = [*self.layout.undivided]
        for indices, by, weighted in self.layout.quotients:
            divisor = total if by == "weight" else steps
            sums_here = [*map(self.sums.accumulators.__getitem__, indices)]
            if {*map(type, sums_here)} != {torch.Tensor}:
                sums_here = local_tensors(sums_here)
            if not isinstance(divisor, torch.Tensor):
                arrays.divide(sums_here, float(divisor / unit if weighted else divisor))
            else:
                _divide_on_device(
                    sums_here, divisor, unit if weighted else 1.0, not weighted and by == "weight"
                )
        for index in self.layout.undivided_weighted:
            local(self.sums.accumulators[index]).mul_(unit)
        return left


def _divide_on_device(
    sums_here: list[torch.Tensor], divisor: torch.Tensor, unit: float, plain: bool
) -> None:
    """Divides in place by a number that the host does not see, in this unit; by 0, to zeros."""
    # Of weight 0 nothing is added to weighted sums: they are zeros then, and any other divisor
    # leaves them so.
    is_zero = divisor == 0
    nonzero = torch.where(is_zero, 1, divisor / unit)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for accumulator in sums_here:
        groups.setdefault((accumulator.device, accumulator.dtype), []).append(accumulator)
    for kind, alike in groups.items():
        torch._foreach_div_(alike, nonzero.to(*kind))
    for accumulator in sums_here if plain else ():
        accumulator.masked_fill_(is_zero.to(accumulator.device), 0)


def power_below(number: float) -> float:
    """The greatest power of two that is not above a positive number."""
    return math.ldexp(1.0, math.frexp(number)[1] - 1)


def _power_above(number: float) -> float:
    """The smallest power of two that is not below a positive number."""
    return number if arrays.is_power_of_two(number) else 2 * power_below(number)
