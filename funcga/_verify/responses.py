"""Responses: what kind of function of its rows a loss is, told from batches in which two groups of rows repeat.

F(i, j) is the gradient of a batch that has a group A of rows i times and another one, B, j times. Repeating the whole
batch k times parts a loss into a sum and the rest: F = k S + M. A sum is additive in the groups. A mean is a weighted
average of F(1, 0) and F(0, 1) whose weights are proportional to what the loss counts. Two means that count different
things are, as a function of the share t = i / (i + j), a rational function with two poles, and whatever is invariant
under repetition but none of these is a function of statistics of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from funcga._verify.probe import Probe, Rows
from funcga._verify.tolerance import Limit

_POINTS = ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (3, 0), (2, 2), (2, 1), (1, 2), (3, 1), (1, 3))


class Kind(NamedTuple):
    """What kind of function of its rows some leaves are.

    name: "nothing", "sum", "sum and constant", "sum and mean", "mean", "two means", "power", "statistics", "coupled",
    or "unknown" where it could not be evaluated. ratios: of a mean, how much A weighs for each B; of a power, a sum
    over something to the power 1 - `power`, how much of that A has for each B.
    """

    name: str
    ratios: tuple[float, ...] = ()
    power: float = 0.0


class Responses(NamedTuple):
    """Two groups of rows, and the Kind that they show; F(i, j) of some leaves as one vector."""

    a: Rows
    b: Rows
    kind: Kind


def respond(probe: Probe, a: Rows, b: Rows, leaves: Sequence[int], limit: Limit) -> Responses:
    """The Responses of these leaves of grad_fn's output."""
    points = _points(probe, a, b, leaves)
    if not {(1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 2)} <= points.keys():
        return Responses(a, b, Kind("unknown"))
    scales = _scales(points, limit)
    kind = classify(_scaled(points, scales), 10 * limit.relative)
    if kind.name == "two means" and not _holds_for_three(probe, a, b, leaves, scales):
        kind = Kind("statistics")
    return Responses(a, b, kind)


_Points = dict[tuple[int, int], Any]


def _points(probe: Probe, a: Rows, b: Rows, leaves: Sequence[int]) -> _Points:
    """F(i, j) at the points where it could be evaluated and is finite: a list of vectors, one a leaf."""
    points: _Points = {}
    for i, j in _POINTS:
        try:
            found = probe.values(a * i + b * j)
        except Exception:  # some losses refuse some batches
            continue
        if all(np.isfinite(found[leaf]).all() for leaf in leaves):
            points[i, j] = [_flat(found[leaf]) for leaf in leaves]
    return points


def _scales(points: _Points, limit: Limit) -> list[float]:
    sizes = [max(np.abs(leaf).max(initial=0.0) for leaf in found) for found in zip(*points.values(), strict=True)]
    return [size + limit.share * max(sizes) + limit.floor / limit.relative for size in sizes]


def _scaled(points: _Points, scales: list[float]) -> _Points:
    """Each list of vectors as one, of size 1."""
    return {
        point: np.concatenate([leaf / scale for leaf, scale in zip(found, scales, strict=True)])
        for point, found in points.items()
    }


def _holds_for_three(probe: Probe, a: Rows, b: Rows, leaves: Sequence[int], scales: list[float]) -> bool:
    """Whether two means of A, B and C follow from those of A and B and of A and C, or there are too few rows to tell.

    Of two groups alone a mean over pairs of rows of two kinds looks like two means.
    """
    rest = [row for row in probe.every if row not in {*a, *b}]
    c = tuple(rest[: len(a)])
    points = _points(probe, a, c, leaves) if len(rest) >= len(a) else {}
    if len(points) < len(_POINTS):
        return True
    left, right = (_scaled(found, scales) for found in (_points(probe, a, b, leaves), points))
    ratios, others = _two_ratios(left), _two_ratios(right)
    if ratios is None or others is None:  # A and C may count as much as each other in both means
        return classify(right, _TRUSTED).name == "mean"
    whole = _scaled({(1, 1): [_flat(probe.values(a + b + c)[leaf]) for leaf in leaves]}, scales)[1, 1]
    return any(
        np.abs(_of_three(left, right, ratios, order) - whole).max() <= _TRUSTED * max(1.0, np.abs(whole).max())
        for order in (others, others[::-1])
    )


