"""Groups: which kind of function of its rows a result is, found from groups of rows.

F(i, j) is the gradient of a batch that has a group A of rows i times and another one, B, j times.
A sum is i F(1, 0) + j F(0, 1). A mean is a weighted average of F(1, 0) and F(0, 1), with weights
proportional to what the loss counts. Any other F that repetition does not change depends on means
over the batch, or is a sum of several means, which counts in the batch then explain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

import numpy as np

from funcga._types import Array
from funcga.folds import Fold
from funcga.tools.verify.causes import Cause, cause
from funcga.tools.verify.counted import Count, counts
from funcga.tools.verify.exact import Case
from funcga.tools.verify.probe import Probe, Rows

# How often each group of rows is in a batch, and the values there: a list of arrays, later one
# vector of size 1.
Point = tuple[int, ...]
_Points = dict[Point, Array]
_POINTS = ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 2), (3, 3), (2, 1), (1, 2), (3, 1), (1, 3))
_NEEDED = {*_POINTS[:6]}

# Of what converges as 1/k, such as a variance with Bessel's correction, a step is a third of the
# last one or less; of a logarithm it is 0.58, of what is linear in k 1.
_SETTLING = 0.45


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the two parts of the rows, A and B, show of some leaves under one fold."""

    case: Case
    leaves: Sequence[int]

    @property
    def probe(self) -> Probe:
        """The function."""
        return self.case.probe

    @property
    def fold(self) -> Fold:
        """The fold of the leaves."""
        return self.probe.folds[self.leaves[0]]

    @property
    def has_weight(self) -> bool:
        """Whether weight= was given."""
        return self.probe.program.weight is not None

    @property
    def kind(self) -> str:
        """What kind of function of its rows the leaves are: "nothing", "sum", "sum and constant",
        "mean", "statistics", "coupled", or "unknown" where it could not be evaluated.
        """
        return self._kind_and_ratio[0]

    @property
    def ratio(self) -> float:
        """Of a mean, how much A weighs for each B."""
        return self._kind_and_ratio[1]

    @cached_property
    def _kind_and_ratio(self) -> tuple[str, float]:
        values = _values_at(self.case, self.case.parts, self.leaves, _POINTS)
        if not values.keys() >= _NEEDED:
            return "unknown", 0.0
        return classify(values, 10 * self.case.limit.relative)

    def cause(self, key: str, **words: object) -> Cause:
        """The Cause with the texts of this key, for these leaves."""
        where, subject = self.probe.paths[self.leaves[0]], self.probe.subject
        (a, b), (weight_a, weight_b, both) = map(len, self.case.parts), self.weights
        about = {"where": where, "subject": subject, "a": a, "b": b, "ratio": self.ratio}
        weights = {"weight_a": weight_a, "weight_b": weight_b, "both": both}
        return cause(key, **about | weights | words)

    @cached_property
    def weights(self) -> tuple[float, float, float]:
        """The weights of A, of B and of both together."""
        (a, b), weigh = self.case.parts, self.probe.weigh
        return weigh(a), weigh(b), weigh(a + b)

    @cached_property
    def divisor(self) -> Count | None:
        """The count that the loss divides by: the rows, or the first expression that fits."""
        return next(iter(self.fitting(1)), None)

    def fitting(self, number: int, has_sum: bool = False) -> tuple[Count, ...]:
        """The first `number` counts such that the leaves are a sum of means over these counts, plus
        a sum if `has_sum`; () if there are none.

        Where several count alike in this batch, it is those that the loss counts also when the rows
        of one array no longer belong to those of another.
        """
        every = [*counts(self.probe)]
        fits = [*self._fits([*combinations(range(len(every)), number)], has_sum)]
        if len(fits) > 1:
            apart = replace(self.case, probe=self.probe.with_rows_apart(self.case.seed))
            fits = [*replace(self, case=apart)._fits(fits, has_sum), *fits]
        return tuple(every[index] for index in fits[0]) if fits else ()

    def _fits(self, chosen: Sequence[tuple[int, ...]], has_sum: bool) -> Iterator[tuple[int, ...]]:
        """Those of the chosen counts, by index, that explain the leaves.

        With three groups of rows few counts fit by chance. With two, a mean over pairs of rows of
        two kinds looks like two means.
        """
        order, size = self.case.order, self.case.group
        parts = [order[:size], order[size : 2 * size], order[2 * size : 3 * size]]
        points = [point for point in product((0, 1, 2), repeat=3) if 0 < sum(point) < 4]
        vectors = _values_at(self.case, parts, self.leaves, points)
        # A loss may refuse some batches, and a few points show nothing.
        if not chosen or len(vectors) <= 3 * (len(chosen[0]) + has_sum):
            return
        times = np.array([*vectors])
        # As many numbers as points have the same distances as whole gradients.
        values = np.transpose(np.linalg.qr(np.transpose([*vectors.values()]), mode="r"))
        tolerance = 100 * self.case.limit.relative * np.linalg.norm(values)
        every = [times * [count.of(part) for part in parts] for count in counts(self.probe)]
        for indices in chosen:
            counted = [every[index] for index in indices]
            if not all((each.sum(1) > 0).all() for each in counted):
                continue
            # The mean of several groups is the sum of their own means, each times its share of what
            # is counted. Fit those means.
            shares = [each / each.sum(1, keepdims=True) for each in counted]
            terms = np.concatenate([*shares, *([times] if has_sum else [])], axis=1)
            if np.linalg.norm(_remainder(terms, values)) <= tolerance:
                yield indices

    def leaves_out(self, weigh: Callable[[Rows], float]) -> bool:
        """Whether rows that weigh 0 have a gradient that is not 0: the leaves change without these
        rows. A micro-batch of them has the weight 0, and a mean leaves it out.
        """
        probe, every = self.probe, self.probe.all_rows
        rows = tuple(row for row in every if weigh((row,)))
        some = probe.try_values(rows) if 0 < len(rows) < len(every) else None
        if some is None:
            return False
        differences = self.case.limit.differences(some, probe.whole)
        return max(differences[leaf] for leaf in self.leaves) > self.case.limit.relative

    def reweighs(self) -> bool:
        """Whether the ratio of A to B depends on the parameters: then the loss does not divide by
        a count.
        """
        moved = self.probe.at_other_parameters()
        if moved is None:
            return False
        other = replace(self, case=replace(self.case, probe=moved))
        if other.kind != self.kind:
            return other.kind in ("statistics", "coupled")
        tolerance = max(1e-5, 100 * self.case.limit.relative)
        return abs(self.ratio - other.ratio) > tolerance * (self.ratio + other.ratio)


