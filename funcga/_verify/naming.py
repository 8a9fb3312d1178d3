"""Naming: what is wrong, and the line that fixes it, from the kind of a loss and the fold that it was given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from funcga import monoids, normalizers, reducers
from funcga._verify.counting import Count, form, matching
from funcga._verify.parameters import moved
from funcga._verify.probe import Probe, Rows
from funcga._verify.responses import Responses, respond
from funcga._verify.tolerance import Limit, relative, scales_of
from funcga._verify.verdict import Cause
from funcga.folds import Fold


def is_linear(fold: Fold) -> bool:
    """Whether the fold adds up values, weighted or not."""
    lifts = (reducers.weighted.lift, reducers.sum.lift)
    return fold.reducer.monoid is monoids.sum and fold.reducer.lift in lifts


@dataclass(frozen=True)
class Case:
    """Some leaves under one fold, of which groups of rows have shown the kind."""

    probe: Probe
    fold: Fold
    leaves: Sequence[int]
    found: Responses
    parts: tuple[Rows, Rows]
    limit: Limit
    growing: bool

    @property
    def ratio(self) -> float:
        """How much A weighs for each B in the loss."""
        return self.found.kind.ratios[0]

    @property
    def weighted(self) -> bool:
        """Whether the fold multiplies by the weight: it takes means."""
        return self.fold.reducer.lift is reducers.weighted.lift

    @property
    def by(self) -> Any:
        """What the fold divides by."""
        return self.fold.normalizer.apply

    @property
    def name(self) -> str:
        """What the fold is called."""
        if self.weighted:
            return "mean()"
        return "per_weight()" if self.by is normalizers.by_weight.apply else "sum()"

    @property
    def where(self) -> str:
        """The first of the leaves."""
        return self.probe.paths[self.leaves[0]]

    def weights(self) -> tuple[float, float, float]:
        """The weights of A, of B and of both together."""
        a, b = self.found.a, self.found.b
        return self.probe.weigh(a), self.probe.weigh(b), self.probe.weigh(a + b)


def causes_of(case: Case) -> list[Cause]:
    """What is wrong with these leaves; nothing if the fold is exact for what they have shown."""
    kind = case.found.kind.name
    if kind in ("nothing", "unknown"):
        return []
    if kind == "statistics" or (kind == "coupled"):
        return [_negatives(case) if case.growing else _statistics(case) if kind == "statistics" else _coupled(case)]
    if kind in ("two means", "sum and mean", "power"):
        if _reweighs(case):
            return [_coupled(case) if kind == "power" else _reweighed(case)]
        return [_power(case) if kind == "power" else _two(case)]
    if case.by is normalizers.by_steps.apply:
        return [_by_steps(case)]
    found = _weight(case)
    if kind == "mean":
        if not (case.weighted and _agrees(case)) and not _fits(case, len):
            other = _no_count(case)
            if other:
                return other
        return found or ([] if case.weighted and _agrees(case) else [_mean(case)])
    if case.weighted:
        return [_sum(case)] + ([_regulariser(case)] if kind == "sum and constant" else [])
    return found + ([_regulariser(case)] if kind == "sum and constant" else [])


def _agrees(case: Case) -> bool:
    """Whether the fold weighs A and B as the loss does."""
    a, b, _ = case.weights()
    return abs(a - case.ratio * b) <= 100 * case.limit.relative * max(a, case.ratio * b)


def _reweighs(case: Case) -> bool:
    """Whether A weighs more or less for each B with other parameters: then it is no count that the loss divides by."""
    kind, other = case.found.kind, moved(case.probe)
    if other is None:
        return False
    found = respond(other, case.found.a, case.found.b, case.leaves, case.limit).kind
    if found.name != kind.name:
        return found.name in ("statistics", "coupled", "two means")
    tolerance = max(1e-5, 100 * case.limit.relative)
    return any(abs(x - y) > tolerance * (x + y) for x, y in zip(kind.ratios, found.ratios, strict=True))


def _no_count(case: Case) -> list[Cause]:
    """Why what weighs A and B in a mean is no count, one that adds up over rows and stays with other parameters."""
    if _reweighs(case):
        return [_reweighed(case)]
    a, b = case.found.a, case.found.b
    rest = tuple(row for row in case.probe.every if row not in {*a, *b})
    if not rest or _count(case):
        return []
    ratios: list[float] = []
    for rows in (a, a + b):
        found = respond(case.probe, rows, rest, case.leaves, case.limit)
        if found.kind.name in ("two means", "unknown"):  # A and B count as much as each other in both means
            return causes_of(replace(case, found=found))
        if found.kind.name != "mean":
            return [_reweighed(case)]
        ratios += found.kind.ratios
    alone, together = ratios
    expected = alone * (1 + 1 / case.ratio)
    close = abs(together - expected) <= max(1e-5, 100 * case.limit.relative) * expected
    return [] if close else [_reweighed(case)]


def _weight(case: Case) -> list[Cause]:
    """A weight that does not add up, where it counts."""
    if case.probe.program.weight is None or case.by is normalizers.identity.apply:
        return []
    a, b, both = case.weights()
    if abs(a + b - both) <= 1e-6 * max(a + b, both):
        return []
    fix = f"count, do not average: {form(case.probe)}"
    if case.found.kind.name == "mean":
        count = None if _fits(case, len) else _count(case)
        fix = count.line if count else fix
        if _fits(case, len):
            fix = "drop weight=: by default a micro-batch weighs as much as it has rows, which is what the loss counts"
    return [
        Cause(
            "weight not additive",
            "The weight of two micro-batches together is not the sum of their weights, so the total depends on how "
            "the batch is cut.",
            fix,
            f"weight is {a:g} for {len(case.found.a)} rows, {b:g} for {len(case.found.b)} others and {both:g} for all",
        )
    ]


def _count(case: Case) -> Count | None:
    """What the loss divides by, if an expression of the batch is found that fits every part of it."""
    return matching(case.probe, lambda count: _fits(case, count))


def _fits(case: Case, count: Callable[[Rows], float]) -> bool:
    """Whether the loss is a mean over what this counts: of A and B, and of two parts of the whole batch."""
    probe, tolerance = case.probe, 100 * case.limit.relative
    left, right = count(case.found.a), case.ratio * count(case.found.b)
    if not abs(left - right) <= tolerance * max(left, right) or left == 0:
        return False
    try:
        parts = [(count(rows), probe.values(rows)) for rows in case.parts]
    except Exception:  # a loss that refuses some batches
        return True
    total, whole = count(probe.every), probe.values(probe.every)
    values = [[leaf[i] for i in case.leaves] for _, leaf in parts]
    scales = scales_of(values, case.limit)
    for k, i in enumerate(case.leaves):
        mixed = sum((c * leaf[k] for (c, _), leaf in zip(parts, values, strict=True) if c > 0), np.zeros(())) / total
        if not relative(mixed, whole[i], scales[k]) <= tolerance:
            return False
    return True


def _mean(case: Case) -> Cause:
    """A mean whose weights are not those of the fold."""
    equal = _fits(case, len)
    count = None if equal else _count(case)
    weight = case.probe.program.weight
    a, b = len(case.found.a), len(case.found.b)
    evidence = (
        f"{case.where} of two groups of {a} and {b} rows together is the mean of both with weights in the ratio "
        f"{case.ratio:.6g} : 1"
    )
    if not case.weighted:
        line = "fold=funcga.mean()" + ("" if equal else f", {count.line}" if count else ", weight=...")
        what = (
            f"The loss is a mean, and {case.name} adds up as of a sum: n micro-batches give up to n times the gradient."
        )
        drop = ", and drop weight=" if equal and weight is not None else ""
        return Cause(f"mean under {case.name[:-2]}", what, line + drop, evidence)
    if weight is None:
        line = count.line if count else form(case.probe)
        what = (
            "The loss is a mean over something of which rows have different numbers, such as tokens that are not "
            "masked, and micro-batches are weighed by their rows."
        )
        if count is None:
            what += (
                " The line shows the form; no expression of the batch was found that counts what the loss counts. A "
                "mean by weights counts their sum."
            )
        return Cause("uneven tokens", what, line, evidence)
    if equal:
        what = "The loss is a mean over rows, and weight= counts something else."
        return Cause("wrong weight", what, "drop weight=: by default a micro-batch weighs as its rows", evidence)
    given = case.weights()
    what = (
        f"weight= is not what the loss divides by: it says {given[0]:g} : {given[1]:g} where the loss says "
        f"{case.ratio:.6g} : 1."
    )
    return Cause("wrong weight", what, count.line if count else "weight= a count of what the mean is over", evidence)


def _sum(case: Case) -> Cause:
    weight = case.probe.program.weight
    counted = "" if weight is not None else " (and weight=..., if it is to be divided by tokens and not by rows)"
    return Cause(
        "sum under mean",
        f"The loss is a sum over rows, and mean() takes it for a mean: n micro-batches give about 1/n of it "
        f"({case.where}).",
        f"fold=funcga.per_weight(){counted}, or fold=funcga.sum() for the sum itself",
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


def _two(case: Case) -> Cause:
    evidence = f"{case.where} is the sum of a part that adds up over rows and of a mean"
    if case.found.kind.name == "two means":
        x, y = case.found.kind.ratios
        evidence = (
            f"{case.where} is the sum of two means, which weigh the same two groups of rows {x:.6g} : 1 and {y:.6g} : 1"
        )
    return Cause(
        "other normaliser",
        "The loss has terms that are divided by different counts, such as a mean over tokens plus an auxiliary mean "
        "over rows: no one weight is right for both.",
        "divide every term by its count in the whole batch, passed whole, and add up: fold=funcga.sum(), "
        "in_axes=(None, 0, None)",
        evidence,
    )


def _power(case: Case) -> Cause:
    power = case.found.kind.power
    return Cause(
        "other normaliser",
        f"The loss is a sum that is divided by a count to the power {1 - power:.4g}, as by the root of the number of "
        f"rows. The fold divides by a count, or by nothing.",
        f"leave that out of the loss, fold=funcga.sum(), and divide the result, value and gradients, by the count of "
        f"the whole batch ** {1 - power:.4g}",
        f"{case.where} of all rows twice is 2 ** {power:.4g} times as large, and in two groups together those of the "
        f"groups add up, once each is divided by such a power",
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


def _by_steps(case: Case) -> Cause:
    return Cause(
        "by steps",
        "The fold divides by the number of micro-batches, so those with fewer rows or tokens count as much as others.",
        "fold=funcga.mean(), or Fold(reducers.weighted, normalizers.by_weight)",
        f"{case.where} of uneven micro-batches differs from that of the whole batch",
    )


def _statistics(case: Case) -> Cause:
    named = case.probe.own.batch_normalisers(case.probe.program.grad_fn)
    modules = f"; in the loss are {', '.join(named[:3])}" if named else ""
    by_row = (
        "write the loss as a sum or a mean of terms of one row each, pass in the statistics, or freeze layers that "
    )
    by_row += "normalise over rows (module.eval(), or LayerNorm); else n=1"
    return Cause(
        "batch statistics",
        "The loss depends on statistics over the rows that it sees together, as BatchNorm in training mode, a "
        "variance, a maximum or root over rows, a load-balancing loss or a mean over pairs of rows does. A micro-batch "
        "has other statistics, and no fold makes up for it.",
        "module.eval(), GroupNorm or LayerNorm instead of BatchNorm, or statistics that are passed in; else n=1"
        if named
        else by_row,
        f"{case.where} of groups of rows is no mean of those of the groups, and it stays, or settles, if all rows are "
        f"repeated{modules}",
    )


def _negatives(case: Case) -> Cause:
    return Cause(
        "in-batch negatives",
        "Every row is compared with the other rows of its micro-batch, as in a contrastive loss: fewer rows are "
        "another, easier loss, and no fold makes up for it.",
        "n=1; or a gradient cache, in two passes: the embeddings of all rows and the gradients of the loss by them, "
        "then sum(embedding(params, x) * those gradients), under fold=funcga.sum(). Candidates that are passed whole, "
        "in_axes=(None, 0, None), are constants: that is another gradient, without the part through the candidates, "
        "and the index of each row's positive is to be split with the rows",
        f"{case.where} of groups of rows is no mean of those of the groups, and the loss grows as a logarithm if all "
        f"rows are repeated",
    )


def _coupled(case: Case) -> Cause:
    return Cause(
        "coupled rows",
        "The loss couples its rows: the value for some rows depends on which others, and how many, it sees with them.",
        "write the loss as a sum or a mean of terms of one row each, as the square of a norm is; where that is "
        "impossible, n=1",
        f"{case.where} of repeated rows is neither the same nor as many times as large"
        + (f": of all rows twice it is 2 ** {case.found.kind.power:.4g} times" if case.found.kind.power else ""),
    )
