"""A normalizer: what becomes of the reduced value, once, at the end.

It divides by what was folded, never by what was planned; a total of 0 gives zeros, not NaN.

Example:
    >>> by_weight, by_steps = funcga.normalizers.by_weight, funcga.normalizers.by_steps
    >>> x = torch.tensor([1.0, 1.0, 7.0])  # micro-batches [1, 1] and [7]
    >>> for normalizer in (by_weight, by_steps):
    ...     fold = funcga.Fold(funcga.reducers.weighted, normalizer)
    ...     print(funcga.accumulate(lambda x: x.mean(), 2, in_axes=0, fold=fold)(x))
    tensor(3.)
    tensor(4.5000)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcga._types import Array, Dtype, Namespace, Reduced, Scalar

_ANY = ("bool", "int", "float", "complex", "other")


@dataclass(frozen=True)
class Normalizer:
    """`apply(xp, reduced, tally)`: the result of a leaf from what was reduced, and how much of it
    there was.

    Args:
        apply: The function. `tally.weight` and `tally.steps` are numbers, or 0-d arrays of the
            reduced dtype.
        dtype: The dtype of the result; by default the leaf's own.
        kinds: The kinds of accumulator dtype that it accepts: "bool", "int", "float", "complex",
            "other".
        wide: True if the result keeps the dtype of the accumulator. Integers are given to `apply`
            as floats, and the result is what a quotient of two of them is, at least float32.
        divides_by: "weight" or "steps" if all it does is divide by the tally's, which a backend may
            do in place.
        lost: For folds whose sums have a fixed range, as that of `reproducible`.
            `lost(xp, reduced, tally)` returns (condition, message) pairs. Where a condition holds,
            the result is NaN, and an error with the message is raised if the host knows the
            condition. The tally is that of the state, whose weight may be an array.

    Example:
        >>> from funcga.normalizers import Normalizer
        >>> root = Normalizer(lambda xp, reduced, tally: xp.sqrt(reduced), kinds=("float",))
        >>> square = lambda xp, value, weight: value * value
        >>> squares = funcga.Reducer(square, funcga.monoids.sum, kinds=("float",))
        >>> norm = funcga.Fold(squares, root)
        >>> funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, fold=norm)(torch.tensor([3.0, 4.0]))
        tensor(5.)
    """

    apply: Callable[[Namespace, Reduced, Any], Any]
    dtype: Dtype = None
    kinds: tuple[str, ...] = _ANY
    wide: bool = False
    divides_by: str | None = None
    lost: Callable[[Namespace, Reduced, Any], list[tuple[Scalar, str]]] | None = None

    @property
    def only_divides(self) -> bool:
        """Whether it divides by a count at most, so that the result of a sum is linear in it."""
        return self.divides_by is not None or self.apply is identity.apply


class Moments(NamedTuple):
    """Weighted mean and (population) variance over micro-batches: two arrays of the leaf's shape
    and dtype.

    Example:
        >>> step = funcga.accumulate(lambda x: x.mean(), 2, in_axes=0, fold=funcga.moments())
        >>> step(torch.tensor([1.0, 3.0, 5.0, 7.0]))  # the means of two micro-batches are 2 and 6
        Moments(mean=tensor(4.), variance=tensor(4.))
    """

    mean: Array
    variance: Array


class Pooled(NamedTuple):
    """Count, mean and population variance, sum((x - mean)**2) / count, of all that was counted:
    arrays of one shape.

    Example:
        >>> moments = lambda x: {"mean": x.mean(), "var": x.var(correction=0)}
        >>> statistics = lambda x: funcga.statistics.batch_moments(moments(x), len(x))
        >>> step = funcga.accumulate(statistics, 2, in_axes=0, fold=funcga.pooled())
        >>> step(torch.tensor([1.0, 3.0, 5.0, 7.0]))
        Pooled(count=tensor(4.), mean=tensor(4.), variance=tensor(5.))
    """

    count: Array
    mean: Array
    variance: Array


def _divide(xp: Namespace, reduced: Reduced, total: Scalar) -> Reduced:
    """Reduced / total, and 0 for a total of 0."""
    if isinstance(reduced, tuple):
        return tuple(_divide(xp, part, total) for part in reduced)
    if isinstance(total, int | float):
        return reduced / total if total else xp.zeros_like(reduced)
    return xp.where(total != 0, reduced / xp.where(total != 0, total, 1), 0)


# The mean: reduced / sum(w).
by_weight = Normalizer(
    lambda xp, reduced, tally: _divide(xp, reduced, tally.weight),
    kinds=("float", "complex"),
    divides_by="weight",
)
# reduced / n: every micro-batch counts alike, whatever its weight.
by_steps = Normalizer(
    lambda xp, reduced, tally: _divide(xp, reduced, tally.steps),
    kinds=("float", "complex"),
    divides_by="steps",
)
# The reduced value itself.
identity = Normalizer(lambda xp, reduced, tally: reduced)


def _quotient(xp: Namespace, reduced: Reduced, tally: Any) -> Array:
    # Integers come in two halves, which division makes floats.
    if isinstance(reduced, tuple):
        high, low = reduced
        reduced = high / 1 * 65536.0 + low / 1
    return _divide(xp, reduced[0], reduced[1])


# The first of a pair by the second: sum(v[0]) / sum(v[1]).
ratio = Normalizer(_quotient, kinds=("int", "float"), wide=True)


def _spread(xp: Namespace, reduced: Reduced, tally: Any) -> Moments:
    _, mean, variance = reduced
    return Moments(mean, variance)


def _pool(xp: Namespace, reduced: Reduced, tally: Any) -> Pooled:
    return Pooled(*reduced)


# Of (weight, mean, variance) the mean and the variance.
moments = Normalizer(_spread)
# The same with the count, which is the weight.
pooled = Normalizer(_pool, wide=True)


def _log(xp: Namespace, reduced: Reduced, tally: Any) -> Array:
    largest, total = reduced
    # Where all values are -inf so is the result, as a constant: its derivative is 0, and not NaN.
    is_nothing = largest == float("-inf")
    return xp.where(is_nothing, float("-inf"), largest + xp.log(xp.where(is_nothing, 1, total)))


# Of the largest v and the sum of exp(v - largest) the log of the sum of exp(v).
logsumexp = Normalizer(_log, kinds=("float",))
# Of (value, is there one) the value.
carry = Normalizer(lambda xp, reduced, tally: reduced[0])
