"""The accumulators of one window, updated in place: what funcga's mathematics says, in one kernel for all leaves.

Only torch has this file: XLA updates the carry of a loop in place by itself.

Indices: a `leaf_index` counts the leaves of grad_fn's output, an index of `reduced` those of them that are reduced.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from funcga._fold import tally
from funcga._fold.outputs import Outputs
from funcga._types import Reduced, Scalar, Tree
from torch_backend import arrays, sums
from torch_backend.dtensor import as_dtensor, local, local_tensors, redistributed, without_partials


class Quotients(NamedTuple):
    """Sums that are divided by one number in the end: by the total weight, or by the number of micro-batches."""

    indices: list[int]
    by: str  # "weight" or "steps"
    weighted: bool  # whether the sums are in units of weight


class Layout:
    """What becomes of each leaf of an output: sums are added in place, every other fold is combined leaf by leaf.

    `kinds[k]` says how the k-th reduced leaf is added in place: "weighted", "plain", or None if it is not. The leaves
    `in_backward`, by their leaf indices, are added in the backward pass; all others are `own`, added by `Buffers.add`.
    `pure`: whether nothing may be written to, so that what is computed can be differentiated and vmapped.
    """

    def __init__(self, outputs: Outputs, in_backward: Collection[int] = (), pure: bool | None = None):
        self.outputs, self.folds = outputs, outputs.reduced_folds
        self.pure = arrays.in_transform() if pure is None else pure
        self.reduced_index = {leaf_index: k for k, leaf_index in enumerate(outputs.reduced)}
        # how each is folded
        self.kinds = [None if self.pure else _kind(outputs, leaf_index) for leaf_index in outputs.reduced]
        self.scaled = [k for k, kind in enumerate(self.kinds) if kind == "weighted"]
        self.plain = [k for k, kind in enumerate(self.kinds) if kind == "plain"]
        self.sums = {*self.scaled, *self.plain}
        # who adds to it: those of the backward pass by their leaf indices
        kinds = {leaf_index: self.kinds[k] for leaf_index, k in self.reduced_index.items() if leaf_index in in_backward}
        self.weighted_in_backward = [leaf_index for leaf_index, kind in kinds.items() if kind == "weighted"]
        self.plain_in_backward = [leaf_index for leaf_index, kind in kinds.items() if kind == "plain"]
        sums_in_backward = {*self.weighted_in_backward, *self.plain_in_backward}
        folded = [leaf_index for leaf_index in in_backward if outputs.folds[leaf_index] is not None]
        self.others_in_backward = [leaf_index for leaf_index in folded if leaf_index not in sums_in_backward]
        self.own = [k for leaf_index, k in self.reduced_index.items() if leaf_index not in in_backward]
        self.own_weighted = [k for k in self.own if self.kinds[k] == "weighted"]
        self.own_plain = [k for k in self.own if self.kinds[k] == "plain"]
        self.own_others = [k for k in self.own if self.kinds[k] is None]
        self.own_collected = [leaf_index for leaf_index in outputs.collected if leaf_index not in in_backward]
        # what the end does
        self.quotients: list[Quotients] = []
        for summed, weighted in ((self.scaled, True), (self.plain, False)):
            for by in ("weight", "steps"):
                indices = [k for k in summed if self.folds[k].fold.normalizer.divides_by == by]
                if indices:
                    self.quotients.append(Quotients(indices, by, weighted))
        self.cast = [k for k, fold in enumerate(self.folds) if fold.accumulator_dtype != fold.result_dtype]


def _kind(outputs: Outputs, leaf_index: int) -> Literal["weighted", "plain"] | None:
    """How a reduced leaf is added in place; None if its fold is no sum, or its sum in a dtype of another kind."""
    fold, dtype = outputs.folds[leaf_index], outputs.dtypes[leaf_index]
    assert fold is not None
    is_half = dtype in (torch.bfloat16, torch.float16) and fold.accumulator_dtype.is_floating_point
    return fold.adds if is_half or dtype == fold.accumulator_dtype else None


class Buffers:
    """What one window has folded so far. It is made by the window, owned by it and emptied into the result.

    `reduced[k]` is what the k-th reduced leaf of the output has come to; None before the first micro-batch.
    """

    def __init__(self, layout: Layout):
        self.layout, self.outputs, self.folds, self.pure = layout, layout.outputs, layout.folds, layout.pure
        self.weight: Scalar = 0  # what the host has counted, and in `counted` what the device has
        self.steps = 0
        self.counted: tally.Tally | None = None
        self.unit: float | None = None
        self.unit_is_fixed = False
        self.reduced: list[Reduced] = [None] * len(self.folds)
        self.passed: dict[int, torch.Tensor] = {}
        self.collected: dict[int, list[torch.Tensor]] = {leaf_index: [] for leaf_index in self.outputs.collected}

    # --- the unit of weighted sums

    def share(self, weight: Scalar) -> float | None:
        """A weight in the unit that weighted sums are held in, 1 at most; None if only the device knows it.

        The unit is the first weight, so that micro-batches alike are added as they are, whatever they weigh. When one
        comes whose share would not be a power of two, the unit becomes one, so that the shares are exact; and when a
        heavier one comes the unit grows, as a share may be what a backward pass in float16 begins with. A unit that
        is fixed stays, and shares may be more than 1.
        """
        if isinstance(weight, torch.Tensor):
            self.unit = self.unit or 1.0
            return None
        if not weight:
            return 0.0
        if self.unit is None:
            self.unit = 1.0 if torch.compiler.is_compiling() else float(weight)
        if weight == self.unit:
            return 1.0
        stays = self.unit_is_fixed or torch.compiler.is_compiling()
        if not stays and (weight > self.unit or not sums.is_power_of_two(weight / self.unit)):
            self.hold_in(_power_above(max(float(weight), self.unit)))
        return float(weight / self.unit)

    def hold_in(self, unit: float) -> None:
        """Lets weighted sums be held in this unit, whatever they are held in now."""
        begun = [self.reduced[k] for k in self.layout.scaled if self.reduced[k] is not None]
        if begun and self.unit is not None and unit != self.unit:
            torch._foreach_mul_(local_tensors(begun), self.unit / unit)
        self.unit = unit

    # --- a micro-batch

    def add(self, leaves: Sequence[Any], weight: Scalar) -> list[Any]:
        """Folds the leaves of one micro-batch in, and returns those that are threaded to the next."""
        layout, share = self.layout, self.share(weight)
        values = {k: _strided(leaves[self.outputs.reduced[k]]) for k in layout.own}
        self._add_sums(layout.own_plain, values, 1)
        if share is None:
            self._add_masked(layout.own_weighted, values, weight)
        else:
            self._add_sums(layout.own_weighted, values, share)
        for k in layout.own_others:
            self._combine(k, values[k], weight)
        for leaf_index in layout.own_collected:
            # a copy, as grad_fn may use its buffer again, as a captured CUDA graph does
            self.collected[leaf_index].append(_strided(leaves[leaf_index]).clone())
        self._count(weight)
        state = [self.passed.pop(leaf_index, leaves[leaf_index]) for leaf_index in self.outputs.threads]
        # a copy, as it may be a view of the micro-batch, or of a buffer that grad_fn uses again
        return state if self.pure else [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in state]

    def add_value(self, value: torch.Tensor, weight: Scalar, share: float) -> None:
        """The same where one weighted sum is all that is added here, as the loss beside its gradients usually is."""
        (k,) = self.layout.own_weighted
        if self.reduced[k] is not None:
            if share:  # a weight of 0 adds nothing, not even a NaN
                self.reduced[k].add_(value, alpha=share)
        elif share:
            self.reduced[k] = value.to(self.folds[k].accumulator_dtype, copy=True).mul_(share)
        else:
            self.reduced[k] = torch.zeros_like(value, dtype=self.folds[k].accumulator_dtype)
        self.weight += weight
        self.steps += 1

    def add_leaf(self, leaf_index: int, value: torch.Tensor, weight: Scalar) -> None:
        """Folds in one leaf of the backward pass, whose memory is from now on the buffers' own."""
        value = _strided(value)
        if leaf_index in self.outputs.threads:
            self.passed[leaf_index] = value
        elif leaf_index in self.collected:
            self.collected[leaf_index].append(value)
        else:
            k = self.layout.reduced_index[leaf_index]
            share = self.share(weight)
            if self.layout.kinds[k] is None:
                self._combine(k, value, weight)
            elif self.layout.kinds[k] == "plain":
                self._add_sums([k], {k: value}, 1)
            elif share is None:
                self._add_masked([k], {k: value}, weight)
            else:
                self._add_sums([k], {k: value}, share)

    def _count(self, weight: Scalar) -> None:
        self.steps += 1
        if not isinstance(weight, torch.Tensor):
            self.weight += weight
            return
        more = tally.of(weight, arrays, steps=0)
        self.counted = more if self.counted is None else tally.merge(self.counted, more)

    def _combine(self, k: int, value: torch.Tensor, weight: Scalar) -> None:
        fold = self.folds[k]
        before = fold.identity(value) if self.reduced[k] is None else self.reduced[k]
        combined = fold.combine(before, fold.lift(value, weight))
        # a monoid of the user's may return what it was given, which is not the buffers' own
        self.reduced[k] = combined.clone() if combined is value else combined

    def _add_sums(self, indices: list[int], values: Mapping[int, torch.Tensor], factor: float) -> None:
        """Adds factor * value to each of these sums."""
        begun = [k for k in indices if self.reduced[k] is not None]
        if begun and factor:
            accumulators = [self.reduced[k] for k in begun]
            more = [redistributed(values[k], self.reduced[k]) for k in begun]
            sums.add_scaled(local_tensors(accumulators), local_tensors(more), factor, donate=True)
        # some may have begun already: those with memory in a bucket that will be sent
        first = indices if not begun else [k for k in indices if self.reduced[k] is None]
        if first:
            self._begin_sums(first, values, factor)

    def _begin_sums(self, indices: list[int], values: Mapping[int, torch.Tensor], factor: float) -> None:
        """Makes accumulators of factor * value, in memory of their own."""
        dtypes = [self.folds[k].accumulator_dtype for k in indices]
        local_values = local_tensors([values[k] for k in indices])
        if factor and len(indices) > 1 and dtypes == [value.dtype for value in local_values]:
            accumulators = [*torch._foreach_mul(local_values, factor)]  # one kernel, where there would be two
        else:
            accumulators = [value.to(dtype, copy=True) for value, dtype in zip(local_values, dtypes, strict=True)]
            if not factor:
                torch._foreach_zero_(accumulators)
            elif factor != 1:
                torch._foreach_mul_(accumulators, factor)
        for k, accumulator in zip(indices, accumulators, strict=True):
            self.reduced[k] = as_dtensor(accumulator, values[k])

    def _add_masked(self, indices: list[int], values: Mapping[int, torch.Tensor], weight: torch.Tensor) -> None:
        """The same for a weight that the host does not see: leaf by leaf, so that one masked leaf lives at a time."""
        # The weight on each device that leaves are on, in each dtype, and whether it is not 0.
        factors: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        for k in indices:
            value, dtype = values[k], self.folds[k].accumulator_dtype
            kind = value.device, dtype
            if kind not in factors:
                here = weight.to(value.device)
                factors[kind] = here.to(dtype) / (self.unit or 1.0), here != 0
            factor, counts = factors[kind]
            if self.reduced[k] is None:
                product = torch.where(counts, local(value).to(dtype), 0).mul_(factor)
                self.reduced[k] = as_dtensor(product, value)
            else:
                accumulator, more = local_tensors([self.reduced[k], redistributed(value, self.reduced[k])])
                accumulator.addcmul_(torch.where(counts, more.to(dtype), 0), factor)

    # --- the end of the window

    @property
    def tally(self) -> tally.Tally:
        """How much has been folded."""
        host = tally.of(self.weight, arrays, steps=self.steps)
        return host if self.counted is None else tally.merge(host, self.counted)

    def settle(self, likes: Mapping[int, torch.Tensor]) -> None:
        """Reduces what lies on the devices of a mesh as sums that are not done yet, to where `likes` of outputs lie."""
        for k, value in enumerate(self.reduced):
            if type(value) is not torch.Tensor:
                self.reduced[k] = without_partials(value, likes.get(self.outputs.reduced[k]))

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, in the structure of grad_fn's output. The buffers are empty afterwards."""
        done, folded = self._divide(), None
        results, self.reduced = self.reduced, [None] * len(self.reduced)
        # What was not divided in place is normalised leaf by leaf, and what was may be in another dtype than asked for.
        for k in self.layout.cast if len(done) == len(results) else range(len(results)):
            if k in done:
                results[k] = results[k].to(self.folds[k].result_dtype)
            else:
                folded = folded or self.tally
                results[k] = self.folds[k].normalize(results[k], folded)
        collected = []
        for fold, chunks in zip(self.outputs.collected_folds, self.collected.values(), strict=True):
            collected.append(torch.cat(chunks, dim=fold.fold.reducer.monoid.axis or 0).to(fold.result_dtype))
            chunks.clear()
        return self.outputs.join(results, collected, state)

    def _divide(self) -> set[int]:
        """Divides means in place, and takes other weighted sums out of their unit. Returns which are divided."""
        total, steps, unit = self.weight, self.steps, self.unit or 1.0
        if self.counted is not None:
            folded = self.tally
            total, steps = tally.total(folded), folded.steps
        done: set[int] = set()
        for indices, by, weighted in self.layout.quotients:
            divisor = total if by == "weight" else steps
            sums_here = local_tensors([self.reduced[k] for k in indices])
            if not isinstance(divisor, torch.Tensor):
                if divisor:
                    sums.divide(sums_here, float(divisor / unit if weighted else divisor))
                else:
                    torch._foreach_zero_(sums_here)
            elif weighted or by == "steps":
                # Of a divisor of 0 the host knows nothing, but then nothing was added: the sums are zeros already.
                divisor = torch.where(divisor != 0, divisor / unit if weighted else divisor, 1)
                for accumulator in sums_here:
                    accumulator.div_(divisor.to(accumulator.device, accumulator.dtype))
            else:
                continue  # a plain sum may be something where the total weight is 0: the normalizer selects
            done.update(indices)
        if unit != 1:
            for k in {*self.layout.scaled} - done:
                local(self.reduced[k]).mul_(unit)
        return done


def _strided(value: torch.Tensor) -> torch.Tensor:
    """The value with all of its zeros: the gradient of an embedding may be sparse, the sum of a few no longer is."""
    return value if value.layout is torch.strided else value.to_dense()


def power_below(number: float) -> float:
    """The greatest power of two that is not above a positive number."""
    return math.ldexp(1.0, math.frexp(number)[1] - 1)


def _power_above(number: float) -> float:
    """The smallest power of two that is not below a positive number."""
    return number if sums.is_power_of_two(number) else 2 * power_below(number)
