"""The tool that says how far two trees are apart, leaf by leaf, and whether rounding explains it.

    report = funcga.compare(torch_params, jax_params, rules=funcga.trees.torch_to_flax)
    report.assert_close()

`compare` is in this file, the report of all leaves in `report.py`, the row of one in `row.py`, and
what rounding explains in `tolerances.py`. It stands on the trees of two frameworks
(`funcga.tools.trees`); verify and parity stand on it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from funcga._types import Tree
from funcga.errors import needs_numpy
from funcga.tools.trees.rules import Rule, pairs, permuted

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
            leaves, and arrays that hold no numbers, are compared by `==`.
        right: A tree of the same kind. Differences are relative to it.
        rtol: A limit for all leaves, instead of that of their dtypes.
        atol: An absolute tolerance, added to the limit. A gradient that is 0 except for rounding,
            such as that of a bias before a normalisation, needs one.
        reduction: The number of terms in the longest sum that the values come from, without rtol.
            Default: 256.
        rules: Rename and transpose the leaves of left, see `funcga.trees`.
        names: The names of the two trees in the report.
        check_dtype: Whether leaves of different dtypes are not close; if False, only values count.

    Returns:
        A Report. `report.ok`, `report.assert_close()` and `print(report)` say whether the trees are
        close; `report.rows`, `.worst`, `.as_dict()` and `.plot("report.png")` how they differ.

    Raises:
        FuncgaError: If a tree has a leaf that cannot be compared.

    Example:
        >>> report = funcga.compare({"w": torch.ones(3)}, {"w": jnp.ones(3)})
        >>> report.ok
        True
        >>> report.assert_close()
    """
    # NumPy is not needed to install funcga, so only what compares imports it.
    with needs_numpy("funcga.compare"):
        from funcga.tools.compare.report import Report
        from funcga.tools.compare.row import row_of
        from funcga.tools.compare.tolerances import TERMS
        from funcga.trees import as_numpy, by_path
    lefts, rights = by_path(left, names[0]), by_path(right, names[1])
    terms = TERMS if reduction is None else reduction
    matched = {pair.right: pair for pair in pairs(lefts, rights, tuple(rules))}
    rows = []
    # What only the left tree has comes last.
    for path in dict.fromkeys((*rights, *matched)):
        pair, actual, left_path = matched.get(path), None, path
        if pair is not None:
            left_path = pair.left
            actual = permuted(as_numpy(lefts[left_path], left_path), pair)
        expected = as_numpy(rights.get(path), path)
        row = row_of(
            path,
            actual,
            expected,
            left_path=left_path,
            limit=rtol,
            atol=atol,
            reduction=terms,
            check_dtype=check_dtype,
        )
        rows.append(row)
    return Report(tuple(rows), (names[0], names[1]), terms if rtol is None else None, rtol, atol)
