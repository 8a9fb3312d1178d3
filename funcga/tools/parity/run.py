"""Runs a problem in both frameworks and compares the results, sorted by the possible cause of a
difference.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from funcga._transform.multi_steps import multi_steps
from funcga._types import Scalar, Tree
from funcga.tools.compare import compare
from funcga.tools.compare.report import Report
from funcga.tools.compare.tolerances import epsilon
from funcga.tools.parity import Problem
from funcga.tools.parity.sides import Leaves, Side, fold_by_hand, fold_in_framework, largest_of
from funcga.tools.verify import Verdict

CAUSES = ("accumulation", "model", "fold", "rounding", "training")
"""The possible causes of a difference, in the order in which they are reported."""


class Compared(NamedTuple):
    """Two results, compared leaf by leaf.

    Attributes:
        cause: One of CAUSES.
        what: What is compared, in words.
        dtype: The dtype of the run.
        n: The number of micro-batches; None for the full batch.
        reports: The comparison; of a training, that of the parameters after every update.
        framework: The framework of both results, as it is written; None for one against the other.
        micro_batch: Which micro-batch, from 0; None for all of them.
        optimizer: The name of the optimizer of a training.
        aside: The parameters that are left out of a training: their gradient is 0 except for
            rounding, which Adam divides by itself.
    """

    cause: str
    what: str
    dtype: str
    n: int | None
    reports: list[Report]
    framework: str | None = None
    micro_batch: int | None = None
    optimizer: str = ""
    aside: Sequence[str] = ()

    @property
    def update(self) -> int:
        """The first update, from 1, after which a leaf is beyond its limit, or else the last."""
        beyond = [update for update, report in enumerate(self.reports, 1) if not report.ok]
        return min(beyond, default=len(self.reports))

    @property
    def report(self) -> Report:
        """The comparison; of a training, that after `update`."""
        return self.reports[self.update - 1]

    @property
    def ok(self) -> bool:
        """Whether every leaf is within its limit."""
        return self.report.ok


@dataclass(frozen=True, eq=False)
class Run:
    """The run of a problem.

    Args:
        problem: The problem.
        dtypes: The dtypes, from coarse to fine; float64, the last, is what the others are compared
            with.
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
        problem = self.problem
        return {
            dtype: [Side(problem, name, dtype, self.n, self.device) for name in problem.losses]
            for dtype in self.dtypes
        }

    @property
    def first(self) -> Side:
        """The first side, whose rows and weights are those of all."""
        return self.sides[self.dtypes[0]][0]

    @cached_property
    def results(self) -> list[Compared]:
        """What has been compared."""
        results = [each for sides in self.sides.values() for each in self._gradients(sides)]
        if len(self.problem.losses) == 2 and self.updates > 0:
            for sides in self.sides.values():
                results += [self._trained(sides, name) for name in self.problem.optimizers]
        return results

    def _gradients(self, sides: Sequence[Side]) -> Iterator[Compared]:
        """The comparisons of gradients in one dtype."""
        dtype = sides[0].dtype
        for side in sides:
            label, whole = side.label, side.whole  # first: what does not fit is described by it
            for n in self.ns:
                names = ("accumulated", "full batch")
                report = side.report(side.accumulated(n), whole, names)
                what = f"{label} vs full batch"
                yield Compared("accumulation", what, dtype, n, [report], label)
        if len(sides) == 2:
            left, right = sides
            names = ("torch", "JAX")
            report = left.report(left.whole, right.whole, names)
            yield Compared("model", "torch vs JAX, full", dtype, None, [report])
            pairs = zip(left.micro_batches, right.micro_batches, strict=True)
            for index, pair in enumerate(pairs):
                report, what = left.report(*pair, names), "torch vs JAX, micro"
                yield Compared("model", what, dtype, self.n, [report], micro_batch=index)
        # All fold the micro-batch gradients of the first framework, so what differs is the fold.
        gradients = [result.gradient for result in sides[0].micro_batches]
        weights = [part.weight for part in sides[0].parts]
        stacked = {path: np.stack([each[path] for each in gradients]) for path in gradients[0]}
        by_hand, sums_by_hand = fold_by_hand(self.problem.fold, stacked, weights)
        for side in sides:
            label, names = side.label, (side.label, "NumPy")
            fold, sums = fold_in_framework(side, stacked, weights)
            # The fold is exact to rounding, and plain sums in the same order to the last bit.
            report = side.compared(fold, by_hand, names, self.n)
            yield Compared("fold", f"{label} vs NumPy", dtype, self.n, [report], label)
            report = compare(sums, sums_by_hand, rtol=0, names=names)
            yield Compared("fold", f"{label}, plain sums", dtype, self.n, [report], label)
        for side, precise in zip(sides, self.sides["float64"], strict=True):
            if side is precise:
                return
            report = side.report(side.whole, precise.whole, (dtype, "float64"))
            what = f"{side.label} vs float64"
            yield Compared("rounding", what, dtype, None, [report], side.label)

    def _trained(self, sides: Sequence[Side], optimizer: str) -> Compared:
        left, right = sides
        # Adam divides a gradient by its own size: one that is rounding alone becomes an update of
        # full size.
        aside = [_zeros(side) if "adam" in optimizer else [] for side in sides]
        params, others = (
            _updates(side, optimizer, self.updates, left_out)
            for side, left_out in zip(sides, aside, strict=True)
        )
        reports = [
            # Every update adds the rounding of its gradient.
            left.compared(ours, theirs, (left.label, right.label), left.reduction * update)
            for update, (ours, theirs) in enumerate(zip(params, others, strict=True), 1)
        ]
        return Compared(
            "training",
            f"{optimizer}, {self.updates} updates",
            left.dtype,
            min(self.n, _WINDOW),
            reports,
            optimizer=optimizer,
            aside=aside[0],
        )

    # --- what was found

    def of(self, cause: str) -> list[Compared]:
        """The results for a cause."""
        return [compared for compared in self.results if compared.cause == cause]

    def is_explained(self, result: Compared) -> bool:
        """Whether rounding, amplified by the loss or by training, explains that a result is beyond
        its limit.
        """
        # A fold is exact.
        if result.dtype == "float64" or result.cause == "fold":
            return False
        # In float64 the same is within its limit.
        is_training = result.cause == "training"
        same = [c for c in self.of(result.cause) if c.dtype == "float64"]
        if not all(c.ok for c in same if c.what == result.what or not is_training):
            return False
        if not is_training:
            # It is no more than 10 times what rounding the arguments alone changes. NaN and
            # infinity are not small.
            return result.report.most <= 10 * self.conditioning[result.dtype]
        gradients = [c for c in self.results if c.dtype == result.dtype and c.cause != "training"]
        is_finite = math.isfinite(result.reports[-1].most)
        return is_finite and not any(map(self.is_wrong, gradients))

    def is_wrong(self, result: Compared) -> bool:
        """Whether it is beyond its limit, and rounding does not explain that."""
        return not (result.ok or self.is_explained(result))

    def wrong(self, cause: str) -> list[Compared]:
        """The results for a cause that are wrong."""
        return [compared for compared in self.of(cause) if self.is_wrong(compared)]

    @property
    def ok(self) -> bool:
        """Whether nothing differs except by rounding."""
        return not any(map(self.is_wrong, self.results))

    @cached_property
    def verified(self) -> dict[str, Verdict]:
        """The verdict of `verify` on each framework whose accumulation is not exact in float64,
        as it takes long.
        """
        wrong = [c.framework for c in self.of("accumulation") if c.dtype == "float64" and not c.ok]
        return {
            side.label: side.verified(max(self.n, 2))
            for side in self.sides["float64"]
            if side.label in wrong and math.isfinite(largest_of(side.whole.gradient))
        }

    @cached_property
    def conditioning(self) -> dict[str, float]:
        """By dtype, how far the float64 gradient moves if its arguments are rounded to that
        dtype.
        """
        # In float64, so that it is the loss which amplifies the rounding of its arguments, and no
        # rounding of its own.
        sides, names = self.sides["float64"], ("nearby", "at")
        return {
            dtype: max(side.report(side.nearby(dtype), side.whole, names).most for side in sides)
            for dtype in self.dtypes[:-1]
        }


