"""Tables, in the two ways in which everything here prints one: as plain text, and by rich."""

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def text_table(lines: Sequence[Sequence[str]], right: bool = False) -> str:
    """The lines of cells as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(justify, line, widths)).rstrip() for line in lines)


def rich_table(
    headings: Sequence[str],
    lines: Iterable[Sequence["RenderableType"]],
    one_line: Collection[str] = (),
    **options: Any,
) -> "Table":
    """The lines of cells, texts or Text of rich, as a table of rich; cells of the columns in
    `one_line` are not wrapped.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, **options)
    for heading in headings:
        table.add_column(heading, no_wrap=heading in one_line, overflow="fold")
    for cells in lines:
        table.add_row(*cells)
    return table
