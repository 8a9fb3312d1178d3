"""The report of a comparison: a row for each leaf and the verdict, as text, JSON or a picture."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np

from funcga.tools.compare import tolerances
from funcga.tools.compare.row import Row
from funcga.tools.reports.tables import new_figure, plain, text_table

_SHOWN = 8


@dataclass(frozen=True)
class Report:
    """What `funcga.compare` returns: `rows` in the right tree's order, those that only the left
    tree has last.

    `str(report)` is the table, with the verdict.

    Attributes:
        rows: A Row for each leaf.
        names: The names of the two trees.
        reduction: The number of terms in a sum that limits are made for.
        rtol: The limit that takes their place, if it was given.
        atol: What the absolute difference may be besides.

    Example:
        >>> left = {"w": torch.ones(3), "b": torch.zeros(1)}
        >>> report = funcga.compare(left, {"w": jnp.ones(3), "b": jnp.ones(1)})
        >>> report.ok, report.worst.path
        (False, 'b')
    """

    rows: tuple[Row, ...]
    names: tuple[str, str] = ("left", "right")
    reduction: int = tolerances.TERMS
    rtol: float | None = None
    atol: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether both trees have the same leaves, at least one, all within their limits."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row | None:
        """The row that is furthest beyond its limit, or closest to it; None without rows."""
        return max(self.rows, key=lambda row: row.badness, default=None)

    @property
    def badness(self) -> tuple[bool, float]:
        """That of the worst row, as a key for sorting."""
        return self.worst.badness if self.worst else (False, 0.0)

    @property
    def most(self) -> float:
        """The largest relative difference; NaN if there is one, and 0 without leaves."""
        # Python's max would lose a NaN, since no comparison with one is true.
        return float(np.max([row.relative for row in self.rows], initial=0.0))

    @property
    def verdict(self) -> str:
        """A sentence: how many leaves are not close, and which one is the worst."""
        worst, (left, right) = self.worst, self.names
        # Nothing compared is nothing shown to be close.
        if worst is None:
            return (
                f"Nothing was compared: {left} and {right} have no leaves, or only what the rules "
                "leave out."
            )
        total, apart = len(self.rows), sum(not row.ok for row in self.rows)
        leaves = f"of {total} leaves of {left} and {right} are"
        where = f"`{worst.path}`" if worst.path else "the array"
        said = _summary(worst, self.names)
        if apart:
            return f"{apart} {leaves} not close; {where} {said}."
        return f"{total} {leaves} close; the worst, {where}, {said}."

    @property
    def tolerance(self) -> str:
        """The limits in words, and where they come from."""
        absolute = f", and abs {self.atol:g} more" if self.atol else ""
        if self.rtol is not None:
            return f"rel may be {self.rtol:g}, as rtol= says{absolute}."
        # A dict is a set that keeps the order of the leaves.
        dtypes = dict.fromkeys(row.dtype for row in self.rows if row.dtype)
        reasons = "; ".join(tolerances.reason(dtype, self.reduction) for dtype in dtypes)
        return f"rel may be, by dtype: {reasons}{absolute}." if reasons else "No leaf is in both."

    def assert_close(self) -> None:
        """Raises AssertionError, with the worst leaves, unless the report is `ok`."""
        if not self.rows:
            raise AssertionError(self.verdict)
        if self.ok:
            return
        beyond = [row for row in self.rows if not row.ok]
        worst = sorted(beyond, key=lambda row: row.badness, reverse=True)
        more = f"\n... and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
        shown = _text(worst[:_SHOWN], self.names)
        advice = self._advice(beyond)
        raise AssertionError(f"{self.verdict}\n{self.tolerance}\n{shown}{more}{advice}")

    def _advice(self, beyond: Sequence[Row]) -> str:
        """The `atol` to use if every leaf that is not close is as small as the largest one's
        rounding.
        """
        # Rounding is relative to what was added up, which cancels: the largest leaf stands for
        # that.
        largest = max(row.largest for row in self.rows)
        for row in beyond:
            if row.absolute + row.largest > 4 * tolerances.epsilon(row.dtype or "") * largest:
                return ""
        # A little more, so that it suffices when it is rounded to two digits.
        atol = f"{1.1 * max(row.absolute for row in beyond):.1e}"
        return (
            "\nWhat is not close is 0 except for rounding, beside the largest leaf, "
            f"{largest:.1e}, as the gradient of a bias before a normalisation is. If it has to be "
            f"0, give atol={atol}."
        )

    def __str__(self) -> str:
        return f"{_text(self.rows, self.names)}\n{self.tolerance}\n{self.verdict}"

    def as_dict(self) -> dict[str, object]:
        """The report for JSON: numbers that are not finite are None, complex ones are pairs."""
        rows = [vars(row) | {"status": row.status, "ok": row.ok} for row in self.rows]
        verdict = {"ok": self.ok, "verdict": self.verdict, "tolerance": self.tolerance}
        return plain(verdict | vars(self) | {"rows": rows})

    def plot(self, file: str | PathLike[str]) -> None:
        """Writes a plot of the relative differences and their limits to a .png, .svg or .pdf file.

        It needs matplotlib.
        """
        left, right = self.names
        figure = new_figure(9, 1.8 + 0.24 * len(self.rows))
        axes = figure.add_subplot(
            xlabel=f"largest |{left} - {right}| / largest |{right}| of the leaf, and its limit",
            xscale="log",
        )
        axes.set_title(f"{self.verdict}\n{self.tolerance}", fontsize="small", loc="left", wrap=True)
        # The leaves from top to bottom, those that are not close with a mark. A logarithmic axis
        # has no 0, no infinity and no NaN: 0 is at its left end, what is not finite at the right.
        leaves = [f"{'' if row.ok else '! '}{row.path or '(the array)'}" for row in self.rows]
        found, limits = [row.relative for row in self.rows], [row.allowed for row in self.rows]
        for marker, sizes in (("o", found), ("k|", limits)):
            axes.plot(np.nan_to_num(sizes, nan=10).clip(1e-18, 10), leaves, marker)
        axes.invert_yaxis()
        axes.grid(alpha=0.3)
        figure.savefig(file, dpi=120)


def _text(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """The table as lines of text."""
    figures = ["abs", "rel", "limit", "ulps", "cosine"]
    headings = ["leaf", "shape", "dtype", *figures, f"where: {names[0]}, {names[1]}", ""]
    return text_table([headings, *map(_cells, rows)])


def _cells(row: Row) -> list[str]:
    path = row.path or "(the array)"
    where = ""
    if row.index is not None and row.values is not None:
        values = [v if isinstance(v, str) else f"{v:.6g}" for v in row.values]
        where = f"{[*row.index]}: {', '.join(values)}"
    return [
        path if row.path == row.left_path else f"{path} ({row.left_path})",
        _pair(row.shapes),
        _pair(row.dtypes),
        figure(row.absolute),
        figure(row.relative),
        figure(row.allowed),
        "" if row.ulps is None else f"{row.ulps:.3g}",
        "" if row.cosine is None else f"{row.cosine:.6g}",
        where,
        row.status if row.ok else f"! {row.status}",
    ]


def _pair(pair: Sequence[object]) -> str:
    """One word for both where they are the same, and for the one that there is."""
    words = [[*part] if isinstance(part, tuple) else part for part in pair if part is not None]
    return " vs ".join(dict.fromkeys(map(str, words)))


def figure(value: float, digits: int = 1) -> str:
    """A number with that many digits after the point, such as `8.6e-7`."""
    return "0" if value == 0 else re.sub(r"e-0?", "e-", f"{value:.{digits}e}")


def _summary(row: Row, names: tuple[str, str]) -> str:
    """A row in half a sentence."""
    if row.ok or row.status == "beyond":
        # Nothing is relative to zeros: there the absolute difference counts.
        if math.isinf(row.allowed):
            return f"has abs {figure(row.absolute)}, where {figure(row.atol)} is the limit"
        return f"has rel {figure(row.relative)}, where {figure(row.allowed)} is the limit"
    return {
        "nan": f"has NaN: {row.nans[0]} and {row.nans[1]}",
        "inf": f"has infinities that do not match: {row.infs[0]} and {row.infs[1]}",
        "shape": f"has two shapes: {_pair(row.shapes)}",
        "dtype": f"has two dtypes: {_pair(row.dtypes)}",
        "missing": f"is missing in {names[0]}",
        "extra": f"is in {names[0]} alone",
    }[row.status]
