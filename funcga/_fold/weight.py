"""The weight of a micro-batch: a finite number or a 0-d array, at least 0."""

import numbers
import sys
from typing import Any

from funcga._backend.protocols import Arrays
from funcga._fold.quantity import as_number
from funcga.errors import FuncgaError

_MOST = sys.float_info.max
LEAST32, MOST32 = 2.0**-126, 2.0**126  # in which a float32 has all of its bits, and its reciprocal too


def check_weight(weight: Any, arrays: Arrays) -> Any:
    """The weight as a Python number where the host can see it, else as the 0-d array that it is.

    Raises FuncgaError if it is no number, no scalar, or seen to be negative, NaN or infinite.
    """
    weight = as_number(weight)
    if not isinstance(weight, numbers.Number):
        kind = arrays.kind(weight.dtype) if arrays.is_array(weight) else None
        if kind not in ("bool", "int", "float") or weight.shape != ():
            raise FuncgaError(
                f"the weight of a micro-batch is {arrays.describe(weight)}; it must be a real number or a 0-d array, "
                f'such as the number of tokens: weight=lambda batch: (batch["labels"] != -100).sum()'
            )
        weight = arrays.scalar(weight)
    return _checked(weight) if isinstance(weight, numbers.Number) else weight


def check_narrow(weight: Any) -> None:
    """Raises FuncgaError for a number that cannot weigh in float32; 0 can."""
    if isinstance(weight, int | float) and weight and not LEAST32 <= weight <= MOST32:
        raise FuncgaError(
            f"the weight of a micro-batch is {weight!r}, which a float32 cannot hold, in which they are counted "
            f"here. Weigh in other units, as by tokens / 1e6."
        )


def known_weight(weight: Any) -> float:
    """The weight as a Python number, for which a device is waited for.

    Raises FuncgaError if it is no number, or negative, NaN or infinite.
    """
    return float(_checked(weight.item() if getattr(weight, "shape", None) == () else weight))


def _checked(weight: Any) -> int | float:
    number: Any = weight
    if not isinstance(weight, numbers.Real) or not 0 <= number <= _MOST:
        raise FuncgaError(
            f"the weight of a micro-batch is {weight!r}; it must be finite and at least 0, such as the number of "
            f"rows or tokens in it."
        )
    return int(number) if isinstance(weight, numbers.Integral) else float(number)
