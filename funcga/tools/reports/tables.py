"""Tables as plain text, the one way in which reports print them, and files with pictures."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def text_table(lines: Sequence[Sequence[str]], right: bool = False) -> str:
    """The lines of cells as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(justify, line, widths)).rstrip() for line in lines)


def bars(shares: Sequence[float]) -> str:
    """A bar for each of the first 16 shares, the largest as high as a letter."""
    largest = max(shares, default=0.0)
    heights = "▁▂▃▄▅▆▇█"
    return "".join(heights[round(7 * each / largest)] if each > 0 else "_" for each in shares[:16])


def plain(value: object) -> dict[str, object]:
    """A dict as JSON has it: a number that is not finite is None, and a complex one is a pair."""
    text = json.dumps(value, default=lambda number: (number.real, number.imag))
    return json.loads(text, parse_constant=lambda _: None)  # type: ignore[no-any-return]


def json_text(value: object) -> str:
    """The text of the JSON of a value."""
    return json.dumps(plain(value), indent=1)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of this size in inches."""
    # Not pyplot, which keeps every figure and may want a screen.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
