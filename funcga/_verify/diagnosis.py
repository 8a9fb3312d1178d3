"""Diagnosis: why splits differ from the whole batch, from groups of rows for which the fold is seen to fail."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from funcga._grad import GradientFunction
from funcga._verify.naming import Case, causes_of, is_linear
from funcga._verify.probe import Probe, Rows, as_numbers
from funcga._verify.repetition import Seen
from funcga._verify.responses import respond
from funcga._verify.splits import GROUP, Splits
from funcga._verify.tolerance import Limit
from funcga._verify.verdict import Cause


def diagnose(probe: Probe, splits: Splits, seen: Seen, limit: Limit, random: np.random.Generator) -> list[Cause]:
    """The causes of what the splits have shown; at least one if a leaf failed or a split could not be computed."""
    failed = [i for i in splits.failed if is_linear(probe.folds[i])]
    if [i for i in splits.ordered if is_linear(probe.folds[i])]:
        return [_by_place(probe, splits, seen)]
    causes: dict[str, Cause] = {}
    pairs = [*_pairs(probe, splits, random)]
    loss = loss_of(probe)
    for leaves in grouped(probe, failed):
        for cause in _explained(probe, leaves, pairs, splits, limit, loss):
            causes.setdefault(cause.name, cause)
        if causes and probe.values(probe.every)[leaves[0]].ndim:
            break  # the value of the loss fails for the same reasons
    if not causes and (splits.failed or any(row.error for row in splits.rows)):
        causes[""] = _unexplained(probe, splits, limit)
    return [*causes.values()]


def grouped(probe: Probe, failed: list[int]) -> Iterator[list[int]]:
    """The leaves that are looked at together: arrays under one fold in one part of the output, or one scalar."""
    whole = probe.values(probe.every)

    def key(i: int) -> tuple[int, str]:
        return id(probe.folds[i]), (re.match(r"output\[\d+\]", probe.paths[i]) or [""])[0]

    arrays = [i for i in failed if whole[i].ndim]
    for group in dict.fromkeys(key(i) for i in reversed(arrays)):
        yield [
            i
            for i, leaf in enumerate(whole)
            if leaf is not None and leaf.ndim and is_linear(probe.folds[i]) and key(i) == group
        ]
    for i in failed:
        if not whole[i].ndim:
            yield [i]


def _pairs(probe: Probe, splits: Splits, random: np.random.Generator) -> Iterator[tuple[Rows, Rows]]:
    """Two groups of rows each: few at first, then all."""
    size = min(GROUP, probe.rows // 2)
    for _ in range(3 if probe.rows > 2 else 1):
        order = [int(i) for i in random.permutation(probe.rows)]
        yield tuple(order[:size]), tuple(order[size : 2 * size])
    yield splits.parts


def _explained(
    probe: Probe,
    leaves: list[int],
    pairs: list[tuple[Rows, Rows]],
    splits: Splits,
    limit: Limit,
    loss: Callable[[Rows], float] | None,
) -> list[Cause]:
    for a, b in pairs:
        found = respond(probe, a, b, leaves, limit)
        coupled = found.kind.name in ("statistics", "coupled")
        growing = coupled and loss is not None and _grows(loss, a)
        causes = causes_of(Case(probe, probe.folds[leaves[0]], leaves, found, splits.parts, limit, growing))
        if causes:
            return causes
    return []


def _grows(loss: Callable[[Rows], float], rows: Rows) -> bool:
    """Whether the loss, or the loss a row, grows as the logarithm of how often the rows are repeated.

    Each time that their number is doubled a logarithm grows by the same; where a row is no candidate of its own, by
    less and less more than that. What grows as a power of it, as a norm does, grows by the same factor each time.
    """
    values = np.array([loss(rows * k) for k in (2, 4, 8, 16)])
    for each in (values, values / (2, 4, 8, 16)):
        steps = np.diff(each)
        if not np.abs(steps).min() > 1e-6 * max(abs(each[0]), 1e-9):  # it stays, or is NaN
            continue
        first, second = np.abs(steps[1:] / steps[:-1] - 1)
        if first < 0.4 and second < max(0.7 * first, 1e-3):
            return True
    return False


def loss_of(probe: Probe) -> Callable[[Rows], float] | None:
    """The value of the loss for some rows: from the output, or from the function whose gradient it is."""
    whole = probe.values(probe.every)
    scalars = [i for i, leaf in enumerate(whole) if leaf is not None and leaf.ndim == 0 and is_linear(probe.folds[i])]
    grad_fn = probe.program.grad_fn
    if scalars:
        return lambda rows: float(np.real(probe.values(rows)[scalars[0]]))
    function = grad_fn.loss_fn if isinstance(grad_fn, GradientFunction) else getattr(grad_fn, "__wrapped__", None)
    if function is None:
        return None

    def value(rows: Rows) -> float:
        try:
            output: Any = function(*probe.gathered(rows), **probe.kwargs)
        except Exception:  # not the loss, or one that refuses some batches
            return math.nan
        leaves = [as_numbers(leaf, probe.backend) for leaf in probe.backend.trees.flatten(output)[0]]
        scalar = [leaf for leaf in leaves if leaf is not None and leaf.ndim == 0]
        return float(np.real(scalar[0])) if scalar else math.nan

    return value


def _by_place(probe: Probe, splits: Splits, seen: Seen) -> Cause:
    row = splits.rows[-1]
    evidence = f"the whole batch in another order of rows differs by {row.relative:.1e} at {row.leaf}"
    if seen.draws:
        return Cause(
            "randomness",
            "The loss draws random numbers by the place of a row in its micro-batch, from a key or a seed that is the "
            "same in every call, as dropout with a key that is passed whole: a row gets other numbers in a micro-batch "
            "than in the whole batch.",
            "a key for each row, split with the batch: keys = jax.random.split(key, rows), in_axes=(None, 0, 0)"
            if probe.backend.name == "jax"
            else "module.eval(); or draw the mask beforehand, and split it with the batch: in_axes=(None, 0, 0)",
            evidence,
        )
    return Cause(
        "row order",
        "The loss depends on the order of the rows, and so on a row's place in its micro-batch: neighbouring rows are "
        "coupled.",
        "make of what belongs together one row, or give each row its position as data",
        evidence,
    )


def _unexplained(probe: Probe, splits: Splits, limit: Limit) -> Cause:
    error = next((row for row in splits.rows if row.error), None)
    worst = max(splits.rows, key=lambda row: -1 if math.isnan(row.relative) else row.relative)
    if not splits.failed and error is not None:
        evidence = f"{error.split}: {error.error}"
    else:
        leaf = probe.paths[splits.failed[0]] if splits.failed else worst.leaf
        evidence = f"{worst.split}: {leaf} differs by {worst.relative:.1e}, limit {worst.limit:.0e}"
    what, fix = _ways_out(probe, splits, limit)
    return Cause("not decomposable", f"Micro-batches do not give the result of the whole batch{what}.", fix, evidence)


def _ways_out(probe: Probe, splits: Splits, limit: Limit) -> tuple[str, str]:
    """(what, fix) of a difference that no kind of loss explains."""
    whole = [key for key, value in probe.kwargs.items() if _has_rows(probe, value)]
    other = [i for i in splits.failed if not is_linear(probe.folds[i])]
    if whole:
        return (
            f": `{whole[0]}` has {probe.rows} rows as well, and keyword arguments are passed whole to every one",
            f"pass `{whole[0]}` by position, after the parameters",
        )
    if other:
        return (
            f": the fold of {probe.paths[other[0]]} takes neither sums nor means, as a loss and gradients need",
            "fold=funcga.mean(), or a tree of folds with another one for such an output alone",
        )
    if limit.relative > 1e-3:
        return (
            ", and in 16 bits rounding hides which mistake it is",
            "run verify with the parameters, the batch and the loss in float32, and do what it says there",
        )
    return (
        ", and none of the usual mistakes explains it",
        "write the loss as a sum or a mean of terms of one row each; where that is impossible, n=1",
    )


def _has_rows(probe: Probe, value: Any) -> bool:
    leaves = probe.backend.trees.flatten(value)[0]
    return any(getattr(leaf, "shape", ())[:1] == (probe.rows,) for leaf in leaves)
