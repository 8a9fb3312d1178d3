"""Exact sums on the host: what funcga._exact says, in place, and without what the usual numbers do not need.

Only torch has this file: XLA makes one loop of the operations of funcga._exact, and eager torch as many passes as there
are operations. Both have the same bits; numbers that are not finite, or out of range, are left to funcga._exact.

While a window lasts, two digits of 30 bits are one of 60 in the same memory, an int64: a sum is then `wide`, and most
terms are added without a carry. Its `narrow` form is the one that funcga._exact knows, and other windows and replicas.
"""

import math
from collections.abc import Sequence

import torch

from funcga._exact import MOST, Finish, digits_of, format_of, unit_of
from funcga._fold import Tally
from torch_backend import _private

_BITS = 60  # of a wide digit
_MASK = (1 << _BITS) - 1
# A product below this part of the limit is not rounded up to the limit.
_ALMOST = 1 - 2.0**-20
# MOST terms below this part of the unit, and what was there, leave room in an int64: 2**11 * 2**51 + 2**60 < 2**63.
_SMALL = 2.0**-9

Sum = Sequence[torch.Tensor]


def zeros(like: torch.Tensor, floats: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The sum of nothing, of leaves like this one, in the dtype of the accumulator; wide on the host."""
    form = format_of(torch, floats)
    wide = digits_of(like.ndim) * form.digit // _BITS * [torch.int64]
    dtypes = wide if like.is_cpu else digits_of(like.ndim) * [form.integers]
    return tuple([torch.zeros_like(like, dtype=dtype, requires_grad=False) for dtype in (floats, *dtypes)])


def is_wide(total: Sum) -> bool:
    """Whether all digits have 60 bits, as those of a float64 always have."""
    return total[1].dtype is torch.int64


def widened(total: Sum) -> Sum:
    """The same sum with digits of 60 bits."""
    if is_wide(total):
        return total
    highs, lows = ([digit.to(torch.int64) for digit in total[first::2]] for first in (1, 2))
    return total[0], *[high.bitwise_left_shift_(_BITS // 2).add_(low) for high, low in zip(highs, lows, strict=True)]


def narrowed(total: Sum) -> Sum:
    """The same sum with digits of the size of its floats. A wide one is carried in its memory."""
    form = format_of(torch, total[0].dtype)
    if form.digit == _BITS or not is_wide(total):
        return total
    carry(total)
    mask = (1 << form.digit) - 1
    halves = [half for digit in total[1:] for half in (digit >> form.digit, digit & mask)]
    return total[0], *[half.to(form.integers) for half in halves]


def add(total: Sum, value: torch.Tensor, weight: float, limit: float, donate: bool) -> bool:
    """Adds weight * value to a wide sum in its memory; False, and nothing, if a number is not finite or out of range.

    Small terms are not carried from the last digit: whatever reads a sum has to.
    `donate`: whether the value may be written to.
    """
    if not weight:
        return True
    leading, *digits = total
    form = format_of(torch, leading.dtype)
    unit, bound = unit_of(leading.ndim, limit, form), 2.0**form.mantissa / MOST * _ALMOST
    rest = value if donate and value.dtype is form.floats else value.to(form.floats, copy=True)
    greatest = _greatest(rest, _SMALL * unit / abs(weight)) * abs(weight) / unit
    # Usually all terms are below the unit, and begin with their first digit.
    has_leading = greatest >= _ALMOST
    scale = (1.0 if has_leading else 2.0**_BITS) / unit
    if not (greatest < bound and abs(weight) * max(scale, 1.0) < torch.finfo(form.floats).max):  # NaN is not below
        return False
    # The product is rounded before it is scaled, unless neither rounds.
    for factor in [weight * scale] if math.frexp(weight)[0] == 0.5 else [weight, scale]:
        rest.mul_(factor)
    if has_leading:
        leading.add_(torch.trunc(rest))
        rest.frac_().mul_(2.0**_BITS)
    for digit in digits[:-1]:
        digit.add_(rest.to(torch.int64))  # as an integer it is truncated
        rest.frac_().mul_(2.0**_BITS)
    digits[-1].add_(rest.round_().to(torch.int64))
    if greatest >= _SMALL or len(digits) > 1:
        carry(total)
    return True


def _greatest(value: torch.Tensor, small: float) -> float:
    """The greatest absolute value; or a number that is above it, and below what is `small`."""
    flat = value.reshape(-1)
    # No number is larger than the root of the sum of all squares, which is found in a third of the time. Those of tiny
    # numbers may be lost.
    squares = torch.dot(flat, flat)
    if type(squares) is _private.FAKE:
        return 0.0  # while planning nobody knows: as usual
    root = squares.item() ** 0.5
    return root if root < small > 2.0**-60 else max(abs(number.item()) for number in torch.aminmax(flat))


def carry(total: Sum) -> None:
    """Gives a wide sum its one form, in its memory: all digits in [0, 2**60)."""
    leading, *digits = total
    for digit, above in zip(digits[::-1], (*digits[-2::-1], leading), strict=True):
        above.add_(digit >> _BITS)
        digit.bitwise_and_(_MASK)


def finish(total: Sum, tally: Tally, how: Finish) -> torch.Tensor | None:
    """The result, in the memory of a wide sum; None, and nothing, if the quotient may be below the normal numbers."""
    leading, *digits = total
    form = format_of(torch, leading.dtype)
    unit = unit_of(leading.ndim, how.limit, form)
    # Rounded as the sum is.
    by = {"weight": tally.total, "steps": tally.steps, None: 1}[how.divides_by]
    divisor = torch.tensor(by, dtype=form.floats).item()
    least = unit * 2.0 ** (-_BITS * len(digits))
    if form.digit == _BITS or len(digits) > 1 or not 0 < divisor < least / torch.finfo(form.floats).tiny:
        return None
    # The halves of the digit, of either sign, and what is above them: half a half is added, and taken away again.
    (digit,), bits, half = digits, form.digit, 1 << (form.digit - 1)
    digit.add_(half * ((1 << bits) + 1))
    leading.add_((digit >> _BITS).to(form.integers)).mul_(unit)
    for part, size in ((digit >> bits, unit * 2.0**-bits), (digit, unit * 2.0 ** (-2 * bits))):
        # As an integer of 32 bits it keeps its lowest ones.
        signed = part.to(form.integers).bitwise_and_((1 << bits) - 1).sub_(half)
        leading.add_(signed.to(form.floats), alpha=size)
    return leading if divisor == 1 else leading.div_(divisor)
