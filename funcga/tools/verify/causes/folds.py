"""Folds that are for another kind of loss, and weights that are not what the loss divides by.

The kind of a loss, found from two groups of rows, is compared with the kind that its fold is for. A
mean needs the weight that the loss divides by; a sum needs none; a loss of any other kind has no
fold.
"""

import copy
from collections.abc import Iterator, Sequence

import numpy as np

from funcga.tools.verify.causes import Answer, Answers, Cause, cause, note, stop
from funcga.tools.verify.causes.calls import by_position
from funcga.tools.verify.causes.counts import totals_line
from funcga.tools.verify.causes.groups import Evidence
from funcga.tools.verify.causes.lines import fold_line, signature
from funcga.tools.verify.causes.rows import of_statistics
from funcga.tools.verify.counted import counts, form
from funcga.tools.verify.exact import Case


def explain(case: Case) -> Sequence[Answer]:
    """The causes of the differences in the table of splits, at least one if there are any."""
    probe, splits, failed = case.probe, case.splits, case.failed
    if splits.are_exact:
        return []
    causes = [*by_position(case)] or by_kind(case) or [_unexplained(case)]
    if _are_clear(causes) or failed != splits.failed:
        return causes
    # The same splits, where larger differences count as rounding.
    loose, is_small = copy.copy(case), splits.worst <= _SMALL
    relative = 10 * splits.worst if is_small else max(case.limit.relative, _EPSILON)
    loose.limit = case.limit._replace(relative=relative)
    others = by_kind(loose)
    if is_small and not others:
        gradients = probe.gradient_leaves()
        is_of_value = gradients and {*gradients}.isdisjoint(failed)
        words = {"where": probe.paths[failed[0]], "difference": splits.worst}
        return [(note if is_of_value else cause)("small remainder", **words)]
    return others if others and _are_clear(others) else causes


def _are_clear(causes: Sequence[Cause]) -> bool:
    return VAGUE.isdisjoint(each.name for each in causes)


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


def by_kind(case: Case) -> list[Cause]:
    """The causes that the kinds of the leaves show, each name once."""
    probe, gradients = case.probe, case.probe.gradient_leaves()
    # Classified together are arrays under one fold, the gradients apart from others. They come
    # first, and the value of the loss, which fails for the same reasons, is not asked then.
    groups, found = dict[object, list[int]](), dict[str, Cause]()
    for leaf in sorted(probe.additive(), key=lambda leaf: leaf not in gradients):
        key = (probe.folds[leaf], leaf in gradients) if probe.whole[leaf].ndim else leaf
        groups.setdefault(key, []).append(leaf)
    for leaves in groups.values():
        if found and gradients and leaves[0] not in gradients:
            break
        if not {*case.failed}.isdisjoint(leaves):
            for each in _causes_of(Evidence(case, leaves)):
                found.setdefault(each.name, each)
    return [*found.values()]


def _causes_of(evidence: Evidence) -> Iterator[Cause]:
    """The causes for these leaves; none if their fold is exact for their kind."""
    kind = evidence.kind
    if kind in ("statistics", "coupled"):
        yield _of_terms(evidence) or of_statistics(evidence)
    elif kind in ("nothing", "unknown"):
        return
    elif evidence.fold.normalizer.divides_by == "steps":
        yield _of_mean_under(evidence, "by steps")
    elif kind == "mean":
        yield from _of_mean(evidence)
    else:
        yield from _of_sum(evidence)


def _unexplained(case: Case) -> Cause:
    """A difference that no kind of loss explains."""
    probe, splits = case.probe, case.splits
    is_refused = not splits.failed and probe.try_values(probe.all_rows[:-1]) is None
    key = "fixed rows: loss" if is_refused else "not decomposable"
    return cause(key, rows=probe.rows, difference=splits.first)


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
    count = divisor or form(evidence.probe)
    if is_mean and divisor is not None and evidence.leaves_out(divisor.of):
        return evidence.cause(name, line=_left_out_line(evidence))
    # A fold for means stays; and of its rows a micro-batch has the weight by default.
    keeps_fold = name in ("uneven tokens", "wrong weight")
    fold = "funcga.mean()" if is_mean else "funcga.per_weight()"
    options = [] if keeps_fold else [_fold_line(evidence, fold)]
    if is_mean and (keeps_fold or evidence.has_weight or not count.is_of_rows):
        options.append(count.line)
    line = ", ".join(options)
    if is_mean and divisor is None:
        line = note("form", line=line)
    return evidence.cause(name, line=line)


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
        yield evidence.cause("weight not additive", line=line)


# --- a weight that is 0


def all_weightless(case: Case) -> Answers:
    """A weight of 0 for all rows, although the loss is not 0."""
    probe = case.probe
    leaves = zip(probe.folds, probe.whole, strict=True)
    counted = any(fold.normalizer.divides_by == "weight" and np.any(leaf) for fold, leaf in leaves)
    if counted and probe.weigh(probe.all_rows) == 0:
        yield cause("wrong weight: zero", rows=probe.rows)
        yield stop()


def weightless_rows(case: Case) -> Answers:
    """Rows of weight 0 whose gradient is not 0, in a step that is exact wherever no micro-batch
    consists of such rows alone.
    """
    probe = case.probe
    if probe.program.weight is None or probe.has_state or not case.splits.are_exact:
        return
    leaves = [index for index in probe.additive() if probe.folds[index].reducer.linear]
    if leaves:
        yield from _left_out(Evidence(case, leaves))


def _left_out(evidence: Evidence) -> Iterator[Cause]:
    """Rows of weight 0 whose gradient is not 0: a mean leaves out a micro-batch of them."""
    if evidence.has_weight and evidence.leaves_out(evidence.probe.weigh):
        yield evidence.cause("wrong weight: rows left out", line=_left_out_line(evidence))


def _left_out_line(evidence: Evidence) -> str:
    options = [_fold_line(evidence, "funcga.per_weight()")]
    if evidence.divisor is not None:
        options.append(evidence.divisor.line)
    return note("left out", line=", ".join(options), subject=evidence.probe.subject)
