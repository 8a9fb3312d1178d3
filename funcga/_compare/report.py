"""The report of a comparison: a Row for each leaf, the verdict, and its forms: text, table, JSON and picture."""

import math
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from funcga._compare import table, tolerances
from funcga._compare.rows import Row as Row
from funcga._compare.rows import row as row

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 8


@dataclass(frozen=True)
class Report:
    """What `funcga.compare` returns: `rows` in the right tree's order, those that only the left tree has last.

    names: of the two trees. reduction: the terms of a sum that limits are made for; None if `rtol`, the limit that
    was given, takes their place. str(report) is the table in plain text, with the verdict; rich prints it in colour.
    """

    rows: tuple[Row, ...]
    names: tuple[str, str] = ("left", "right")
    reduction: int | None = tolerances.TERMS
    rtol: float | None = None
    atol: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether both trees have the same leaves, one at least, and each of them is equal or within its limit."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row | None:
        """The row that is furthest from its limit, or beyond it; None if there is none at all."""
        return max(self.rows, key=lambda row: row.badness, default=None)

    @property
    def badness(self) -> tuple[bool, float]:
        """How far the worst row is from its limit, to sort by."""
        return self.worst.badness if self.worst else (False, 0.0)

    @property
    def most(self) -> float:
        """The largest relative difference; NaN if there is one, and 0 without leaves."""
        every = [row.relative for row in self.rows]
        return math.nan if any(map(math.isnan, every)) else max(every, default=0.0)

    @property
    def verdict(self) -> str:
        """One sentence: how many leaves are not close, of how many, and which is the worst."""
        worst, total, of = self.worst, len(self.rows), f"leaves of {self.names[0]} and {self.names[1]}"
        if worst is None:
            return (
                f"Nothing was compared: {self.names[0]} and {self.names[1]} have no leaves, or only what the rules "
                f"leave out."
            )
        close, where = sum(row.ok for row in self.rows), f"`{worst.path}`" if worst.path else "the array"
        summary = table.summary(worst, self.names)
        if close == total:
            return f"{total} of {total} {of} are close; the worst, {where}, {summary}."
        return f"{total - close} of {total} {of} are not close; {where} {summary}."

    @property
    def tolerance(self) -> str:
        """What rel may be, and why, in words."""
        absolute = f", and abs {self.atol:g} more" if self.atol else ""
        if self.rtol is not None:
            return f"rel may be {self.rtol:g}, as rtol= says{absolute}."
        dtypes = dict.fromkeys(row.dtype for row in self.rows if row.dtype)
        reasons = "; ".join(tolerances.reason(dtype, self.reduction or tolerances.TERMS) for dtype in dtypes)
        return f"rel may be, by dtype: {reasons}{absolute}." if reasons else "No leaf is in both."

    def assert_close(self) -> None:
        """None if `ok`. Raises AssertionError, which shows the worst leaves, if not."""
        if not self.rows:
            raise AssertionError(self.verdict)
        if not self.ok:
            worst = [row for row in sorted(self.rows, key=lambda row: row.badness, reverse=True) if not row.ok]
            more = f"\n... and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
            shown = table.plain(worst[:_SHOWN], self.names)
            raise AssertionError(f"{self.verdict}\n{self.tolerance}\n{shown}{more}{self._advice()}")

    def _advice(self) -> str:
        """What to do if every leaf that is not close is itself as small as rounding of the largest one is."""
        beyond = [row for row in self.rows if not row.ok]
        largest = max(row.largest for row in self.rows)
        rounding = [4 * tolerances.epsilon(row.dtype or "") * largest for row in beyond]
        small = [row.absolute + row.largest <= most for row, most in zip(beyond, rounding, strict=True)]
        if not all(small):
            return ""
        atol = f"{1.1 * max(row.absolute for row in beyond):.1e}"  # not less when rounded
        return (
            f"\nWhat is not close is 0 but for rounding, beside the largest leaf, {largest:.1e}, as the gradient of a "
            f"bias before a normalisation is. If that is what it has to be, give atol={atol}."
        )

    def table(self) -> "Table":
        """The report as a table of rich."""
        return table.rich(self.rows, self.names, f"{self.verdict}\n{self.tolerance}")

    def __rich__(self) -> "Table":
        return self.table()

    def __str__(self) -> str:
        return f"{table.plain(self.rows, self.names)}\n{self.tolerance}\n{self.verdict}"

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it: figures that are not finite are None, complex ones are pairs."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "tolerance": self.tolerance,
            "names": list(self.names),
            "reduction": self.reduction,
            "rtol": self.rtol,
            "atol": self.atol,
            "rows": [{**{name: _plain(value) for name, value in vars(row).items()}, "ok": row.ok} for row in self.rows],
        }

    def plot(self, file: str | PathLike[str]) -> None:
        """None; writes a picture of rel and its limit, leaf by leaf, to a file: .png, .svg or .pdf.

        Raises FuncgaError if matplotlib is not installed, or cannot write such a file.
        """
        from funcga._compare.picture import draw

        draw(self.rows, self.names, f"{self.verdict}\n{self.tolerance}", file)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
