"""How far two arrays are apart, and whether that is within a limit."""

import math
from typing import Any, NamedTuple

import numpy as np


class Difference(NamedTuple):
    """The largest absolute difference, that over the largest absolute element of the right array, and its limit."""

    absolute: float
    relative: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the relative difference is within the limit; NaN is not."""
        return self.relative <= self.limit


def difference(left: Any, right: Any, limit: float) -> Difference:
    """The Difference of two NumPy arrays; infinite if their shapes or dtypes differ, NaN if an element is."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return Difference(math.inf, math.inf, limit)
    left, right = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore"):
        absolute, scale = float(np.abs(left - right).max()), float(np.abs(right).max())
    if scale == 0:
        return Difference(absolute, 0.0 if absolute == 0 else math.inf, limit)
    return Difference(absolute, absolute / scale, limit)


def rank(difference: Difference) -> float:
    """The relative difference as a number to sort by: NaN is the worst."""
    return math.inf if math.isnan(difference.relative) else difference.relative
