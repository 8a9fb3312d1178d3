"""Training: the same updates of the same optimizer in torch and in JAX, through `multi_steps`, and where they part."""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from funcga.backend import load
from funcga.gradients import value_and_grad
from funcga.interop import to_jax, to_numpy, to_torch
from funcga.parity.differences import Difference, difference, rank
from funcga.parity.problems import Problem
from funcga.parity.run import cast, leaves_of
from funcga.stepping import multi_steps

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
LIMITS = {"float32": 1e-5, "float64": 1e-12}
_WINDOW = 128  # rows of one update, or one more


class Trajectory(NamedTuple):
    """One optimizer in one dtype: the mean loss over the first and the last window, and the parameters at the end.

    n: the micro-batches of an update; updates: how many there were. differences: of torch against JAX, by leaf.
    """

    optimizer: str
    dtype: str
    n: int
    updates: int
    first: float
    last: float
    differences: dict[str, Difference]

    @property
    def ok(self) -> bool:
        """Whether every difference is within its limit."""
        return all(found.ok for found in self.differences.values())

    @property
    def worst(self) -> tuple[str, Difference]:
        """The leaf that differs most."""
        return max(self.differences.items(), key=lambda item: rank(item[1]))


def train(problem: Problem, dtypes: Sequence[str], n: int, updates: int) -> list[Trajectory]:
    """The Trajectories of a problem whose loss is a mean over rows: each optimizer, in every dtype."""
    n = min(n, _WINDOW)
    return [_trajectory(problem, name, dtype, n, updates) for dtype in dtypes for name in OPTIMIZERS]


def _trajectory(problem: Problem, optimizer: str, dtype: str, n: int, updates: int) -> Trajectory:
    (torch_params, losses), (jax_params, _) = (
        _trained(framework, problem, optimizer, dtype, n, updates) for framework in ("torch", "jax")
    )
    found = {leaf: difference(torch_params[leaf], jax_params[leaf], LIMITS[dtype]) for leaf in torch_params}
    return Trajectory(optimizer, dtype, n, updates, float(np.mean(losses[:n])), float(np.mean(losses[-n:])), found)


def _trained(
    framework: str, problem: Problem, optimizer: str, dtype: str, n: int, updates: int
) -> tuple[dict[str, Any], list[float]]:
    """The parameters after all updates, by leaf, and the loss of every micro-batch."""
    backend = load(framework)
    own = importlib.import_module(f"{backend.name}_backend.problems")
    convert = {"torch": to_torch, "jax": to_jax}[framework]
    gradient = value_and_grad(getattr(own, problem.loss))
    tx = multi_steps(own.optimizer(optimizer), n)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        loss, grads = gradient(params, *batch)
        changes, state = tx.update(grads, state, params, weight=len(batch[0]))
        return own.applied(params, changes), state, loss

    losses = []
    with own.precision(dtype):
        params, *batch = convert(cast((problem.params, *problem.batch), dtype))
        state, run = tx.init(params), own.compiled(step)
        for update in range(updates):
            for rows in _micro_batches(update, len(problem.items), n):
                params, state, loss = run(params, state, *(part[rows] for part in batch))
                losses.append(float(loss))
        return leaves_of(to_numpy(params)), losses


def _micro_batches(update: int, rows: int, n: int) -> list[slice]:
    """The rows of each micro-batch of an update: windows in turn, cut into parts that need not be equal."""
    windows = np.array_split(np.arange(rows), max(rows // _WINDOW, 1))
    parts = np.array_split(windows[update % len(windows)], n)
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
