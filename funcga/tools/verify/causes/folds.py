"""Folds that are for another kind of loss, and weights that are not what the loss divides by.

The Kind of a loss, found from two groups of rows, is compared with the kind that its fold is for. A
mean needs the weight that the loss divides by; a sum needs none; a loss of any other kind has no
fold.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from funcga.folds import Fold
from funcga.tools.verify.causes import Answer, Cause, cause, causes_in, note
from funcga.tools.verify.causes.calls import by_position
from funcga.tools.verify.causes.counts import totals_line
from funcga.tools.verify.causes.groups import Evidence, compare_groups
from funcga.tools.verify.causes.lines import fold_line, signature
from funcga.tools.verify.causes.rows import of_means, of_statistics, of_sums
from funcga.tools.verify.counted import counts, form
from funcga.tools.verify.exact import Case
from funcga.tools.verify.probe import Probe


def explain(case: Case) -> list[Answer]:
    """The causes of the differences in the table of splits, at least one if there are any: those
    of the first question that has an answer.
    """
    answers = [*by_position(case)] or [*by_kind(case)] or [*unexplained(case)]
    return [*remainder(case, causes_in(answers))] or answers


def by_kind(case: Case) -> Iterator[Cause]:
    """The causes found from groups of rows, each name once."""
    probe, found = case.probe, dict[str, Cause]()
    for leaves in _alike(probe, case.failed):
        # Of the pairs of groups the first one that shows something decides.
        for pair in case.pairs:
            causes = causes_of(compare_groups(case, leaves, *pair))
            if causes:
                found = {each.name: each for each in causes} | found
                break
        # The value of a loss fails for the same reasons as its gradients.
        if found and probe.whole[leaves[0]].ndim:
            break
    yield from found.values()


def _alike(probe: Probe, failed: list[int]) -> Iterator[list[int]]:
    """The leaves that are classified together: arrays under one fold in one part of the output,
    or one scalar.
    """

    def key(i: int) -> tuple[Fold, str]:
        return probe.folds[i], (re.match(r"output\[\d+\]", probe.paths[i]) or [""])[0]

    arrays = [i for i in probe.additive() if probe.whole[i].ndim]
    scalars = [i for i in failed if not probe.whole[i].ndim]
    for group in dict.fromkeys(key(i) for i in reversed(failed) if i in arrays):
        yield [i for i in arrays if key(i) == group]
    yield from ([i] for i in scalars)


def causes_of(evidence: Evidence) -> list[Cause]:
    """The causes for these leaves; none if their fold is exact for their kind."""
    kind = evidence.kind.name
    if evidence.divides_by == "steps" and kind in ("sum", "sum and constant", "mean"):
        return [_of_mean_under(evidence, "by steps")]
    return [*_OF_KIND[kind](evidence)] if kind in _OF_KIND else []


# --- the causes of each kind


def _of_statistics(evidence: Evidence) -> Iterator[Cause]:
    """Terms with different denominators if counts fit, which give the totals to write."""
    # In less than float64 too many counts fit.
    is_precise = evidence.case.limit.relative < 1e-8
    guarded = [*_of_guarded(evidence)] if is_precise else []
    if guarded:
        yield from guarded
        return
    for terms, number in {"two means": 2, "sum and mean": 1}.items() if is_precise else ():
        chosen = evidence.fitting(number, has_sum=number == 1)
        if chosen:
            ratio, *_, other = (
                count.of(evidence.a) / (count.of(evidence.b) or math.nan) for count in chosen * 2
            )
            words = totals_line(evidence.probe, chosen, has_sum=number == 1)
            words["line"] += f", {_fold_line(evidence, 'funcga.sum()')}"
            yield evidence.cause(f"other normaliser: {terms}", ratio=ratio, other=other, **words)
            return
    yield of_statistics(evidence)


# What an epsilon in the divisor, as in mask.sum() + 1e-6, changes at most.
_EPSILON = 1e-6


def _of_guarded(evidence: Evidence) -> Iterator[Cause]:
    """The causes for what is a mean apart from an epsilon in what it is divided by."""
    case = evidence.case
    loose = replace(case, limit=case.limit._replace(relative=_EPSILON))
    mean = compare_groups(loose, evidence.leaves, evidence.a, evidence.b)
    if mean.kind.name == "mean" and mean.divisor is not None:
        yield from _of_mean(mean)


def _of_power(evidence: Evidence) -> Iterator[Cause]:
    growth = evidence.kind.power
    if evidence.reweighs():
        yield of_sums(evidence, "coupled rows")
    else:
        yield evidence.cause("other normaliser: power", power=1 - growth, growth=growth)


def _of_sum(evidence: Evidence) -> Iterator[Cause]:
    if evidence.fold.reducer.linear:
        key, line, other = "sum under mean", "funcga.per_weight()", "funcga.sum()"
        if evidence.probe.subject == "summary":
            key, line, other = f"{key}: summary", other, line
        elif evidence.has_weight:
            key = f"{key}: weighted"
        lines = {"line": _fold_line(evidence, line), "other": _fold_line(evidence, other)}
        yield evidence.cause(key, **lines)
    else:
        yield from _not_additive(evidence)
    if evidence.kind.name == "sum and constant":
        probe = evidence.probe
        parameters = next(counts(probe)).parameters
        line = f'totals=lambda {parameters}: {{"one": 1}}'
        yield evidence.cause("regulariser", line=line, signature=signature(probe))


def _of_mean(evidence: Evidence) -> Iterator[Cause]:
    """A mean under a fold with other weights, or under one for sums."""
    # Only where no count explains the weights is it worth asking whether they are counts at all.
    a, b, _ = evidence.weights
    is_linear = evidence.fold.reducer.linear
    apart, largest = abs(a - evidence.kind.ratio * b), max(a, evidence.kind.ratio * b)
    is_right = is_linear and apart <= 100 * evidence.case.limit.relative * largest
    is_counted = is_right or evidence.divisor is not None
    found = ([] if is_counted else _without_count(evidence)) or [*_not_additive(evidence)]
    if found:
        yield from found
    elif is_right:
        yield from _left_out(evidence)
    elif is_linear:
        yield _of_mean_under(evidence, "wrong weight" if evidence.has_weight else "uneven tokens")
    else:
        fold = "per_weight" if evidence.divides_by == "weight" else "sum"
        yield _of_mean_under(evidence, f"mean under {fold}")


def _of_mean_under(evidence: Evidence, name: str) -> Cause:
    """The Cause of a mean under another fold, or with other weights, than it needs; or of a sum
    under a fold by steps. The line has the weight that the loss divides by.
    """
    divisor, is_mean = evidence.divisor, evidence.kind.name == "mean"
    count, (weight_a, weight_b, _) = divisor or form(evidence.probe), evidence.weights
    words = {"count": count.expression, "weight_a": weight_a, "weight_b": weight_b}
    if not is_mean:
        return evidence.cause(name, line=_fold_line(evidence, "funcga.per_weight()"), **words)
    fold, weight = "funcga.mean()", count.line
    if divisor is None:
        key = f"{name}: unknown"
    elif evidence.leaves_out(divisor.of):
        key, fold = f"{name}: left out", "funcga.per_weight()"
    else:
        key, weight = name, divisor.fix
    # A fold for means stays; and of its rows a micro-batch has the weight by default.
    if name in ("uneven tokens", "wrong weight") and fold == "funcga.mean()":
        return evidence.cause(key, line=weight, **words)
    line = _fold_line(evidence, fold)
    if not count.is_of_rows or evidence.has_weight:
        line += f", {count.line}"
    return evidence.cause(key, line=line, **words)


def _fold_line(evidence: Evidence, better: str) -> str:
    """The option fold= with another fold for these leaves, and for others that fail under
    theirs.
    """
    probe, fold = evidence.probe, evidence.fold
    failed = {index for index in evidence.case.failed if probe.folds[index] == fold}
    return fold_line(probe, better, failed | {*evidence.leaves})


def _without_count(evidence: Evidence) -> list[Cause]:
    """The causes if the weights of A and B in a mean are no counts: a count adds up over rows and
    does not depend on the parameters.
    """
    case, a, b = evidence.case, evidence.a, evidence.b
    if evidence.reweighs():
        return [of_means(evidence)]
    # Against a third group, A and B together must weigh as much as A and as B do.
    c = tuple(row for row in case.probe.all_rows if row not in {*a, *b})
    alone, together = (compare_groups(case, evidence.leaves, rows, c) for rows in (a, a + b))
    for other in (alone, together):
        # A and B have hidden a second mean, in which they count as much as each other.
        if other.kind.name != "mean":
            return causes_of(other)
    expected = alone.kind.ratio * (1 + 1 / evidence.kind.ratio)
    apart = abs(together.kind.ratio - expected)
    return [of_means(evidence)] if apart > evidence.tolerance * expected else []


def _not_additive(evidence: Evidence) -> Iterator[Cause]:
    """A weight that does not add up, if the fold divides by it."""
    a, b, both = evidence.weights
    is_used = evidence.has_weight and evidence.divides_by == "weight"
    if not is_used or abs(a + b - both) <= 1e-6 * max(a + b, both):
        return
    divisor = evidence.divisor if evidence.kind.name == "mean" else None
    line = divisor.fix if divisor else f"count, do not average: {form(evidence.probe).line}"
    yield evidence.cause("weight not additive", line=line, weight_a=a, weight_b=b, both=both)


_OF_KIND = {
    "sum": _of_sum,
    "sum and constant": _of_sum,
    "mean": _of_mean,
    "power": _of_power,
    "statistics": _of_statistics,
    "coupled": _of_statistics,
}


# --- a weight that is 0 everywhere


def all_weightless(case: Case) -> Iterator[Answer]:
    """A weight of 0 for all rows, although the loss is not 0.

    All further questions, and the weight in the fix, are about the step without weight=.
    """
    probe = case.probe
    if probe.program.weight is None or probe.weigh(probe.all_rows) != 0:
        return
    leaves = zip(probe.folds, probe.whole, strict=True)
    if any(fold.normalizer.divides_by == "weight" and np.any(leaf) for fold, leaf in leaves):
        case.probe = probe.with_attributes(program=replace(probe.program, weight=None))
        found = causes_in(by_kind(case))
        lines = [each.fix for each in found if each.name == "uneven tokens"]
        line = (lines or [next(counts(probe)).fix])[0]
        yield cause("wrong weight: zero", line=line, rows=probe.rows)
        yield note("without weight")


# --- a weight that is 0 for rows that count


def weightless_rows(case: Case) -> Iterator[Answer]:
    """Rows of weight 0 whose gradient is not 0, in a step that is exact wherever no micro-batch
    consists of such rows alone.
    """
    probe = case.probe
    if probe.program.weight is None or probe.has_state:
        return
    leaves = [index for index in probe.additive() if probe.folds[index].reducer.linear]
    found = [*_left_out(compare_groups(case, leaves, *case.parts))] if leaves else []
    if found and case.splits.are_exact:
        yield from found


def _left_out(evidence: Evidence) -> Iterator[Cause]:
    """Rows of weight 0 whose gradient is not 0: a mean leaves out a micro-batch of them."""
    if not evidence.has_weight or not evidence.leaves_out(evidence.probe.weigh):
        return
    line, count, divisor = _fold_line(evidence, "funcga.per_weight()"), "it", evidence.divisor
    if divisor is not None:
        line, count = f"{line}, {divisor.line}", f"`{divisor.expression}`"
    yield evidence.cause("wrong weight: rows left out", line=line, count=count)


# --- what no kind explains


def unexplained(case: Case) -> Iterator[Cause]:
    """A difference that no kind of loss explains."""
    probe, splits = case.probe, case.splits
    if splits.are_exact:
        return
    row = max(splits.rows, key=lambda row: -1 if math.isnan(row.relative) else row.relative)
    if not splits.failed:
        row = next(row for row in splits.rows if row.error)
    keywords = [name for name, value in probe.kwargs.items() if _has_rows(probe, value)]
    others = [probe.paths[i] for i in splits.failed if not probe.folds[i].reducer.additive]
    is_refused = not splits.failed and probe.try_values(probe.all_rows[:-1]) is None
    # The first one that applies.
    keys = {
        "not decomposable: keyword": keywords,
        "fixed rows: loss": is_refused,
        "not decomposable: fold": others,
        "not decomposable: 16 bits": case.limit.relative > 1e-3,
        "not decomposable": True,
    }
    words = {"keyword": "".join(keywords[:1]), "other": "".join(others[:1]), "rows": probe.rows}
    words["line"] = fold_line(probe, "funcga.mean()", splits.failed)
    key = next(key for key, applies in keys.items() if applies)
    yield cause(key, split=row.split, difference=str(row), **words)


def _has_rows(probe: Probe, value: object) -> bool:
    return any(leaf.shape[:1] == (probe.rows,) for leaf in probe.numbers(value))


# A difference of less than this may be a small term of the loss, or rounding where large numbers
# cancel. Some causes are too vague to be kept beside that.
_SMALL = 1e-5
_VAGUE = {
    "batch statistics",
    "coupled rows",
    "in-batch negatives",
    "other normaliser",
    "not decomposable",
}


def remainder(case: Case, causes: Sequence[Cause]) -> Iterator[Answer]:
    """A very small difference, which replaces these causes if the fold is exact apart from it."""
    probe, splits = case.probe, case.splits
    worst = max((math.inf if row.error else row.relative for row in splits.rows), default=0.0)
    failed = case.failed
    is_small = case.limit.relative < worst <= _SMALL and failed == splits.failed
    if not is_small or not {each.name for each in causes} <= _VAGUE:
        return
    # Within a limit above the difference the fold must be exact for all that failed.
    loose = replace(case, limit=case.limit._replace(relative=10 * worst))
    for leaves in _alike(probe, failed):
        evidence = compare_groups(loose, leaves, *case.parts)
        if evidence.kind.name == "unknown" or causes_of(evidence):
            return
    arrays = {i for i, leaf in enumerate(probe.whole) if leaf.ndim}
    words = {"where": probe.paths[failed[0]], "difference": worst}
    if arrays and arrays.isdisjoint(failed):
        yield note("small difference", **words)
    else:
        yield cause("small remainder", **words)
