"""A normalizer: what becomes of the reduced value, once, at the end.

It divides by what was folded, never by what was planned; a total of 0 gives zeros, not NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_ANY = ("bool", "int", "float", "complex", "other")


@dataclass(frozen=True)
class Normalizer:
    """`apply(xp, reduced, tally)`: the result of a leaf from what was reduced, and how much of it there was.

    `tally.weight` and `tally.steps` are numbers, or 0-d arrays of the reduced dtype. `dtype` is that of the result;
    None keeps the leaf's own. `kinds` are the kinds of accumulator dtype that it accepts. `wide` says that the
    result is in the dtype of the accumulator, and of integers a float32. `divides_by` says that all it does is divide
    by the tally's "weight" or "steps", which a backend may do in place.
    """

    apply: Callable[[Any, Any, Any], Any]
    dtype: Any = None
    kinds: tuple[str, ...] = _ANY
    wide: bool = False
    divides_by: str | None = None


class Moments(NamedTuple):
    """Weighted mean and (population) variance over micro-batches: two arrays of the leaf's shape and dtype."""

    mean: Any
    variance: Any


class Pooled(NamedTuple):
    """Count, mean and population variance, sum((x - mean)**2) / count, of all that was counted: arrays of one shape."""

    count: Any
    mean: Any
    variance: Any


def _divide(xp: Any, reduced: Any, total: Any) -> Any:
    if isinstance(reduced, tuple):
        return tuple(_divide(xp, part, total) for part in reduced)
    if isinstance(total, int | float):
        return reduced / total if total else xp.zeros_like(reduced)
    return xp.where(total != 0, reduced / xp.where(total != 0, total, 1), 0)


def _quotient(xp: Any, reduced: Any, tally: Any) -> Any:
    if isinstance(reduced, tuple):  # the halves of integers, which division makes floats
        high, low = reduced
        reduced = high / 1 * 65536.0 + low / 1
    return _divide(xp, reduced[0], reduced[1])


def _spread(xp: Any, reduced: Any, tally: Any) -> Moments:
    weight, mean, deviation = reduced
    return Moments(mean, deviation / xp.where(weight > 0, weight, 1))


def _pool(xp: Any, reduced: Any, tally: Any) -> Pooled:
    count, mean, deviation = reduced
    return Pooled(count, mean, deviation / xp.where(count > 0, count, 1))


def _first(xp: Any, reduced: Any, tally: Any) -> Any:
    return reduced[0]


# By the total weight; zeros if that is 0.
by_weight = Normalizer(
    lambda xp, reduced, tally: _divide(xp, reduced, tally.weight), kinds=("float", "complex"), divides_by="weight"
)
# By the number of micro-batches, whatever their weights.
by_steps = Normalizer(
    lambda xp, reduced, tally: _divide(xp, reduced, tally.steps), kinds=("float", "complex"), divides_by="steps"
)
# The first of a pair by the second.
ratio = Normalizer(_quotient, kinds=("int", "float"), wide=True)
# Nothing: the reduced value itself.
identity = Normalizer(lambda xp, reduced, tally: reduced)
# `Moments` of what reducers.moments holds, `Pooled` of reducers.pooled, and the value of what reducers.carry holds.
moments = Normalizer(_spread)
pooled = Normalizer(_pool, wide=True)
carry = Normalizer(_first)
