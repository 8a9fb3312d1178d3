"""Summaries of `coupled` whose fold is not the summary of all rows.

Only then can a step of `coupled` differ from the gradient of the whole batch. So summary_fn is
verified like any other function whose outputs are folded.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from funcga.errors import FuncgaError
from funcga.folds import mean
from funcga.tools.verify.causes import Answer, Cause, cause, causes_in, stop
from funcga.tools.verify.causes.calls import of_position
from funcga.tools.verify.causes.folds import by_kind, explain, weightless_rows
from funcga.tools.verify.causes.lines import fold_line
from funcga.tools.verify.causes.outputs import per_example
from funcga.tools.verify.exact import Case, Splits
from funcga.tools.verify.probe import Probe

# These causes are named for a summary as for a loss. Any other means that it is no sum or mean over
# single rows.
_AS_OF_A_LOSS = {
    "sum under mean",
    "mean under sum",
    "mean under per_weight",
    "by steps",
    "uneven tokens",
    "wrong weight",
    "weight not additive",
    "row order",
    "randomness",
}


def explain_step(case: Case) -> Iterator[Answer]:
    """The causes if the fold of summaries is not that of the whole batch."""
    of_summary = _of_summary(case)
    try:
        splits = case.splits
    # The step refuses to fold summaries of different shapes.
    except FuncgaError:
        found = _without_comparison(of_summary)
        if not found:
            raise
        yield from found
        yield stop("nothing else")
        return
    if splits.are_exact:
        yield from weightless_rows(of_summary)
        return
    found = _without_comparison(of_summary) or _from_splits(of_summary)
    difference = _first(splits)
    yield from found or [
        cause("not decomposable: summary", where="the summary", difference=difference)
    ]


def _first(splits: Splits) -> str:
    """The first split that differs, in words."""
    return next(f"{row.split}: {row}" for row in splits.rows if not row.ok)


def _of_summary(case: Case) -> Case:
    """The Case of summary_fn, with the totals of the whole batch."""
    probe = case.probe
    args, kwargs = probe.args, probe.kwargs
    program = replace(probe.program, prologue=None)
    return replace(case, probe=Probe(program, None, args, kwargs, probe.precise, "summary"))


def _without_comparison(case: Case) -> list[Cause]:
    """The causes that need no comparison: rows that are not collected."""
    summary = case.probe
    summary.values(summary.all_rows)
    return causes_in(per_example(case))


def _from_splits(case: Case) -> list[Cause]:
    failed, added = case.splits.failed, case.failed
    explained = causes_in(explain(case)) if added else []
    # A summary that couples its rows has texts of its own.
    found = [each for each in explained if each.name in _AS_OF_A_LOSS]
    return found or [_of_leaf(case, leaf_index) for leaf_index in (added or failed)[:1]]


def _of_leaf(case: Case, leaf_index: int) -> Cause:
    """The Cause for a leaf of the summary that differs from that of the whole batch."""
    summary, order = case.probe, case.order
    fold, path = summary.folds[leaf_index], summary.paths[leaf_index]
    whole, axis = summary.whole[leaf_index], fold.reducer.monoid.axis
    if axis is not None and whole.shape[axis] == summary.rows:
        # Rows in another order are to have the same summaries, in that order.
        permuted, moved = summary.values(order)[leaf_index], np.take(whole, order, axis)
        if case.differ([permuted], [moved]):
            (difference,) = case.limit.differences([permuted], [moved])
            return of_position(case, difference, path)
    elif better := _better_fold(case, leaf_index):
        better_fold, *weight = better.split(", ", 1)
        line = ", ".join([fold_line(summary, better_fold, [leaf_index]), *weight])
        return cause("wrong fold", where=path, better=better.partition(". ")[0], line=line)
    if axis is None and not fold.reducer.additive:
        return cause("not decomposable: summary", where=path, difference=_first(case.splits))
    layers = summary.layers() or "BatchNorm in training mode or a variance"
    return cause("batch statistics: summary", where=path, layers=f", as {layers} does")


def _better_fold(case: Case, leaf_index: int) -> str | None:
    """The expression of a fold for sums or means under which two parts of the batch give the leaf
    of all rows, in place of one that does not add up.
    """
    summary, of_leaves = case.probe, [*case.probe.folds]
    values = [summary.values(rows)[leaf_index] for rows in (*case.parts, summary.all_rows)]
    is_of_one_shape = len({x.shape for x in values}) == 1
    if not is_of_one_shape or of_leaves[leaf_index].reducer.additive:
        return None
    of_leaves[leaf_index] = mean()
    as_mean = replace(case, probe=summary.with_folds(of_leaves))
    if leaf_index not in as_mean.failed:
        return "funcga.mean()"
    for each in by_kind(as_mean):
        if each.name == "sum under mean":
            return "funcga.sum()"
        if each.name in ("uneven tokens", "wrong weight"):
            # What may count 0 is the weight of sums.
            better = "per_weight" if "per_weight()" in each.fix else "mean"
            return f"funcga.{better}(), weight={each.fix.partition('weight=')[2]}"
    return None
