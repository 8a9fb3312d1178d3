"""Exact sums on the host: what funcga._exact says, in place, and without what the usual numbers do not need.

Only torch has this file: XLA makes one loop of the operations of funcga._exact, and eager torch as many passes as there
are operations. Both have the same bits; numbers that are not finite, or out of range, are left to funcga._exact.
"""

import math
from collections.abc import Sequence

import torch

from funcga._exact import MOST, Finish, digits_of, format_of, unit_of
from funcga._fold import Tally

# A product below this part of the limit is not rounded up to the limit.
_ALMOST = 1 - 2.0**-20


def zeros(like: torch.Tensor, floats: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The sum of nothing, of leaves like this one, in the dtype of the accumulator."""
    form = format_of(torch, floats)
    dtypes = [floats, *[form.integers] * digits_of(like.ndim)]
    return tuple([torch.zeros_like(like, dtype=dtype, requires_grad=False) for dtype in dtypes])


def add(total: Sequence[torch.Tensor], value: torch.Tensor, weight: float, limit: float, donate: bool) -> bool:
    """Adds weight * value to a sum in its memory; False, and nothing, if a number is not finite or out of range.

    `donate`: whether the value may be written to.
    """
    if not weight:
        return True
    leading, *digits = total
    form = format_of(torch, leading.dtype)
    unit, bound = unit_of(leading.ndim, limit, form), 2.0**form.mantissa / MOST * _ALMOST
    # What is written to is looked at before.
    lowest, highest = (number.item() * weight / unit for number in torch.aminmax(value))
    if not (-bound < lowest and highest < bound):  # NaN is neither
        return False
    # Usually all terms are below the unit, and begin with their first digit.
    has_leading = max(-lowest, highest) >= _ALMOST
    scale = (1.0 if has_leading else 2.0**form.digit) / unit
    rest = value if donate and value.dtype is form.floats else value.to(form.floats, copy=True)
    # The product is rounded before it is scaled, unless neither rounds.
    for factor in [weight * scale] if math.frexp(weight)[0] == 0.5 else [weight, scale]:
        rest.mul_(factor)
    if has_leading:
        leading.add_(torch.trunc(rest))
        rest.frac_().mul_(2.0**form.digit)
    # Each digit has room for one number of either sign: what is carried comes later.
    carry = torch.empty_like(digits[0])
    for digit in digits[:-1]:
        digit.add_(carry.copy_(rest))  # as an integer it is truncated
        rest.frac_().mul_(2.0**form.digit)
    digits[-1].add_(carry.copy_(rest.round_()))
    for digit, above in zip(digits[::-1], (*digits[-2::-1], leading), strict=True):
        torch.bitwise_right_shift(digit, form.digit, out=carry)
        digit.bitwise_and_((1 << form.digit) - 1)
        above.add_(carry)
    return True


def finish(total: Sequence[torch.Tensor], tally: Tally, how: Finish) -> torch.Tensor | None:
    """The result, in the memory of the sum; None, and nothing, if the quotient may be below the normal numbers."""
    leading, *digits = total
    form = format_of(torch, leading.dtype)
    unit = unit_of(leading.ndim, how.limit, form)
    divisor = torch.tensor({"weight": tally.total, "steps": tally.steps, None: 1}[how.divides_by], dtype=form.floats)
    least = unit * 2.0 ** (-form.digit * len(digits))
    if not 0 < divisor.item() < least / torch.finfo(form.floats).tiny:
        return None
    # Digits of either sign.
    half = 1 << (form.digit - 1)
    for digit, above in zip(digits[::-1], (*digits[-2::-1], leading), strict=True):
        carry = (digit + half).bitwise_right_shift_(form.digit)
        above.add_(carry)
        digit.sub_(carry.bitwise_left_shift_(form.digit))
    leading.mul_(unit)
    for digit in digits:
        unit *= 2.0**-form.digit
        leading.add_(digit.to(form.floats), alpha=unit)
    return leading if divisor.item() == 1 else leading.div_(divisor)
