"""The rows of a report as a table, in plain text and for rich, which is imported when it is asked for."""

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from funcga._compare.rows import Row, Shape
from funcga.errors import FuncgaError

if TYPE_CHECKING:
    from rich.table import Table


def plain(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """The table as lines of text, in columns."""
    lines = [_headings(names), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def rich(rows: Sequence[Row], names: tuple[str, str], caption: str) -> "Table":
    """The table for a console of rich; rows that are not close are red, and say why in their last column.

    Raises FuncgaError if rich is not installed.
    """
    try:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError as error:
        raise FuncgaError(
            "rich is not installed, and report.table needs it. Install it: pip install 'funcga[parity]', or print the "
            "report as text: print(str(report))."
        ) from error
    made = Table(caption=Text(caption), caption_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in _headings(names):
        made.add_column(heading, no_wrap=heading not in ("leaf", ""), overflow="fold")
    for row in rows:
        made.add_row(*map(Text, _cells(row)), style="" if row.ok else "bold red")
    return made


def _headings(names: tuple[str, str]) -> list[str]:
    return ["leaf", "shape", "dtype", "abs", "rel", "limit", "ulps", "cosine", f"where: {names[0]}, {names[1]}", ""]


def _cells(row: Row) -> list[str]:
    return [
        (row.path or "(the array)") if row.path == row.left_path else f"{row.path} ({row.left_path})",
        _pair(row.shapes, _shape),
        _pair(row.dtypes, str),
        figure(row.absolute),
        figure(row.relative),
        figure(row.allowed),
        "" if row.ulps is None else f"{row.ulps:.3g}",
        "" if row.cosine is None else f"{row.cosine:.6g}",
        "" if row.index is None or row.values is None else f"{_shape(row.index)}: {_values(row.values)}",
        row.status if row.ok else f"! {row.status}{_counts(row)}",
    ]


def _pair(pair: tuple[Any, Any], spell: Any) -> str:
    """One word for both where they are the same, and for the one that there is."""
    return " vs ".join(dict.fromkeys(spell(part) for part in pair if part is not None))


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _values(values: tuple[Any, Any]) -> str:
    return ", ".join(value if isinstance(value, str) else f"{value:.6g}" for value in values)


def _counts(row: Row) -> str:
    counts = {"nan": row.nans, "inf": row.infs}.get(row.status)
    return f" ({counts[0]} and {counts[1]})" if counts else ""


def figure(value: float, digits: int = 1) -> str:
    """A figure in few characters, with so many digits after the point: `8.6e-7`."""
    return "0" if value == 0 else re.sub(r"e-0?", "e-", f"{value:.{digits}e}")


def summary(row: Row, names: tuple[str, str]) -> str:
    """What is to be said of a row, in half a sentence."""
    if row.ok or row.status == "beyond":
        if math.isinf(row.allowed):  # nothing is relative to zeros
            return f"has abs {figure(row.absolute)}, where {figure(row.atol)} is the limit"
        return f"has rel {figure(row.relative)}, where {figure(row.allowed)} is the limit"
    if row.status in ("nan", "inf"):
        what = {"nan": "NaN", "inf": "infinities that do not match"}[row.status]
        counts = _counts(row).strip(" ()")
        return f"has {what}: {counts}"
    if row.status in ("shape", "dtype"):
        return (
            f"has two {row.status}s: {_pair(row.shapes, _shape) if row.status == 'shape' else _pair(row.dtypes, str)}"
        )
    return f"is missing in {names[0]}" if row.status == "missing" else f"is in {names[0]} alone"
