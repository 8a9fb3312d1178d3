"""Folds that are for another kind of loss, and weights that are not what the loss divides by.

The kind of a loss, found from two groups of rows, is compared with the kind that its fold is for. A
mean needs the weight that the loss divides by; a sum needs none; a loss of any other kind has no
fold.
"""

import copy
import re
from collections.abc import Iterator, Sequence

import numpy as np

from funcga.tools.verify.causes import Answer, Cause, cause, note, stop
from funcga.tools.verify.causes.calls import by_position
from funcga.tools.verify.causes.counts import totals_line
from funcga.tools.verify.causes.groups import Evidence
from funcga.tools.verify.causes.lines import fold_line, signature
from funcga.tools.verify.causes.rows import of_statistics
from funcga.tools.verify.counted import counts, form
from funcga.tools.verify.exact import Case
from funcga.tools.verify.probe import Probe, Rows


def explain(case: Case) -> Sequence[Answer]:
    """The causes of the differences in the table of splits, at least one if there are any: those
    of the first question that has an answer.
    """
    causes = [*by_position(case)] or by_kind(case, case.pairs) or [*unexplained(case)]
    return [*apart_from_an_epsilon(case, causes)] or causes


def by_kind(case: Case, pairs: Sequence[tuple[Rows, Rows]]) -> list[Cause]:
    """The causes found from these pairs of groups of rows, each name once."""
    found = dict[str, Cause]()
    for leaves in _alike(case.probe, case.failed):
        # The first pair that shows something decides.
        for pair in pairs:
            causes = _causes_of(Evidence(case, leaves, *pair))
            if causes:
                found = {each.name: each for each in causes} | found
                break
        # The value of a loss fails for the same reasons as its gradients.
        if found and case.probe.whole[leaves[0]].ndim:
            break
    return [*found.values()]


def _alike(probe: Probe, failed: Sequence[int]) -> list[list[int]]:
    """The leaves that are classified together, of those that hold one that failed: arrays under one
    fold in one part of the output, then each scalar.
    """
    groups = dict[object, list[int]]()
    for leaf in probe.additive():
        part = re.match(r"output\[\d+\]|", probe.paths[leaf])
        key = (probe.folds[leaf], part and part[0]) if probe.whole[leaf].ndim else leaf
        groups.setdefault(key, []).append(leaf)
    found = [leaves for leaves in groups.values() if not {*failed}.isdisjoint(leaves)]
    # Gradients come last in an output, and say most.
    return sorted(found, key=lambda leaves: (probe.whole[leaves[0]].ndim == 0, -leaves[0]))


def _causes_of(evidence: Evidence) -> list[Cause]:
    """The causes for these leaves; none if their fold is exact for their kind."""
    kind, is_by_steps = evidence.kind, evidence.fold.normalizer.divides_by == "steps"
    if is_by_steps and kind in ("sum", "sum and constant", "mean"):
        return [_of_mean_under(evidence, "by steps")]
    if kind == "mean":
        return [*_of_mean(evidence)]
    if kind in ("statistics", "coupled"):
        return [_of_terms(evidence) or of_statistics(evidence)]
    if kind in ("sum", "sum and constant"):
        return [*_of_sum(evidence)]
    return []


# --- the causes of each kind


def _of_sum(evidence: Evidence) -> Iterator[Cause]:
    if evidence.fold.reducer.linear:
        line, other = (_fold_line(evidence, f"funcga.{fold}()") for fold in ("per_weight", "sum"))
        yield evidence.cause("sum under mean", line=line, other=other)
    else:
        yield from _not_additive(evidence)
    if evidence.kind == "sum and constant":
        parameters = next(counts(evidence.probe)).parameters
        line = f'totals=lambda {parameters}: {{"one": 1}}'
        yield evidence.cause("regulariser", line=line, signature=signature(evidence.probe))


