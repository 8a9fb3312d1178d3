"""A row of a report: the comparison of one leaf of two trees."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from funcga._types import Array, Dtype
from funcga.errors import FuncgaError
from funcga.tools.compare import tolerances

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """The comparison of one leaf. It is close if `absolute <= atol + limit * largest`.

    Attributes:
        path: The dotted path in the right tree.
        left_path: The path in the left tree, before rules renamed it.
        shapes: Those of the left leaf, after rules permuted its axes, and of the right one; None
            for a leaf that is missing.
        dtypes: Those of the two leaves.
        absolute: The largest `|left - right|`.
        relative: That over the largest `|right|` of the leaf.
        limit: The limit of the relative difference.
        ulps: The largest difference in units in the last place, for floats of the same dtype.
        cosine: The cosine of the angle between the leaves as vectors; None if one is zero, or if
            its square is too large or small for a float.
        index: Where the leaves differ most; None if they do not.
        values: The two values there.
        nans: The number of NaNs on the left and on the right.
        infs: The number of infinities on the left and on the right.
        largest: The largest finite `|right|`.
        atol: The absolute tolerance.
        check_dtype: Whether leaves of different dtypes are not close.
    """

    path: str
    left_path: str
    shapes: tuple[Shape | None, Shape | None]
    dtypes: tuple[str | None, str | None]
    absolute: float = math.inf
    relative: float = math.inf
    limit: float = 0.0
    ulps: float | None = None
    cosine: float | None = None
    index: Shape | None = None
    values: tuple[Array, Array] | None = None
    nans: tuple[int, int] = (0, 0)
    infs: tuple[int, int] = (0, 0)
    largest: float = 0.0
    atol: float = 0.0
    check_dtype: bool = True

    @property
    def status(self) -> str:
        """'equal', 'within' or 'beyond' the limit; 'nan' if there is one; 'inf' if infinities do
        not match; 'shape' or 'dtype' if they differ; 'missing' or 'extra' on the left.
        """
        # What explains most comes first: a NaN, say, is also beyond every limit.
        left, right = self.shapes
        if left is None or right is None:
            return "missing" if left is None else "extra"
        if left != right:
            return "shape"
        if self.check_dtype and self.dtypes[0] != self.dtypes[1]:
            return "dtype"
        if any(self.nans):
            return "nan"
        if math.isinf(self.absolute) and any(self.infs):
            return "inf"
        if self.absolute == 0:
            return "equal"
        return "within" if self.absolute <= self.atol + self.limit * self.largest else "beyond"

    @property
    def ok(self) -> bool:
        """Whether the values are equal or within their limit."""
        return self.status in ("equal", "within")

    @property
    def dtype(self) -> str | None:
        """The coarser of the two dtypes, which sets the limit; None if a leaf is missing."""
        left, right = self.dtypes
        return left and right and max(left, right, key=tolerances.epsilon)

    @property
    def allowed(self) -> float:
        """The limit of `relative` with atol: limit + atol / largest, infinite if largest is 0."""
        if not self.atol:
            return self.limit
        return self.limit + self.atol / self.largest if self.largest else math.inf

    @property
    def badness(self) -> tuple[bool, float]:
        """A key for sorting: whether it is not close, then the difference over the tolerance."""
        if not math.isfinite(self.absolute):
            return not self.ok, math.inf
        # Not by `relative`, which a leaf of zeros has none of.
        allowed = self.atol + self.limit * self.largest
        return not self.ok, self.absolute / allowed if allowed else self.relative


def row_of(
    path: str,
    left_path: str,
    left: Array,
    right: Array,
    rtol: float | None,
    atol: float,
    reduction: int,
    check_dtype: bool,
) -> Row:
    """Compares two leaves: NumPy arrays, numbers, other objects, or None for a missing one.

    The limit of the relative difference is `rtol`, or that of the coarser dtype and of sums of
    `reduction` terms. Raises FuncgaError for masked arrays.
    """
    left, right = _as_array(left, path), _as_array(right, path)
    shapes = getattr(left, "shape", None), getattr(right, "shape", None)
    dtypes = _dtype(left), _dtype(right)
    row = Row(path, left_path, shapes, dtypes, atol=atol, check_dtype=check_dtype)
    if row.dtype is None:
        return row
    row = replace(row, limit=tolerances.limit(row.dtype, reduction) if rtol is None else rtol)
    if left.shape != right.shape:
        return row
    is_of_numbers = _has_numbers(left) and _has_numbers(right)
    return replace(row, **(_of_numbers if is_of_numbers else _of_objects)(left, right))


def _as_array(leaf: Array, path: str) -> Array:
    """A leaf as an array: one of objects, without axes, for what NumPy has no dtype for."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise FuncgaError(
            f"{f'`{path}`' if path else 'the array'} is masked, and what is under a mask has no "
            "value. Pass x.filled(0), or the elements alone: x.compressed()."
        )
    if leaf is None:
        return None
    # An array of a matrix too, which no reshape makes flat.
    if isinstance(leaf, np.ndarray | np.generic | complex | float | int | str):
        return np.asarray(leaf)
    array = np.empty((), object)
    array[()] = leaf
    return array


def _dtype(array: Array) -> str | None:
    """The name of the dtype; for texts without their length."""
    if array is None:
        return None
    return str(array.dtype.type.__name__ if array.dtype.kind in "US" else array.dtype.name)


def _has_numbers(array: Array) -> bool:
    return array.dtype.kind in "biufc" or array.dtype.type.__module__ == "ml_dtypes"