def _values_at(
    case: Case, parts: Sequence[Rows], leaves: Sequence[int], points: Sequence[Point]
) -> _Points:
    """The values of the leaves as one vector, scaled to about 1, at each point where the loss
    can be evaluated and is finite.
    """
    values, scales = _Points(), case.limit.scales(case.evaluated)
    for point in points:
        rows = tuple(row for part, times in zip(parts, point, strict=True) for row in part * times)
        result = case.probe.try_values(rows)
        if result is not None and all(np.isfinite(result[leaf]).all() for leaf in leaves):
            flat = [result[leaf].ravel() / scales[leaf] for leaf in leaves]
            values[point] = np.concatenate([part for x in flat for part in (x.real, x.imag)])
    return values


def _remainder(terms: Array, values: Array) -> Array:
    """What is left of the values at each point after the best linear combination of the terms."""
    return terms @ np.linalg.lstsq(terms, values, rcond=None)[0] - values


def classify(f: _Points, tolerance: float) -> tuple[str, float]:
    """The kind and the ratio of a function, from its scaled values at points (i, j)."""
    times, values = np.array([*f]), np.array([*f.values()])
    is_zero: Callable[[Array], bool] = lambda array: np.abs(array).max(initial=0.0) <= tolerance
    is_made_of: Callable[[Array], bool] = lambda terms: is_zero(_remainder(terms, values))
    if is_zero(values):
        return "nothing", 0.0
    if is_made_of(times):
        return "sum", 0.0
    # Where A and B differ, the value of both lies on the line between them. The ratio that this
    # mixture shows must hold for every other.
    a, b, both = f[1, 0], f[0, 1], f[1, 1]
    apart = a - b
    share = 0.5 if is_zero(apart) else float((both - b) @ apart / (apart @ apart))
    if 0 < share < 1:
        ratio = share / (1 - share)
        weights = times * [ratio, 1]
        if is_made_of(weights / weights.sum(1, keepdims=True)):
            return "mean", ratio
    if is_made_of(np.column_stack([times, np.ones(len(times))])):
        return "sum and constant", 0.0
    # What does not grow linearly with the number of repetitions, and does not converge.
    if (3, 3) in f and not is_zero(f[3, 3] - 2 * f[2, 2] + both):
        first, second = (float(np.linalg.norm(f[k + 1, k + 1] - f[k, k])) for k in (1, 2))
        if second >= _SETTLING * first:
            return "coupled", 0.0
    return "statistics", 0.0