def _of_terms(evidence: Evidence) -> Cause | None:
    """The Cause of terms with different denominators if counts fit, which give the totals."""
    # In less than float64 too many counts fit.
    for has_sum in (False, True) if evidence.case.limit.relative < 1e-8 else ():
        chosen = evidence.fitting(1 if has_sum else 2, has_sum)
        if chosen:
            words = totals_line(evidence.probe, chosen, has_sum)
            fold = _fold_line(evidence, "funcga.sum()")
            return evidence.cause("other normaliser", fold=fold, **words)
    return None


def _of_mean(evidence: Evidence) -> Iterator[Cause]:
    """A mean under a fold with other weights, or under one for sums."""
    a, b, _ = evidence.weights
    b *= evidence.ratio
    is_linear = evidence.fold.reducer.linear
    is_right = is_linear and abs(a - b) <= 100 * evidence.case.limit.relative * max(a, b)
    not_additive = [*_not_additive(evidence)]
    # Only where no count explains the weights is it worth asking whether they are counts at all.
    if not is_right and evidence.divisor is None and evidence.reweighs():
        yield of_statistics(evidence)
    elif not_additive:
        yield from not_additive
    elif is_right:
        yield from _left_out(evidence)
    elif is_linear:
        yield _of_mean_under(evidence, "wrong weight" if evidence.has_weight else "uneven tokens")
    else:
        fold = "per_weight" if evidence.fold.normalizer.divides_by == "weight" else "sum"
        yield _of_mean_under(evidence, f"mean under {fold}")


def _of_mean_under(evidence: Evidence, name: str) -> Cause:
    """The Cause of a mean under another fold, or with other weights, than it needs; or of a sum
    under a fold by steps. The line has the weight that the loss divides by.
    """
    divisor, is_mean = evidence.divisor, evidence.kind == "mean"
    count, (weight_a, weight_b, _) = divisor or form(evidence.probe), evidence.weights
    words = {"weight_a": weight_a, "weight_b": weight_b}
    if is_mean and divisor is not None and evidence.leaves_out(divisor.of):
        return evidence.cause(name, line=_left_out_line(evidence), **words)
    # A fold for means stays; and of its rows a micro-batch has the weight by default.
    keeps_fold = name in ("uneven tokens", "wrong weight")
    fold = "funcga.mean()" if is_mean else "funcga.per_weight()"
    options = [] if keeps_fold else [_fold_line(evidence, fold)]
    if is_mean and (keeps_fold or evidence.has_weight or not count.is_of_rows):
        options.append(count.line)
    line = ", ".join(options)
    if is_mean and divisor is None:
        line = note("form", line=line)
    return evidence.cause(name, line=line, **words)


def _fold_line(evidence: Evidence, better: str) -> str:
    """The option fold= with another fold for these leaves, and for others that fail under
    theirs.
    """
    probe, fold = evidence.probe, evidence.fold
    failed = {index for index in evidence.case.failed if probe.folds[index] == fold}
    return fold_line(probe, better, failed | {*evidence.leaves})


def _not_additive(evidence: Evidence) -> Iterator[Cause]:
    """A weight that does not add up, if the fold divides by it."""
    a, b, both = evidence.weights
    is_used = evidence.has_weight and evidence.fold.normalizer.divides_by == "weight"
    if is_used and abs(a + b - both) > 1e-6 * max(a + b, both):
        divisor = evidence.divisor if evidence.kind == "mean" else None
        line = (divisor or form(evidence.probe)).line
        yield evidence.cause("weight not additive", line=line, weight_a=a, weight_b=b, both=both)


# --- a weight that is 0


def all_weightless(case: Case) -> Iterator[Answer]:
    """A weight of 0 for all rows, although the loss is not 0."""
    probe = case.probe
    leaves = zip(probe.folds, probe.whole, strict=True)
    counted = any(fold.normalizer.divides_by == "weight" and np.any(leaf) for fold, leaf in leaves)
    if counted and probe.weigh(probe.all_rows) == 0:
        yield cause("wrong weight: zero", rows=probe.rows)
        yield stop("nothing else")


