"""Splits: the fold over n micro-batches, and over uneven ones in another order, against the whole batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from funcga import monoids, normalizers, reducers
from funcga._call.arguments import groups, starts
from funcga._fold.tally import Tally
from funcga._verify.probe import Probe, Rows, is_moments
from funcga._verify.tolerance import Limit, relative, scales_of
from funcga._verify.verdict import Measured
from funcga.errors import FuncgaError, TooFewRowsError
from funcga.folds import Fold


class Splits(NamedTuple):
    """What the splits have shown.

    failed: the leaves that differ, but for those of carried state; ordered: those that change where the rows are put
    in another order; carried: the leaves of carried state that differ. parts: two uneven parts of the rows.
    """

    rows: list[Measured]
    failed: list[int]
    ordered: list[int]
    carried: list[int]
    parts: tuple[Rows, Rows]


GROUP = 4
"""The rows of a group. JAX compiles for each number of rows, so that of the parts is made of the same sizes."""


def uneven(probe: Probe, random: np.random.Generator) -> tuple[Rows, Rows]:
    """Two uneven parts of the rows, in another order."""
    order = tuple(int(i) for i in random.permutation(probe.rows))
    cut = probe.rows - max(1, min(GROUP, probe.rows // 3))
    return order[:cut], order[cut:]


def compare(probe: Probe, ns: Sequence[int], limit: Limit, parts: tuple[Rows, Rows]) -> Splits:
    """What every split gives, against the whole batch. What grad_fn raises for a part of the batch is noted."""
    whole = probe.values(probe.every)
    tried = [found for found in (_attempt(partial(probe.values, p)) for p in parts) if not isinstance(found, str)]
    judged = [i for i, fold in enumerate(probe.folds) if whole[i] is not None and not is_moments(fold)]
    measure = _Measure(probe, limit, [*judged], scales_of([whole, *tried], limit), expected(probe, whole))
    rows = [measure(f"n = {n}", _sizes(probe.rows, n), partial(_accumulated, probe, n)) for n in ns]
    if not probe.threaded:
        unordered = [i for i in judged if not _is_ordered(probe.folds[i])]
        sizes = (len(parts[0]), len(parts[1]))
        rows.append(measure("uneven, permuted", sizes, lambda: _folded(probe, parts), unordered))
    failed = sorted(measure.failed)
    ordered = []
    if failed and not probe.threaded:
        permuted = _Measure(probe, limit, unordered, measure.scales, expected(probe, whole))
        rows.append(
            permuted(
                "one micro-batch, permuted", (probe.rows,), lambda: expected(probe, probe.values(parts[0] + parts[1]))
            )
        )
        ordered = sorted(permuted.failed)
    is_carry = [fold.reducer.lift is reducers.carry.lift for fold in probe.folds]
    carried = [i for i in failed if is_carry[i]]
    return Splits(rows, [i for i in failed if not is_carry[i]], ordered, carried, parts)


def _sizes(rows: int, n: int) -> Rows:
    return tuple(size for _, size in starts(groups(rows, n, None)))


def _accumulated(probe: Probe, n: int) -> list[Any]:
    return probe.numbers(probe.step(n)(*probe.args, **probe.kwargs))


class _Measure:
    """Compares results with what is expected, and collects the leaves that fail."""

    def __init__(self, probe: Probe, limit: Limit, judged: list[int], scales: list[float], wanted: list[Any]):
        self.probe, self.limit, self.judged, self.scales, self.wanted = probe, limit, judged, scales, wanted
        self.failed: set[int] = set()

    def __call__(
        self, split: str, sizes: Rows, run: Callable[[], list[Any]], leaves: list[int] | None = None
    ) -> Measured:
        found = _attempt(run)
        if isinstance(found, str):
            return Measured(split, sizes, float("nan"), self.limit.relative, "", f"it raised {found}")
        judged = self.judged if leaves is None else leaves
        apart = {i: relative(found[i], self.wanted[i], self._scale(i)) for i in judged}
        self.failed |= {i for i, value in apart.items() if not value <= self.limit.relative}
        worst = max(apart, key=lambda i: np.inf if np.isnan(apart[i]) else apart[i], default=None)
        if worst is None:
            return Measured(split, sizes, 0.0, self.limit.relative, "")
        return Measured(split, sizes, apart[worst], self.limit.relative, self.probe.paths[worst])

    def _scale(self, i: int) -> float:
        fold = self.probe.folds[i]
        divided = fold.reducer.monoid is monoids.sum and fold.reducer.lift is reducers.sum.lift
        if divided and fold.normalizer.apply is normalizers.by_weight.apply:
            return self.scales[i] / max(self.probe.weigh(self.probe.every), 1e-300)
        return self.scales[i]


def _attempt(run: Callable[[], Any]) -> Any:
    """What it returns, or the type and first line of what it raises; errors of funcga's own are raised."""
    try:
        return run()
    except TooFewRowsError as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    except FuncgaError:
        raise
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {first[:200]}"


def expected(probe: Probe, whole: Sequence[Any]) -> list[Any]:
    """What the folds make of a single micro-batch, the whole batch, with these leaves."""
    return _reduced(probe, [(whole, probe.weigh(probe.every))])


def _folded(probe: Probe, parts: Sequence[Rows]) -> list[Any]:
    return _reduced(probe, [(probe.values(part), probe.weigh(part)) for part in parts])


def _reduced(probe: Probe, parts: Sequence[tuple[Sequence[Any], float]]) -> list[Any]:
    """The fold's own mathematics on NumPy arrays: a second implementation of the loop, if not of the fold."""
    tally = Tally(sum(weight for _, weight in parts), len(parts))
    found: list[Any] = []
    for i, fold in enumerate(probe.folds):
        leaves = [values[i] for values, _ in parts]
        if leaves[0] is None or _is_ordered(fold) or is_moments(fold):
            found.append(leaves[0])
            continue
        with np.errstate(invalid="ignore"):
            lifted = [fold.reducer.lift(np, leaf, weight) for leaf, (_, weight) in zip(leaves, parts, strict=True)]
            reduced = lifted[0]
            for more in lifted[1:]:
                reduced = fold.reducer.monoid.combine(np, reduced, more)
            found.append(np.asarray(fold.normalizer.apply(np, reduced, tally)))
    return found


def _is_ordered(fold: Fold) -> bool:
    return fold.reducer.lift is reducers.carry.lift or fold.reducer.monoid.axis is not None
