"""Weights and their tally: what a micro-batch counts, and how much has been folded.

Counts stay exact where a float32 would stop at 2**24.
"""

import numbers
import sys
from typing import NamedTuple

from funcga._backend import Arrays
from funcga._types import Array, Scalar
from funcga.errors import FuncgaError

_MOST = sys.float_info.max
# Between these a float32 has all of its bits, and so has its reciprocal.
LEAST32, MOST32 = 2.0**-126, 2.0**126


class Tally(NamedTuple):
    """The total weight and the number of micro-batches.

    Attributes:
        weight: A tuple of scalars whose sum is the total: one where the framework has 64-bit scalars, else a float32
            and the float32 remainder, which together are exact to 48 bits. A normalizer gets one scalar, their sum.
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
        if len(a) != len(b):
            raise FuncgaError(
                "one state counts in 64 bits and the other in 32: they were made with and without JAX's 64-bit types. "
                'Choose once for the whole program: jax.config.update("jax_enable_x64", True)'
            )
        if len(a) == 1:
            return Tally((a[0] + b[0],), steps)
        # The sum of the high parts loses some low bits. They join the low parts, and a second sum carries them over.
        high, error = two_sum(a[0], b[0])
        return Tally(two_sum(high, error + (a[1] + b[1])), steps)

    @property
    def total(self) -> Scalar:
        """The total weight as one scalar, rounded to the type of its limbs."""
        return self.weight[0] if len(self.weight) == 1 else self.weight[0] + self.weight[1]


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its rounding error, exactly: `a + b == high + low` (Knuth, 1969)."""
    high = a + b
    part = high - a
    return high, (a - (high - part)) + (b - part)


def check_weight(weight: object, arrays: Arrays) -> Scalar:
    """The weight as a Python number where the host can see it, else as the 0-d array that it is.

    Raises FuncgaError if it is not a scalar number, or if the host sees that it is negative, NaN or infinite.
    """
    # The usual case: a number of rows, which every type that counts can hold.
    if type(weight) is int and 0 <= weight <= 2**53:
        return weight
    number = as_number(weight)
    if not isinstance(number, numbers.Number):
        kind = arrays.kind(number.dtype) if arrays.is_array(number) else None
        if kind not in ("bool", "int", "float") or number.shape != ():
            raise FuncgaError(
                f"the weight of a micro-batch is {arrays.describe(number)}; it must be a real number or a 0-d array, "
                f'such as the number of tokens: weight=lambda batch: (batch["labels"] != -100).sum()'
            )
        # Where the array is traced, or on a device, it stays one: its value is not waited for.
        number = arrays.scalar(number)
    return _checked(number) if isinstance(number, numbers.Number) else number


def check_narrow(weight: Scalar) -> None:
    """Raises FuncgaError for a weight that is not 0 and out of the range of a float32."""
    if isinstance(weight, int | float) and weight and not LEAST32 <= weight <= MOST32:
        raise FuncgaError(
            f"the weight of a micro-batch is {weight!r}, which a float32 cannot hold, in which they are counted "
            f"here. Weigh in other units, as by tokens / 1e6."
        )


def weight_on_host(weight: Scalar) -> float:
    """The weight as a Python number. If it is on a device, the host waits for it.

    Raises FuncgaError if it is no number, or negative, NaN or infinite.
    """
    return float(_checked(weight.item() if has_no_axes(weight) else weight))


def _checked(weight: Scalar) -> int | float:
    number: Scalar = weight
    if not isinstance(weight, numbers.Real) or not 0 <= number <= _MOST:
        raise FuncgaError(
            f"the weight of a micro-batch is {weight!r}; it must be finite and at least 0, such as the number of "
            f"rows or tokens in it."
        )
    return int(number) if isinstance(weight, numbers.Integral) else float(number)


def is_quantity(number: object, least: float = 0.0, most: float = _MOST) -> bool:
    """Whether it is a finite real number above `least`, and not above `most`; bools are none."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        return False
    real: Scalar = number
    return bool(least < real <= most)


def as_number(value: Scalar) -> Scalar:
    """A scalar of NumPy, or a 0-d array of one, as a Python number; anything else as it is."""
    return value.item() if type(value).__module__ == "numpy" and has_no_axes(value) else value


def has_no_axes(value: object) -> bool:
    """Whether it is a 0-d array, or a scalar, of any library of arrays."""
    return getattr(value, "shape", None) == ()
