"""A normalizer: what becomes of the reduced value, once, at the end.

It divides by what was folded, never by what was planned; where nothing was folded the result is zeros, not NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_NUMBERS = ("bool", "int", "float", "complex", "other")


@dataclass(frozen=True)
class Normalizer:
    """`apply(xp, reduced, tally)`: the result of a leaf from what was reduced, and how much of it there was.

    `tally.weight` and `tally.steps` are numbers, or 0-d arrays of the reduced dtype. `dtype` is that of the result;
    None keeps the leaf's own. `kinds` are the kinds of accumulator dtype that it accepts.
    """

    apply: Callable[[Any, Any, Any], Any]
    dtype: Any = None
    kinds: tuple[str, ...] = _NUMBERS


class Moments(NamedTuple):
    """Weighted mean and (population) variance over micro-batches: two arrays of the leaf's shape and dtype."""

    mean: Any
    variance: Any


def _divide(xp: Any, reduced: Any, total: Any) -> Any:
    if isinstance(reduced, tuple):
        return tuple(_divide(xp, part, total) for part in reduced)
    if isinstance(total, int | float):
        return reduced / total if total else xp.zeros_like(reduced)
    return xp.where(total != 0, reduced / xp.where(total != 0, total, xp.ones_like(total)), xp.zeros_like(reduced))


def _spread(xp: Any, reduced: Any, tally: Any) -> Moments:
    weight, mean, deviation = reduced
    return Moments(mean, deviation / xp.where(weight > 0, weight, 1))


def _first(xp: Any, reduced: Any, tally: Any) -> Any:
    return reduced[0]


by_weight = Normalizer(lambda xp, reduced, tally: _divide(xp, reduced, tally.weight), kinds=("float", "complex"))
by_steps = Normalizer(lambda xp, reduced, tally: _divide(xp, reduced, tally.steps), kinds=("float", "complex"))
identity = Normalizer(lambda xp, reduced, tally: reduced)
moments = Normalizer(_spread)
carry = Normalizer(_first)
