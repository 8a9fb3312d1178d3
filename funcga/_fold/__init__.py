"""The state of a window: for each leaf a fold bound to its dtypes, and a tally of how much has
been folded.
"""

import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from funcga._backend import Arrays
from funcga._backend.dispatch import is_numpy
from funcga._types import Array, Dtype, Reduced, Scalar
from funcga.errors import FuncgaError
from funcga.folds import Fold

# -- arrays and dtypes of any framework, which differ in their names alone


def describe(leaf: Any) -> str:
    """`float32[8, 3]`, or the type of anything that is not an array."""
    try:
        dtype, shape = leaf.dtype, leaf.shape
    except AttributeError:
        return "None" if leaf is None else f"of type {type(leaf).__name__}"
    except RuntimeError:  # a lazy parameter, or a nested tensor of the old kind
        dtype, shape = leaf.dtype, "?"
    names = getattr(dtype, "names", None) or [dtype]  # JAX's float0 is a struct of NumPy's
    kind_of = "a NumPy array " if is_numpy(leaf) else ""
    return f"{kind_of}{names[0]}[{', '.join(map(str, shape))}]".replace("torch.", "")


def kind(dtype: Dtype) -> str:
    """'bool', 'int', 'float', 'complex' or 'other'."""
    name = str(getattr(dtype, "name", dtype))
    return next((kind for kind in ("bool", "int", "float", "complex") if kind in name), "other")


def accumulator_dtype(dtype: Dtype, arrays: Arrays) -> Dtype:
    """The dtype that sums of this dtype are held in: at least 32 bits."""
    kind_of = kind(dtype)
    if kind_of == "other" or dtype.itemsize >= (8 if kind_of == "complex" else 4):
        return dtype
    if kind_of in ("bool", "int"):
        return arrays.as_array(0).dtype
    return arrays.as_dtype("float32" if kind_of == "float" else "complex64")


# -- weights and their tally: counts stay exact where a float32 would stop at 2**24

_MOST = sys.float_info.max
# The range in which a float32 and its reciprocal are both normal numbers.
LEAST32, MOST32 = 2.0**-126, 2.0**126


