"""The verdict: what was measured, and what is wrong, each with the line that fixes it."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    name: a short identifier that stays, such as "uneven tokens". what: it, in a sentence. fix: the line to write
    instead. evidence: the figures by which it was recognised.
    """

    name: str
    what: str
    fix: str
    evidence: str


class Measured(NamedTuple):
    """The result of a split against that of the whole batch: the largest relative difference, its limit, and where.

    sizes: the rows of each micro-batch. error: what the split raised instead of a result, or None.
    """

    split: str
    sizes: tuple[int, ...]
    relative: float
    limit: float
    leaf: str
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the difference is within the limit; NaN is not."""
        return self.error is None and self.relative <= self.limit


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. `str(verdict)` is a short text for people.

    ok: no cause was found: every split gives the result of the whole batch, but for what a note says. rows: a Measured
    for each split. dtype: in which the arguments were; notes: what else is to be known, such as what could not be
    looked at. gradients: whether any were compared; False of a loss that was given in place of its gradient.
    """

    ok: bool
    causes: tuple[Cause, ...]
    rows: tuple[Measured, ...]
    dtype: str
    notes: tuple[str, ...] = ()
    gradients: bool = True

    def assert_exact(self) -> None:
        """Raises AssertionError, with the text, if accumulation is not exact."""
        if not self.ok:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings, numbers and None, for JSON; what is not finite is a string."""
        rows = [{**row._asdict(), "sizes": [*row.sizes], "ok": row.ok} for row in self.rows]
        for row in rows:
            if not row["relative"] < float("inf"):
                row["relative"] = str(row["relative"])
        return {
            "ok": self.ok,
            "causes": [asdict(cause) for cause in self.causes],
            "rows": rows,
            "dtype": self.dtype,
            "notes": [*self.notes],
            "gradients": self.gradients,
        }

    def __str__(self) -> str:
        return "\n".join(line for line, _ in _lines(self))

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text("\n").join(Text(line, style) for line, style in _lines(self))


def _lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """(line, style) of the text."""
    if verdict.ok and not verdict.gradients:
        yield "The values agree, and no gradient was compared: see the note.", "bold yellow"
    elif verdict.ok:
        yield "Accumulation is exact for this loss.", "bold green"
    else:
        count = len(verdict.causes)
        yield f"Accumulation is NOT exact for this loss: {count} cause{'s' * (count != 1)}.", "bold red"
    for i, cause in enumerate(verdict.causes, 1):
        yield "", ""
        yield f"{i}. {cause.name}", "bold"
        yield from ((line, "") for line in _wrapped(cause.what))
        yield f"   Fix: {cause.fix}", "green"
        yield from ((line, "dim") for line in _wrapped(f"Seen: {cause.evidence}"))
    if verdict.rows:
        yield "", ""
        yield f"Against the whole batch, in {verdict.dtype}:", ""
    for row in verdict.rows:
        found = row.error or f"largest relative difference {row.relative:.1e} at {row.leaf}, limit {row.limit:.0e}"
        yield f"   {row.split}: {found}", "" if row.ok else "red"
    for note in verdict.notes:
        yield from ((line, "dim") for line in _wrapped(note, "Note: "))


def _wrapped(text: str, first: str = "   ") -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=first, subsequent_indent="   ", break_long_words=False)
