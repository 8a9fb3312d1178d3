"""Tables as plain text, the one way in which reports print them, and files with pictures."""

import json
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from funcga.errors import FuncgaError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def text_table(lines: Sequence[Sequence[str]], right: bool = False) -> str:
    """The lines of cells as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(justify, line, widths)).rstrip() for line in lines)


def bars(shares: Sequence[float], most: int) -> str:
    """A bar for each of the first shares, the largest as high as a letter."""
    largest = max(shares, default=0.0)
    heights = "▁▂▃▄▅▆▇█"
    return "".join(
        heights[round(7 * each / largest)] if each > 0 else "_" for each in shares[:most]
    )


def json_text(value: object) -> str:
    """JSON of what it has not: a number that is not finite is null, and a complex one is a pair."""
    text = json.dumps(value, default=lambda number: (number.real, number.imag))
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1)


def new_figure(name: str, size: tuple[float, float]) -> "Figure":
    """An empty figure of this size in inches. `name` is the method that draws."""
    try:
        # Not pyplot, which keeps every figure and may want a screen.
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise FuncgaError(
            f"{error.name} is not installed, and {name} draws with it. Install it: pip install "
            "'funcga[parity]'"
        ) from error
    return Figure(figsize=size, layout="constrained")


def save(figure: "Figure", name: str, file: str | PathLike[str]) -> None:
    """Writes a figure to a .png, .svg or .pdf file."""
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise FuncgaError(
            f"{name} cannot write {str(file)!r}: {error}. Name a .png, .svg or .pdf file in a "
            "folder that exists."
        ) from error
