"""A step of `coupled`: its results against the gradient of the whole batch, whose summary is that
of one micro-batch.

That gradient is the framework's own, of loss_fn(params, s) with s the fold of summary_fn's output
for all rows. A step can differ from it only if what summary_fn makes of several micro-batches does
not fold to what it makes of all rows. So summary_fn is looked at like any other function whose
outputs are folded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from funcga import folds
from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call import Memory, Program, owner_of
from funcga._call.arguments import CARRY, groups, starts
from funcga._call.totals import whole_state
from funcga._coupled import Coupled, coupled
from funcga._fold import Tally, bind
from funcga._fold.outputs import broadcast_folds
from funcga._grad import GradientFunction
from funcga._types import LossFn, TotalsFn, Tree, WeightFn
from funcga._verify.causes import Cause, cause, diagnose, note, of_totals
from funcga._verify.fixed_rows import of_fixed_rows, of_order
from funcga._verify.probe import Leaves, Limit, Probe, Rows
from funcga._verify.responses import Measured, Splits, compare, folded, measured, scales_of
from funcga._verify.whole import Seen, late_state, per_example, unused
from funcga._verify.whole import unevaluated as unwritten
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean, sum


@dataclass(frozen=True, eq=False)
class Whole:
    """The loss of the whole batch, as a function of summary_fn's arguments: its summary is that
    of one micro-batch.
    """

    job: Coupled
    backend: Backend

    @property
    def __wrapped__(self) -> LossFn:
        return self.job.program.grad_fn  # for the names of its parameters

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """The loss."""
        job, program = self.job, self.job.program
        weight = program.weigh(program.read(args, self.backend), args, None)
        summary = self._folded(program.grad_fn(*args, **kwargs), self.backend.arrays.tally(weight))
        params = [args[arg_index] for arg_index in job.arg_indices(args)]
        return job.gradient.split(job.gradient.loss_fn(*params, summary), self.backend)[0]

    def _folded(self, summary: Tree, tally: Tally) -> Tree:
        """The fold of one summary."""
        trees, arrays = self.backend.trees, self.backend.arrays
        leaves, structure = trees.flatten(summary)
        of_leaves = broadcast_folds(
            self.job.program.fold, summary, len(leaves), self.backend, "summary"
        )
        results = []
        for leaf, (fold, _), path in zip(
            leaves, of_leaves, leaf_paths(summary, trees, "summary"), strict=True
        ):
            if leaf is not None and not fold.reducer.monoid.ordered:
                array = arrays.as_array(leaf)
                leaf_fold = bind(fold, array, lambda path=path: path, arrays)  # type: ignore[misc]
                leaf = leaf_fold.normalize(leaf_fold.lift(array, tally.total), tally)
            results.append(leaf)
        return trees.unflatten(structure, results)


def job_of(step: object) -> Coupled | None:
    """What a step of `coupled` computes; None for any other function."""
    job = getattr(step, "coupled", None)
    return job if isinstance(job, Coupled) else None


def whole_of(probe: Probe) -> Coupled | None:
    """What the step computes whose whole batch is probed; None if the function is no such step."""
    grad_fn = probe.program.grad_fn
    loss_fn = grad_fn.loss_fn if isinstance(grad_fn, GradientFunction) else None
    return loss_fn.job if isinstance(loss_fn, Whole) else None


def check_options(
    job: Coupled, fold: FoldTree, weight: WeightFn | None, in_axes: Tree, totals: TotalsFn | None
) -> None:
    """Raises FuncgaError for options that a step brings, and for one whose parameters are those
    of a module.
    """
    is_default = {
        "fold": fold == mean(),
        "weight": weight is None,
        "in_axes": in_axes is None,
        "totals": totals is None,
    }
    for name in (name for name, is_left_out in is_default.items() if not is_left_out):
        raise FuncgaError(
            f"verify was given {name}=, and a step of `coupled` brings its own. Leave it out: "
            f"funcga.verify(step, params, *batch)."
        )
    if owner_of(job.program.grad_fn) is not None:
        raise FuncgaError(
            "verify evaluates a step with parameters of its own choice, and this one brings its "
            "own. Give it funcga.coupled(torch_backend.pure_loss(module, summary_fn), loss_fn, "
            "n=8), of the module that was wrapped."
        )


def whole_program(job: Coupled, backend: Backend) -> Program:
    """The program of the whole batch's gradient."""
    program = job.program
    gradient = replace(job.gradient, loss_fn=Whole(job, backend), has_aux=False, reached={True})
    in_axes = program.default_in_axes if program.in_axes is None else program.in_axes
    return Program(gradient, sum(), None, whole_state(in_axes, backend), totals=program.totals)


