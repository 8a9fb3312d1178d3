"""A quantity: a real number above 0, as a size, a rate or a scale has to be one; and NumPy's numbers as Python's."""

import numbers
import sys
from typing import Any


def is_quantity(number: Any, least: float = 0.0, most: float = sys.float_info.max) -> bool:
    """Whether it is a finite real number above `least`, and not above `most`; bools are none."""
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        return False
    real: Any = number
    return bool(least < real <= most)


def as_number(given: Any) -> Any:
    """A scalar of NumPy, or a 0-d array of one, as a Python number; anything else as it is."""
    return given.item() if type(given).__module__ == "numpy" and getattr(given, "shape", None) == () else given
