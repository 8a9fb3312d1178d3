"""The tool that says how far two trees are apart, leaf by leaf, and whether rounding explains it.

    report = funcga.compare(torch_params, jax_params, rules=funcga.trees.torch_to_flax)
    report.assert_close()

`compare` is in this file, the report of all leaves in `report.py`, the row of one in `row.py`, and
what rounding explains in `tolerances.py`. It stands on the trees of two frameworks
(`funcga.tools.trees`); verify and parity stand on it.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from funcga._types import Tree
from funcga.errors import FuncgaError, needs_numpy
from funcga.tools.trees.rules import Rule, as_rules, pairs, permuted

if TYPE_CHECKING:
    from funcga.tools.compare.report import Report


def compare(
    left: Tree,
    right: Tree,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
    reduction: int | None = None,
    rules: Iterable[Rule] = (),
    names: tuple[str, str] = ("left", "right"),
    check_dtype: bool = True,
) -> "Report":
    """Compares two trees of arrays leaf by leaf, with limits that rounding alone explains.

    The leaves are matched by dotted path. A leaf is close if, in every element,
    `|left - right| <= atol + limit * max|right|`. The limit is `4 * eps * sqrt(reduction)`, for the
    coarser of the two dtypes, and at most 0.5. Integers and booleans have to be equal. Infinities
    of the same sign are equal; NaN is never close. Trees without leaves are not close.

    Args:
        left: A tree of torch, JAX or NumPy arrays, on any device, in any containers: nested or flat
            dicts such as state dicts, flax variables, nnx states, equinox modules, or a single
            array. None and functions are ignored; a Python number is a 0-d array of 64 bits; other
            leaves, and arrays of text or dates, are compared by `==`.
        right: A tree of the same kind. Differences are relative to it.
        rtol: A limit for all leaves, instead of that of their dtypes.
        atol: An absolute tolerance, added to the limit. A gradient that is 0 except for rounding,
            such as that of a bias before a normalisation, needs one.
        reduction: The number of terms in the longest sum that the values come from. Default: 256.
        rules: Rename and transpose the leaves of left, see `funcga.trees`.
        names: The names of the two trees in the report.
        check_dtype: Whether leaves of different dtypes are not close; if False, only values count.

    Returns:
        A Report. `report.ok`, `report.assert_close()` and `print(report)` say whether the trees are
        close; `report.rows`, `.worst`, `.as_dict()` and `.plot("report.png")` how they differ.

    Raises:
        FuncgaError: If a tree has a leaf that cannot be compared, or an argument is invalid.

    Example:
        >>> report = funcga.compare({"w": torch.ones(3)}, {"w": jnp.ones(3)})
        >>> report.ok
        True
        >>> report.assert_close()
    """
    _check(rtol, atol, reduction, names)
    rules = as_rules(rules)
    # NumPy is not needed to install funcga, so only what compares imports it.
    with needs_numpy("funcga.compare"):
        from funcga.tools.compare.report import Report
        from funcga.tools.compare.row import Row, row_of
        from funcga.tools.compare.tolerances import TERMS
        from funcga.trees import as_numpy, by_path
    # The rules say which left leaf is compared with which path on the right, whether there is one
    # or not.
    lefts, rights = by_path(left, names[0]), by_path(right, names[1])
    terms = TERMS if reduction is None else reduction
    matched = {pair.right: pair for pair in pairs(lefts, rights, rules)}

    def row_at(path: str) -> Row:
        pair = matched.get(path)
        left_path = path if pair is None else pair.left
        actual = None if pair is None else permuted(as_numpy(lefts[left_path], left_path), pair)
        expected = as_numpy(rights[path], path) if path in rights else None
        return row_of(
            path,
            actual,
            expected,
            left_path=left_path,
            limit=rtol,
            atol=atol,
            reduction=terms,
            check_dtype=check_dtype,
        )

    # What only the left tree has comes last.
    rows = [row_at(path) for path in (*rights, *(path for path in matched if path not in rights))]
    return Report(tuple(rows), (names[0], names[1]), terms if rtol is None else None, rtol, atol)


def _check(rtol: object, atol: object, reduction: object, names: object) -> None:
    # Without rtol the limits come from the dtypes.
    if rtol is not None:
        _check_tolerance("rtol", rtol)
    _check_tolerance("atol", atol)
    is_count = isinstance(reduction, int) and not isinstance(reduction, bool) and reduction >= 1
    if reduction is not None and not is_count:
        raise FuncgaError(
            f"reduction={reduction!r} is not a number of terms in a sum, which is an integer of 1 "
            "or more. Write reduction=len(rows), or leave it out."
        )
    if rtol is not None and reduction is not None:
        raise FuncgaError(
            f"rtol={rtol!r} and reduction={reduction!r} are two limits: reduction= is there to "
            "find one. Give one of them."
        )
    if (
        not isinstance(names, tuple | list)
        or len(names) != 2
        or not all(isinstance(name, str) for name in names)
    ):
        raise FuncgaError(
            f"names={names!r} are not the names of two trees. Write names=('torch', 'jax')."
        )


def _check_tolerance(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise FuncgaError(
            f"{name}={value!r} is not a tolerance, which is a finite number of 0 or more. Write "
            f"{name}=1e-6, or leave it out."
        )
