"""The comparison itself: the leaves of two trees matched by path, as NumPy arrays, a Row for each."""

from collections.abc import Sequence
from typing import Any

from funcga._compare import tolerances
from funcga._compare.report import Report
from funcga._compare.rows import Row, row
from funcga._trees.paths import as_numpy, by_path
from funcga.rules import Rule, pairs, permuted


def run(
    left: Any,
    right: Any,
    rtol: float | None,
    atol: float,
    reduction: int | None,
    rules: Sequence[Rule],
    names: tuple[str, str],
    check_dtype: bool,
) -> Report:
    """The Report that `funcga.compare` returns; the arguments are those, checked."""
    lefts, rights = by_path(left, names[0]), by_path(right, names[1])
    terms = tolerances.TERMS if reduction is None else reduction
    matched = {pair.right: pair for pair in pairs(lefts, rights, rules)}

    def row_of(path: str) -> Row:
        pair = matched.get(path)
        given = None if pair is None else permuted(as_numpy(lefts[pair.left], pair.left), pair)
        left_path = path if pair is None else pair.left
        expected = as_numpy(rights[path], path) if path in rights else None
        return row(path, given, expected, left_path=left_path, limit=rtol, atol=atol, reduction=terms,
                   check_dtype=check_dtype)  # fmt: skip

    rows = [row_of(path) for path in (*rights, *(path for path in matched if path not in rights))]
    return Report(tuple(rows), names, terms if rtol is None else None, rtol, atol)
