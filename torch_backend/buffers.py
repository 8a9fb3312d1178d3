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
        self.scaled = [k for k in in_place if self.folds[k].fold.reducer.lift is reducers.weighted.lift]
        self.plain = [k for k in in_place if k not in self.scaled]
        self.others = [k for k in range(len(self.folds)) if k not in in_place]

    def add(self, leaves: list[Any], weight: Any) -> list[Any]:
        """Folds the leaves of one micro-batch in, and returns those that are threaded to the next."""
        values = [leaves[i] for i in self.outputs.reduced]
        state = [leaves[i] for i in self.outputs.threads]
        if self.pure:
            self._add(values, leaves, weight)
            return state
        with torch.no_grad():
            self._add(values, leaves, weight)
        return [leaf.detach() if arrays.is_array(leaf) else leaf for leaf in state]

    def _add(self, values: list[Any], leaves: list[Any], weight: Any) -> None:
        if not self.reduced:
            self.reduced = [
                torch.zeros_like(value, dtype=fold.accumulator_dtype) if k not in self.others else fold.identity(value)
                for k, (fold, value) in enumerate(zip(self.folds, values, strict=True))
            ]
        if self.plain:
            torch._foreach_add_([self.reduced[k] for k in self.plain], [values[k] for k in self.plain])
        if self.scaled and not isinstance(weight, torch.Tensor):
            if weight:
                accumulators = [self.reduced[k] for k in self.scaled]
                torch._foreach_add_(accumulators, [values[k] for k in self.scaled], alpha=weight)
        else:
            for k in self.scaled:
                self.reduced[k].add_(self.folds[k].lift(values[k], weight))
        for k in self.others:
            self.reduced[k] = self.folds[k].combine(self.reduced[k], self.folds[k].lift(values[k], weight))
        for chunks, i in zip(self.collected, self.outputs.collected, strict=True):
            chunks.append(leaves[i].clone())
        self.tally = tally.merge(self.tally, tally.one(weight, arrays))

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output. The buffers are empty afterwards."""
        if self.pure:
            return self._result(state)
        with torch.no_grad():
            return self._result([leaf.clone() if arrays.is_array(leaf) else leaf for leaf in state])

    def _result(self, state: list[Any]) -> Any:
        reduced = self.reduced
        done = [*self._divide(normalizers.by_weight, self.tally.weight[0]),
                *self._divide(normalizers.by_steps, self.tally.steps)]  # fmt: skip
        results = []
        for k, fold in enumerate(self.folds):
            value, reduced[k] = reduced[k], None
            results.append(value.to(fold.result_dtype) if k in done else fold.normalize(value, self.tally))
        collected = []
        for fold, chunks in zip(self.outputs.collected_folds, self.collected, strict=True):
            collected.append(torch.cat(chunks, dim=fold.fold.reducer.monoid.axis or 0).to(fold.result_dtype))
            chunks.clear()
        return self.outputs.join(results, collected, state)

    def _divide(self, normalizer: normalizers.Normalizer, total: Any) -> list[int]:
        """Divides in place the sums that this normalizer divides by a number known to the host, and says which."""
        if isinstance(total, torch.Tensor):
            return []
        found = [k for k in (*self.scaled, *self.plain) if self.folds[k].fold.normalizer.apply is normalizer.apply]
        if found and total:
            torch._foreach_div_([self.reduced[k] for k in found], total)
        for k in [] if total else found:
            self.reduced[k].zero_()
        return found


def _adds(fold: LeafFold, dtype: torch.dtype) -> bool:
    """Whether adding in place, with the weight as a factor, is what the fold does with values of this dtype."""
    stock = fold.fold.reducer.lift in (reducers.weighted.lift, reducers.sum.lift)
    same = dtype in (fold.accumulator_dtype, torch.bfloat16, torch.float16)
    return stock and same and fold.fold.reducer.monoid is reducers.sum.monoid