def weightless_rows(case: Case) -> Iterator[Answer]:
    """Rows of weight 0 whose gradient is not 0, in a step that is exact wherever no micro-batch
    consists of such rows alone.
    """
    probe = case.probe
    if probe.program.weight is None or probe.has_state or not case.splits.are_exact:
        return
    leaves = [index for index in probe.additive() if probe.folds[index].reducer.linear]
    if leaves:
        yield from _left_out(Evidence(case, leaves, *case.parts))


def _left_out(evidence: Evidence) -> Iterator[Cause]:
    """Rows of weight 0 whose gradient is not 0: a mean leaves out a micro-batch of them."""
    if evidence.has_weight and evidence.leaves_out(evidence.probe.weigh):
        yield evidence.cause("wrong weight: rows left out", line=_left_out_line(evidence))


def _left_out_line(evidence: Evidence) -> str:
    options = [_fold_line(evidence, "funcga.per_weight()")]
    if evidence.divisor is not None:
        options.append(evidence.divisor.line)
    return note("left out", line=", ".join(options), subject=evidence.probe.subject)


# --- what no kind explains


def unexplained(case: Case) -> Iterator[Cause]:
    """A difference that no kind of loss explains."""
    probe, splits = case.probe, case.splits
    if splits.are_exact:
        return
    keywords = [
        name
        for name, value in probe.kwargs.items()
        if any(leaf.shape[:1] == (probe.rows,) for leaf in probe.numbers(value))
    ]
    others = [probe.paths[i] for i in splits.failed if not probe.folds[i].reducer.additive]
    words = {"rows": probe.rows, "difference": splits.first}
    # The first one that applies.
    if keywords:
        yield cause("not decomposable: keyword", keyword=keywords[0], **words)
    elif not splits.failed and probe.try_values(probe.all_rows[:-1]) is None:
        yield cause("fixed rows: loss", **words)
    elif others:
        line = fold_line(probe, "funcga.mean()", splits.failed)
        yield cause("not decomposable: fold", other=others[0], line=line, **words)
    elif case.limit.relative > 1e-3:
        yield cause("not decomposable: 16 bits", **words)
    else:
        yield cause("not decomposable", **words)


# A difference of less than this may be a small term of the loss, or rounding where large numbers
# cancel. What an epsilon in a divisor, as in mask.sum() + 1e-6, changes at most. And the causes
# that are too vague to be kept beside that.
_SMALL, _EPSILON = 1e-5, 1e-6
VAGUE = {
    "batch statistics",
    "coupled rows",
    "in-batch negatives",
    "other normaliser",
    "not decomposable",
}


def apart_from_an_epsilon(case: Case, causes: Sequence[Cause]) -> Iterator[Answer]:
    """What replaces these causes if it is all that is wrong but for a very small difference."""
    probe, failed, worst = case.probe, case.failed, case.splits.worst
    are_vague = causes and all(each.name in VAGUE for each in causes)
    # A loss that refuses repeated rows shows no kind.
    if not are_vague or failed != case.splits.failed or not probe.try_values(probe.all_rows * 2):
        return
    # The same splits, where larger differences count as rounding.
    loose, is_small = copy.copy(case), worst <= _SMALL
    loose.limit = case.limit._replace(relative=10 * worst if is_small else _EPSILON)
    found = by_kind(loose, [case.parts])
    if is_small and not found:
        yield _small_remainder(case)
    elif case.limit.relative < 1e-8 and VAGUE.isdisjoint(each.name for each in found):
        yield from found


def _small_remainder(case: Case) -> Answer:
    """The cause; a note if the value of the loss alone differs."""
    probe, failed = case.probe, case.failed
    arrays = {index for index, leaf in enumerate(probe.whole) if leaf.ndim}
    is_of_value = arrays and arrays.isdisjoint(failed)
    words = {"where": probe.paths[failed[0]], "difference": case.splits.worst}
    return (note if is_of_value else cause)("small remainder", **words)
