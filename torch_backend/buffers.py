"""The accumulators of one call, updated in place: what funcga's mathematics says, in one kernel for all leaves.

Only torch has this file: XLA updates the carry of a loop in place by itself.
"""

from typing import Any

import torch

from funcga import normalizers, reducers, tally
from funcga.leaves import LeafFold
from funcga.outputs import Outputs
from torch_backend import arrays


class Buffers:
    """What one call has folded so far. It is made by the call, owned by it and emptied into the result.

    Sums, weighted or plain, are added in place, all leaves at once; every other fold is combined leaf by leaf. Inside
    a torch.func transform nothing is written to, so that the fold can itself be differentiated and vmapped.
    """

    def __init__(self, outputs: Outputs):
        self.outputs = outputs
        self.pure = arrays.in_transform()
        self.tally = tally.empty(arrays)
        self.reduced: list[Any] = []
        self.collected: list[list[torch.Tensor]] = [[] for _ in outputs.collected]
        self.folds = outputs.reduced_folds
        dtypes = [outputs.dtypes[i] for i in outputs.reduced]
        in_place = [] if self.pure else [k for k, d in enumerate(dtypes) if _adds(self.folds[k], d)]
        lifts = {k: self.folds[k].fold.reducer.lift for k in in_place}
        self.scaled = [k for k, lift in lifts.items() if lift is reducers.weighted.lift]
        self.plain = [k for k, lift in lifts.items() if lift is reducers.sum.lift]
        self.others = [k for k in range(len(self.folds)) if k not in lifts]

    def add(self, leaves: list[Any], weight: Any) -> list[Any]:
        """Folds the leaves of one micro-batch in, and returns those that are threaded to the next."""
        values = [leaves[i] for i in self.outputs.reduced]
        state = [leaves[i] for i in self.outputs.threads]
        if self.pure:
            self._add(values, leaves, weight)
            return state
        with torch.no_grad():
            self._add(values, leaves, weight)
            # a copy, as it may be a view of the micro-batch, or of a buffer that grad_fn uses again
            return [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in state]

    def _add(self, values: list[Any], leaves: list[Any], weight: Any) -> None:
        first = not self.reduced
        if first:
            self.reduced = [None] * len(values)
        if self.plain:
            self._add_all(self.plain, values, 1, first)
        if self.scaled and not isinstance(weight, torch.Tensor):
            self._add_all(self.scaled, values, float(weight), first)
        elif self.scaled:
            self._add_masked(values, weight, first)
        for k in self.others:
            fold, value = self.folds[k], values[k]
            self.reduced[k] = fold.combine(fold.identity(value) if first else self.reduced[k], fold.lift(value, weight))
        for chunks, i in zip(self.collected, self.outputs.collected, strict=True):
            chunks.append(leaves[i].clone())  # grad_fn may use its buffer again, as a captured CUDA graph does
        self.tally = tally.merge(self.tally, tally.of(weight, arrays))

    def _add_all(self, places: list[int], values: list[Any], weight: float, first: bool) -> None:
        """Adds weight * value to the accumulators at these places, all at once."""
        every = len(places) == len(values)
        chosen = values if every else [values[k] for k in places]
        if not first:
            if weight:  # a weight of 0 adds nothing, not even a NaN
                own = self.reduced if every else [self.reduced[k] for k in places]
                torch._foreach_add_(own, chosen, alpha=weight)
            return
        if weight and all(self.folds[k].accumulator_dtype == values[k].dtype for k in places):
            own = list(torch._foreach_mul(chosen, weight))
        else:
            own = [v.to(self.folds[k].accumulator_dtype, copy=True) for k, v in zip(places, chosen, strict=True)]
            torch._foreach_mul_(own, weight) if weight else torch._foreach_zero_(own)
        for k, accumulator in zip(places, own, strict=True):
            self.reduced[k] = accumulator

    def _add_masked(self, values: list[Any], weight: torch.Tensor, first: bool) -> None:
        """The same for a weight that the host does not see: leaf by leaf, so that one masked leaf lives at a time."""
        factors: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        for k in self.scaled:
            value, dtype = values[k], self.folds[k].accumulator_dtype
            if (value.device, dtype) not in factors:
                own = weight.to(value.device)
                factors[value.device, dtype] = own.to(dtype), own != 0
            factor, counts = factors[value.device, dtype]
            masked = torch.where(counts, value.to(dtype), 0)
            self.reduced[k] = masked.mul_(factor) if first else self.reduced[k].addcmul_(masked, factor)

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output. The buffers are empty afterwards."""
        if self.pure:
            return self._result(state)
        with torch.no_grad():
            return self._result(state)

    def _result(self, state: list[Any]) -> Any:
        reduced = self.reduced
        done = {*self._divide(normalizers.by_weight, tally.total(self.tally)),
                *self._divide(normalizers.by_steps, self.tally.steps)}  # fmt: skip
        results = []
        for k, fold in enumerate(self.folds):
            value, reduced[k] = reduced[k], None
            results.append(_cast(value, fold) if k in done else fold.normalize(value, self.tally))
        collected = []
        for fold, chunks in zip(self.outputs.collected_folds, self.collected, strict=True):
            collected.append(torch.cat(chunks, dim=fold.fold.reducer.monoid.axis or 0).to(fold.result_dtype))
            chunks.clear()
        return self.outputs.join(results, collected, state)

    def _divide(self, normalizer: normalizers.Normalizer, total: Any) -> list[int]:
        """Divides in place the sums that this normalizer divides, and says which; the others are left to it."""
        found = [k for k in (*self.scaled, *self.plain) if self.folds[k].fold.normalizer.apply is normalizer.apply]
        if isinstance(total, torch.Tensor):
            # Of a total of 0 the host knows nothing, but then nothing was added to a weighted sum: it is zeros already.
            found = sorted({*found} & {*self.scaled})
            safe = torch.where(total != 0, total, 1)
            for k in found:
                self.reduced[k].div_(safe.to(self.reduced[k].device, self.reduced[k].dtype))
        elif found and total:
            torch._foreach_div_([self.reduced[k] for k in found], float(total))
        elif found:
            torch._foreach_zero_([self.reduced[k] for k in found])
        return found


def _cast(value: torch.Tensor, fold: LeafFold) -> torch.Tensor:
    return value if value.dtype == fold.result_dtype else value.to(fold.result_dtype)


def _adds(fold: LeafFold, dtype: torch.dtype) -> bool:
    """Whether adding in place, with the weight as a factor, is what the fold does with values of this dtype."""
    stock = fold.fold.reducer.lift in (reducers.weighted.lift, reducers.sum.lift)
    halves = (torch.bfloat16, torch.float16) if fold.accumulator_dtype.is_floating_point else ()
    same = dtype in (fold.accumulator_dtype, *halves)
    return stock and same and fold.fold.reducer.monoid is reducers.sum.monoid
