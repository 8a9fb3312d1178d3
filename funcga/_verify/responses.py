"""Responses: how a result responds to the way in which the rows are cut, and to rows that repeat.

First the fold over n micro-batches, in order and cut unevenly in another order, is compared with
the whole batch. Where they differ, two groups of rows tell what kind of function the loss is. F(i,
j) is the gradient of a batch that has a group A of rows i times and another one, B, j times.
Repeating the whole batch k times separates a sum S from the rest M: F = k S + M. A sum is additive
in the groups. A mean is a weighted average of F(1, 0) and F(0, 1), with weights proportional to
what the loss counts. Two means that count different things are a rational function of the share t =
i / (i + j), with two poles. Anything else that repetition leaves as it is depends on statistics of
the batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from funcga._call.arguments import groups, starts
from funcga._fold import Tally
from funcga._types import Array
from funcga._verify.probe import Leaves, Limit, Probe, Rows, relative
from funcga.errors import FuncgaError, TooFewRowsError
from funcga.folds import Fold


class Measured(NamedTuple):
    """The result of a split against that of the whole batch.

    Attributes:
        split: Which split it is, in words.
        sizes: The rows of each micro-batch.
        relative: The largest relative difference.
        limit: How large it may be.
        leaf: The path of the leaf that has it.
        error: What the split raised instead of a result, or None.
    """

    split: str
    sizes: tuple[int, ...]
    relative: float
    limit: float
    leaf: str
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the difference is within the limit; NaN is not."""
        return self.error is None and self.relative <= self.limit


class Splits(NamedTuple):
    """What the splits have shown, as indices of leaves.

    failed: those that differ, without carried state; carried: those of carried state that differ;
    reordered: those that change when the rows of the whole batch come in another order. parts: two
    uneven parts of the rows.
    """

    rows: list[Measured]
    failed: list[int]
    carried: list[int]
    reordered: list[int]
    parts: tuple[Rows, Rows]


# The rows of a group. JAX compiles for each number of rows, so the smaller of two uneven parts has
# as many.
GROUP = 4


