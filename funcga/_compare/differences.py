"""How far two NumPy arrays of one shape are apart, in every sense that a report has a column for."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

CHUNK = 2**20
"""The elements that are looked at at once: what is computed takes that much memory, however large the arrays."""


class Difference(NamedTuple):
    """The largest absolute difference, the largest finite |right|, and the rest of what a Row says.

    absolute: NaN where an element is, infinite where infinities do not match; infinities of one sign in one place are
    equal. place: of the element, in the flat array, that differs most; None where nothing differs.
    """

    absolute: float
    scale: float
    ulps: float | None
    cosine: float | None
    place: int | None
    nans: tuple[int, int]
    infs: tuple[int, int]


def difference(left: Any, right: Any) -> Difference:
    """The Difference of two NumPy arrays of one shape, in float64 or complex128, to which longdoubles are rounded.

    Of integers it is exact, and beside floats it is 0 only if both are equal exactly.
    """
    ordered = left.dtype == right.dtype and _bits(left.dtype) is not None
    worst, place, ulps = 0.0, None, 0.0
    scales, nans, infs = (0.0, 0.0), (0, 0), (0, 0)
    for start, a, b in _chunks(left, right):
        x, y = _wide(a), _wide(b)
        scales = max(scales[0], _largest(x)), max(scales[1], _largest(y))
        nans = nans[0] + _count(np.isnan(x)), nans[1] + _count(np.isnan(y))
        infs = infs[0] + _count(np.isinf(x)), infs[1] + _count(np.isinf(y))
        apart = _between(a, b, x, y)
        most = int(np.argmax(apart))  # the first NaN, if there is one
        if not (math.isnan(worst) or apart[most] <= worst):
            worst, place = float(apart[most]), start + most
        if ordered:
            finite = np.isfinite(x) & np.isfinite(y)
            ulps = max(ulps, float(_gaps(_ordered(a[finite]), _ordered(b[finite])).max(initial=0)))
    return Difference(worst, scales[1], ulps if ordered else None, _cosine(left, right, scales), place, nans, infs)


def _chunks(left: Any, right: Any) -> Iterator[tuple[int, Any, Any]]:
    """(first place, elements of the left, elements of the right), flat, piece by piece."""
    a, b = left.reshape(-1), right.reshape(-1)
    for start in range(0, a.size, CHUNK):
        yield start, a[start : start + CHUNK], b[start : start + CHUNK]


def _wide(array: Any) -> Any:
    with np.errstate(invalid="ignore"):  # signalling NaNs of less than 32 bits
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _largest(array: Any) -> float:
    """The largest absolute value that is finite."""
    size = np.abs(array)
    return float(np.max(size, initial=0.0, where=np.isfinite(size)))


def _count(mask: Any) -> int:
    return int(np.count_nonzero(mask))


def _between(left: Any, right: Any, x: Any, y: Any) -> Any:
    """|left - right| of every element in float64, and what is hidden where they are converted to it, as x and y."""
    kinds = left.dtype.kind, right.dtype.kind
    if all(kind in "biu" for kind in kinds):
        return _between_whole(left, right)
    apart = _apart(x, y)
    if any(kind in "iu" for kind in kinds):
        hidden = (apart == 0) & (np.abs(y) >= 2.0**53)
        pairs = zip(left[hidden].tolist(), right[hidden].tolist(), strict=True)
        apart[hidden] = [abs(_whole(a) - _whole(b)) for a, b in pairs]
    return apart


def _whole(number: Any) -> int:
    """A number whose fraction is zero as Python's int, of any size."""
    return int(number.real)


def _between_whole(left: Any, right: Any) -> Any:
    apart = _gaps(left, right).astype(np.float64)
    if left.dtype != right.dtype:  # the gap from below 0 to 2**64 needs 65 bits
        across = (left < 0) != (right < 0)
        apart[across] = np.abs(_wide(left[across]) - _wide(right[across]))
    return apart


def _apart(left: Any, right: Any) -> Any:
    """|left - right| of every element: infinite where infinities do not match, NaN where a NaN is."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(left - right)
    matched = left == right
    apart[matched] = 0.0  # infinities too
    apart[~matched & (np.isinf(left) | np.isinf(right))] = math.inf
    apart[np.isnan(left) | np.isnan(right)] = math.nan
    return apart


def _gaps(left: Any, right: Any) -> Any:
    """|left - right| of integers as uint64, without overflow: what wraps around in the subtraction wraps back."""
    a, b = (part.astype(np.uint8) if part.dtype.kind == "b" else part for part in (left, right))
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    return np.where(a > b, x - y, y - x)


def _bits(dtype: Any) -> str | None:
    """The integers to look at the bits of a floating dtype with; None for what has no sign bit on top."""
    name = dtype.name
    known = name in ("float16", "bfloat16", "float32", "float64") or (name.startswith("float8") and "e8m0" not in name)
    return f"int{8 * dtype.itemsize}" if known else None


def _ordered(array: Any) -> Any:
    """Integers in the order of the floats, one for each; 0 and -0 are both 0."""
    bits = array.view(_bits(array.dtype))
    return np.where(bits < 0, -(bits & np.iinfo(bits.dtype).max), bits)


def _cosine(left: Any, right: Any, scales: tuple[float, float]) -> float | None:
    """The cosine of the angle between two vectors of finite elements; None if one is zero."""
    product = lefts = rights = 0.0
    for _, a, b in _chunks(left, right):
        # Scaled, so that no square overflows or vanishes.
        x, y = _wide(a), _wide(b)
        finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[finite] / (scales[0] or 1.0), y[finite] / (scales[1] or 1.0)
        product += float(np.vdot(x, y).real)
        lefts += float(np.vdot(x, x).real)
        rights += float(np.vdot(y, y).real)
    norm = math.sqrt(lefts) * math.sqrt(rights)
    return max(-1.0, min(1.0, product / norm)) if norm else None
