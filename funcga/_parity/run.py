"""The run of a problem: everything that is compared, sorted by the cause that a difference would
have.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from funcga._compare import compare
from funcga._compare.report import Report
from funcga._compare.tolerances import epsilon
from funcga._parity import Problem
from funcga._parity.problems import Choice
from funcga._parity.replicas import over_replicas
from funcga._parity.sides import Folded, Result, Side, fold_by_hand, fold_in_framework
from funcga._transform.multi_steps import multi_steps
from funcga._types import Array, Scalar, Tree
from funcga._verify import Verdict

CAUSES = {
    "accumulation": (
        "is the gradient of a framework, accumulated over n micro-batches, that of its own full "
        "batch?"
    ),
    "model": (
        "do both frameworks have the same gradients, of the full batch and of every micro-batch?"
    ),
    "fold": (
        "do both, and NumPy in float64, fold the same micro-batch gradients to the same? Plain "
        "sums bit for bit."
    ),
    "rounding": (
        "is each framework as close to its own float64 as rounding in a sum of so many terms "
        "allows?"
    ),
    "training": "do the parameters of both stay together, update by update?",
}
"""What a difference may come from, in the order in which they are looked at, and what is
compared to find it.
"""


class Compared(NamedTuple):
    """Two runs, compared leaf by leaf.

    framework: that of both runs, as it is written; None for one against the other. n: of how many
    micro-batches; micro_batch: which of them, from 0. replicas: how many folded.
    """

    cause: str
    what: str
    dtype: str
    n: int | None
    report: Report
    framework: str | None = None
    micro_batch: int | None = None
    replicas: int = 1

    @property
    def ok(self) -> bool:
        """Whether every leaf is within its limit."""
        return self.report.ok


class Trajectory(NamedTuple):
    """One optimizer in one dtype: its losses, and how far the parameters of two runs are apart
    after every update.

    n: the micro-batches of an update, 4 at most. losses: of the left run, the mean over the
    micro-batches of every update. reports: of the parameters after every update. aside: the
    parameters that are left out, as their gradient is 0 but for rounding, which Adam divides by
    itself.
    """

    optimizer: str
    dtype: str
    n: int
    losses: list[float]
    reports: list[Report]
    aside: tuple[str, ...] = ()

    @property
    def diverges(self) -> int | None:
        """The number of the first update, from 1, after which a leaf is beyond its limit; None
        if there is none.
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
    """What the run of a problem found.

    dtypes: in which it ran. reduction: the terms of a sum, for the limits. rows, weights: of each
    micro-batch of the largest n. losses: of the full batch, by dtype and framework. verified: what
    `verify` says of the framework, where accumulation is not exact. conditioning: how far the
    gradient in float64 moves if the arguments are rounded to each lesser dtype.
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
        """What was compared to find this cause."""
        return [compared for compared in self.compared if compared.cause == cause]

    @property
    def finest(self) -> str:
        """The dtype that the others are measured by."""
        return self.dtypes[-1]

    def is_explained(self, result: Compared | Trajectory) -> bool:
        """Whether what is beyond its limit is rounding, which the loss, or training, makes
        large. A fold is exact.
        """
        # There is no conditioning for float64: what is beyond its limit there is a mistake.
        if result.dtype not in self.conditioning:
            return False
        if isinstance(result, Trajectory):
            return self._training_is_explained(result)
        return result.cause != "fold" and self._gradient_is_explained(result)

    def _gradient_is_explained(self, compared: Compared) -> bool:
        """In float64 it is within its limit, and here no more than 10 times what rounding the
        arguments alone does.
        """
        # NaN and infinity are not small.
        small = compared.report.most <= 10 * self.conditioning[compared.dtype]
        return small and all(c.ok for c in self.of(compared.cause) if c.dtype == "float64")

    def _training_is_explained(self, trajectory: Trajectory) -> bool:
        """Its gradients are within their limits, or explained, and in float64 the same training
        is within its own.
        """
        exact = [
            t
            for t in self.trajectories
            if t.dtype == "float64" and t.optimizer == trajectory.optimizer
        ]
        gradients = [c for c in self.compared if c.dtype == trajectory.dtype]
        finite = math.isfinite(trajectory.reports[-1].most)
        return (
            finite
            and all(t.ok for t in exact)
            and all(c.ok or self.is_explained(c) for c in gradients)
        )

    @property
    def ok(self) -> bool:
        """Whether nothing differs but by rounding."""
        results: list[Compared | Trajectory] = [*self.compared, *self.trajectories]
        return all(result.ok or self.is_explained(result) for result in results)


@dataclass(frozen=True)
class Plan:
    """How a problem is run.

    dtypes: float64 is what the others are measured by. ns: numbers of micro-batches. updates: of
    each optimizer. ranks: numbers of replicas.
    """

    dtypes: Sequence[str]
    ns: Sequence[int]
    updates: int
    device: str = "cpu"
    ranks: Sequence[int] = ()


Key = tuple[object, ...]
"""What a step computes: its kind, and of what."""


class Run:
    """The run of a problem: what is computed, one step after the other, and what is found in it.

    Args:
        choice: For processes to find the problem by.

    Raises:
        FuncgaError: where parts of the problem do not fit; so do `steps` and `findings`.
    """

    def __init__(self, problem: Problem, plan: Plan, choice: Choice):
        self.problem, self.plan, self.choice = problem, plan, choice
        self.frameworks = problem.frameworks
        self.most = max(plan.ns)
        self.sides = {
            (name, dtype): Side(problem, name, dtype, plan.device)
            for dtype in plan.dtypes
            for name in self.frameworks
        }
        self.results: dict[Key, Any] = {}
        """What was computed, by what it is."""

    def steps(self) -> Iterator[tuple[int, int]]:
        """Computes everything; after each step (steps that are done, steps that there are)."""
        steps = self._steps()
        for key, step in steps.items():
            self.results[key] = step()
            yield len(self.results), len(steps)

    def _steps(self) -> dict[Key, Callable[[], object]]:
        """What is to be computed, by what it is. A step may need the results of those before it."""
        problem, plan, sides = self.problem, self.plan, self.sides
        steps: dict[Key, Callable[[], object]] = {("full", *key): sides[key].full for key in sides}
        for name in self.frameworks:
            for count in plan.ranks:
                steps["replicas", name, count] = partial(self._over_replicas, name, count)
        for key, side in sides.items():
            steps["micro-batches", *key] = partial(side.micro_batches, self.most)
        for key, side in sides.items():
            for n in plan.ns:
                steps["accumulated", *key, n] = partial(side.accumulated, n)
        for key, side in sides.items():
            steps["folded", *key] = partial(self._fold, side)
        if len(self.frameworks) == 2 and plan.updates:
            for dtype in plan.dtypes:
                for optimizer in problem.optimizers:
                    steps["trained", dtype, optimizer] = partial(self._train, dtype, optimizer)
        return steps

    def _fold(self, side: Side) -> tuple[Folded, Folded]:
        """What the side, and NumPy, make of the same micro-batch gradients: those of the first
        framework.
        """
        # All fold the same numbers, so what differs is the fold.
        first = self.sides[self.frameworks[0], side.dtype]
        results = self.results["micro-batches", first.framework, side.dtype]
        stacked = {
            path: np.stack([result.gradient[path] for result in results])
            for path in results[0].gradient
        }
        weights = first.weights(self.most)
        by_hand = fold_by_hand(self.problem.fold, stacked, weights)
        return fold_in_framework(side, stacked, weights), by_hand

    def _over_replicas(self, name: str, count: int) -> tuple[int, dict[str, tuple[Result, Result]]]:
        """The micro-batches of each replica, and by dtype what `over_replicas` finds."""
        side = self.sides[name, self.plan.dtypes[0]]
        n = min(self.most, side.rows(count)[-1])
        return n, over_replicas(self.choice, side, self.plan.dtypes, n, count)

    def _train(self, dtype: str, optimizer: str) -> Trajectory:
        left, right = self.sides["torch", dtype], self.sides["jax", dtype]
        # Adam divides a gradient by its own size: of one that is rounding alone it makes an update
        # of full size.
        aside = [
            _zeros(self._full(side).gradient, dtype) if "adam" in optimizer else ()
            for side in (left, right)
        ]
        runs = [
            _trained(side, optimizer, self.most, self.plan.updates, out)
            for side, out in zip((left, right), aside, strict=True)
        ]
        losses, reports = [], []
        for update, ((loss, params), (_, others)) in enumerate(zip(*runs, strict=True), 1):
            losses.append(loss)
            # Every update adds the rounding of its gradient.
            reports.append(
                left.compared(
                    params,
                    others,
                    (left.label, right.label),
                    left.reduction * update,
                    self.problem.rules,
                )
            )
        n = min(self.most, _WINDOW)
        return Trajectory(optimizer, dtype, n, losses, reports, tuple(aside[0]))

    def _full(self, side: Side) -> Result:
        result: Result = self.results["full", side.framework, side.dtype]
        return result

    # -- what is found

    def findings(self) -> Findings:
        """All of them, once every step is done."""
        compared = [compared for dtype in self.plan.dtypes for compared in self._compared(dtype)]
        first = next(iter(self.sides.values()))
        losses = {
            dtype: {
                name: float(self._full(self.sides[name, dtype]).loss) for name in self.frameworks
            }
            for dtype in self.plan.dtypes
        }
        return Findings(
            self.problem,
            self.plan.dtypes,
            first.reduction,
            first.rows(self.most),
            first.weights(self.most),
            losses,
            compared,
            [result for key, result in self.results.items() if key[0] == "trained"],
            self._verified(compared),
            self._conditioning(),
        )

    def _conditioning(self) -> dict[str, float]:
        # In float64, so that it is the loss which makes a rounding of its arguments large, and no
        # rounding of its own.
        sides = [side for side in self.sides.values() if side.dtype == "float64"]
        return {
            dtype: max(self._moved(side, dtype) for side in sides)
            for dtype in self.plan.dtypes
            if dtype != "float64" and sides
        }

    def _moved(self, side: Side, dtype: str) -> float:
        return side.report(side.nearby(dtype), self._full(side), ("nearby", "at")).most

    def _compared(self, dtype: str) -> Iterator[Compared]:
        sides = [self.sides[name, dtype] for name in self.frameworks]
        for side in sides:
            yield from self._accumulated(side)
        if len(sides) == 2:
            yield from self._of_both(*sides)
        for side in sides:
            yield from self._folded(side)
            if dtype != "float64" and "float64" in self.plan.dtypes:
                exact = self._full(self.sides[side.framework, "float64"])
                report = side.report(self._full(side), exact, (dtype, "float64"), check_dtype=False)
                what = f"{side.label} vs float64"
                yield Compared("rounding", what, dtype, None, report, side.label)

    def _accumulated(self, side: Side) -> Iterator[Compared]:
        dtype, label = side.dtype, side.label
        for n in self.plan.ns:
            accumulated = self.results["accumulated", side.framework, dtype, n]
            report = side.report(accumulated, self._full(side), ("accumulated", "full batch"))
            yield Compared("accumulation", f"{label} vs full batch", dtype, n, report, label)
        for count in self.plan.ranks:
            n, results = self.results["replicas", side.framework, count]
            merged, whole = results[dtype]
            what = f"{count} replicas"
            report = side.report(merged, whole, (what, "full batch"))
            yield Compared(
                "accumulation", f"{label}, {what}", dtype, n, report, label, replicas=count
            )

    def _of_both(self, torch: Side, jax: Side) -> Iterator[Compared]:
        def between(left: Result, right: Result) -> Report:
            return torch.report(left, right, ("torch", "JAX"), self.problem.rules)

        dtype = torch.dtype
        full = between(self._full(torch), self._full(jax))
        yield Compared("model", "torch vs JAX, full", dtype, None, full)
        parts = [self.results["micro-batches", side.framework, dtype] for side in (torch, jax)]
        for index, (left, right) in enumerate(zip(*parts, strict=True)):
            report, what = between(left, right), "torch vs JAX, micro"
            yield Compared("model", what, dtype, self.most, report, micro_batch=index)

    def _folded(self, side: Side) -> Iterator[Compared]:
        dtype, names = side.dtype, (side.label, "NumPy")
        folded, exact = self.results["folded", side.framework, dtype]
        # The fold is exact to rounding, and plain sums in the same order to the last bit.
        fold = side.compared(folded.fold, exact.fold, names, reduction=self.most)
        yield Compared("fold", f"{side.label} vs NumPy", dtype, self.most, fold, side.label)
        sums = compare(folded.sums, exact.sums, rtol=0, names=names)
        yield Compared("fold", f"{side.label}, plain sums", dtype, self.most, sums, side.label)

    def _verified(self, compared: list[Compared]) -> dict[str, Verdict]:
        # `verify` takes long, and is asked only where accumulation is not exact in the finest
        # dtype.
        dtype = self.plan.dtypes[-1]
        wrong = [c for c in compared if c.cause == "accumulation" and c.dtype == dtype and not c.ok]
        sides = [self.sides[name, dtype] for name in self.frameworks]
        return {
            side.label: side.verified(max(self.most, 2))
            for side in sides
            if self._full(side).is_finite and side.label in {c.framework for c in wrong}
        }


_WINDOW = 4  # the micro-batches of one update, at most


def _trained(
    side: Side, optimizer: str, n: int, updates: int, aside: Sequence[str]
) -> Iterator[tuple[float, dict[str, Array]]]:
    """The mean loss of the micro-batches of each update, of which there are n in turn, and the
    parameters after it, but those that are left aside.
    """
    window = min(n, _WINDOW)
    with side.running():
        params = side.args[0]
        # What follows the parameters in a call, and the weight, of every micro-batch.
        parts = cycle([([*args[1:]], side.weight(args, rows)) for args, rows in side.parts(n)])
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


def _zeros(gradient: dict[str, Array], dtype: str) -> list[str]:
    """The paths of the leaves that are 0 but for rounding."""
    sizes = {path: float(np.abs(leaf).max(initial=0)) for path, leaf in gradient.items()}
    return [
        path for path, size in sizes.items() if size <= 4 * epsilon(dtype) * max(sizes.values())
    ]