def _of_three(left: _Points, right: _Points, ratios: tuple[float, float], others: tuple[float, float]) -> Any:
    """The sum of two means over A, B and C, from that over A and B and that over A and C."""
    value = left[1, 0]
    for b, c, apart_b, apart_c in zip(ratios, others, _apart(left, ratios), _apart(right, others), strict=True):
        value = value - (apart_b / b + apart_c / c) / (1 + 1 / b + 1 / c)
    return value


def _apart(f: _Points, ratios: tuple[float, float]) -> Any:
    """How far each of the two means of A is from that of B."""
    mixed = [(1, 0), (3, 1), (2, 1), (1, 1), (1, 2), (1, 3)]
    shares = np.array([[i * ratio / (i * ratio + j) for ratio in ratios] for i, j in mixed])
    return np.linalg.lstsq(shares, np.stack([f[p] - f[0, 1] for p in mixed]), rcond=None)[0]


def _flat(leaf: Any) -> Any:
    leaf = leaf.ravel()
    return np.concatenate([leaf.real, leaf.imag]) if np.iscomplexobj(leaf) else leaf


def classify(f: dict[tuple[int, int], Any], tolerance: float) -> Kind:
    """The Kind of a vector that is scaled to about 1, from its values at points (i, j)."""

    def near(x: Any, y: Any) -> bool:
        return bool(np.abs(x - y).max(initial=0.0) <= tolerance)

    if (3, 0) in f and not near(f[3, 0], 2 * f[2, 0] - f[1, 0]):
        power = _of_power(f, near)
        if power is not None:
            return power
        steps = [float(np.linalg.norm(f[k + 1, 0] - f[k, 0])) for k in (1, 2)]
        return Kind("statistics" if steps[1] < _SETTLING * steps[0] else "coupled")
    sums = {p: f[2 * p[0], 2 * p[1]] - f[p] for p in ((1, 0), (0, 1), (1, 1))}
    rest = {p: 2 * f[p] - f[2 * p[0], 2 * p[1]] for p in ((1, 0), (0, 1), (1, 1))}
    without_sum = all(near(part, 0) for part in sums.values())
    without_rest = all(near(part, 0) for part in rest.values())
    additive = near(sums[1, 1], sums[1, 0] + sums[0, 1])
    if without_sum and without_rest:
        return Kind("nothing")
    if without_sum:
        return _of_mean(f, near, tolerance)
    if additive and without_rest:
        return Kind("sum")
    if additive and near(rest[1, 0], rest[0, 1]) and near(rest[1, 1], rest[1, 0]):
        return Kind("sum and constant")
    share = _share(rest, near) if additive else None
    return Kind("statistics") if share is None else Kind("sum and mean", (share / (1 - share),))


def _of_power(f: dict[tuple[int, int], Any], near: Callable[[Any, Any], bool]) -> Kind | None:
    """The Kind of a sum over a count to some power, F(i, j) = (i S + j T) / (i c + j d)**(1 - p), if it is one.

    Repeated k times it grows as k**p. Of a sum over the root of its rows the counts are those of rows, and of a norm,
    which is the gradient's sum over the root of a sum as well, they are sums of squares.
    """
    if not {(2, 1), (3, 0)} <= f.keys():
        return None
    growth = float(f[2, 0] @ f[1, 0] / (f[1, 0] @ f[1, 0])) if f[1, 0].any() else 0.0
    if growth <= 0:
        return None
    p = float(np.log2(growth))
    doubled = all(near(f[2 * i, 2 * j], growth * f[i, j]) for i, j in ((1, 0), (0, 1), (1, 1)))
    (x, y), _, rank, _ = np.linalg.lstsq(np.stack([f[1, 0], f[0, 1]], axis=1), f[1, 1], rcond=1e-6)
    if not doubled or not near(f[3, 0], 3**p * f[1, 0]) or rank < 2 or min(x, y) <= 0:
        return None
    share = float(x ** (1 / (1 - p)))
    if not 0 < share < 1 or abs(share + y ** (1 / (1 - p)) - 1) > _TRUSTED:
        return None
    ratio = share / (1 - share)
    follows = (2 * ratio ** (1 - p) * f[1, 0] + f[0, 1]) / (2 * ratio + 1) ** (1 - p)
    return Kind("power", (ratio,), p) if near(f[2, 1], follows) else None


