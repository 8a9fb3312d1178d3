"""A row of a report: one leaf, of two trees, and whether its values are close."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from funcga._compare import tolerances
from funcga._compare.differences import Difference, difference
from funcga.errors import FuncgaError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One leaf of two trees: how far the left is from the right, how far it may be, and its status.

    path: dotted, as the right tree spells it; left_path: as the left tree does, before a rule renamed it.
    shapes, dtypes: of the left, after a rule permuted its axes, and the right; None where a leaf is missing.
    absolute: the largest |left - right|. relative: that over the largest |right| of the leaf.
    limit: of the relative difference, and atol, what the absolute one may be besides: a leaf is close if
    absolute <= atol + limit * largest |right|.
    ulps: the largest distance in units in the last place, of floats of one dtype.
    cosine: of the angle between the leaves as vectors, in float64; None if one is zero.
    index, values: where it differs most, and (left, right) there; None where nothing does.
    nans, infs: how many there are on the left and on the right.
    status: 'equal' or 'within'; 'beyond' the limit; 'nan' if there is one; 'inf' if infinities do not match; 'shape',
    'dtype' if they differ; 'missing' on the left; 'extra' on the left.
    largest: the largest |right| that is finite.
    """

    path: str
    left_path: str
    shapes: tuple[Shape | None, Shape | None]
    dtypes: tuple[str | None, str | None]
    absolute: float
    relative: float
    limit: float
    ulps: float | None
    cosine: float | None
    index: Shape | None
    values: tuple[Any, Any] | None
    nans: tuple[int, int]
    infs: tuple[int, int]
    status: str
    largest: float = 0.0
    atol: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the values are equal or within their limit."""
        return self.status in ("equal", "within")

    @property
    def dtype(self) -> str | None:
        """The coarser of the two dtypes, which the limit is made for; None where a leaf is missing."""
        left, right = self.dtypes
        return left and right and tolerances.coarser(left, right)

    @property
    def allowed(self) -> float:
        """What `relative` may be: the limit, and atol over the largest |right|; infinite if that is 0, and atol not."""
        if not self.atol:
            return self.limit
        return self.limit + self.atol / self.largest if self.largest else math.inf

    @property
    def badness(self) -> tuple[bool, float]:
        """To sort by: what is not close first, then how many times what is allowed it is away."""
        if not math.isfinite(self.absolute):
            return not self.ok, math.inf
        allowed = self.atol + self.limit * self.largest  # of a leaf of zeros nothing is relative
        return not self.ok, self.absolute / allowed if allowed else self.relative


def row(
    path: str,
    left: Any,
    right: Any,
    *,
    left_path: str | None = None,
    limit: float | None = None,
    atol: float = 0.0,
    reduction: int = tolerances.TERMS,
    check_dtype: bool = True,
) -> Row:
    """The Row of two NumPy arrays or numbers, or of other leaves, which are compared by `==`; None: it is missing.

    limit: of the relative difference; by default that of the coarser dtype and of sums of `reduction` terms. Raises
    FuncgaError for arrays without numbers or text in them: masked, structured, or of Python objects.
    """
    left, right = _as_array(left, path), _as_array(right, path)
    shapes, dtypes = (_shape(left), _shape(right)), (_dtype(left), _dtype(right))
    if limit is None:
        limit = tolerances.limit(tolerances.coarser(*(dtype or "" for dtype in dtypes)), reduction)
    made = Row(path, path if left_path is None else left_path, shapes, dtypes, math.inf, math.inf, limit, None, None,
               None, None, (0, 0), (0, 0), "", atol=atol)  # fmt: skip
    if left is None or right is None:
        return replace(made, status="missing" if left is None else "extra")
    if not _is_array(left) or not _is_array(right):
        return _of_objects(made, left, right)
    if shapes[0] != shapes[1]:
        return replace(made, status="shape")
    if not _has_numbers(left) or not _has_numbers(right):
        return _of_texts(made, left, right, check_dtype)
    return _of_arrays(made, left, right, difference(left, right), check_dtype)


def _as_array(leaf: Any, path: str) -> Any:
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
        return leaf  # of which NumPy makes an object
    if not isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        return leaf
    array = np.asarray(leaf)  # of a matrix too, which no reshape makes flat
    why = _unfit(leaf, array)
    if why:
        spelled = f"{array.dtype.name}[{', '.join(map(str, array.shape))}]"
        raise FuncgaError(f"{f'`{path}`' if path else 'the array'} is {spelled}, {why}.")
    return array


def _unfit(leaf: Any, array: Any) -> str:
    """Why an array cannot be compared, and what to pass instead; nothing if it can."""
    if isinstance(leaf, np.ma.MaskedArray):
        return "masked, and what is under a mask has no value. Pass x.filled(0), or the elements alone: x.compressed()"
    if array.dtype.names:
        return f"structured, and has no one number in a place. Pass its fields: x[{array.dtype.names[0]!r}]"
    if array.dtype.kind == "O" or not (_has_numbers(array) or array.dtype.kind in _ORDERLY):
        return "whose elements are no numbers. Pass numbers, x.astype('float64'), or a list, whose items are leaves"
    return ""


_ORDERLY = "USTMm"
"""The kinds of dtypes that are equal or not: texts, bytes, dates and times."""


def _has_numbers(array: Any) -> bool:
    return array.dtype.kind in "biufc" or array.dtype.type.__module__ == "ml_dtypes"


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray)


def _shape(leaf: Any) -> Shape | None:
    return None if leaf is None else leaf.shape if _is_array(leaf) else ()


def _dtype(leaf: Any) -> str | None:
    return None if leaf is None else leaf.dtype.name if _is_array(leaf) else type(leaf).__name__


def _of_objects(made: Row, left: Any, right: Any) -> Row:
    if type(left) is type(right) and bool(left == right):
        return replace(made, status="equal", absolute=0.0, relative=0.0)
    status = "beyond" if type(left) is type(right) else "dtype"
    return replace(made, status=status, values=(repr(left), repr(right)))


def _of_texts(made: Row, left: Any, right: Any, check_dtype: bool) -> Row:
    """The Row of arrays one of which holds no numbers, which are equal or not."""
    if left.dtype.kind != right.dtype.kind or (check_dtype and left.dtype != right.dtype and left.dtype.kind in "Mm"):
        return replace(made, status="dtype")
    apart = np.atleast_1d(left != right)
    if not apart.any():
        return replace(made, status="equal", absolute=0.0, relative=0.0)
    index = tuple(map(int, np.unravel_index(int(np.argmax(apart)), right.shape)))
    return replace(made, status="beyond", index=index, values=(str(left[index]), str(right[index])))


def _of_arrays(made: Row, left: Any, right: Any, found: Difference, check_dtype: bool) -> Row:
    index = None if found.place is None else tuple(map(int, np.unravel_index(found.place, right.shape)))
    return replace(
        made,
        absolute=found.absolute,
        relative=found.absolute / found.scale if found.scale else (math.inf if found.absolute > 0 else found.absolute),
        ulps=found.ulps,
        cosine=found.cosine,
        index=index,
        values=None if index is None else (_number(left[index]), _number(right[index])),
        nans=found.nans,
        infs=found.infs,
        largest=found.scale,
        status=_status(made, found, check_dtype),
    )


def _number(element: Any) -> Any:
    """An element as Python's own bool, int, float or complex."""
    if element.dtype.kind in "biu":
        return element.item()
    return complex(element) if element.dtype.kind == "c" else float(element)  # item() of a longdouble is itself


def _status(made: Row, found: Difference, check_dtype: bool) -> str:
    if check_dtype and made.dtypes[0] != made.dtypes[1]:
        return "dtype"
    if any(found.nans):
        return "nan"
    if math.isinf(found.absolute) and any(found.infs):
        return "inf"
    if found.absolute == 0:
        return "equal"
    return "within" if found.absolute <= made.atol + made.limit * found.scale else "beyond"
