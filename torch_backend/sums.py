"""The sums of one window: what has been folded so far, one accumulator for each leaf of the output.

Only torch has this file: XLA updates the carry of a loop in place by itself.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from types import NoneType
from typing import Any

import torch

from funcga._fold import LeafFold, Tally, largest
from funcga._fold.outputs import Outputs
from funcga._types import Scalar, Tree
from torch_backend import arrays, trees


@dataclass(frozen=True, eq=False)
class Folding:
    """How each leaf of an output is folded: the same for every window with outputs of one kind.

    `grads`: the gradients of leaves that last as long as the window, in the order of these; they
    are the same for all micro-batches. `moved`: those of arguments that are split. `beside`: all
    other leaves, and `rest_outputs` the Outputs of these alone; `with_loss`: whether the first of
    them is the loss. `may_be_wide`: whether a `.grad` may be wider than its leaf, as a module's own
    parameters may not have it: their `grad_dtype`, once set, can't be unset. `pure`: whether
    nothing may be written to, as what is computed is differentiated from outside.
    """

    outputs: Outputs
    grads: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    rest_outputs: Outputs | None = None
    with_loss: bool = False
    may_be_wide: bool = True
    pure: bool = False

    @cached_property
    def folds(self) -> dict[int, LeafFold]:
        """The folds of the leaves that are reduced."""
        return self.outputs.reduced

    @cached_property
    def adds(self) -> list[str | None]:
        """How torch adds values to each leaf's sum: "weighted", "plain", None if it does not."""
        adds: list[str | None] = [None] * len(self.outputs.folds)
        for index, fold in () if self.pure else self.folds.items():
            dtype, wide = self.outputs.dtypes[index], fold.accumulator_dtype
            is_half = dtype in (torch.bfloat16, torch.float16) and wide.is_floating_point
            if dtype == wide or is_half:
                adds[index] = fold.adds
        return adds

    @cached_property
    def loss_alone(self) -> int | None:
        """The index of the loss, if it is all that is added beside gradients; None otherwise."""
        is_alone = self.with_loss and len(self.beside) == 1 and not self.moved
        if not is_alone or self.outputs.threads or not self.lends:
            return None
        return None if self.adds[self.beside[0]] is None else self.beside[0]

    @cached_property
    def adds_of_grads(self) -> set[str | None]:
        """How torch adds to the sums of the gradients that stay in place: `adds` of each."""
        return {self.adds[index] for index in self.grads}

    @cached_property
    def are_weighted(self) -> bool:
        """Whether all of them are to be multiplied by their weight."""
        return self.adds_of_grads <= {"weighted"}

    @cached_property
    def wide(self) -> dict[int, torch.dtype]:
        """The dtypes of sums that are wider than their leaves, by place among the gradients."""
        folds, own = self.folds, self.outputs.dtypes
        return {
            at: folds[index].accumulator_dtype
            for at, index in enumerate(self.grads)
            if folds[index].accumulator_dtype != own[index]
        }

    @cached_property
    def lends(self) -> bool:
        """Whether autograd may add to the sums, which stand as `.grad`s."""
        return None not in self.adds_of_grads and (self.may_be_wide or not self.wide)

    @cached_property
    def quotients(self) -> list[tuple[list[int], str, bool]]:
        """Sums that one number divides: (their indices, "weight" or "steps", if in the unit)."""
        groups: dict[tuple[str, bool], list[int]] = {}
        for index, fold in self.folds.items():
            kind, by = self.adds[index], fold.fold.normalizer.divides_by
            if kind and by:
                groups.setdefault((by, kind == "weighted"), []).append(index)
        return [(indices, *key) for key, indices in groups.items()]

    @cached_property
    def normalized(self) -> list[int]:
        """All other reduced leaves: each is normalised by its own fold."""
        divided = {index for indices, *_ in self.quotients for index in indices}
        return [index for index in self.outputs.reduced if index not in divided]

    @cached_property
    def joins(self) -> Any:
        """The tool that folds, and normalises, several leaves as one; False if it has none to."""
        has_any = any(fold.fold.reducer.per_element for fold in self.folds.values())
        return has_any and import_module("funcga.tools.reproducible.in_torch")

    @cached_property
    def cast(self) -> dict[int, torch.dtype]:
        """The dtypes of results, where sums that are divided have another one."""
        return {
            index: fold.result_dtype
            for index, fold in self.folds.items()
            if index not in self.normalized and fold.accumulator_dtype != fold.result_dtype
        }


