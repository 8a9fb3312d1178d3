"""Runs a problem in both frameworks and compares the results, sorted by the possible cause of a
difference.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from funcga._transform.multi_steps import multi_steps
from funcga._types import Array, Scalar, Tree
from funcga.tools.compare import compare
from funcga.tools.compare.report import Report
from funcga.tools.compare.tolerances import epsilon
from funcga.tools.parity import Problem
from funcga.tools.parity.sides import Result, Side, fold_by_hand, fold_in_framework
from funcga.tools.verify import Verdict

CAUSES = {
    "accumulation": (
        "is the gradient of a framework, accumulated over n micro-batches, that of its own full "
        "batch?"
    ),
    "model": (
        "do both frameworks have the same gradients, of the full batch and of every micro-batch?"
    ),
    "fold": (
        "do both, and NumPy in float64, fold the same micro-batch gradients to the same result? "
        "Plain sums have to be bitwise identical."
    ),
    "rounding": (
        "is each framework as close to its own float64 as rounding in a sum of so many terms "
        "allows?"
    ),
    "training": "do the parameters of both stay together, update by update?",
}
"""The possible causes of a difference, in the order in which they are reported, and the question
that is asked for each.
"""


class Compared(NamedTuple):
    """Two results, compared leaf by leaf.

    Attributes:
        cause: The key of CAUSES.
        what: What is compared, in words.
        dtype: The dtype of the run.
        n: The number of micro-batches; None for the full batch.
        report: The comparison.
        framework: The framework of both results, as it is written; None for one against the other.
        micro_batch: Which micro-batch, from 0; None for all of them.
    """

    cause: str
    what: str
    dtype: str
    n: int | None
    report: Report
    framework: str | None = None
    micro_batch: int | None = None

    @property
    def ok(self) -> bool:
        """Whether every leaf is within its limit."""
        return self.report.ok


class Trajectory(NamedTuple):
    """One optimizer in one dtype: the parameters of torch and JAX compared after every update.

    Attributes:
        optimizer: The name of the optimizer.
        dtype: The dtype of the run.
        n: The number of micro-batches of an update, at most 4.
        losses: The mean loss of every update, in torch.
        reports: The comparison of the parameters after every update.
        aside: The parameters that are left out: their gradient is 0 except for rounding, which
            Adam divides by itself.
    """

    optimizer: str
    dtype: str
    n: int
    losses: list[float]
    reports: list[Report]
    aside: tuple[str, ...] = ()

    @property
    def diverges(self) -> int | None:
        """The first update, from 1, after which a leaf is beyond its limit; None if there is
        none.
        """
        return next(
            (update for update, report in enumerate(self.reports, 1) if not report.ok), None
        )

    @property
    def decisive(self) -> Report:
        """The report of the update after which they diverge, or else of the last one."""
        return self.reports[(self.diverges or len(self.reports)) - 1]

    @property
    def ok(self) -> bool:
        """Whether the two stay together."""
        return self.diverges is None


class Findings(NamedTuple):
    """The results of a run.

    Attributes:
        problem: The problem.
        dtypes: The dtypes of the run, the finest one last.
        reduction: The number of terms of a sum, for the limits.
        rows: The rows of each micro-batch, of the largest n.
        weights: Their weights.
        losses: The loss of the full batch, by dtype and framework.
        compared: The comparisons.
        trajectories: The training runs.
        verified: The verdict of `verify` on each framework whose accumulation is not exact.
        conditioning: By dtype, how far the float64 gradient moves if its arguments are rounded to
            that dtype.
    """

    problem: Problem
    dtypes: Sequence[str]
    reduction: int
    rows: list[int]
    weights: list[float]
    losses: dict[str, dict[str, float]]
    compared: list[Compared]
    trajectories: list[Trajectory]
    verified: dict[str, Verdict]
    conditioning: dict[str, float]

    def of(self, cause: str) -> list[Compared]:
        """The comparisons for a cause."""
        return [compared for compared in self.compared if compared.cause == cause]

    @property
    def finest(self) -> str:
        """The dtype that the others are compared with."""
        return self.dtypes[-1]

    def is_explained(self, result: Compared | Trajectory) -> bool:
        """Whether rounding, amplified by the loss or by training, explains that a result is beyond
        its limit.
        """
        # There is no conditioning for float64, where nothing is explained; and a fold is exact.
        if result.dtype not in self.conditioning:
            return False
        if isinstance(result, Trajectory):
            return self._training_is_explained(result)
        # In float64 the same is within its limit, and here it is no more than 10 times what
        # rounding the arguments alone changes. NaN and infinity are not small.
        small = result.report.most <= 10 * self.conditioning[result.dtype]
        exact = all(c.ok for c in self.of(result.cause) if c.dtype == "float64")
        return result.cause != "fold" and small and exact

    def _training_is_explained(self, trajectory: Trajectory) -> bool:
        # The gradients are within their limits or explained, and in float64 training is within its
        # own.
        optimizer, dtype = trajectory.optimizer, trajectory.dtype
        exact = all(
            t.ok for t in self.trajectories if (t.optimizer, t.dtype) == (optimizer, "float64")
        )
        gradients = [c for c in self.compared if c.dtype == dtype]
        finite = math.isfinite(trajectory.reports[-1].most)
        return finite and exact and all(c.ok or self.is_explained(c) for c in gradients)

    @property
    def wrong(self) -> list[Compared | Trajectory]:
        """The results that are beyond their limits, and not explained by rounding."""
        results: list[Compared | Trajectory] = [*self.compared, *self.trajectories]
        return [result for result in results if not (result.ok or self.is_explained(result))]

    @property
    def ok(self) -> bool:
        """Whether nothing differs except by rounding."""
        return not self.wrong


@dataclass(frozen=True)
class Run:
    """The run of a problem: take all `results`, then make the `findings`.

    Args:
        problem: The problem.
        dtypes: The dtypes, from coarse to fine; float64 is what the others are compared with.
        ns: The numbers of micro-batches.
        updates: The number of training updates of each optimizer.
        device: The device of both frameworks.

    Raises:
        FuncgaError: If parts of the problem do not fit.
    """

    problem: Problem
    dtypes: Sequence[str]
    ns: Sequence[int]
    updates: int
    device: str = "cpu"

    @property
    def n(self) -> int:
        """The number of the micro-batches that are compared one by one."""
        return max(self.ns)

    @cached_property
    def sides(self) -> dict[str, list[Side]]:
        """The sides of the problem, by dtype."""
        make = partial(Side, self.problem, n=self.n, device=self.device)
        return {
            dtype: [make(framework=name, dtype=dtype) for name in self.problem.losses]
            for dtype in self.dtypes
        }

    def results(self) -> Iterator[Compared | Trajectory]:
        """Computes and compares, one result after the other."""
        for sides in self.sides.values():
            for side in sides:
                yield from self._accumulated(side)
            if len(sides) == 2:
                yield from self._model(*sides)
            for side in sides:
                yield from self._folded(side, sides[0])
                yield from self._rounded(side)
        if len(self.problem.losses) == 2 and self.updates:
            for sides in self.sides.values():
                for optimizer in self.problem.optimizers:
                    yield self._trained(sides, optimizer)

    def _accumulated(self, side: Side) -> Iterator[Compared]:
        whole = side.whole  # first: what does not fit is described by the full batch
        for n in self.ns:
            report = side.report(side.accumulated(n), whole, ("accumulated", "full batch"))
            what = f"{side.label} vs full batch"
            yield Compared("accumulation", what, side.dtype, n, report, side.label)

    def _model(self, torch: Side, jax: Side) -> Iterator[Compared]:
        def between(left: Result, right: Result) -> Report:
            return torch.report(left, right, ("torch", "JAX"), self.problem.rules)

        report = between(torch.whole, jax.whole)
        yield Compared("model", "torch vs JAX, full", torch.dtype, None, report)
        pairs = zip(torch.micro_batches, jax.micro_batches, strict=True)
        for index, (left, right) in enumerate(pairs):
            report, what = between(left, right), "torch vs JAX, micro"
            yield Compared("model", what, torch.dtype, self.n, report, micro_batch=index)

    def _folded(self, side: Side, first: Side) -> Iterator[Compared]:
        # All fold the micro-batch gradients of the first framework, so what differs is the fold.
        results, names = first.micro_batches, (side.label, "NumPy")
        stacked = {
            path: np.stack([result.gradient[path] for result in results])
            for path in results[0].gradient
        }
        folded = fold_in_framework(side, stacked, first.weights)
        by_hand = fold_by_hand(self.problem.fold, stacked, first.weights)
        # The fold is exact to rounding, and plain sums in the same order to the last bit.
        fold = side.compared(folded.fold, by_hand.fold, names, reduction=self.n)
        sums = compare(folded.sums, by_hand.sums, rtol=0, names=names)
        label, dtype = side.label, side.dtype
        yield Compared("fold", f"{label} vs NumPy", dtype, self.n, fold, label)
        yield Compared("fold", f"{label}, plain sums", dtype, self.n, sums, label)

    def _rounded(self, side: Side) -> Iterator[Compared]:
        for exact in self.sides.get("float64", ()):
            if exact.framework == side.framework and side.dtype != "float64":
                names = (side.dtype, "float64")
                report = side.report(side.whole, exact.whole, names, check_dtype=False)
                what = f"{side.label} vs float64"
                yield Compared("rounding", what, side.dtype, None, report, side.label)

    def _trained(self, sides: Sequence[Side], optimizer: str) -> Trajectory:
        left, right = sides
        # Adam divides a gradient by its own size: one that is rounding alone becomes an update of
        # full size.
        aside = [_zeros(side) if "adam" in optimizer else [] for side in sides]
        runs = [
            _updates(side, optimizer, self.updates, out)
            for side, out in zip(sides, aside, strict=True)
        ]
        names, losses, reports = (left.label, right.label), [], []
        for update, ((loss, params), (_, others)) in enumerate(zip(*runs, strict=True), 1):
            losses.append(loss)
            # Every update adds the rounding of its gradient.
            terms, rules = left.reduction * update, self.problem.rules
            reports.append(left.compared(params, others, names, terms, rules))
        n = min(self.n, _WINDOW)
        return Trajectory(optimizer, left.dtype, n, losses, reports, tuple(aside[0]))

    def findings(self, results: Sequence[Compared | Trajectory]) -> Findings:
        """The Findings, from all of the results."""
        compared = [result for result in results if isinstance(result, Compared)]
        first = self.sides[self.dtypes[0]][0]
        losses = {
            dtype: {side.framework: float(side.whole.loss) for side in sides}
            for dtype, sides in self.sides.items()
        }
        return Findings(
            self.problem,
            self.dtypes,
            first.reduction,
            first.rows,
            first.weights,
            losses,
            compared,
            [result for result in results if isinstance(result, Trajectory)],
            self._verified(compared),
            self._conditioning(),
        )

    def _verified(self, compared: list[Compared]) -> dict[str, Verdict]:
        # `verify` takes long, and is asked only if accumulation is not exact in the finest dtype.
        dtype = self.dtypes[-1]
        wrong = {
            c.framework
            for c in compared
            if (c.cause, c.dtype, c.ok) == ("accumulation", dtype, False)
        }
        return {
            side.label: side.verified(max(self.n, 2))
            for side in self.sides[dtype]
            if side.whole.is_finite and side.label in wrong
        }

    def _conditioning(self) -> dict[str, float]:
        # In float64, so that it is the loss which amplifies the rounding of its arguments, and no
        # rounding of its own.
        sides = self.sides.get("float64", [])
        names = ("nearby", "at")
        return {
            dtype: max(side.report(side.nearby(dtype), side.whole, names).most for side in sides)
            for dtype in self.dtypes
            if dtype != "float64" and sides
        }


_WINDOW = 4  # the micro-batches of one update, at most


def _updates(
    side: Side, optimizer: str, updates: int, aside: Sequence[str]
) -> Iterator[tuple[float, dict[str, Array]]]:
    """After each update, the mean loss of its micro-batches, and the parameters that are not set
    aside.
    """
    window = min(side.n, _WINDOW)
    with side.running():
        params = side.args[0]
        # What follows the parameters in a call, and the weight, of every micro-batch.
        parts = cycle([([*args[1:]], side.weight(args, rows)) for args, rows in side.parts])
        tx = multi_steps(side.own.optimizer(optimizer), window, fold=side.problem.fold)
        # In JAX a state that is not placed as the steps place it would make the second step compile
        # anew.
        state = side.placed(tx.init(params))

    def after(grads: Tree, state: Tree, params: Tree, weight: Scalar) -> tuple[Tree, Tree]:
        changes, state = tx.update(grads, state, params, weight=weight)
        return side.own.apply_updates(params, changes), state

    step = side.own.unoptimised(after)
    for _ in range(updates):
        losses = []
        with side.running():
            for batch, weight in islice(parts, window):
                loss, grads = side.compiled(params, *batch)
                params, state = step(grads, state, params, weight)
                losses.append(float(loss))
            named = side.named(params)
        yield (
            sum(losses) / window,
            {path: leaf for path, leaf in named.items() if path not in aside},
        )


def _zeros(side: Side) -> list[str]:
    """The paths of the gradients that are 0 except for rounding."""
    leaves = side.whole.gradient.items()
    sizes = {path: float(np.abs(leaf).max(initial=0)) for path, leaf in leaves}
    limit = 4 * epsilon(side.dtype) * max(sizes.values())
    return [path for path, size in sizes.items() if size <= limit]
