"""Training: the same updates of the same optimizer in torch and in JAX, and where they diverge."""

from typing import NamedTuple

import numpy as np

from funcga._call.arguments import groups, starts
from funcga._compare.report import Report
from funcga._compare.tolerances import epsilon
from funcga._parity.sides import Side
from funcga._transform.multi_steps import multi_steps
from funcga._types import Array, Tree

Gradient = dict[str, Array]
_WINDOW = 4  # the micro-batches of one update, at most


class Trajectory(NamedTuple):
    """One optimizer in one dtype: its losses, and how far the parameters of two runs are apart after every update.

    n: the micro-batches of an update, 4 at most. losses: of the left run, the mean over the micro-batches of every
    update. reports: of the parameters after every update. aside: the parameters that are left out, as their gradient is
    0 but for rounding, which Adam divides by itself.
    """

    optimizer: str
    dtype: str
    n: int
    losses: list[float]
    reports: list[Report]
    aside: tuple[str, ...] = ()

    @property
    def diverges(self) -> int | None:
        """The number of the first update, from 1, after which a leaf is beyond its limit; None if there is none."""
        return next((update for update, report in enumerate(self.reports, 1) if not report.ok), None)

    @property
    def decisive(self) -> Report:
        """The report of the update after which they diverge, or else of the last one."""
        return self.reports[(self.diverges or len(self.reports)) - 1]

    @property
    def ok(self) -> bool:
        """Whether the two stay together."""
        return self.diverges is None


def train(
    left: Side, right: Side, optimizer: str, n: int, updates: int, gradients: tuple[dict[str, Array], dict[str, Array]]
) -> Trajectory:
    """The Trajectory of two sides on n micro-batches, a few for each update, in turn.

    gradients: of the full batch, those of each side by path.
    """
    # Adam divides a gradient by its own size: of one that is rounding alone it makes an update of full size.
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
    return [path for path, size in sizes.items() if size <= 4 * epsilon(dtype) * max(sizes.values())]


class _Training:
    """The training of one side."""

    def __init__(self, side: Side, optimizer: str, n: int):
        self.side = side
        with side.running():
            self.micro_batches = list(starts(groups(side.arguments.rows(), n, None)))
            self.n = min(n, _WINDOW)
            self.tx = multi_steps(side.own.optimizer(optimizer), self.n, fold=side.problem.fold)
            self.params, self.state = side.args[0], self.tx.init(side.args[0])
            self.step = side.own.compiled(self._step)

    def update(self, update: int) -> tuple[float, dict[str, Array]]:
        """The mean loss of the micro-batches of the next update, and the parameters after it."""
        with self.side.running():
            # Counted on through the epochs.
            window = range(update * self.n, (update + 1) * self.n)
            count = len(self.micro_batches)
            losses = [self._micro_batch(*self.micro_batches[index % count]) for index in window]
            return sum(map(float, losses)) / self.n, self.side.named(self.params)

    def _micro_batch(self, start: int, size: int) -> Array:
        _, *batch = self.side.arguments.cut(start, size, [])
        weight = self.side.weight((self.params, *batch), size)
        with self.side.lock:
            loss, grads = self.side.compiled(self.params, *batch)
            self.params, self.state = self.step(grads, self.state, self.params, weight)
        return loss

    def _step(self, grads: Tree, state: Tree, params: Tree, weight: Array) -> tuple[Tree, Tree]:
        updates, state = self.tx.update(grads, state, params, weight=weight)
        return self.side.own.applied(params, updates), state
