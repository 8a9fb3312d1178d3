"""Causes: why micro-batches do not give the result of the whole batch, and the line that fixes it.

What two groups of rows show of the loss, its Kind, is held against the fold that it was given. A mean needs a weight
that is what the loss divides by; a sum needs none; what is neither of them has no fold.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from funcga._types import Tree
from funcga._verify.divisors import ROWS, Count, counts, form
from funcga._verify.probe import Limit, Probe, Rows, relative
from funcga._verify.responses import GROUP, Kind, Splits, respond
from funcga.folds import Fold


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    name: a short identifier that stays, such as "uneven tokens". what: it, in a sentence. fix: the line to write
    instead. evidence: the figures by which it was recognised.
    """

    name: str
    what: str
    fix: str
    evidence: str


def diagnose(probe: Probe, splits: Splits, draws: bool, limit: Limit, random: np.random.Generator) -> list[Cause]:
    """The causes of what the splits have shown; at least one if a leaf failed or a split could not be computed."""
    if probe.additive(splits.reordered):
        return [_reordered(probe, splits, draws)]
    causes: dict[str, Cause] = {}
    pairs = [*_pairs(probe, splits, random)]
    for leaves in _grouped(probe, probe.additive(splits.failed)):
        # The first pair of groups that shows something decides.
        explanations = (causes_of(_case(probe, leaves, pair, splits, limit)) for pair in pairs)
        for cause in next(filter(None, explanations), []):
            causes.setdefault(cause.name, cause)
        if causes and probe.whole[leaves[0]].ndim:
            break  # the value of the loss fails for the same reasons
    if not causes and (splits.failed or any(row.error for row in splits.rows)):
        return [_unexplained(probe, splits, limit)]
    return [*causes.values()]


def _reordered(probe: Probe, splits: Splits, draws: bool) -> Cause:
    row = splits.rows[-1]
    evidence = f"the whole batch in another order of rows differs by {row.relative:.1e} at {row.leaf}"
    if draws:
        return Cause(
            "randomness",
            "The loss draws random numbers by a row's position in its micro-batch, from a key or a seed that every "
            "call shares, such as dropout with a key that is passed whole. In a micro-batch a row gets other numbers "
            "than in the whole batch.",
            "a key for each row, split with the batch: keys = jax.random.split(key, rows), in_axes=(None, 0, 0)"
            if probe.backend.name == "jax"
            else "module.eval(); or draw the mask beforehand, and split it with the batch: in_axes=(None, 0, 0)",
            evidence,
        )
    return Cause(
        "row order",
        "The loss depends on the order of the rows, and so on a row's position in its micro-batch: neighbouring rows "
        "are coupled.",
        "make one row of what belongs together, or give each row its position as data",
        evidence,
    )


