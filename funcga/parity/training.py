"""Training: the same updates of the same optimizer in torch and in JAX, through `multi_steps`, and where they part."""

from collections.abc import Callable
from typing import Any, NamedTuple

from funcga.arguments import groups, starts
from funcga.comparison.report import Report
from funcga.parity.sides import Side
from funcga.stepping import multi_steps

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
_WINDOW = 128  # rows of one update, or one more
_MOST = 4  # micro-batches of one update


class Trajectory(NamedTuple):
    """One optimizer in one dtype: its losses, and how far the parameters of two runs are apart after every update.

    n: the micro-batches of an update. losses: of the left run, the mean over the micro-batches of every update.
    reports: of the parameters after every update.
    """

    optimizer: str
    dtype: str
    n: int
    losses: list[float]
    reports: list[Report]

    @property
    def parts(self) -> int | None:
        """The number of the first update, from 1, after which a leaf is beyond its limit; None if there is none."""
        return next((i for i, report in enumerate(self.reports, 1) if not report.ok), None)

    @property
    def decisive(self) -> Report:
        """The report of the update after which they part, or else of the last one."""
        return self.reports[(self.parts or len(self.reports)) - 1]

    @property
    def ok(self) -> bool:
        """Whether the two stay together."""
        return self.parts is None


def train(left: Side, right: Side, optimizer: str, n: int, updates: int, tick: Callable[[], None]) -> Trajectory:
    """The Trajectory of two sides, update by update; `tick` is called after each."""
    runs = [_Run(side, optimizer, n) for side in (left, right)]
    names, rules = (left.label, right.label), left.problem.rules
    losses, reports = [], []
    for update in range(updates):
        (loss, params), (_, others) = (run.update(update) for run in runs)
        losses.append(loss)
        # Every update adds the rounding of its gradient.
        reports.append(left.compared(params, others, names, left.reduction * (update + 1), rules))
        tick()
    return Trajectory(optimizer, left.dtype, runs[0].n, losses, reports)


class _Run:
    """The training of one side."""

    def __init__(self, side: Side, optimizer: str, n: int):
        self.side = side
        with side.running():
            rows = side.arguments.rows()
            self.windows = list(starts(groups(rows, max(rows // _WINDOW, 1), None)))
            self.n = min(n, _MOST, *(size for _, size in self.windows))
            self.tx = multi_steps(side.own.optimizer(optimizer), self.n, fold=side.problem.fold)
            self.params, self.state = side.args[0], self.tx.init(side.args[0])
            self.step = side.own.compiled(self._step)

    def update(self, update: int) -> tuple[float, dict[str, Any]]:
        """The mean loss of the micro-batches of the next update, and the parameters after it."""
        with self.side.running():
            losses = [self._micro_batch(start, size) for start, size in self._micro_batches(update)]
            return sum(map(float, losses)) / self.n, self.side.named(self.params)

    def _micro_batches(self, update: int) -> list[tuple[int, int]]:
        """(first row, rows) of each micro-batch of an update: windows in turn, cut into parts that need not be equal."""
        start, size = self.windows[update % len(self.windows)]
        return [(start + first, rows) for first, rows in starts(groups(size, self.n, None))]

    def _micro_batch(self, start: int, size: int) -> Any:
        _, *batch = self.side.arguments.cut(start, size, [])
        loss, grads = self.side.compiled(self.params, *batch)
        weight = self.side.weight((self.params, *batch), size)
        self.params, self.state = self.step(grads, self.state, self.params, weight)
        return loss

    def _step(self, grads: Any, state: Any, params: Any, weight: Any) -> Any:
        updates, state = self.tx.update(grads, state, params, weight=weight)
        return self.side.own.applied(params, updates), state