def _of_objects(left: Array, right: Array) -> dict[str, Any]:
    """The measures of two arrays at least one of which has no numbers: they are equal or not."""
    apart = np.atleast_1d(left != right)
    if not apart.any():
        return {"absolute": 0.0, "relative": 0.0}
    position = int(np.argmax(apart))
    values = repr(left.item(position)), repr(right.item(position))
    return {"index": _index(position, right.shape), "values": values}


def _index(position: int, shape: Shape) -> Shape:
    """The index of an element, from its position in the flat array."""
    return tuple(map(int, np.unravel_index(position, shape)))


CHUNK = 2**20
"""The elements that are looked at at once: what is computed takes that much memory, however
large the arrays.
"""


def _of_numbers(left: Array, right: Array) -> dict[str, Any]:
    """The measures of two arrays of the same shape, computed in float64 or complex128.

    They are exact for integers, and between integers and floats 0 only if both are exactly equal.
    """
    # One pass over the elements in chunks, so that float64 copies never take more than a chunk's
    # memory. Units in the last place are counted only between floats of one dtype.
    has_ulps = left.dtype == right.dtype and _bits(left.dtype) is not None
    worst, position, largest, ulps = 0.0, 0, 0.0, 0.0
    counts, products = np.zeros((2, 2), int), np.zeros(3)
    lefts, rights = left.reshape(-1), right.reshape(-1)
    for start in range(0, left.size, CHUNK):
        a, b = lefts[start : start + CHUNK], rights[start : start + CHUNK]
        x, y = _wide(a), _wide(b)
        counts += [[np.isnan(each).sum(), np.isinf(each).sum()] for each in (x, y)]
        largest = max(largest, float(np.abs(y[np.isfinite(y)]).max(initial=0.0)))
        apart = _apart(a, b, x, y)
        # The first NaN, if there is one. Once the worst is NaN, it stays so.
        most = int(np.argmax(apart))
        if not (math.isnan(worst) or apart[most] <= worst):
            worst, position = float(apart[most]), start + most
        finite = np.isfinite(x) & np.isfinite(y)
        if has_ulps:
            ulps = max(ulps, float(_ulps(a[finite], b[finite]).max(initial=0)))
        x, y = x[finite], y[finite]
        with np.errstate(over="ignore", invalid="ignore"):
            products += [np.vdot(x, y).real, np.vdot(x, x).real, np.vdot(y, y).real]
    zeros = math.inf if worst > 0 else worst  # beside zeros: infinite, 0 or NaN
    product, *squares = products.tolist()
    norm = math.prod(map(math.sqrt, squares))
    nans, infs = counts.T.tolist()
    measures = {
        "absolute": worst,
        "relative": worst / largest if largest else zeros,
        "ulps": ulps if has_ulps else None,
        "cosine": max(-1.0, min(1.0, product / norm)) if 0 < norm < math.inf else None,
        "nans": tuple(nans),
        "infs": tuple(infs),
        "largest": largest,
    }
    if worst != 0:
        index = _index(position, right.shape)
        measures |= {"index": index, "values": (_number(left[index]), _number(right[index]))}
    return measures


def _wide(array: Array) -> Array:
    # A signalling NaN of less than 32 bits would warn.
    with np.errstate(invalid="ignore"):
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _apart(left: Array, right: Array, x: Array, y: Array) -> Array:
    """`|left - right|` of every element; x and y are the same as floats.

    It is infinite where infinities do not match, and NaN where there is a NaN.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x - y)
    # In this order: infinities of one sign are equal, though their difference is NaN; other
    # infinities are infinitely far apart; and where a NaN is, the difference is NaN.
    matched = x == y
    apart[matched] = 0.0
    apart[~matched & (np.isinf(x) | np.isinf(y))] = math.inf
    apart[np.isnan(x) | np.isnan(y)] = math.nan
    # From 2**53 on a float64 does not hold every integer. There Python's own integers decide:
    # between two of them always, beside a float where both have become the same number.
    whole = [array.dtype.kind in "biu" for array in (left, right)]
    if any(whole):
        inexact = np.maximum(np.abs(x), np.abs(y)) >= 2.0**53
        if not all(whole):
            inexact &= apart == 0
        pairs = zip(left[inexact].tolist(), right[inexact].tolist(), strict=True)
        apart[inexact] = [abs(int(a.real) - int(b.real)) for a, b in pairs]
    return apart


def _ulps(left: Array, right: Array) -> Array:
    """The distance of every two elements in the order of all floats, as uint64."""
    a, b = _ordered(left), _ordered(right)
    # What wraps around in the conversion wraps back in the subtraction.
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    return np.where(a > b, x - y, y - x)


def _ordered(array: Array) -> Array:
    """Integers in the order of the floats, one for each; 0 and -0 are both 0."""
    # Read as integers, the bits of positive floats are in the order of the floats, and those of
    # negative ones run backwards.
    bits = array.view(_bits(array.dtype))
    return np.where(bits < 0, -(bits & np.iinfo(bits.dtype).max), bits)


def _bits(dtype: Dtype) -> str | None:
    """The integers to look at the bits of a floating dtype with; None for what has no sign bit
    on top.
    """
    # e8m0 has an exponent alone, without a sign.
    name = dtype.name
    has_sign = name in ("float16", "bfloat16", "float32", "float64") or (
        name.startswith("float8") and "e8m0" not in name
    )
    return f"int{8 * dtype.itemsize}" if has_sign else None


def _number(element: Array) -> Array:
    """An element as Python's own bool, int, float or complex."""
    return (element if element.dtype.kind in "biu" else _wide(element)).item()