class Tally(NamedTuple):
    """The total weight and the number of micro-batches.

    Attributes:
        weight: A tuple of scalars whose sum is the total: one where the framework has 64-bit
            scalars, else a float32 and the float32 remainder, which together are exact to 48 bits.
            A normalizer gets one scalar, their sum.
        steps: How many micro-batches have been folded.

    Example:
        >>> accumulator = funcga.Accumulator(funcga.mean())
        >>> state = accumulator.update(accumulator.init(torch.zeros(())), torch.ones(()), weight=3)
        >>> int(state.tally.steps)
        1
    """

    weight: tuple[Scalar, ...] | Scalar
    steps: Scalar

    def merge(self, other: "Tally") -> "Tally":
        """The tally of both."""
        a, b, steps = self.weight, other.weight, self.steps + other.steps
        if len(a) == len(b) == 1:
            return Tally((a[0] + b[0],), steps)
        # The error of the high sum joins the low parts, and a second two_sum renormalises.
        high, error = two_sum(a[0], b[0])
        return Tally(two_sum(high, error + (a[1] + b[1])), steps)

    @property
    def total(self) -> Scalar:
        """The total weight as one scalar, rounded to the type of its limbs."""
        first, *rest = self.weight
        return sum(rest, first)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its rounding error, exactly: `a + b == high + low` (Knuth, 1969)."""
    high = a + b
    part = high - a
    return high, (a - (high - part)) + (b - part)


def addends(weight: Scalar, is_wide: bool, arrays: Arrays) -> tuple[Array, ...]:
    """A weight as arrays that it is the sum of: one float64 if wide, else two of float32."""
    xp, array = arrays.xp, arrays.as_array
    if is_wide:
        return (array(weight, xp.float64),)
    if isinstance(weight, int | float):
        # The first 24 bits, which are those of a float32, and the rest (Dekker, 1971).
        shifted = weight * (2.0**29 + 1)
        high = shifted - (shifted - weight)
        return array(high, xp.float32), array(weight - high, xp.float32)
    weight, whole = array(weight), array(0).dtype
    if kind(weight.dtype) == "float":
        high = array(weight, xp.float32)
        return high, array(weight - array(high, weight.dtype), xp.float32)
    if weight.dtype.itemsize < whole.itemsize:
        weight = array(weight, whole)
    # The lower 16 bits of an integer and the rest, each exact in float32.
    low = weight & 0xFFFF
    return two_sum(array(weight - low, xp.float32), array(low, xp.float32))


def check_weight(weight: object, arrays: Arrays) -> Scalar:
    """The weight as a Python number where the host can see it, else as the 0-d array that it is.

    Raises FuncgaError if it is not a scalar number, or if the host sees that it is negative, NaN or
    infinite.
    """
    # The usual case: a number of rows, exact in every dtype of weights.
    if type(weight) is int and 0 <= weight <= 2**53:
        return weight
    number = as_number(weight)
    if not isinstance(number, numbers.Number):
        kind_of = kind(number.dtype) if arrays.is_array(number) else None
        if kind_of not in ("bool", "int", "float") or number.shape != ():
            raise FuncgaError(
                f"the weight of a micro-batch is {describe(number)}; it must be a real "
                "number or a 0-d array, "
                'such as the number of tokens: weight=lambda batch: (batch["labels"] != -100).sum()'
            )
        # An array that is traced, or on a device, stays one: the host does not wait for it.
        number = arrays.scalar(number)
    return _checked(number) if isinstance(number, numbers.Number) else number


def check_narrow(weight: Scalar) -> None:
    """Raises FuncgaError for a weight that is not 0 and out of the range of a float32."""
    if isinstance(weight, int | float) and weight and not LEAST32 <= weight <= MOST32:
        raise FuncgaError(
            f"the weight of a micro-batch is {weight!r}, which a float32 cannot hold, in which "
            "they are counted here. Weigh in other units, as by tokens / 1e6."
        )


def weight_on_host(weight: Scalar) -> float:
    """The weight as a Python number; the host waits for a device.

    Raises FuncgaError if it is no number, or negative, NaN or infinite.
    """
    return float(_checked(weight.item() if has_no_axes(weight) else weight))


def _checked(weight: Scalar) -> int | float:
    number: Scalar = weight
    if not isinstance(weight, numbers.Real) or not 0 <= number <= _MOST:
        raise FuncgaError(
            f"the weight of a micro-batch is {weight!r}; it must be finite and at least 0, such as "
            "the number of rows or tokens in it."
        )
    return int(number) if isinstance(weight, numbers.Integral) else float(number)


def is_quantity(number: object, least: float = 0.0, most: float = _MOST) -> bool:
    """Whether it is a finite real number above `least`, and not above `most`; bools are none."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        return False
    real: Scalar = number
    return bool(least < real <= most)


def check_quantity(
    name: str,
    number: object,
    example: str,
    meaning: str = "a finite number above 0",
    *,
    least: float = 0.0,
    most: float = _MOST,
) -> None:
    """Raises FuncgaError unless it is a finite real number above `least`, and not above `most`."""
    if not is_quantity(number, least, most):
        raise FuncgaError(f"{name} is {number!r}: it must be {meaning}, such as {name}={example}.")


def as_number(value: Scalar) -> Scalar:
    """A scalar of NumPy, or a 0-d array of one, as a Python number; anything else as it is."""
    return value.item() if type(value).__module__ == "numpy" and has_no_axes(value) else value


def has_no_axes(value: object) -> bool:
    """Whether it is a 0-d array, or a scalar, of any library of arrays."""
    return getattr(value, "shape", None) == ()


# -- the fold of one leaf


