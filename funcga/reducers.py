"""A reducer: how one micro-batch's value enters the monoid.

`reducer = (lift, monoid)`. Lift is where weights enter: with `weighted`, a micro-batch of weight 0 contributes
nothing, whatever its value, so a fully masked micro-batch whose mean is NaN does no harm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga import monoids
from funcga.monoids import Monoid

_NUMBERS = ("bool", "int", "float", "complex")


@dataclass(frozen=True)
class Reducer:
    """`lift(xp, value, weight)` into a monoid: one array, or a tuple of arrays, for a leaf of one micro-batch.

    `value` comes in the dtype of the accumulator: `dtype`, or that of the leaf with floats of less than 32 bits in
    float32. `weight` is a number, or a 0-d array of that dtype. `kinds` are the kinds of dtype that it accepts:
    'bool', 'int', 'float', 'complex', 'other'. `linear` says that lift(v, w) = w * v in the monoid of sums, so that a
    weight which all micro-batches share can be taken out of the loop; `unweighted`, that lift(v, w) = v. `stacked` is
    the length that axis 0 of a leaf must have, where a leaf is several arrays, stacked.
    """

    lift: Callable[[Any, Any, Any], Any]
    monoid: Monoid
    dtype: Any = None
    kinds: tuple[str, ...] = _NUMBERS
    linear: bool = False
    stacked: int | None = None
    unweighted: bool = False
    over_steps: bool = False

    @property
    def elementwise(self) -> bool:
        """Whether each element of the result depends on the same element of the values alone."""
        return self.monoid.collective is not None and (self.linear or self.unweighted)

    @property
    def additive(self) -> bool:
        """Whether it is a sum, of w * v if `linear`, else of v: what a backend adds in place."""
        return self.monoid.collective == "sum" and (self.linear or self.unweighted)

    @property
    def carries(self) -> bool:
        """Whether it keeps the last value alone, as carry() does."""
        return self.monoid.ordered and self.monoid.axis is None


def _scale(xp: Any, value: Any, weight: Any) -> Any:
    if isinstance(weight, int | float):
        return xp.zeros_like(value) if weight == 0 else value if weight == 1 else value * weight
    return xp.where(weight != 0, value * weight, 0)


def _keep(xp: Any, value: Any, weight: Any) -> Any:
    return value


def _halves(xp: Any, value: Any, weight: Any) -> Any:
    return (value >> 16, value & 0xFFFF) if "int" in str(value.dtype) else value


def _moments(xp: Any, value: Any, weight: Any) -> tuple[Any, Any, Any]:
    zeros = xp.zeros_like(value)
    filled = zeros.sum() + weight  # made of the value, so that it is where and what the value is
    return filled, xp.where(filled > 0, value, 0), zeros


def _unstack(xp: Any, value: Any, weight: Any) -> tuple[Any, Any, Any]:
    count, mean, variance = value[0], value[1], value[2]
    return count, xp.where(count > 0, mean, 0), xp.where(count > 0, variance * count, 0)


def _mark(xp: Any, value: Any, weight: Any) -> tuple[Any, Any]:
    return value, xp.ones_like(value, dtype=xp.bool)


# The weighted sum, `sum(w * v)`; a micro-batch of weight 0 is left out.
weighted = Reducer(_scale, monoids.sum, kinds=("float", "complex"), linear=True)
# The sum, `sum(v)`, whatever the weights.
sum = Reducer(_keep, monoids.sum, unweighted=True)
# The same of pairs, [2, ...]; integers in two halves, which 2**47 do not overflow.
pairs = Reducer(_halves, monoids.counts, kinds=("int", "float"), stacked=2)
# The elementwise maximum and minimum.
max = Reducer(_keep, monoids.max, kinds=("bool", "int", "float"), unweighted=True)
min = Reducer(_keep, monoids.min, kinds=("bool", "int", "float"), unweighted=True)
# (total weight, weighted mean, weighted sum of squared deviations from it).
moments = Reducer(_moments, monoids.moments, kinds=("float",), over_steps=True)
# (count, mean, sum of squared deviations from it), of leaves [3, ...] = (count, mean, variance); no weights.
pooled = Reducer(_unstack, monoids.moments, kinds=("float",), stacked=3)
# The last value.
carry = Reducer(_mark, monoids.last, kinds=(*_NUMBERS, "other"))


def concat(axis: int = 0) -> Reducer:
    """Collects the values of all micro-batches along an axis, in their order."""
    return Reducer(_keep, monoids.concat(axis), kinds=(*_NUMBERS, "other"), unweighted=True)
