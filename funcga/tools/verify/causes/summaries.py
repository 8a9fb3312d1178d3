"""Summaries of `coupled` whose fold is not the summary of all rows.

Only then can a step of `coupled` differ from the gradient of the whole batch. So summary_fn is
verified like any other function whose outputs are folded.
"""

from dataclasses import replace

from funcga.folds import mean
from funcga.tools.verify.causes import Answers, Cause, cause, causes_in, stop
from funcga.tools.verify.causes.folds import VAGUE, by_kind, explain, weightless_rows
from funcga.tools.verify.causes.lines import fold_line
from funcga.tools.verify.causes.outputs import per_example
from funcga.tools.verify.exact import Case
from funcga.tools.verify.probe import Probe


def explain_step(case: Case) -> Answers:
    """The causes if the fold of summaries is not that of the whole batch."""
    # The Case of summary_fn, with the totals of the whole batch.
    step = case.probe
    summary = Probe(step.program, None, step.args, step.kwargs, step.precise, "summary")
    of_summary = replace(case, probe=summary)
    # First what needs no comparison: the step refuses to fold summaries of different shapes.
    not_collected = causes_in(per_example(of_summary))
    if not_collected:
        yield from not_collected
        yield stop()
    elif case.splits.are_exact:
        yield from weightless_rows(of_summary)
    else:
        # A summary that couples its rows has texts of its own.
        explained = causes_in(explain(of_summary))
        found = [each for each in explained if each.name not in VAGUE]
        failed = of_summary.failed or of_summary.splits.failed
        found = found or [_of_leaf(of_summary, leaf) for leaf in failed[:1]]
        of_step = {"where": "the summary", "difference": case.splits.first}
        yield from found or [cause("not decomposable: summary", **of_step)]


def _of_leaf(case: Case, leaf: int) -> Cause:
    """The Cause for a leaf of the summary that differs from that of the whole batch."""
    summary, reducer = case.probe, case.probe.folds[leaf].reducer
    path, line = summary.paths[leaf], _better_line(case, leaf)
    if line:
        return cause("wrong fold", where=path, line=line)
    if reducer.monoid.axis is None and not reducer.additive:
        return cause("not decomposable: summary", where=path, difference=case.splits.first)
    layers = summary.layers() or "BatchNorm in training mode or a variance"
    return cause("batch statistics: summary", where=path, layers=layers)


def _better_line(case: Case, leaf: int) -> str | None:
    """The line of a fold for sums or means under which two parts of the batch give the leaf of all
    rows, in place of one that does not add up.
    """
    summary, of_leaves = case.probe, [*case.probe.folds]
    values = [summary.values(rows)[leaf] for rows in (*case.parts, summary.all_rows)]
    if len({x.shape for x in values}) > 1 or of_leaves[leaf].reducer.additive:
        return None
    of_leaves[leaf] = mean()
    as_mean = replace(case, probe=summary.with_folds(of_leaves))
    line = fold_line(as_mean.probe, "", ())
    if leaf not in as_mean.failed:
        return line
    fixes = [each.fix for each in by_kind(as_mean) if each.name not in VAGUE]
    # Some have a line with another fold, others a weight for the mean.
    return next((fix if fix.startswith("fold=") else f"{line}, {fix}" for fix in fixes), None)
