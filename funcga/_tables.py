"""Tables as plain text, the one way in which reports print them."""

from collections.abc import Sequence


def text_table(lines: Sequence[Sequence[str]], right: bool = False) -> str:
    """The lines of cells as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(justify, line, widths)).rstrip() for line in lines)