# Of what converges as 1/k, such as a variance with Bessel's correction, a step is a third of the last one or less; of
# a logarithm it is 0.58, of what is linear in k 1.
_SETTLING = 0.45


def _share(f: dict[tuple[int, int], Any], near: Callable[[Any, Any], bool]) -> float | None:
    """The L of F(1, 1) = L F(1, 0) + (1 - L) F(0, 1), by least squares; None where there is none between 0 and 1."""
    apart = f[1, 0] - f[0, 1]
    if near(apart, 0):
        return 0.5 if near(f[1, 1], f[1, 0]) else None
    share = float((f[1, 1] - f[0, 1]) @ apart / (apart @ apart))
    fits = near(f[1, 1], share * f[1, 0] + (1 - share) * f[0, 1])
    return share if fits and 0 < share < 1 else None


def _of_mean(f: dict[tuple[int, int], Any], near: Callable[[Any, Any], bool], tolerance: float) -> Kind:
    share = _share(f, near)
    if share is not None:
        ratio = share / (1 - share)
        mixed = [p for p in ((2, 1), (1, 2), (3, 1), (1, 3)) if p in f]
        if all(near(f[i, j], (i * ratio * f[1, 0] + j * f[0, 1]) / (i * ratio + j)) for i, j in mixed):
            return Kind("mean", (ratio,))
    ratios = _two_ratios(f) if tolerance < 1e-6 else None
    return Kind("statistics") if ratios is None else Kind("two means", ratios)


_TRUSTED = 1e-6


def _two_ratios(f: dict[tuple[int, int], Any]) -> tuple[float, float] | None:
    """What two means count, as ratios of A to B; None if F is no sum of two means.

    With D(t) = 1 + alpha t + beta t**2 the product D F is a polynomial of degree 2, so alpha and beta solve a linear
    system from which these polynomials are projected out. The ratios follow from the roots of D. A double root, or
    none, is a product of means, as in a variance or in a load-balancing loss.
    """
    points = [p for p in ((0, 1), (1, 3), (1, 2), (1, 1), (2, 1), (3, 1), (1, 0)) if p in f]
    if len(points) < 7:
        return None
    t = np.array([i / (i + j) for i, j in points])
    values = np.stack([f[p] for p in points])
    basis, _ = np.linalg.qr(np.stack([t**0, t, t**2], axis=1), mode="complete")
    project = basis[:, 3:].T
    target, *columns = ((project @ (t[:, None] ** power * values)).ravel() for power in range(3))
    size = float(np.linalg.norm(target))
    if size < 1e-7:
        return None
    (alpha, beta), *_ = np.linalg.lstsq(np.stack(columns, axis=1), -target, rcond=None)
    residual = np.linalg.norm(target + alpha * columns[0] + beta * columns[1])
    if residual > _TRUSTED * size:
        return None
    roots = np.roots([beta, alpha, 1]) if abs(beta) > 1e-6 else np.array([np.inf, -1 / alpha])
    if np.iscomplexobj(roots) and np.abs(roots.imag).max() > 1e-6:
        return None
    ratios = sorted(float(1 - 1 / root.real) for root in roots)
    if min(ratios) <= 0 or ratios[1] - ratios[0] < 1e-3 * ratios[1]:
        return None
    return ratios[0], ratios[1]
