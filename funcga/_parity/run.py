"""The run of a problem: everything that is compared, sorted by the cause that a difference would
have.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from funcga._backend.dispatch import load
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

P = ParamSpec("P")
T = TypeVar("T")

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

    def pool(self) -> ThreadPoolExecutor:
        """The threads that problems run in. On the CPU two, as JAX compiles on one core; a GPU
        may be full.
        """
        return ThreadPoolExecutor(2 if self.device == "cpu" else 1)


class Run:
    """The run of a problem, which begins where this is made: its tasks, in the order in which the
    pool takes them.

    A task may wait for those before it, and problems follow one another without a pause.

    Args:
        choice: For processes to find the problem by.
        pool: The Plan's, which other problems may share.

    Raises:
        FuncgaError: where parts of the problem do not fit; so do `progress` and `findings`.
    """

    def __init__(self, problem: Problem, plan: Plan, choice: Choice, pool: Executor):
        self.problem, self.plan, self.choice, self.pool = problem, plan, choice, pool
        self.frameworks = problem.frameworks
        self.most = max(plan.ns)
        # Imported here, since an import in a thread can wait for another one.
        for name in self.frameworks:
            load(name)
        self.sides = {
            (name, dtype): Side(problem, name, dtype, plan.device)
            for dtype in plan.dtypes
            for name in self.frameworks
        }
        # What is made once and kept is made here, as two threads at a time would make two.
        for side in self.sides.values():
            side.prepare()
        self.tasks: list[Future[Any]] = []
        self._begin_all()

    def _begin_all(self) -> None:
        problem, plan = self.problem, self.plan
        self.full = {key: self._begin(side.full) for key, side in self.sides.items()}
        self.merged = {
            (name, count): self._begin(self._over_replicas, name, count)
            for name in self.frameworks
            for count in plan.ranks
        }
        self.micro = {
            key: self._begin(side.micro_batches, self.most) for key, side in self.sides.items()
        }
        self.accumulated = {
            (*key, n): self._begin(side.accumulated, n)
            for key, side in self.sides.items()
            for n in plan.ns
        }
        self.folded = {
            key: self._begin(self._fold, key[1], side) for key, side in self.sides.items()
        }
        trained = problem.optimizers if len(self.frameworks) == 2 and plan.updates else ()
        self.trained = [
            self._begin(self._train, dtype, name) for dtype in plan.dtypes for name in trained
        ]

    def _begin(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        task = self.pool.submit(work, *args, **kwargs)
        self.tasks.append(task)
        return task

    def progress(self) -> Iterator[int]:
        """How many tasks are done: whenever it is one more, and every second. Raises the error
        of the first to fail.
        """
        for task in self.tasks:
            while wait([task], timeout=1).not_done:
                yield sum(task.done() for task in self.tasks)
            task.result()
            yield sum(task.done() for task in self.tasks)

    def _fold(self, dtype: str, side: Side) -> tuple[Folded, Folded]:
        """What the side, and NumPy, make of the same micro-batch gradients: those of the first
        framework.
        """
        # All fold the same numbers, so what differs is the fold.
        gradients = [result.gradient for result in self.micro[self.frameworks[0], dtype].result()]
        stacked = {
            path: np.stack([gradient[path] for gradient in gradients]) for path in gradients[0]
        }
        weights = self.sides[self.frameworks[0], dtype].weights(self.most)
        return fold_in_framework(side, stacked, weights), fold_by_hand(
            self.problem.fold, stacked, weights
        )

    def _over_replicas(self, name: str, count: int) -> tuple[int, dict[str, tuple[Result, Result]]]:
        """The micro-batches of each replica, and by dtype what `over_replicas` finds."""
        side = self.sides[name, self.plan.dtypes[0]]
        n = min(self.most, side.rows(count)[-1])
        return n, over_replicas(self.choice, side, self.plan.dtypes, n, count)

    def _train(self, dtype: str, optimizer: str) -> Trajectory:
        torch, jax = (self.sides[name, dtype] for name in ("torch", "jax"))
        gradients = [self.full[name, dtype].result().gradient for name in ("torch", "jax")]
        return train(torch, jax, optimizer, self.most, self.plan.updates, gradients)

    def findings(self) -> Findings:
        """All of them, once every task is done."""
        compared = [compared for dtype in self.plan.dtypes for compared in self._compared(dtype)]
        first = next(iter(self.sides.values()))
        losses = {
            dtype: {name: float(self.full[name, dtype].result().loss) for name in self.frameworks}
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
            [task.result() for task in self.trained],
            self._verified(compared),
            self._conditioning(),
        )

    def _conditioning(self) -> dict[str, float]:
        # In float64, so that it is the loss which makes a rounding of its arguments large, and no
        # rounding of its own.
        sides = [side for (_, dtype), side in self.sides.items() if dtype == "float64"]
        return {
            dtype: max(
                side.report(
                    side.nearby(dtype),
                    self.full[side.framework, "float64"].result(),
                    ("nearby", "at"),
                ).most
                for side in sides
            )
            for dtype in self.plan.dtypes
            if dtype != "float64" and sides
        }

    def _compared(self, dtype: str) -> Iterator[Compared]:
        for name in self.frameworks:
            yield from self._accumulated(self.sides[name, dtype], self.full[name, dtype].result())
        if len(self.frameworks) == 2:
            yield from self._of_both(dtype)
        for name in self.frameworks:
            yield from self._folded(self.sides[name, dtype])
            if dtype != "float64" and "float64" in self.plan.dtypes:
                yield self._rounded(self.sides[name, dtype])

    def _accumulated(self, side: Side, full: Result) -> Iterator[Compared]:
        for n in self.plan.ns:
            accumulated = self.accumulated[side.framework, side.dtype, n].result()
            report = side.report(accumulated, full, ("accumulated", "full batch"))
            yield Compared(
                "accumulation", f"{side.label} vs full batch", side.dtype, n, report, side.label
            )
        for count in self.plan.ranks:
            n, results = self.merged[side.framework, count].result()
            report = side.report(*results[side.dtype], (f"{count} replicas", "full batch"))
            what = f"{side.label}, {count} replicas"
            yield Compared("accumulation", what, side.dtype, n, report, side.label, replicas=count)

    def _of_both(self, dtype: str) -> Iterator[Compared]:
        full = self._between(
            dtype, self.full["torch", dtype].result(), self.full["jax", dtype].result()
        )
        yield Compared("model", "torch vs JAX, full", dtype, None, full)
        pairs = zip(
            self.micro["torch", dtype].result(), self.micro["jax", dtype].result(), strict=True
        )
        for micro_batch, (torch, jax) in enumerate(pairs):
            report = self._between(dtype, torch, jax)
            yield Compared(
                "model", "torch vs JAX, micro", dtype, self.most, report, micro_batch=micro_batch
            )

    def _between(self, dtype: str, torch: Result, jax: Result) -> Report:
        return self.sides["torch", dtype].report(torch, jax, ("torch", "JAX"), self.problem.rules)

    def _folded(self, side: Side) -> Iterator[Compared]:
        folded, exact = self.folded[side.framework, side.dtype].result()
        # The fold is exact to rounding, and plain sums in the same order to the last bit.
        fold = side.compared(folded.fold, exact.fold, (side.label, "NumPy"), reduction=self.most)
        yield Compared("fold", f"{side.label} vs NumPy", side.dtype, self.most, fold, side.label)
        sums = compare(folded.sums, exact.sums, rtol=0, names=(side.label, "NumPy"))
        yield Compared("fold", f"{side.label}, plain sums", side.dtype, self.most, sums, side.label)

    def _rounded(self, side: Side) -> Compared:
        report = side.report(
            self.full[side.framework, side.dtype].result(),
            self.full[side.framework, "float64"].result(),
            (side.dtype, "float64"),
            check_dtype=False,
        )
        return Compared(
            "rounding", f"{side.label} vs float64", side.dtype, None, report, side.label
        )

    def _verified(self, compared: list[Compared]) -> dict[str, Verdict]:
        # `verify` takes long, and is asked only where accumulation is not exact in the finest
        # dtype.
        dtype = self.plan.dtypes[-1]
        wrong = [c for c in compared if c.cause == "accumulation" and c.dtype == dtype and not c.ok]
        labels = {c.framework for c in wrong}
        sides = [
            self.sides[name, dtype]
            for name in self.frameworks
            if self.full[name, dtype].result().is_finite
        ]
        return {
            side.label: side.verified(max(self.most, 2)) for side in sides if side.label in labels
        }


_WINDOW = 4  # the micro-batches of one update, at most


def train(
    left: Side,
    right: Side,
    optimizer: str,
    n: int,
    updates: int,
    gradients: Sequence[dict[str, Array]],
) -> Trajectory:
    """The Trajectory of two sides on n micro-batches, a few for each update, in turn.

    gradients: of the full batch, those of each side by path.
    """
    # Adam divides a gradient by its own size: of one that is rounding alone it makes an update of
    # full size.
    aside = [_zeros(gradient, left.dtype) if "adam" in optimizer else () for gradient in gradients]
    runs = [_Training(side, optimizer, n) for side in (left, right)]
    names, rules = (left.label, right.label), left.problem.rules
    losses, reports = [], []
    for update in range(updates):
        (loss, params), (_, others) = (run.update(update) for run in runs)
        params, others = (
            {path: leaf for path, leaf in leaves.items() if path not in out}
            for leaves, out in zip((params, others), aside, strict=True)
        )
        losses.append(loss)
        # Every update adds the rounding of its gradient.
        reports.append(left.compared(params, others, names, left.reduction * (update + 1), rules))
    return Trajectory(optimizer, left.dtype, runs[0].n, losses, reports, tuple(aside[0]))


def _zeros(gradient: dict[str, Array], dtype: str) -> list[str]:
    """The paths of the leaves that are 0 but for rounding."""
    sizes = {path: float(np.abs(leaf).max(initial=0)) for path, leaf in gradient.items()}
    return [
        path for path, size in sizes.items() if size <= 4 * epsilon(dtype) * max(sizes.values())
    ]


class _Training:
    """The training of one side."""

    def __init__(self, side: Side, optimizer: str, n: int):
        self.side = side
        with side.running():
            params = side.args[0]
            # What follows the parameters in a call, and the weight, of every micro-batch.
            self.parts = [([*args[1:]], side.weight(args, rows)) for args, rows in side.parts(n)]
            self.n = min(n, _WINDOW)
            self.tx = multi_steps(side.own.optimizer(optimizer), self.n, fold=side.problem.fold)
            # In JAX a state that is not placed as the steps place it would make the second step
            # compile anew.
            self.params, self.state = params, side.placed(self.tx.init(params))
            self.step = side.own.unoptimised(self._step)

    def update(self, update: int) -> tuple[float, dict[str, Array]]:
        """The mean loss of the micro-batches of the next update, and the parameters after it."""
        with self.side.running():
            # Counted on through the epochs.
            window = [
                self.parts[part % len(self.parts)]
                for part in range(update * self.n, (update + 1) * self.n)
            ]
            losses = [self._micro_batch(batch, weight) for batch, weight in window]
            return sum(map(float, losses)) / self.n, self.side.named(self.params)

    def _micro_batch(self, batch: list[Tree], weight: Scalar) -> Array:
        with self.side.lock:
            loss, grads = self.side.compiled(self.params, *batch)
        # None of the user's code is in the step, so that two of them compile at the same time.
        self.params, self.state = self.step(grads, self.state, self.params, weight)
        return loss

    def _step(self, grads: Tree, state: Tree, params: Tree, weight: Scalar) -> tuple[Tree, Tree]:
        updates, state = self.tx.update(grads, state, params, weight=weight)
        return self.side.own.apply_updates(params, updates), state
