"""A reducer: how one micro-batch's value enters the monoid, `reducer = (lift, monoid)`.

What a window holds is combine(lift(v1, w1), combine(lift(v2, w2), ...)), of values v and weights w.
Weights enter by `lift` alone: with `weighted`, a micro-batch of weight 0 contributes nothing,
whatever its value, so a fully masked micro-batch whose mean is NaN does no harm.

Example:
    >>> funcga.reducers.weighted.lift(torch, torch.tensor(5.0), 3)
    tensor(15.)
    >>> funcga.reducers.sum.lift(torch, torch.tensor(5.0), 3)
    tensor(5.)
"""

from collections.abc import Callable
from dataclasses import dataclass

from funcga import monoids
from funcga._types import Array, Dtype, Namespace, Reduced, Scalar
from funcga.monoids import Monoid

_NUMBERS = ("bool", "int", "float", "complex")


@dataclass(frozen=True)
class Reducer:
    """`lift(xp, value, weight)` into a monoid: one array, or a tuple of arrays, for a leaf of one
    micro-batch.

    Args:
        lift: What a micro-batch contributes. `value` comes in the dtype of the accumulator;
            `weight` is a number, or a 0-d array of that dtype.
        monoid: How contributions combine.
        dtype: The dtype of the accumulator. By default that of the leaf, with floats of less than
            32 bits in float32.
        kinds: The kinds of dtype that it accepts: "bool", "int", "float", "complex", "other".
        linear: Whether lift(v, w) = w * v in the monoid of sums, so that a weight which all
            micro-batches share can be taken out of the loop.
        stacked: The length that axis 0 of a leaf must have, where a leaf is several arrays,
            stacked.
        unweighted: Whether lift(v, w) = v.
        over_steps: True if the result is a statistic over micro-batches, so that it changes with n.
        per_element: Whether each element of what is lifted depends on the same element of the value
            alone.
        of_bits: Whether it looks at the bits of a value, so that there is no derivative.

    Example:
        >>> square = lambda xp, value, weight: value * value
        >>> squares = funcga.Reducer(square, funcga.monoids.sum, kinds=("float",))
        >>> mean_square = funcga.Fold(squares, funcga.normalizers.by_steps)
        >>> step = funcga.accumulate(lambda x: x.sum(), 2, in_axes=0, fold=mean_square)
        >>> step(torch.tensor([1.0, 3.0]))
        tensor(5.)
    """

    lift: Callable[[Namespace, Array, Scalar], Reduced]
    monoid: Monoid
    dtype: Dtype = None
    kinds: tuple[str, ...] = _NUMBERS
    linear: bool = False
    stacked: int | None = None
    unweighted: bool = False
    over_steps: bool = False
    per_element: bool = False
    of_bits: bool = False

    @property
    def elementwise(self) -> bool:
        """Whether each element of the result depends on the same element of the values alone."""
        return self.per_element or (
            self.monoid.collective is not None and (self.linear or self.unweighted)
        )

    @property
    def additive(self) -> bool:
        """Whether it is a sum, of w * v if `linear`, else of v: what a backend adds in place."""
        return self.monoid.collective == "sum" and (self.linear or self.unweighted)

    @property
    def carries(self) -> bool:
        """Whether it keeps the last value alone, as carry() does."""
        return self.monoid.ordered and self.monoid.axis is None


def _scale(xp: Namespace, value: Array, weight: Scalar) -> Array:
    # 0 * NaN is NaN, so a weight of 0 selects zeros.
    if isinstance(weight, int | float):
        return xp.zeros_like(value) if weight == 0 else value if weight == 1 else value * weight
    return xp.where(weight != 0, value * weight, 0)


# The weighted sum: lift(v, w) = w v, and 0 for w = 0.
weighted = Reducer(_scale, monoids.sum, kinds=("float", "complex"), linear=True)


def _keep(xp: Namespace, value: Array, weight: Scalar) -> Array:
    return value


# The sum, the maximum and the minimum: lift(v, w) = v.
sum = Reducer(_keep, monoids.sum, unweighted=True)
max = Reducer(_keep, monoids.max, kinds=("bool", "int", "float"), unweighted=True)
min = Reducer(_keep, monoids.min, kinds=("bool", "int", "float"), unweighted=True)


def concat(axis: int = 0) -> Reducer:
    """Collects the values of all micro-batches along an axis, in their order."""
    return Reducer(_keep, monoids.concat(axis), kinds=(*_NUMBERS, "other"), unweighted=True)


def _halves(xp: Namespace, value: Array, weight: Scalar) -> Reduced:
    return (value >> 16, value & 0xFFFF) if "int" in str(value.dtype) else value


# The sum of pairs, [2, ...]; integers in two halves, v = 2**16 high + low, whose sums 2**47 does
# not overflow.
pairs = Reducer(_halves, monoids.counts, kinds=("int", "float"), stacked=2)


def _moments(xp: Namespace, value: Array, weight: Scalar) -> Reduced:
    zeros = xp.zeros_like(value)
    filled = zeros.sum() + weight  # with the device, dtype and tracing of the value
    return filled, xp.where(filled > 0, value, 0), zeros


# One value of weight w has the moments (w, v, 0).
moments = Reducer(_moments, monoids.moments, kinds=("float",), over_steps=True)


def _unstack(xp: Namespace, value: Array, weight: Scalar) -> Reduced:
    count, mean, variance = value[0], value[1], value[2]
    return count, xp.where(count > 0, mean, 0), xp.where(count > 0, variance, 0)


# Items with these count, mean and variance, [3, ...], have these moments; no weights.
pooled = Reducer(_unstack, monoids.moments, kinds=("float",), stacked=3)


def _with_one(xp: Namespace, value: Array, weight: Scalar) -> Reduced:
    return value, xp.ones_like(value)


# One value v is the largest of one, and the sum of exp(v - v) is 1.
logsumexp = Reducer(_with_one, monoids.logsumexp, kinds=("float",))


def _mark(xp: Namespace, value: Array, weight: Scalar) -> Reduced:
    return value, xp.ones_like(value, dtype=xp.bool)


# The last value.
carry = Reducer(_mark, monoids.last, kinds=(*_NUMBERS, "other"))