def _pairs(probe: Probe, splits: Splits, random: np.random.Generator) -> Iterator[tuple[Rows, Rows]]:
    """Two groups of rows each: few at first, then all."""
    size = min(GROUP, probe.rows // 2)
    for _ in range(3 if probe.rows > 2 else 1):
        order = [int(i) for i in random.permutation(probe.rows)]
        yield tuple(order[:size]), tuple(order[size : 2 * size])
    yield splits.parts


def _grouped(probe: Probe, failed: list[int]) -> Iterator[list[int]]:
    """The leaves that are looked at together: arrays under one fold in one part of the output, or one scalar."""

    def key(i: int) -> tuple[Fold, str]:
        return probe.folds[i], (re.match(r"output\[\d+\]", probe.paths[i]) or [""])[0]

    arrays = [i for i in probe.additive() if probe.whole[i].ndim]
    for group in dict.fromkeys(key(i) for i in reversed(failed) if probe.whole[i].ndim):
        yield [i for i in arrays if key(i) == group]
    yield from ([i] for i in failed if not probe.whole[i].ndim)


@dataclass(frozen=True)
class Case:
    """Some leaves under one fold, and the Kind that two groups of rows, a and b, have shown of them.

    parts: two parts of the whole batch, on which what a and b suggest is tried.
    """

    probe: Probe
    leaves: Sequence[int]
    a: Rows
    b: Rows
    kind: Kind
    parts: tuple[Rows, Rows]
    limit: Limit

    @property
    def fold(self) -> Fold:
        """The fold of the leaves."""
        return self.probe.folds[self.leaves[0]]

    @property
    def linear(self) -> bool:
        """Whether the fold takes means, which it multiplies by the weight."""
        return self.fold.reducer.linear

    @property
    def where(self) -> str:
        """The path of the first of the leaves."""
        return self.probe.paths[self.leaves[0]]

    @property
    def ratio(self) -> float:
        """How much A weighs for each B in the loss."""
        return self.kind.ratios[0]

    @cached_property
    def weights(self) -> tuple[float, float, float]:
        """The weights of A, of B and of both together."""
        return self.probe.weigh(self.a), self.probe.weigh(self.b), self.probe.weigh(self.a + self.b)

    @cached_property
    def agrees(self) -> bool:
        """Whether the fold weighs A and B as the loss does, which takes a mean."""
        a, b, _ = self.weights
        return self.linear and abs(a - self.ratio * b) <= 100 * self.limit.relative * max(a, self.ratio * b)

    @cached_property
    def divisor(self) -> Count | None:
        """What the loss divides by: rows, or the first expression of the batch that fits every part of it."""
        return next((count for count in (ROWS, *counts(self.probe)) if self._fits(count.of)), None)

    def _fits(self, count: Callable[[Rows], float]) -> bool:
        """Whether the loss is a mean over what this counts: of A and B, and of two parts of the whole batch."""
        tolerance = 100 * self.limit.relative
        left, right = count(self.a), self.ratio * count(self.b)
        if left == 0 or not abs(left - right) <= tolerance * max(left, right):
            return False
        values = [self.probe.try_values(rows) for rows in self.parts]
        parts = [[leaves[i] for i in self.leaves] for leaves in values if leaves is not None]
        if len(parts) < 2:  # a loss that refuses some batches
            return True
        shares = [count(rows) / count(self.probe.every) for rows in self.parts]
        scales = self.limit.scales(parts)
        for index, scale, *leaf in zip(self.leaves, scales, *parts, strict=True):
            mixed = sum((s * x for s, x in zip(shares, leaf, strict=True) if s > 0), np.zeros(()))
            if not relative(mixed, self.probe.whole[index], scale) <= tolerance:
                return False
        return True

    def reweighs(self) -> bool:
        """Whether A weighs more or less for each B at other parameters: then no count is what the loss divides by."""
        moved = self.probe.moved()
        if moved is None:
            return False
        kind = respond(moved, self.a, self.b, self.leaves, self.limit)
        if kind.name != self.kind.name:
            return kind.name in ("statistics", "coupled", "two means")
        tolerance = max(1e-5, 100 * self.limit.relative)
        return any(abs(x - y) > tolerance * (x + y) for x, y in zip(self.kind.ratios, kind.ratios, strict=True))


def _case(probe: Probe, leaves: Sequence[int], pair: tuple[Rows, Rows], splits: Splits, limit: Limit) -> Case:
    return Case(probe, leaves, *pair, respond(probe, *pair, leaves, limit), splits.parts, limit)


def causes_of(case: Case) -> list[Cause]:
    """What is wrong with these leaves; nothing if the fold is exact for what they have shown."""
    kind = case.kind.name
    if kind in ("nothing", "unknown"):
        return []
    if kind in ("statistics", "coupled"):
        if _grows(case.probe, case.a):
            return [_negatives(case)]
        return [_statistics(case) if kind == "statistics" else _coupled(case)]
    if kind == "power":
        return [_coupled(case) if case.reweighs() else _power(case)]
    if kind in ("two means", "sum and mean"):
        return [_reweighed(case) if case.reweighs() else _two(case)]
    if case.fold.normalizer.divides_by == "steps":
        return [_by_steps(case)]
    if kind == "mean":
        return _of_mean(case)
    causes = [_sum(case)] if case.linear else _not_additive(case)
    return causes + ([_regulariser(case)] if kind == "sum and constant" else [])


def _grows(probe: Probe, rows: Rows) -> bool:
    """Whether the loss, or the loss a row, grows as the logarithm of how often the rows are repeated.

    Each time that their number is doubled a logarithm grows by the same; where a row is no candidate of its own, by
    less and less more than that. What grows as a power of it, as a norm does, grows by the same factor each time.
    """
    times = (2, 4, 8, 16)
    values = np.array([probe.loss(rows * k) for k in times])
    for each in (values, values / times):
        steps = np.diff(each)
        if not np.abs(steps).min() > 1e-6 * max(abs(each[0]), 1e-9):  # it stays, or is NaN
            continue
        first, second = np.abs(steps[1:] / steps[:-1] - 1)
        if first < 0.4 and second < max(0.7 * first, 1e-3):
            return True
    return False


def _negatives(case: Case) -> Cause:
    return Cause(
        "in-batch negatives",
        "Every row is compared with the other rows of its micro-batch, as in a contrastive loss. With fewer rows it is "
        "another, easier loss, and no fold makes up for it.",
        "n=1; or a gradient cache: the embeddings of all rows and the gradients of the loss by them first, then "
        "sum(embedding(params, x) * those gradients), under fold=funcga.sum(). Candidates that are passed whole, "
        "in_axes=(None, 0, None), with the index of each row's positive split, are constants: that is another gradient",
        f"{case.where} of groups of rows is no mean of those of the groups, and the loss grows as a logarithm if all "
        f"rows are repeated",
    )


def _statistics(case: Case) -> Cause:
    layers = case.probe.framework.batch_normalisers(case.probe.program.grad_fn)
    return Cause(
        "batch statistics",
        "The loss depends on statistics of the rows that it sees together, as BatchNorm in training mode, a variance, "
        "a maximum or root over rows, a load-balancing loss or a mean over pairs of rows does. A micro-batch has other "
        "statistics, and no fold makes up for it.",
        "module.eval(), GroupNorm or LayerNorm instead of BatchNorm, or statistics that are passed in; else n=1"
        if layers
        else "write the loss as a sum or a mean of terms of one row each, pass in the statistics, or freeze layers "
        "that normalise over rows (module.eval(), or LayerNorm); else n=1",
        f"{case.where} of groups of rows is no mean of those of the groups, and it stays, or settles, if all rows are "
        f"repeated{'; in the loss are ' if layers else ''}{', '.join(layers[:3])}",
    )


def _coupled(case: Case) -> Cause:
    power = f": of all rows twice it is 2 ** {case.kind.power:.4g} times as large" if case.kind.power else ""
    return Cause(
        "coupled rows",
        "The loss couples its rows: the value for some rows depends on which others, and how many, it sees with them.",
        "write the loss as a sum or a mean of terms of one row each, as the square of a norm is; where that is "
        "impossible, n=1",
        f"{case.where} of repeated rows is neither the same nor as many times as large{power}",
    )


def _power(case: Case) -> Cause:
    power = f"{1 - case.kind.power:.4g}"
    return Cause(
        "other normaliser",
        f"The loss is a sum that is divided by a count to the power {power}, as by the root of the number of rows. The "
        f"fold divides by a count, or by nothing.",
        f"leave that out of the loss, fold=funcga.sum(), and divide the result, value and gradients, by the count of "
        f"the whole batch ** {power}",
        f"{case.where} of all rows twice is 2 ** {case.kind.power:.4g} times as large, and in two groups together "
        f"those of the groups add up, once each is divided by such a power",
    )


def _reweighed(case: Case) -> Cause:
    return Cause(
        "batch statistics",
        "The loss weighs its rows by what the parameters make of all of them, as the logarithm of a mean, a "
        "log-sum-exp over rows, the worst of several groups, or weights that are normalised over rows do. weight= sees "
        "the batch alone, so no fold makes up for it.",
        "write the loss as a sum or a mean of terms of one row each; of log(mean) leave out the logarithm, and take "
        "log(value) and grads / value of the result; else n=1",
        f"{case.where} of two groups of rows together is a mean of both, with weights that change with the parameters "
        f"or with the rows beside them",
    )


def _two(case: Case) -> Cause:
    terms = "a part that adds up over rows and of a mean"
    if case.kind.name == "two means":
        x, y = case.kind.ratios
        terms = f"two means, which weigh the same two groups of rows {x:.6g} : 1 and {y:.6g} : 1"
    return Cause(
        "other normaliser",
        "The loss has terms that are divided by different counts, such as a mean over tokens plus an auxiliary mean "
        "over rows: no one weight is right for both.",
        "divide every term by its count in the whole batch, passed whole, and add up: fold=funcga.sum(), "
        "in_axes=(None, 0, None)",
        f"{case.where} is the sum of {terms}",
    )


def _by_steps(case: Case) -> Cause:
    return Cause(
        "by steps",
        "The fold divides by the number of micro-batches, so those with fewer rows or tokens count as much as others.",
        "fold=funcga.mean(), or Fold(reducers.weighted, normalizers.by_weight)",
        f"{case.where} of uneven micro-batches differs from that of the whole batch",
    )


def _sum(case: Case) -> Cause:
    counted = " (and weight=..., if it is to be divided by tokens and not by rows)"
    return Cause(
        "sum under mean",
        f"The loss is a sum over rows, and mean() takes it for a mean: n micro-batches give about 1/n of it "
        f"({case.where}).",
        f"fold=funcga.per_weight(){'' if case.probe.program.weight else counted}, or fold=funcga.sum() for the sum",
        f"{case.where} of two groups of rows together is the sum of both, and twice as much of all rows twice",
    )


def _regulariser(case: Case) -> Cause:
    return Cause(
        "regulariser",
        "The loss is a sum over rows plus a term that does not depend on the rows, such as an L2 penalty: it is "
        "counted once in every micro-batch, n times in all.",
        "take the term out of the loss (weight_decay= of the optimizer), or divide the sum by its count and use a "
        "mean: fold=funcga.mean(), weight=...",
        f"{case.where} of groups of rows adds up but for a constant",
    )


def _not_additive(case: Case) -> list[Cause]:
    """A weight that does not add up, where it counts."""
    a, b, both = case.weights
    counts_nothing = case.probe.program.weight is None or case.fold.normalizer.divides_by != "weight"
    if counts_nothing or abs(a + b - both) <= 1e-6 * max(a + b, both):
        return []
    divisor = case.divisor if case.kind.name == "mean" else None
    fix = divisor.line if divisor else f"count, do not average: {form(case.probe)}"
    if divisor is ROWS:
        fix = "drop weight=: by default a micro-batch weighs as much as it has rows, which is what the loss counts"
    return [
        Cause(
            "weight not additive",
            "The weight of two micro-batches together is not the sum of their weights, so the total depends on how "
            "the batch is cut.",
            fix,
            f"weight is {a:g} for {len(case.a)} rows, {b:g} for {len(case.b)} others and {both:g} for all",
        )
    ]


def _of_mean(case: Case) -> list[Cause]:
    """What is wrong with the fold for a mean: its weights, or that it takes sums."""
    if not case.agrees and case.divisor is None:
        causes = _without_count(case)
        if causes:
            return causes
    causes = _not_additive(case)
    if causes or case.agrees:
        return causes
    return [_other_weight(case) if case.linear else _mean(case)]


def _without_count(case: Case) -> list[Cause]:
    """Why what weighs A and B in a mean is no count, one that adds up over rows and stays with other parameters."""
    if case.reweighs():
        return [_reweighed(case)]
    rest = tuple(row for row in case.probe.every if row not in {*case.a, *case.b})
    if not rest:
        return []
    ratios: list[float] = []
    for rows in (case.a, case.a + case.b):
        kind = respond(case.probe, rows, rest, case.leaves, case.limit)
        if kind.name in ("two means", "unknown"):  # A and B count as much as each other in both means
            return causes_of(replace(case, a=rows, b=rest, kind=kind))
        if kind.name != "mean":
            return [_reweighed(case)]
        ratios += kind.ratios
    alone, together = ratios
    expected = alone * (1 + 1 / case.ratio)
    adds_up = abs(together - expected) <= max(1e-5, 100 * case.limit.relative) * expected
    return [] if adds_up else [_reweighed(case)]


def _mean(case: Case) -> Cause:
    """A mean under a fold that takes sums."""
    name = "per_weight" if case.fold.normalizer.divides_by == "weight" else "sum"
    weight = "" if case.divisor is ROWS else f", {case.divisor.line}" if case.divisor else ", weight=..."
    drop = ", and drop weight=" if case.divisor is ROWS and case.probe.program.weight is not None else ""
    return Cause(
        f"mean under {name}",
        f"The loss is a mean, and {name}() adds up as of a sum: n micro-batches give up to n times the gradient.",
        f"fold=funcga.mean(){weight}{drop}",
        _as_ratio(case),
    )


def _as_ratio(case: Case) -> str:
    return (
        f"{case.where} of two groups of {len(case.a)} and {len(case.b)} rows together is the mean of both with weights "
        f"in the ratio {case.ratio:.6g} : 1"
    )


def _other_weight(case: Case) -> Cause:
    """A mean whose weights are not those of the fold."""
    divisor = case.divisor
    if case.probe.program.weight is None:
        unknown = (
            " The line shows the form, as no expression of the batch was found that counts what the loss counts; a "
            "mean by weights counts their sum."
        )
        return Cause(
            "uneven tokens",
            "The loss is a mean over something of which rows have different numbers, such as tokens that are not "
            f"masked, and micro-batches are weighed by their rows.{'' if divisor else unknown}",
            divisor.line if divisor else form(case.probe),
            _as_ratio(case),
        )
    a, b, _ = case.weights
    rows = divisor is ROWS
    return Cause(
        "wrong weight",
        "The loss is a mean over rows, and weight= counts something else."
        if rows
        else f"weight= says {a:g} : {b:g} where the loss, by what it divides by, says {case.ratio:.6g} : 1.",
        "drop weight=: by default a micro-batch weighs as its rows"
        if rows
        else divisor.line
        if divisor
        else "weight= a count of what the mean is over",
        _as_ratio(case),
    )


def _unexplained(probe: Probe, splits: Splits, limit: Limit) -> Cause:
    error = next((row for row in splits.rows if row.error), None)
    worst = max(splits.rows, key=lambda row: -1 if math.isnan(row.relative) else row.relative)
    if not splits.failed and error is not None:
        evidence = f"{error.split}: {error.error}"
    else:
        leaf = probe.paths[splits.failed[0]] if splits.failed else worst.leaf
        evidence = f"{worst.split}: {leaf} differs by {worst.relative:.1e}, limit {worst.limit:.0e}"
    what, fix = _ways_out(probe, splits, limit)
    return Cause("not decomposable", f"Micro-batches do not give the result of the whole batch{what}.", fix, evidence)


def _ways_out(probe: Probe, splits: Splits, limit: Limit) -> tuple[str, str]:
    """(what, fix) of a difference that no kind of loss explains."""
    whole = [name for name, value in probe.kwargs.items() if _has_rows(probe, value)]
    if whole:
        return (
            f": `{whole[0]}` has {probe.rows} rows as well, and keyword arguments are passed whole to every one",
            f"pass `{whole[0]}` by position, after the parameters",
        )
    other = [probe.paths[i] for i in splits.failed if not probe.folds[i].reducer.additive]
    if other:
        return (
            f": the fold of {other[0]} takes neither sums nor means, as a loss and gradients need",
            "fold=funcga.mean(), or a tree of folds with another one for such an output alone",
        )
    if limit.relative > 1e-3:
        return (
            ", and in 16 bits rounding hides which mistake it is",
            "run verify with the parameters, the batch and the loss in float32, and do what it says there",
        )
    return (
        ", and none of the usual mistakes explains it",
        "write the loss as a sum or a mean of terms of one row each; where that is impossible, n=1",
    )


def _has_rows(probe: Probe, value: Tree) -> bool:
    leaves = filter(probe.backend.arrays.is_array, probe.backend.trees.flatten(value)[0])
    return any(leaf.shape[:1] == (probe.rows,) for leaf in leaves)


# A difference of less than this may be a small term of the loss, or rounding where large numbers cancel.
_SMALL = 1e-5
_VAGUE = {"batch statistics", "coupled rows", "in-batch negatives", "other normaliser", "not decomposable"}


def without_remainder(probe: Probe, splits: Splits, causes: list[Cause], limit: Limit) -> tuple[list[Cause], list[str]]:
    """(causes, notes): these causes, or in their place what explains a very small difference: one cause, or a note."""
    worst = max((math.inf if row.error else row.relative for row in splits.rows), default=0.0)
    failed = probe.additive(splits.failed)
    if not limit.relative < worst <= _SMALL or not {cause.name for cause in causes} <= _VAGUE:
        return causes, []
    # Within a limit above the difference, is the fold exact for all that failed?
    loose = limit._replace(relative=10 * worst)
    cases = [_case(probe, leaves, splits.parts, splits, loose) for leaves in _grouped(probe, failed)]
    is_right = all(case.kind.name != "unknown" and not causes_of(case) for case in cases)
    if failed != splits.failed or not is_right:
        return causes, []
    path = probe.paths[failed[0]]
    arrays = [i for i, leaf in enumerate(probe.whole) if leaf is not None and leaf.ndim]
    if arrays and not {*arrays} & {*failed}:
        note = (
            f"{path} differs by {worst:.1e}, though every gradient agrees: that is rounding, where large numbers "
            f"cancel, or a small term that no gradient comes from"
        )
        return [], [note]
    cause = Cause(
        "small remainder",
        "The fold is right for this loss but for a small term, such as the epsilon of a mean that is divided by "
        "(mask.sum() + 1e-6): every micro-batch adds its own to the count.",
        "mask.sum().clamp(min=1), or jnp.maximum(mask.sum(), 1), instead of an epsilon that is added",
        f"{path} differs by {worst:.1e}, and in all that is larger it is what the fold is for",
    )
    return [cause], []
