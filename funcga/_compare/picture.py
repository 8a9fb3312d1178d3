"""The picture of a report: the relative difference of every leaf on a logarithmic axis, with its limit."""

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from funcga._compare.row import Row
from funcga.errors import FuncgaError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rows: Sequence[Row], names: tuple[str, str], caption: str, file: str | PathLike[str]) -> None:
    """None; writes the picture, whose marks can be told apart without their colours, in the format of the suffix.

    Raises FuncgaError if matplotlib is not installed, or does not know the suffix, or the file cannot be written.
    """
    try:
        # Not pyplot, which keeps every figure and may want a screen.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise FuncgaError(
            f"{error.name} is not installed, and report.plot draws with it. Install it: pip install 'funcga[parity]'"
        ) from error
    figure = Figure(figsize=(9, 1.8 + 0.24 * len(rows)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_rows(axes, rows)
    axes.set_title(caption, fontsize="small", loc="left", wrap=True)
    axes.set_xlabel(f"largest |{names[0]} - {names[1]}| / largest |{names[1]}| of the leaf")
    axes.set_ylabel("leaf")
    suffix = str(file).rpartition(".")[2].lower()
    if suffix not in canvas.get_supported_filetypes():
        raise FuncgaError(f"report.plot cannot write {str(file)!r}: name a .png, .svg or .pdf file.")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise FuncgaError(
            f"report.plot cannot write {str(file)!r}: {error.strerror}. Name a file in a folder that exists."
        ) from error


_FINE = {"equal": "|", "within": "o"}
_BAD = {"beyond": "X", "nan": "*", "inf": "P", "shape": "s", "dtype": "D", "missing": "<", "extra": ">"}


def _draw_rows(axes: "Axes", rows: Sequence[Row]) -> None:
    """Leaves from top to bottom; what is 0 stands at the left edge, what has no size at the right one."""
    # A logarithmic axis has no 0 and no infinity: both are drawn at its ends.
    low, high = _range(rows)
    axes.set_xscale("log")
    axes.set_xlim(low / 3, high * 3)
    axes.set_yticks(range(len(rows)), [row.path or "(the array)" for row in rows], fontsize="small")
    # From the larger to the smaller number, as the first leaf stands on top.
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.grid(alpha=0.3)
    # One call for each status, which gives it a mark, a colour and a line in the legend.
    for status, mark in (_FINE | _BAD).items():
        lines = [line for line, row in enumerate(rows) if row.status == status]
        if lines:
            sizes = [rows[line].relative for line in lines]
            shown = [max(size, low) if math.isfinite(size) else high for size in sizes]
            color = "tab:blue" if status in _FINE else "tab:red"
            axes.plot(shown, lines, mark, label=f"{status} ({len(lines)})", color=color)
    limits = [(row.allowed, line) for line, row in enumerate(rows) if 0 < row.allowed < math.inf]
    if limits:
        axes.plot(*zip(*limits, strict=True), marker=4, markersize=9, color="k", linestyle="none", label="limit")
    if rows:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)


def _range(rows: Sequence[Row]) -> tuple[float, float]:
    """The smallest and the largest size to draw, each with some room."""
    sizes = [size for row in rows for size in (row.relative, row.allowed) if 0 < size < math.inf]
    return (min(sizes) / 10, max(sizes) * 10) if sizes else (1e-9, 1.0)