_WINDOW = 4  # the micro-batches of one update, at most


def _updates(side: Side, optimizer: str, count: int, aside: Sequence[str]) -> list[Leaves]:
    """The parameters after each update, but for those that are set aside."""
    window = min(side.n, _WINDOW)

    def after(grads: Tree, state: Tree, params: Tree, weight: Scalar) -> tuple[Tree, Tree]:
        changes, state = tx.update(grads, state, params, weight=weight)
        return side.own.apply_updates(params, changes), state

    step, parts = side.own.compiled(after), cycle(side.parts)
    trained = list[Leaves]()
    with side.running():
        params = side.args[0]
        tx = multi_steps(side.own.optimizer(optimizer), window, fold=side.problem.fold)
        # In JAX a state that is not placed as the steps place it would make the second step compile
        # anew.
        state = side.placed(tx.init(params))
        for _ in range(count):
            for part in islice(parts, window):
                _, grads = side.compiled(params, *part.args[1:])
                params, state = step(grads, state, params, part.weight)
            named = side.named(params)
            trained.append({path: named[path] for path in named if path not in aside})
    return trained


def _zeros(side: Side) -> list[str]:
    """The paths of the gradients that are 0 except for rounding."""
    gradient = side.whole.gradient
    limit = 4 * epsilon(side.dtype) * largest_of(gradient)
    return [path for path, leaf in gradient.items() if np.abs(leaf).max(initial=0) <= limit]
