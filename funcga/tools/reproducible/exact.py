"""Exact sums: numbers in fixed point, whose sum is the same in any order and any grouping.

A float sum rounds after every addition, so its last bits depend on the order. Integers do not
round. A term is therefore taken apart once into a leading number and some digits, in units that are
fixed before the first term:

    term = unit * (leading + digits[0] / 2**30 + digits[1] / 2**60),    |leading| < 2**13,   |digit|
    < 2**30

and only what is below the last digit is lost: half of `limit * 2**-73` at most, whatever else is in
the sum. `leading` is a whole number in a float32 and each digit an int32, so an element takes 12
bytes and no 64-bit types. A float64 is taken apart in the same way, into a float64 below 2**42 and
digits of 60 bits.

- **Adding** adds from the last digit on and carries: digits of a sum are again in [0, 2**30), so
  one sum has one form. The leading numbers are added as floats, which is exact while they stay
  below 2**24: for up to MOST = 2048 terms.
- **NaN and infinity** stand in `leading`, where adding floats treats them as it always does.
- **Out of range.** A term of `limit` or more puts BEYOND into `leading`, a number so large that no
  sum of others comes near it and always positive, so that no two of them cancel. The sum then says
  that it has left the range.
- **Replicas** send digits in pieces that leave room: two digits of 30 bits as three pieces of 20,
  of which an int32 adds up 2**11. So any collective that adds, in any order, is exact.
- **The result** is rounded to a float once, to the nearest or the one next to it. A quotient is
  rounded correctly, by integer arithmetic on its remainder: a compiler may divide by multiplying
  with a reciprocal, or contract a product and a sum into one operation, and all frameworks would no
  longer have the same bits.

A leaf without axes, such as a loss, has four digits instead of two, and a limit 2**30 times as
large: it may be a sum over a million tokens, and costs nothing.

The products of a multiplication by a power of two are exact, and so is `x - trunc(x)`: contracted
or not, the bits are the same. Only the weighted term `w * v` is rounded, once. What follows reads
its bits as an integer, through which no compiler can see.

Sources: Kulisch (2011), "Very fast and exact accumulation of products"; Ahrens, Demmel and Nguyen
(2020), "Algorithms for Efficient Reproducible Floating Point Summation", which assumes no range and
takes twice the memory.

Design note: docs/concepts/inside_exact.md.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from funcga._types import Array, Dtype, Namespace, Reduced, Scalar
from funcga.errors import FuncgaError
from funcga.folds import Fold
from funcga.monoids import Monoid
from funcga.monoids import sum as plain_sum

# The most terms of one sum: micro-batches of a window, on all replicas.
MOST = 2**11
# What stands in `leading` for a term that is out of range. The others of a sum add up to at most
# 2**24 there in float32, and to 2**53 in float64.
BEYOND = 2.0**60


def no_derivative() -> FuncgaError:
    """The error for a step with an exact sum inside of a loss that is differentiated."""
    return FuncgaError(
        "a step with the fold reproducible() is differentiated, and its sums of integers have no "
        "derivative: it would be 0. Use the plain fold inside of a loss."
    )


class Format(NamedTuple):
    """How numbers of one dtype are held: the bits of a float's mantissa, those of a digit, and
    those of a piece, three of which are two digits; all bits of a float but its sign; and the
    exponent of infinity and NaN, as it stands in the bits of a float.
    """

    floats: Dtype
    integers: Dtype
    mantissa: int
    digit: int
    piece: int
    positive: int
    most: int

    def split(self, number: Array) -> tuple[Array, Array]:
        """(exponent, mantissa) of a normal number, as integers; the sign is left out."""
        bits, top = number.view(self.integers), 1 << (self.mantissa - 1)
        return (bits >> (self.mantissa - 1)) & self.most, (bits & (top - 1)) | top


def format_of(xp: Namespace, dtype: Dtype) -> Format:
    """The Format for sums in this dtype, float32 or float64."""
    if dtype == xp.float64:
        return Format(xp.float64, xp.int64, 53, 60, 40, 2**63 - 1, 2**11 - 1)
    return Format(xp.float32, xp.int32, 24, 30, 20, 2**31 - 1, 2**8 - 1)


def _cast(array: Array, dtype: Dtype) -> Array:
    return array.to(dtype) if hasattr(array, "to") else array.astype(dtype)


def digits_of(ndim: int) -> int:
    """How many digits a leaf of so many axes has."""
    return 2 if ndim else 4


def unit_of(ndim: int, limit: float, form: Format) -> float:
    """What a leading number of 1 stands for."""
    wider = 2.0 ** (0 if ndim else 30)
    return limit * wider * MOST / 2.0**form.mantissa


def expanded(xp: Namespace, term: Array, limit: float) -> tuple[Array, ...]:
    """(leading, *digits) of a float; the digits are of either sign."""
    form = format_of(xp, term.dtype)
    unit = unit_of(term.ndim, limit, form)
    size = abs(term)
    below = size < unit * (2.0**form.mantissa / MOST)
    # Twice the number, by adding 1 to the exponent: an integer, so that nothing before it is
    # contracted with what follows. Of 0 it makes the least normal number, which has only zeros in
    # its digits.
    bits = xp.where(below, term, 0.0).view(form.integers)
    rest = (bits + (1 << (form.mantissa - 1))).view(form.floats) * (0.5 / unit)
    leading = xp.round(rest)
    digits = []
    rest = rest - leading
    for left in range(digits_of(term.ndim))[::-1]:
        rest = rest * 2.0**form.digit
        whole = xp.round(rest)
        digits.append(_cast(whole, form.integers))
        if left:
            rest = rest - whole
    outside = xp.where(size < float("inf"), BEYOND, term)  # NaN and infinities as they are
    return xp.where(below, leading, outside), *digits


def _negative(integers: Array) -> Array:
    """A mask: -1, which is all bits, where an integer is below 0, else 0."""
    return integers >> (8 * integers.dtype.itemsize - 1)


def _not_finite(xp: Namespace, numbers: Array) -> Array:
    """NaN and infinities as they are, and 0 for any finite number."""
    return numbers - _finite(xp, numbers)


def _finite(xp: Namespace, numbers: Array) -> Array:
    """The numbers that are finite, and 0 for others."""
    return xp.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)


def _carried(terms: Iterable[Array], bits: int) -> tuple[Array, list[Array]]:
    """(what is carried out, digits of so many bits, most significant first) of terms of any size,
    least significant first.
    """
    carry: Array = None
    digits: list[Array] = []
    for term in terms:
        total = term if carry is None else term + carry
        carry = total >> bits
        digits.append(total & ((1 << bits) - 1))
    return carry, digits[::-1]


def added(xp: Namespace, a: Reduced, b: Reduced) -> Reduced:
    """The sum of two, of which each may be a term or a sum. Its digits are in [0, 2**digit)."""
    if not isinstance(a, tuple):
        return a + b
    form = format_of(xp, a[0].dtype)
    pairs = zip(a[:0:-1], b[:0:-1], strict=True)
    carry, digits = _carried((left + right for left, right in pairs), form.digit)
    return a[0] + b[0] + _cast(carry, form.floats), *digits


def pieces(xp: Namespace, total: Reduced) -> Reduced:
    """A sum as numbers to be added up over MOST replicas at most, by any addition of floats and
    integers.
    """
    if not isinstance(total, tuple):
        return total
    piece = format_of(xp, total[0].dtype).piece
    mask, half = (1 << piece) - 1, piece // 2
    cut: list[Array] = []
    for high, low in zip(total[1::2], total[2::2], strict=True):
        middle = (low >> piece) | ((high & ((1 << half) - 1)) << half)
        cut += [high >> half, middle, low & mask]
    return total[0], *cut


def joined(xp: Namespace, sums: Reduced) -> Reduced:
    """The sum whose `pieces` were added up."""
    if not isinstance(sums, tuple):
        return sums
    form = format_of(xp, sums[0].dtype)
    half, digits = form.piece // 2, list[Array]()
    carry, cut = _carried(sums[:0:-1], form.piece)
    for high, middle, low in zip(cut[::3], cut[1::3], cut[2::3], strict=True):
        digits.append((high << half) | (middle >> half))
        digits.append(((middle & ((1 << half) - 1)) << form.piece) | low)
    return sums[0] + _cast(carry, form.floats), *digits


def rounded(xp: Namespace, total: Sequence[Array], limit: float) -> Array:
    """A sum as a float, one of the two next to it; NaN where a term was out of range."""
    form = format_of(xp, total[0].dtype)
    # Digits of either sign, of which the first that is not 0 tells the size: nothing cancels below.
    half = 1 << (form.digit - 1)
    carry, digits = _carried((digit + half for digit in total[:0:-1]), form.digit)
    unit = unit_of(total[0].ndim, limit, form)
    number = (total[0] + _cast(carry, form.floats)) * unit
    for digit in digits:
        unit *= 2.0**-form.digit
        number = number + _cast(digit - half, form.floats) * unit
    is_lost = (total[0] >= BEYOND / 2) & (total[0] < float("inf"))
    return xp.where(is_lost, float("nan"), number)


def quotient(xp: Namespace, number: Array, divisor: Scalar) -> Array:
    """Number / divisor, rounded correctly, for a positive divisor; 0 where the divisor, or the
    result, is 0 or below the normal numbers.
    """
    form = format_of(xp, number.dtype)
    has_doubles = xp.__name__ == "torch" and number.device.type != "mps"
    if has_doubles and form.floats == xp.float32:
        return _quotient_of_doubles(xp, number, divisor)
    below = form.mantissa - 1
    total = xp.zeros_like(number.reshape(-1)[:1]).sum() + divisor  # where and what the number is
    exponent, mantissa = form.split(number)
    total_exponent, total_mantissa = form.split(total)
    # The mantissa of the quotient: 2**shift * mantissa / total_mantissa, an integer of as many
    # bits.
    is_less = _negative(mantissa - total_mantissa)
    doubled = 1.0 - _cast(is_less, form.floats)
    result = _cast(
        _cast(mantissa, form.floats) * (2.0**below / _cast(total_mantissa, form.floats)) * doubled,
        form.integers,
    )
    # Integers wrap around, and the remainder is small: so it is exact, although neither product is.
    twice = ((mantissa << (below - is_less)) - result * total_mantissa) * 2
    for away in (total_mantissa, 3 * total_mantissa):
        result = result - _negative(away - twice) + _negative(twice + away)
    power = exponent + is_less + ((form.most >> 1) - total_exponent)
    unusual = (power - 1) | (form.most - 1 - power)  # below 0 if not that of a normal number
    for each in (exponent, total_exponent):
        unusual = unusual | (each - 1) | (form.most - 1 - each)
    magnitude = ((power - 1) << below) + result
    sign = number.view(form.integers) & ~form.positive
    exact = ((magnitude | sign) & ~_negative(unusual)).view(form.floats) + _not_finite(
        xp, number / total
    )
    return xp.where(total < xp.finfo(number.dtype).tiny, 0.0, exact)


def _quotient_of_doubles(xp: Namespace, number: Array, divisor: Scalar) -> Array:
    """The same for float32, in a tenth of the operations.

    Two numbers of 24 bits have a quotient that is 2**-49 of itself, or more, away from where
    float32 rounds the other way. So nothing is rounded twice (Figueroa, 1995), also where a product
    with the reciprocal takes the place of the division.
    """
    if not hasattr(divisor, "dtype"):
        divisor = xp.full((), divisor, dtype=number.dtype, device="cpu")  # rounded like others
    quotient = number.double() / divisor.double()
    least = xp.finfo(number.dtype).tiny
    return xp.where((divisor < least) | (abs(quotient) < least), 0.0, quotient).to(number.dtype)


# -- the parts of a fold. A sum of integers is exact as it is: one array, which is left alone.


def _check_readable(tensor: Array) -> None:
    """Raises FuncgaError for a tensor whose bits say nothing."""
    if tensor.requires_grad:
        raise no_derivative()
    if hasattr(tensor, "device_mesh"):
        raise FuncgaError(
            f"reproducible() was given a DTensor {[*tensor.shape]}, whose gradients a mesh has "
            "added up in floats already, in an order of its own. Fold DTensors with "
            "funcga.mean(), funcga.per_weight() or funcga.sum()."
        )


@dataclass(frozen=True)
class Lift:
    """What the lift of a `plain` fold makes of a value, as an exact sum of one term."""

    plain: Fold
    limit: float

    @property
    def name(self) -> str:
        """What it is called among folds."""
        return f"exact {self.plain.name.partition(',')[0]} below {self.limit:g}"

    def __call__(self, xp: Namespace, value: Array, weight: Scalar) -> Reduced:
        """The exact sum of one term."""
        if xp.__name__ == "torch":
            _check_readable(value)
        else:
            value = import_module("funcga.tools.reproducible.in_jax").readable(value)
        term = self.plain.reducer.lift(xp, value, weight)
        return expanded(xp, term, self.limit) if "float" in str(term.dtype) else term


monoid = Monoid(plain_sum.identity, added, collective="sum", sent=pieces, received=joined)


@dataclass(frozen=True)
class Finish:
    """The result of an exact sum, divided by the tally's "weight" or "steps", or by nothing."""

    divides_by: str | None
    limit: float

    @property
    def name(self) -> str:
        """What it is called among folds."""
        return "identity" if self.divides_by is None else f"by_{self.divides_by}"

    def __call__(self, xp: Namespace, total: Reduced, tally: Any) -> Array:
        """The result, rounded once."""
        if not isinstance(total, tuple):
            return total
        number = rounded(xp, total, self.limit)
        if not isinstance(tally.steps, int | float):
            number = xp.where(tally.steps > MOST, float("nan"), number)
        elif tally.steps > MOST:
            number = xp.full_like(number, float("nan"))
        return (
            number
            if self.divides_by is None
            else quotient(xp, number, getattr(tally, self.divides_by))
        )

    def lost(self, xp: Namespace, total: Reduced, tally: Any) -> list[tuple[Scalar, str]]:
        """(whether, why) the sum is not known."""
        if not isinstance(total, tuple):
            return []
        most = self.limit * (1 if total[0].ndim else 2.0**30)
        return [
            (
                (_finite(xp, total[0]) >= BEYOND / 2).any(),
                f"a weighted value of one micro-batch is not below {most:.3g}, and an exact sum "
                "is held in a range that is fixed beforehand. Make the loss or the weights "
                "smaller, or the range larger: funcga.reproducible(fold, "
                f"limit=2.0**{math.log2(min(self.limit * 2.0**20, GREATEST)):.0f})",
            ),
            (
                tally.steps > MOST,
                f"it is a sum over {tally.steps} micro-batches, and an exact sum has room for "
                f"{MOST} on all replicas together. Let a micro-batch have more rows",
            ),
        ]


# Limits for which every constant above is a normal float32.
LEAST, GREATEST = 2.0**-40, 2.0**60