def uneven(probe: Probe, random: np.random.Generator) -> tuple[Rows, Rows]:
    """Two uneven parts of the rows, in another order."""
    order = tuple(int(i) for i in random.permutation(probe.rows))
    cut = probe.rows - max(1, min(GROUP, probe.rows // 3))
    return order[:cut], order[cut:]


def compare(probe: Probe, ns: Sequence[int], limit: Limit, parts: tuple[Rows, Rows]) -> Splits:
    """The Splits over n micro-batches, for each n, and over these two parts, compared with the
    whole batch.

    What grad_fn raises for a part of the batch is noted; errors of funcga's own are raised.
    """
    scales, expected = scales_of(probe, limit, parts), _folded(probe, [probe.every])
    rows: list[Measured] = []

    def measure(split: str, sizes: Rows, leaves: list[int], run: Callable[[], Leaves]) -> set[int]:
        """The leaves that differ by more than the limit; adds the row of the split."""
        row, apart = measured(probe, split, sizes, run, expected, scales, limit, leaves)
        rows.append(row)
        return apart

    # Carried state and collected rows depend on the order, and moments on the number of
    # micro-batches.
    compared = [
        i
        for i, fold in enumerate(probe.folds)
        if probe.whole[i] is not None and not fold.reducer.over_steps
    ]
    unordered = [i for i in compared if not probe.folds[i].reducer.monoid.ordered]
    failed: set[int] = set()
    reordered: set[int] = set()
    for n in ns:
        sizes = tuple(size for _, size in starts(groups(probe.rows, n, None)))
        failed |= measure(f"n = {n}", sizes, compared, partial(probe.accumulated, n))
    # State goes through the rows in their order only.
    if not probe.threaded:
        sizes = (len(parts[0]), len(parts[1]))
        failed |= measure("uneven, permuted", sizes, unordered, partial(_folded, probe, parts))
    # Does the order of the rows matter by itself, in one micro-batch?
    if failed and not probe.threaded:
        permuted = partial(_folded, probe, [parts[0] + parts[1]])
        reordered = measure("one micro-batch, permuted", (probe.rows,), unordered, permuted)
    carries = {i for i in failed if probe.folds[i].reducer.carries}
    return Splits(rows, sorted(failed - carries), sorted(carries), sorted(reordered), parts)


def measured(
    probe: Probe,
    split: str,
    sizes: Rows,
    run: Callable[[], Leaves],
    expected: Leaves,
    scales: Sequence[float],
    limit: Limit,
    leaves: Sequence[int],
) -> tuple[Measured, set[int]]:
    """(row, apart): how far what `run` returns is from what is expected, and which of these
    leaves are too far.
    """
    try:
        result = run()
    except Exception as error:
        if isinstance(error, FuncgaError) and not isinstance(error, TooFewRowsError):
            raise
        first, *_ = str(error).splitlines() or [""]
        text = f"it raised {type(error).__name__}: {first[:200]}"
        return Measured(split, sizes, float("nan"), limit.relative, "", text), set()
    apart = {i: relative(result[i], expected[i], scales[i]) for i in leaves}
    worst = max(apart, key=lambda i: np.inf if np.isnan(apart[i]) else apart[i], default=None)
    difference, leaf = (0.0, "") if worst is None else (apart[worst], probe.paths[worst])
    row = Measured(split, sizes, difference, limit.relative, leaf)
    return row, {i for i, difference in apart.items() if not difference <= limit.relative}


def scales_of(probe: Probe, limit: Limit, parts: tuple[Rows, Rows]) -> list[float]:
    """What a difference in each leaf is relative to, after the fold."""
    some = [values for part in parts if (values := probe.try_values(part)) is not None]
    # per_weight() divides a sum, so that its result is smaller than what was added up.
    total = max(probe.weigh(probe.every), 1e-300)
    divided = [
        fold.reducer.additive and not fold.reducer.linear and fold.normalizer.divides_by == "weight"
        for fold in probe.folds
    ]
    scales = limit.scales([probe.whole, *some])
    return [
        scale / total if is_divided else scale
        for scale, is_divided in zip(scales, divided, strict=True)
    ]


def _folded(probe: Probe, parts: Sequence[Rows]) -> Leaves:
    """The fold over these parts, on NumPy arrays: a second implementation of the loop, if not of
    the fold.
    """
    values, weights = [probe.values(part) for part in parts], [probe.weigh(part) for part in parts]
    results: Leaves = []
    for fold, *leaves in zip(probe.folds, *values, strict=True):
        if leaves[0] is None or fold.reducer.monoid.ordered or fold.reducer.over_steps:
            results.append(leaves[0])
        else:
            results.append(folded(fold, leaves, weights))
    return results


def folded(fold: Fold, values: Sequence[Array], weights: Sequence[float]) -> Array:
    """The fold of these NumPy arrays."""
    with np.errstate(invalid="ignore"):
        lifted = [
            fold.reducer.lift(np, value, weight)
            for value, weight in zip(values, weights, strict=True)
        ]
        reduced = lifted[0]
        for more in lifted[1:]:
            reduced = fold.reducer.monoid.combine(np, reduced, more)
        return np.asarray(fold.normalizer.apply(np, reduced, Tally(sum(weights), len(values))))


class Kind(NamedTuple):
    """What kind of function of its rows some leaves are.

    name: "nothing", "sum", "sum and constant", "sum and mean", "mean", "two means", "power",
    "statistics", "coupled", or "unknown" where it could not be evaluated. ratios: of a mean, how
    much A weighs for each B; of a power, a sum over something to the power 1 - `power`, how much of
    that A has for each B.
    """

    name: str
    ratios: tuple[float, ...] = ()
    power: float = 0.0


# How often each group of rows is in a batch, and the values there: a list of arrays, later one
# vector of size 1.
Point = tuple[int, ...]
_Points = dict[Point, Array]
_POINTS = ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (3, 0), (2, 2), (2, 1), (1, 2), (3, 1), (1, 3))
_NEEDED = {(1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 2)}

# What an exact fit to values in float64 leaves.
_EXACT = 1e-6
# Of what converges as 1/k, such as a variance with Bessel's correction, a step is a third of the
# last one or less; of a logarithm it is 0.58, of what is linear in k 1.
_SETTLING = 0.45


def respond(probe: Probe, a: Rows, b: Rows, leaves: Sequence[int], limit: Limit) -> Kind:
    """The Kind of these leaves of grad_fn's output, from the groups A and B."""
    points = _evaluated(probe, (a, b), leaves, _POINTS)
    if not points.keys() >= _NEEDED:
        return Kind("unknown")
    scales = limit.scales([*points.values()])
    vectors = _scaled(points, scales)
    kind = classify(vectors, 10 * limit.relative)
    if kind.name == "two means":
        # Of two groups alone, a mean over pairs of rows of two kinds looks like two means. A third
        # group tells.
        rest = [row for row in probe.every if row not in {*a, *b}]
        if len(rest) >= len(a) and not _fits_three(
            probe, (a, b, tuple(rest[: len(a)])), leaves, vectors, scales
        ):
            return Kind("statistics")
    return kind


def _evaluated(
    probe: Probe, parts: Sequence[Rows], leaves: Sequence[int], points: Sequence[Point]
) -> _Points:
    """The values at these points where the loss can be evaluated and is finite."""
    values: _Points = {}
    for point in points:
        rows = sum((part * times for part, times in zip(parts, point, strict=True)), ())
        result = probe.try_values(rows)
        if result is not None and all(np.isfinite(result[leaf]).all() for leaf in leaves):
            flat = [result[leaf].ravel() for leaf in leaves]
            values[point] = [
                np.concatenate([x.real, x.imag]) if np.iscomplexobj(x) else x for x in flat
            ]
    return values


def _scaled(points: _Points, scales: list[float]) -> _Points:
    """One vector for each point, of a size of about 1."""
    return {
        point: np.concatenate([leaf / scale for leaf, scale in zip(leaves, scales, strict=True)])
        for point, leaves in points.items()
    }


_Near = Callable[[Array, Array], bool]


def classify(f: _Points, tolerance: float) -> Kind:
    """The Kind of a vector of a size of about 1, from its values at points (i, j)."""
    near: _Near = lambda x, y: bool(np.abs(x - y).max(initial=0.0) <= tolerance)
    # Not linear in the number of repetitions: neither a sum nor a mean.
    if (3, 0) in f and not near(f[3, 0], 2 * f[2, 0] - f[1, 0]):
        return _as_power(f, near) or _as_growth(f)
    # F = k S + M for k repetitions, so F(2i, 2j) - F(i, j) is S, and M what is left.
    once = ((1, 0), (0, 1), (1, 1))
    sums: _Points = {(i, j): f[2 * i, 2 * j] - f[i, j] for i, j in once}
    rests: _Points = {point: f[point] - sums[point] for point in once}
    is_sum = all(near(rest, 0) for rest in rests.values())
    if all(near(part, 0) for part in sums.values()):
        return Kind("nothing") if is_sum else _as_means(f, near, tolerance)
    if not near(sums[1, 1], sums[1, 0] + sums[0, 1]):
        return Kind("statistics")
    if is_sum:
        return Kind("sum")
    if near(rests[1, 0], rests[0, 1]) and near(rests[1, 1], rests[1, 0]):
        return Kind("sum and constant")
    # The sum aside, the rest may be a mean.
    share = _share(rests, near)
    return Kind("statistics") if share is None else Kind("sum and mean", (share / (1 - share),))


def _as_growth(f: _Points) -> Kind:
    """The Kind of what grows with repetitions in another way: whether it settles, or goes on
    growing.
    """
    first, second = (float(np.linalg.norm(f[k + 1, 0] - f[k, 0])) for k in (1, 2))
    return Kind("statistics" if second < _SETTLING * first else "coupled")


def _as_power(f: _Points, near: _Near) -> Kind | None:
    """The Kind of a sum over a count to some power, F(i, j) = (i S + j T) / (i c + j d)**(1 - p),
    if it is one.

    Repeated k times it grows as k**p. Of a sum over the root of its rows the counts are those of
    rows, and of a norm, which is the gradient's sum over the root of a sum as well, they are sums
    of squares.
    """
    if not f.keys() >= {(2, 1), (3, 0)}:
        return None
    # All rows twice: F is 2**p times as large, in A, in B and in both.
    growth = float(f[2, 0] @ f[1, 0] / (f[1, 0] @ f[1, 0])) if f[1, 0].any() else 0.0
    if growth <= 0:
        return None
    p = float(np.log2(growth))
    grows = all(near(f[2 * i, 2 * j], growth * f[i, j]) for i, j in ((1, 0), (0, 1), (1, 1)))
    (x, y), _, rank, _ = np.linalg.lstsq(
        np.stack([f[1, 0], f[0, 1]], axis=1), f[1, 1], rcond=_EXACT
    )
    if not grows or not near(f[3, 0], 3**p * f[1, 0]) or rank < 2 or min(x, y) <= 0:
        return None
    # x and y are the shares of A and B in the count, to the power 1 - p; shares add up to 1.
    share = float(x ** (1 / (1 - p)))
    if not 0 < share < 1 or abs(share + y ** (1 / (1 - p)) - 1) > _EXACT:
        return None
    ratio = share / (1 - share)
    # What follows for A twice and B once must be so.
    predicted = (2 * ratio ** (1 - p) * f[1, 0] + f[0, 1]) / (2 * ratio + 1) ** (1 - p)
    return Kind("power", (ratio,), p) if near(f[2, 1], predicted) else None


def _share(f: _Points, near: _Near) -> float | None:
    """The s of F(1, 1) = s F(1, 0) + (1 - s) F(0, 1), by least squares; None where there is none
    between 0 and 1.
    """
    apart = f[1, 0] - f[0, 1]
    if near(apart, 0):
        return 0.5 if near(f[1, 1], f[1, 0]) else None
    # Where A and B differ, their mixture lies on the line between them.
    share = float((f[1, 1] - f[0, 1]) @ apart / (apart @ apart))
    fits = near(f[1, 1], share * f[1, 0] + (1 - share) * f[0, 1])
    return share if fits and 0 < share < 1 else None


def _as_means(f: _Points, near: _Near, tolerance: float) -> Kind:
    """The Kind of what stays as it is when the batch repeats: a mean, two of them, or another
    statistic.
    """
    share = _share(f, near)
    # The ratio that one mixture shows must hold for every other.
    if share is not None:
        ratio = share / (1 - share)
        mixed = [point for point in ((2, 1), (1, 2), (3, 1), (1, 3)) if point in f]
        if all(
            near(f[i, j], (i * ratio * f[1, 0] + j * f[0, 1]) / (i * ratio + j)) for i, j in mixed
        ):
            return Kind("mean", (ratio,))
    ratios = _two_ratios(f) if tolerance < _EXACT else None
    return Kind("statistics") if ratios is None else Kind("two means", ratios)


def _two_ratios(f: _Points) -> tuple[float, float] | None:
    """What two means count, as ratios of A to B; None if F is no sum of two means.

    With D(t) = 1 + alpha t + beta t**2 the product D F is a polynomial of degree 2, so alpha and
    beta solve a linear system from which these polynomials are projected out. The ratios follow
    from the roots of D. A double root, or none, is a product of means, as in a variance or in a
    load-balancing loss.
    """
    # Seven points: three go to the polynomial of degree 2, two to alpha and beta, and two test the
    # fit.
    points = [
        point for point in ((0, 1), (1, 3), (1, 2), (1, 1), (2, 1), (3, 1), (1, 0)) if point in f
    ]
    if len(points) < 7:
        return None
    t = np.array([i / (i + j) for i, j in points])
    values = np.stack([f[point] for point in points])
    basis, _ = np.linalg.qr(np.stack([t**0, t, t**2], axis=1), mode="complete")
    project = basis[:, 3:].T
    target, *columns = ((project @ (t[:, None] ** power * values)).ravel() for power in range(3))
    size = float(np.linalg.norm(target))
    # F is a polynomial already.
    if size < 1e-7:
        return None
    (alpha, beta), *_ = np.linalg.lstsq(np.stack(columns, axis=1), -target, rcond=None)
    if np.linalg.norm(target + alpha * columns[0] + beta * columns[1]) > _EXACT * size:
        return None
    roots = np.roots([beta, alpha, 1]) if abs(beta) > _EXACT else np.array([np.inf, -1 / alpha])
    if np.iscomplexobj(roots) and np.abs(roots.imag).max() > _EXACT:
        return None
    low, high = sorted(float(1 - 1 / root.real) for root in roots)
    return None if low <= 0 or high - low < 1e-3 * high else (low, high)


def _fits_three(
    probe: Probe,
    parts: tuple[Rows, Rows, Rows],
    leaves: Sequence[int],
    left: _Points,
    scales: list[float],
) -> bool:
    """Whether the two means of A and B, and those of A and C, are the same two means of A, B and
    C.
    """
    a, _, c = parts
    right = _scaled(_evaluated(probe, (a, c), leaves, _POINTS), scales)
    whole = _scaled(_evaluated(probe, parts, leaves, [(1, 1, 1)]), scales)
    # Where it cannot be told, two means are the simpler explanation.
    if len(right) < len(_POINTS) or not whole:
        return True
    ratios, others = _two_ratios(left), _two_ratios(right)
    # A and C may count as much as each other in both means, which then are one.
    if ratios is None or others is None:
        return classify(right, _EXACT).name == "mean"
    points = (
        {(i, j, 0): f for (i, j), f in left.items()}
        | {(i, 0, k): f for (i, k), f in right.items()}
        | whole
    )
    times, values = np.array([*points]), np.stack([*points.values()])
    size = max(1.0, np.abs(whole[1, 1, 1]).max())
    # The two ratios of A to C come in either order.
    for matched in (others, others[::-1]):
        # A mean of groups is the sum of their own means, each times its share of what is counted.
        # Fit those means.
        counted = [times * (1, 1 / b, 1 / c) for b, c in zip(ratios, matched, strict=True)]
        shares = np.concatenate(
            [count / count.sum(axis=1, keepdims=True) for count in counted], axis=1
        )
        fitted = shares @ np.linalg.lstsq(shares, values, rcond=None)[0]
        if np.abs(fitted - values).max() <= _EXACT * size:
            return True
    return False
