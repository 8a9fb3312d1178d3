"""The tool that says how far two trees are apart, leaf by leaf, and whether rounding explains it.

    report = funcga.compare(torch_params, jax_params, rules=funcga.trees.torch_to_flax)
    report.assert_close()

`compare` is in this file, the report of all leaves in `report.py`, the row of one in `row.py`, and
what rounding explains in `tolerances.py`. It stands on the trees of two frameworks
(`funcga.tools.trees`); verify and parity stand on it.
"""

from collections.abc import Iterable

from funcga._types import Tree
from funcga.tools.compare.report import Report
from funcga.tools.compare.row import row_of
from funcga.tools.compare.tolerances import TERMS
from funcga.tools.trees.rules import Rule, pairs, permuted
from funcga.trees import as_numpy, by_path


def compare(
    left: Tree,
    right: Tree,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
    reduction: int = TERMS,
    rules: Iterable[Rule] = (),
    names: tuple[str, str] = ("left", "right"),
    check_dtype: bool = True,
) -> Report:
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
    lefts, rights = by_path(left, names[0]), by_path(right, names[1])
    matched = pairs(lefts, rights, rules)
    rows = []
    # What only the left tree has comes last.
    for path in dict.fromkeys((*rights, *matched)):
        pair, actual = matched.get(path), None
        if pair is not None:
            actual = permuted(as_numpy(lefts[pair.left], pair.left), pair.rules)
        expected = as_numpy(rights.get(path), path)
        left_path = path if pair is None else pair.left
        rows.append(row_of(path, left_path, actual, expected, rtol, atol, reduction, check_dtype))
    return Report(tuple(rows), names, reduction, rtol, atol)