@dataclass(eq=False)
class Sums:
    """What one window has folded: `add` each micro-batch, then take the `result`.

    `of` has the accumulator of each leaf, None before its first value. A weighted sum is held
    divided by the `unit`, which stays where it is fixed. `total` and `steps` count, and `rejected`
    what is left out: tensors where only a device knows. `state` is what is threaded to the next
    micro-batch. `sparse`: the sums that are lists of rows, as gradients of sparse embeddings are.
    """

    folding: Folding
    of: defaultdict[int, Any] = field(default_factory=partial(defaultdict, NoneType))
    collected: defaultdict[int, list[torch.Tensor]] = field(
        default_factory=partial(defaultdict, list)
    )
    state: list[Any] = field(default_factory=list)
    total: Scalar = 0
    steps: Any = 0
    rejected: Any = 0
    unit: float | None = None
    unit_is_fixed: bool = False
    sparse: set[int] = field(default_factory=set)

    # --- the unit of weighted sums

    def share(self, weight: Scalar) -> float | None:
        """A weight in the unit of weighted sums, 1 at most; None for one that is a tensor.

        The unit is the first weight, so that micro-batches of equal weight are added as they are.
        A share that is no power of two may be rounded, as 1/3 is: then the unit becomes a power of
        two, which is exact. For a heavier micro-batch it grows, since a share can be the cotangent
        of a pass in float16, which overflows early.
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
        # The mantissa of a power of two is 0.5.
        is_held = weight <= self.unit and math.frexp(weight / self.unit)[0] == 0.5
        if not (is_held or self.unit_is_fixed):
            self.hold_in(power_above(max(float(weight), self.unit)))
        return float(weight / self.unit)

    def hold_in(self, unit: float) -> None:
        """Rescales the weighted sums to this unit."""
        weighted = [self.of[i] for i, kind in enumerate(self.folding.adds) if kind == "weighted"]
        begun = [total for total in weighted if total is not None]
        if begun and self.unit is not None and unit != self.unit:
            arrays.multiply(begun, self.unit / unit)
        self.unit = unit

    # --- a micro-batch

    def add_loss(self, loss: torch.Tensor, index: int, weight: Scalar, share: float) -> None:
        """`add` of the loss, where it is all that is added beside gradients."""
        share, before = 1.0 if self.folding.adds[index] == "plain" else share, self.of[index]
        if before is not None:
            if share:  # a weight of 0 adds nothing, not even a NaN
                before.add_(loss, alpha=share)
        else:
            first = loss.to(self.folding.folds[index].accumulator_dtype)
            self.of[index] = first.mul(share) if share else torch.zeros_like(first)
        self.total, self.steps = self.total + weight, self.steps + 1

    def add(self, values: Mapping[int, Any], weight: Scalar) -> None:
        """Folds the leaves of one micro-batch in, by their indices, and counts it."""
        outputs = self.folding.outputs
        self.add_reduced(values, weight)
        for index in outputs.collected:
            # Copied, because grad_fn may reuse its buffer, as a captured CUDA graph does. What a
            # tool has measured is new.
            row = arrays.strided(values[index])
            self.collected[index].append(row if index < outputs.before else row.clone())
        # Copied, because state may be a view of the micro-batch, which is freed next.
        self.state = [
            leaf.clone() if arrays.is_array(leaf) and not self.folding.pure else leaf
            for leaf in map(values.__getitem__, outputs.threads)
        ]
        self.total = self.total + arrays.counted(weight)
        self.steps += 1

    def taken(self, values: dict[int, Any]) -> dict[int, Any]:
        """Values as their sums take them: lists of rows stay so if torch adds them, all else is
        dense.
        """
        of, sparse, folding = self.of, self.sparse, self.folding
        for index, value in values.items():
            if value.layout is torch.strided and not sparse:
                continue
            if value.layout is torch.sparse_coo and folding.adds[index] and not folding.joins:
                if of[index] is None:
                    sparse.add(index)
                continue
            if index in sparse:  # to which nothing dense can be added
                sparse.remove(index)
                of[index] = of[index].to_dense()
            values[index] = value.to_dense()
        return values

    def add_reduced(self, values: Mapping[int, Any], weight: Scalar) -> None:
        """Folds the reduced ones of these leaves in, all that are added alike in one kernel."""
        of, folds, adds = self.of, self.folding.folds, self.folding.adds
        values = self.taken({index: values[index] for index in values if index in folds})
        others: dict[int, torch.Tensor] = values
        if self.folding.joins:
            others = self.folding.joins.add(self, values, weight)
        new: dict[int, torch.dtype] = {}
        for index, value in others.items():
            if adds[index] is None:
                total = folds[index].folded(of[index], value, weight)
                # A monoid of the user's may return its argument, whose memory is grad_fn's.
                of[index] = total.clone() if total is value else total
            elif of[index] is None:
                new[index] = folds[index].accumulator_dtype
        if new:
            of.update(arrays.zeros(values, new))
        # A weight that is a tensor is that of a transform, in which no kernel adds.
        for kind, factor in (("weighted", self.share(weight)), ("plain", 1)):
            indices = [index for index in values if adds[index] == kind]
            if indices and factor:  # a weight of 0 adds nothing, not even a NaN
                sums, more = ([*map(each.__getitem__, indices)] for each in (of, values))
                arrays.add(sums, more, factor)

    # --- the end of the window

    def result(self, finish: Callable[[dict[int, Any]], None] | None = None) -> Tree:
        """The normalised result, in the structure of the output. The sums are empty afterwards.
        `finish` may replace leaves of the result.
        """
        folding, outputs = self.folding, self.folding.outputs
        of, self.of = self.of, defaultdict(NoneType)
        results = dict(enumerate(map(of.__getitem__, range(len(outputs.folds)))))
        for indices, by, weighted in folding.quotients:
            divisor = self.total if by == "weight" else self.steps
            unit = (self.unit or 1.0) if weighted else 1.0
            sums = [results[index] for index in indices]
            if isinstance(divisor, torch.Tensor) or divisor != unit:
                arrays.divide(sums, divisor / unit)
        if folding.cast:
            results.update(arrays.cast(results, folding.cast))
        results.update({index: results[index].coalesce() for index in self.sparse})
        if folding.normalized:
            self._normalize(results)
        for index, fold in outputs.collected.items():
            rows = self.collected[index]
            results[index] = torch.cat(rows, dim=fold.axis or 0).to(fold.result_dtype)
        results.update(zip(outputs.threads, self.state, strict=True))
        if finish is not None:
            finish(results)
        return trees.unflatten(outputs.structure, [*results.values()])

    @property
    def tally(self) -> Tally:
        """How much has been folded."""
        return Tally((self.total,), self.steps)

    def _normalize(self, results: dict[int, Any]) -> None:
        """Replaces those of the sums that are normalised by their own folds by their results."""
        folding, tally, indices = self.folding, self.tally, self.folding.normalized
        if folding.joins:
            indices = folding.joins.normalize(self, results)
        for index in indices:
            reduced = results[index]
            if folding.adds[index] == "weighted" and self.unit not in (None, 1.0):
                arrays.multiply([reduced], self.unit)
            if largest(reduced).is_cpu:  # elsewhere the host sees nothing of it
                where = lambda index=index: folding.outputs.paths()[index]
                folding.folds[index].check_known(reduced, tally, where)
            results[index] = folding.folds[index].normalize(reduced, tally)


def power_above(number: float) -> float:
    """The smallest power of two that is not below a positive number."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