@dataclass(frozen=True)
class LeafFold:
    """`identity`, `lift`, `combine` and `normalize` of one leaf, with casts to wide enough
    dtypes.

    `adds`: what a backend may add in place instead of `lift` and `combine`: w * v of a
    "weighted" sum, v of a "plain" one; None if the fold is not a sum. `bits`: of the floats that
    sums are held in, 0 for others: the range of 32 is smaller than that of the weights, and with 64
    these need as many. `is_mean`: whether the result is sum(w * v) / sum(w), which is the same if
    all weights are multiplied by one number. `axis`: the one that values are collected along.
    """

    fold: Fold
    accumulator_dtype: Dtype
    result_dtype: Dtype
    arrays: Arrays
    adds: Literal["weighted", "plain"] | None = None
    bits: int = 0
    is_mean: bool = False
    axis: int | None = None

    def identity(self, like: Array) -> Reduced:
        """The reduced value of no micro-batch, in the shape of `like`."""
        xp = self.arrays.xp
        # Lifted, as a reducer may make several arrays of a leaf, or one of another shape.
        zeros = xp.zeros_like(like, dtype=self.accumulator_dtype)
        return self.fold.reducer.monoid.identity(xp, self.fold.reducer.lift(xp, zeros, 0))

    def lift(self, value: Array, weight: Scalar) -> Reduced:
        """One micro-batch's value as it enters the monoid."""
        as_array, dtype = self.arrays.as_array, self.accumulator_dtype
        # JAX takes no int of more than 31 bits as an operand.
        is_array = self.arrays.is_array(weight)
        weight = as_array(weight, dtype, value) if is_array else float(weight)
        return self.fold.reducer.lift(self.arrays.xp, as_array(value, dtype), weight)

    def combine(self, a: Reduced, b: Reduced) -> Reduced:
        """Both, combined by the monoid."""
        return self.fold.reducer.monoid.combine(self.arrays.xp, a, b)

    def folded(self, total: Reduced | None, value: Array, weight: Scalar) -> Reduced:
        """The accumulator, if there is one yet, with one more micro-batch's value."""
        before = self.identity(value) if total is None else total
        return self.combine(before, self.lift(value, weight))

    def normalize(self, reduced: Reduced, tally: Tally) -> Reduced:
        """The result, in the dtype of results."""
        arrays, apply = self.arrays, self.fold.normalizer.apply
        if self.fold.normalizer.wide and kind(self.result_dtype) == "float":
            # Integers as floats of the result, but at least float32.
            floats = accumulator_dtype(self.result_dtype, arrays)
            as_float = lambda part: (
                arrays.as_array(part, floats) if kind(part.dtype) == "int" else part
            )
            reduced = _each(as_float, reduced)
        beside = largest(reduced) if isinstance(reduced, tuple) else reduced
        scalars = [
            arrays.as_array(amount, self.accumulator_dtype, beside)
            if arrays.is_array(amount)
            else float(amount)
            for amount in (tally.total, tally.steps)
        ]
        result = apply(arrays.xp, reduced, Tally(*scalars))
        if self.result_dtype == arrays.xp.bool:
            # Bools are folded as ints, whose identity for a maximum is the lowest int.
            result = _each(lambda part: part > 0 if kind(part.dtype) == "int" else part, result)
        if not isinstance(result, tuple):  # the usual case
            return arrays.as_array(result, self.result_dtype)
        return _each(lambda part: arrays.as_array(part, self.result_dtype), result)

    def check_known(self, reduced: Reduced, tally: Tally, where: Callable[[], str]) -> list[Array]:
        """Raises FuncgaError if the host sees that the result is lost, as that of a sum out of
        range. Returns the conditions for it that the host does not see.
        """
        unseen, lost = list[Array](), self.fold.normalizer.lost
        for condition, why in lost(self.arrays.xp, reduced, tally) if lost else ():
            # While planning, arrays without numbers count as True: here, as known.
            known = self.arrays.scalar(condition ^ True)
            if not isinstance(known, bool):
                unseen.append(condition)
            elif not known:
                raise FuncgaError(f"the result of {where()} is not known: {why}.")
        return unseen