def counts_of(job: Coupled, rows: int) -> list[int]:
    """How many micro-batches the step makes of so many rows; nothing if it makes one, or cannot
    make so many.
    """
    program = job.program
    n = program.n if program.microbatch_size is None else -(-rows // program.microbatch_size)
    return [n] if n is not None and 2 <= n <= rows else []


def unevaluated(probe: Probe, job: Coupled) -> list[Cause]:
    """What is wrong where there is no gradient of the whole batch, though there is one of fewer
    rows.
    """
    try:
        return unwritten(probe)
    except FuncgaError:
        raise
    except Exception as error:
        program = job.program
        n = None if program.n is None else min(program.n, probe.rows)
        sizes = [size for _, size in groups(probe.rows, n, program.microbatch_size)]
        for size in dict.fromkeys([*sizes, probe.rows // 2]):
            if probe.try_values(probe.every[:size]) is not None:
                return [of_fixed_rows(probe, job, size, probe.every, error)]
        raise


class StepCase(NamedTuple):
    """A step, the Probe of its whole batch, and how they are compared: into n micro-batches, and
    into two parts.
    """

    probe: Probe
    job: Coupled
    seen: Seen
    limit: Limit
    counts: Sequence[int]
    parts: tuple[Rows, Rows]
    random: np.random.Generator

    @property
    def is_threaded(self) -> bool:
        """Whether state is threaded from one micro-batch to the next."""
        return any(
            axis is CARRY for _, axis in self.job.program.read(self.probe.args, self.probe.backend)
        )


def compared(case: StepCase) -> tuple[list[Cause], list[Measured], list[str]]:
    """(causes, rows, notes): n micro-batches, and uneven ones of the rows in another order,
    against one.
    """
    probe, limit = case.probe, case.limit
    try:
        rows = _splits(case)
    except FuncgaError:
        # Where micro-batches have too few rows to be added up, it is better said of the summary.
        unfolded = _unfolded(_probe_of_summary(case), case.parts[0])
        if not unfolded:
            raise
        return unfolded, [], [note("nothing else")]
    causes = unused(probe) + of_totals(probe, case.parts)
    if not all(row.ok for row in rows):
        reasons = _of_summary(case) or late_state(probe, case.seen, limit)
        return causes + (reasons or [_unexplained(rows, "the summary")]), rows, []
    reasons, notes = late_state(probe, case.seen, limit), list[str]()
    if not reasons and not case.is_threaded:
        reasons, notes = of_order(probe, case.job, limit, case.parts)
    return causes + reasons, rows, notes


def _splits(case: StepCase) -> list[Measured]:
    probe, (long, short) = case.probe, case.parts
    # State goes through the rows in their order only.
    split, order = (
        ("uneven", probe.every) if case.is_threaded else ("uneven, permuted", long + short)
    )
    cuts = [(f"n = {n}", probe.every, groups(probe.rows, n, None), {"n": n}) for n in case.counts]
    cuts.append((split, order, groups(probe.rows, None, len(long)), {"microbatch_size": len(long)}))
    scales, leaves, rows = scales_of(probe, case.limit, case.parts), probe.additive(), []
    for split, of_rows, sizes, options in cuts:
        lengths = tuple(length for _, length in starts(sizes))
        run = partial(_result, probe, case.job, of_rows, options)
        rows.append(
            measured(probe, split, lengths, run, probe.values(of_rows), scales, case.limit, leaves)[
                0
            ]
        )
    return rows


def _result(probe: Probe, job: Coupled, rows: Rows, options: dict[str, int]) -> Leaves:
    """The loss and the gradient of the step, with these rows cut so."""
    program, gradient = job.program, job.gradient
    totals = None if program.totals is None else program.totals.function
    step = coupled(
        program.grad_fn,
        gradient.loss_fn,
        fold=program.fold,
        weight=program.weight,
        in_axes=program.in_axes,
        totals=totals,
        argnums=gradient.argnums,
        has_aux=gradient.has_aux,
        **options,
    )
    kwargs = {
        name: value for name, value in probe.kwargs.items() if totals is None or name != "totals"
    }
    loss, grads = step(*probe.gathered(rows), **kwargs)
    return probe.numbers((loss[0] if gradient.has_aux else loss, grads))


def _unexplained(rows: Sequence[Measured], where: str) -> Cause:
    row = next(row for row in rows if not row.ok)
    difference = row.error or f"{row.leaf} differs by {row.relative:.1e}, limit {row.limit:.0e}"
    return cause("not decomposable: summary", where=where, difference=f"{row.split}: {difference}")


# --- what is wrong with a summary

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


def _unfolded(summary: Probe, part: Rows) -> list[Cause]:
    """What needs no comparison: folds over micro-batches, and a row for each example that is not
    collected.
    """
    for fold, path in zip(summary.folds, summary.paths, strict=True):
        if fold.reducer.over_steps:
            return [cause("by steps: moments", where=path)]
    return per_example(summary, part)[0]


def _of_summary(case: StepCase) -> list[Cause]:
    """Why the summaries of micro-batches do not fold to that of the whole batch."""
    limit, summary = case.limit, _probe_of_summary(case)
    causes = _unfolded(summary, case.parts[0])
    if causes:
        return causes
    splits = compare(summary, case.counts, limit, case.parts)
    added = summary.additive(splits.failed)
    if added:
        said = diagnose(summary, splits, case.seen.draws, limit, case.random)
        # What is said of a loss that couples its rows has its own words for a summary.
        causes = [each for each in said if each.name in _AS_OF_A_LOSS] or [
            _of_leaf(case, summary, splits, added[0])
        ]
    elif splits.failed:
        causes = [_of_leaf(case, summary, splits, splits.failed[0])]
    return causes


def _probe_of_summary(case: StepCase) -> Probe:
    """The Probe of summary_fn, with the totals of the whole batch."""
    probe, program = case.probe, case.job.program
    program = replace(
        program, n=None, microbatch_size=None, across=None, totals=None, memory=Memory()
    )
    summary = Probe(
        program, probe.backend, probe.args, probe.kwargs, probe.precise, subject="summary"
    )
    summary.values(summary.every)
    return summary


def _of_leaf(case: StepCase, summary: Probe, splits: Splits, leaf_index: int) -> Cause:
    """Why a leaf of the summary is not that of the whole batch."""
    fold, path, whole = (
        summary.folds[leaf_index],
        summary.paths[leaf_index],
        summary.whole[leaf_index],
    )
    axis, (first, second) = fold.reducer.monoid.axis, splits.parts
    if axis is not None and whole.shape[axis] == summary.rows:
        # Rows in another order are to have the same summaries, in that order.
        permuted = summary.values(first + second)[leaf_index]
        (difference,) = case.limit.differences([permuted], [np.take(whole, first + second, axis)])
        if difference > case.limit.relative:
            key = (
                f"randomness: by position, {summary.backend.name}"
                if case.seen.draws
                else "row order"
            )
            return cause(key, subject="summary", difference=difference, where=path)
    elif (better := _better_fold(case, summary, leaf_index)) is not None:
        return cause(
            "wrong fold",
            where=path,
            better=better,
            place="" if path == "summary" else f", at {path}",
        )
    if axis is None and not fold.reducer.additive:
        return _unexplained(splits.rows, path)
    layers = summary.framework.batch_normalisers(summary.program.grad_fn)
    words = (
        f", as {', '.join(layers[:3])} does"
        if layers
        else ", as BatchNorm in training mode or a variance does"
    )
    return cause("batch statistics: summary", where=path, layers=words)


def _better_fold(case: StepCase, summary: Probe, leaf_index: int) -> str | None:
    """A stock fold under which two parts of the batch have the leaf of all rows, as it is
    written.
    """
    whole, values = (
        summary.whole[leaf_index],
        [summary.values(part)[leaf_index] for part in case.parts],
    )
    if not values[0].shape == values[1].shape == whole.shape:
        return None
    weights = [summary.weigh(part) for part in case.parts]
    for fold in (folds.mean, folds.sum, folds.max, folds.min, folds.logsumexp):
        (difference,) = case.limit.differences([folded(fold(), values, weights)], [whole])
        if difference <= case.limit.relative:
            return f"funcga.{fold.__name__}()"
    # As a mean it may have another weight.
    of_leaves, structure = [*summary.folds], summary.backend.trees.flatten(summary.output)[1]
    if of_leaves[leaf_index].reducer.additive:
        return None
    of_leaves[leaf_index] = folds.mean()
    as_mean = summary.under(
        summary.backend.trees.unflatten(structure, of_leaves), summary.program.weight
    )
    splits = compare(as_mean, [], case.limit, case.parts)
    for each in diagnose(as_mean, splits, case.seen.draws, case.limit, case.random):
        if each.name in ("uneven tokens", "wrong weight"):
            return (
                "funcga.mean(), "
                f"{each.fix if each.fix.startswith('weight=') else 'and drop weight='}"
            )
    return None