def _each(function: Callable[[Array], Array], result: Reduced) -> Reduced:
    """The result with a function applied to each array; a NamedTuple stays one."""
    # Some normalizers return several arrays, as Moments does.
    if not isinstance(result, tuple):
        return function(result)
    parts = [_each(function, part) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


def parts_of(reduced: Reduced) -> tuple[Array, ...]:
    """The arrays of the accumulator of a leaf."""
    return reduced if isinstance(reduced, tuple) else (reduced,)


def largest(reduced: Reduced) -> Array:
    """The array that has the shape of the leaf: in a tuple, such as a sum and a count, the one
    with most axes.
    """
    if not isinstance(reduced, tuple):
        return reduced
    axes = [len(part.shape) for part in reduced]
    return reduced[axes.index(max(axes))]


def bind(fold: Fold, like: Array, where: Callable[[], str], arrays: Arrays) -> LeafFold:
    """The fold for a leaf of `like`'s dtype, at the path `where()`.

    Raises FuncgaError if the fold cannot take that dtype, or asks for one that the framework does
    not have.
    """
    reducer, normalizer = fold.reducer, fold.normalizer
    dtype = like.dtype if reducer.dtype is None else arrays.as_dtype(reducer.dtype)
    # Both must support this kind: a mean of integers would have to be rounded.
    kind_of = kind(dtype)
    if kind_of not in reducer.kinds or kind_of not in normalizer.kinds:
        raise FuncgaError(
            f"{where()} is {describe(like)}, and the fold `{fold.name}` is not defined for "
            f"{kind_of} values. Give it a fold of its own, as in fold={{'w': funcga.mean(), "
            "'count': funcga.sum()}: integers are averaged by funcga.mean(dtype='float32'), and a "
            "random key is threaded by funcga.carry(). Or leave it out, None in its place."
        )
    # A dtype that the fold asks for is used; else sums get at least 32 bits, and a maximum keeps
    # its own.
    if reducer.dtype is None and reducer.monoid.widens:
        dtype = accumulator_dtype(like.dtype, arrays)
    adds: Literal["weighted", "plain"] | None = None
    if reducer.additive:
        adds = "weighted" if reducer.linear else "plain"
    result_dtype = _result_dtype(fold, like.dtype, dtype, arrays)
    # Of the real part, if it is complex.
    bits = dtype.itemsize * {"float": 8, "complex": 4}.get(kind_of, 0)
    return LeafFold(
        fold,
        dtype,
        result_dtype,
        arrays,
        adds,
        bits,
        is_mean=adds == "weighted" and normalizer.divides_by == "weight",
        axis=reducer.monoid.axis,
    )


def _result_dtype(fold: Fold, leaf_dtype: Dtype, dtype: Dtype, arrays: Arrays) -> Dtype:
    """The dtype of the result for leaves of the dtype `leaf_dtype`, whose sums are in `dtype`."""
    reducer, normalizer = fold.reducer, fold.normalizer
    if normalizer.dtype is not None:
        return arrays.as_dtype(normalizer.dtype)
    if normalizer.wide:
        if kind(dtype) != "int":
            return dtype
        # What the framework makes of a quotient: float64 for integers of 64 bits in JAX, torch's
        # default dtype in torch. Of at least 32 bits, as counts in bfloat16 would be rounded.
        quotient = arrays.as_array(1, dtype) / 1
        return accumulator_dtype(quotient.dtype, arrays)
    # A maximum of bools is a bool, a sum of them a number.
    selects = reducer.dtype is None and reducer.unweighted and reducer.monoid.collective != "sum"
    keeps_kind = kind(leaf_dtype) == kind(dtype)
    return leaf_dtype if selects or keeps_kind else dtype


def check_shape(fold: Fold, like: Array, where: Callable[[], str], arrays: Arrays) -> None:
    """Raises FuncgaError if the leaf lacks the axis that the fold collects along, or is not the
    stack of arrays that it needs.
    """
    axis, stacked = fold.reducer.monoid.axis, fold.reducer.stacked
    if stacked is not None and like.shape[:1] != (stacked,):
        raise FuncgaError(
            f"{where()} is {describe(like)}, and the fold `{fold.name}` takes leaves of "
            f"{stacked} arrays that are stacked on axis 0: {arrays.xp.__name__}.stack([...]); "
            "funcga.statistics.batch_moments makes those of pooled()."
        )
    if axis is not None and not -len(like.shape) <= axis < len(like.shape):
        raise FuncgaError(
            f"{where()} is {describe(like)}: it has no axis {axis} for concat(axis={axis}) "
            "to collect along. Fold it with funcga.mean() or funcga.sum(), or return one value for "
            "each example."
        )
