"""The picture of results: ratios with their quartiles, and how time and memory grow; readable without colour."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot, which keeps every figure
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from PIL import Image  # which matplotlib needs as well

from benchmarks import standing
from benchmarks.results import Results
from benchmarks.standing import Pair, Point
from benchmarks.wording import framework, setting, workload

_MARKERS = "osD^vPX*"
WIDTH = 4.2  # inches: the width of a telephone, on which 8 points can be read
OURS, OTHERS = "#0072b2", "#767676"  # funcga is blue in every picture, what it is compared with is grey

_UNITS = {"micro-batches": "micro-batches", "leaves": "leaves of 16 elements"}
_UNITS |= {"parameters": "elements of parameters", "ranks": "replicas"}


def draw(results: Results, file: Path) -> list[Path]:
    """The pictures that it writes beside each other, in the format of the suffix, .png or .svg.

    For each framework its ratios, `NAME-torch`, and its growth, `NAME-torch-growth`; `NAME-summary` has the rows of the
    README. What there are no figures of is not drawn: with imports alone there is no picture.
    """
    pairs, grown = standing.pairs(results), standing.growth(results)
    written = []
    for name in ("torch", "JAX"):
        own = [pair for pair in pairs if framework(pair.setting) == name]
        lines = {key: points for key, points in grown.items() if framework(key[1]) == name}
        if own:
            written.append(file.with_stem(f"{file.stem}-{name.lower()}"))
            save(_ratios_figure(own), written[-1])
        if lines:
            written.append(file.with_stem(f"{file.stem}-{name.lower()}-growth"))
            save(_growth_figure(lines), written[-1])
    if standing.best_known(pairs):
        written.append(file.with_stem(f"{file.stem}-summary"))
        draw_summary(pairs, written[-1])
    return written


def draw_summary(pairs: Sequence[Pair], file: Path) -> None:
    """None; the rows of the README are in the file, as a picture."""
    save(_summary_figure(standing.best_known(pairs)), file)


def save(figure: Figure, file: Path) -> None:
    """None; the picture is in the file."""
    canvas: Any = FigureCanvasAgg(figure)
    if file.suffix == ".svg":
        figure.savefig(file, metadata={"Date": None})
        return
    figure.set_dpi(170)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    image.quantize(64).save(file, optimize=True)  # a third of the bytes


def _summary_figure(rows: Sequence[Pair]) -> Figure:
    """Time and bytes against the best-known rival of each setting: bars of ours, a line for the rival."""
    figure = Figure(figsize=(WIDTH, 0.5 + 0.62 * len(rows)), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    for ax, values, what in (
        (panels[0], [pair.time[1] for pair in rows], "time"),
        (panels[1], [pair.peak for pair in rows], "bytes at the peak"),
    ):
        ax.barh(range(len(rows)), [value or 0 for value in values], color=OURS, height=0.32)
        ax.bar_label(ax.containers[0], [f" {value:.2f}" if value else " not counted" for value in values], fontsize=8)
        ax.axvline(1, color=OTHERS, linewidth=1.2)
        ax.set_xlim(0, max(1.3, *(1.2 * (value or 0) for value in values)))
        ax.set_xlabel(what, fontsize=8)
        ax.set_xticks([0, 0.5, 1])
        ax.tick_params(labelsize=8, left=False, labelleft=False)
        ax.spines[["top", "right", "left"]].set_visible(False)
    for place, pair in enumerate(rows):
        name = f"{setting(pair.setting, pair.ranks)}: {pair.rival_name}\n{workload(pair.workload)}"
        _write_above(panels, place - 0.2, name.replace("`", ""))
    panels[0].set_ylim(len(rows) - 0.6, -0.95)
    figure.suptitle("funcga over the alternative, which is 1", fontsize=8)
    return figure


def _write_above(panels: Any, place: float, text: str, **style: Any) -> None:
    """Writes the name of a row above it, from the left edge of the first panel and across both."""
    panels[1].patch.set_visible(False)
    where = {"xycoords": panels[0].get_yaxis_transform(), "annotation_clip": False, "va": "bottom", "linespacing": 1.1}
    where["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the lines of the panels stop there
    # The layout would make the panel as narrow as the text leaves it.
    panels[0].annotate(text, (0, place), fontsize=style.pop("fontsize", 8), **where, **style).set_in_layout(False)


def _ratios_figure(pairs: Sequence[Pair]) -> Figure:
    """The ratios to every rival."""
    rows = _rows(pairs)
    figure = Figure(figsize=(WIDTH, 1.4 + 0.4 * len(rows)), layout="constrained")
    places = {row: place for place, row in enumerate(rows)}
    workloads = list(dict.fromkeys(pair.workload for pair in pairs))
    left, right = panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for k, name in enumerate(workloads):
        mine = [pair for pair in pairs if pair.workload == name]
        shift = 0.4 * ((k + 0.5) / len(workloads) - 0.5) + 0.25
        style: dict[str, Any] = {"marker": _MARKERS[k % 8], "color": OURS, "linestyle": "", "markersize": 4}
        style |= {"markerfacecolor": "white" if k % 2 else OURS, "zorder": 4}  # above the names of rows
        where = [places[pair.setting, pair.rival, pair.ours] + shift for pair in mine]
        medians = [pair.time[1] for pair in mine]
        whiskers = [[max(p.time[1] - p.time[0], 0) for p in mine], [max(p.time[2] - p.time[1], 0) for p in mine]]
        left.errorbar(medians, where, xerr=whiskers, label=workload(name), elinewidth=0.9, **style)
        peaks = [(pair.peak, place) for pair, place in zip(mine, where, strict=True) if pair.peak]
        right.plot([peak for peak, _ in peaks], [place for _, place in peaks], **style)
    for place, row in enumerate(rows):
        label = _label(row, pairs)
        label = label.replace(" | ", "\n    ") if len(label) > 60 else label
        _write_above(panels, place, label, fontsize=7.5, fontweight="normal" if row[1] else "bold")
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.set_xlabel("time: median and quartiles")
    right.set_xlabel("bytes at the peak")
    for ax in panels:
        _ratio_axis(ax)
    figure.suptitle("funcga over the other; left of 1, funcga is faster or leaner", fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7.5)
    return figure


def _growth_figure(grown: dict[tuple[str, str], list[Point]]) -> Figure:
    """How time and memory grow: a row of two panels for each axis."""
    axes = list(dict.fromkeys(axis for axis, _ in grown))
    figure = Figure(figsize=(WIDTH, 1.7 * len(axes)), layout="constrained")
    grid = figure.subplots(len(axes), 2, squeeze=False)
    for (left, right), axis in zip(grid, axes, strict=True):
        found = {key: points for (of, key), points in grown.items() if of == axis}
        _lines(left, found, lambda point, own: 1e3 * own["seconds"][1] / point.microbatches)
        _lines(right, found, lambda point, own: own.get("peak_bytes", 0) / 2**20)
        for ax in (left, right):
            ax.set_xlabel(_UNITS.get(axis, axis), fontsize=7.5)
    grid[0][0].set_title("ms of a micro-batch", fontsize=8)
    grid[0][1].set_title("MiB at the peak", fontsize=8)
    return figure


Row = tuple[str, str, str]  # a setting, a rival, what of ours it is compared with; "" and "" are the setting's heading


def _rows(pairs: Sequence[Pair]) -> list[Row]:
    """The rows from the top; each setting has a heading."""
    rows = list(dict.fromkeys((pair.setting, pair.rival, pair.ours) for pair in pairs))
    settings = dict.fromkeys(setting for setting, _, _ in rows)
    return [row for key in settings for row in [(key, "", ""), *(row for row in rows if row[0] == key)]]


def _ratio_axis(ax: Any) -> None:
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.8), max(high, 1.25))
    ticks = [t for t in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.axvline(1, color="k", linewidth=0.9)
    ax.grid(axis="x", alpha=0.3)
    ax.xaxis.label.set_size(8)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", left=False, labelleft=False)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _label(row: Row, pairs: Sequence[Pair]) -> str:
    key, rival, _ = row
    mine = [pair for pair in pairs if pair.setting == key]
    if not rival:
        return setting(key, mine[0].ranks)
    pair = next(pair for pair in mine if (pair.setting, pair.rival, pair.ours) == row)
    alone = pair.ours_name == "funcga" or len({pair.ours for pair in mine}) == 1
    ours = "" if alone else f" | {pair.ours_name.removeprefix('funcga, ')}"
    return f"{pair.rival_name}{ours}".replace("`", "")


def _lines(ax: Any, found: dict[str, list[Point]], value: Callable[[Point, Any], float]) -> None:
    """Ours is a full line with filled marks, the loop by hand a dashed one with open marks."""
    for points in found.values():
        for name in dict.fromkeys(name for point in points for name in point.contenders):
            own = [(p.value, value(p, p.contenders[name])) for p in points if name in p.contenders]
            own = [(x, y) for x, y in own if y > 0]
            rival = any(p.contenders[name]["against"] for p in points if name in p.contenders)
            colour, line, size = (OTHERS, "--", 8) if rival else (OURS, "-", 4.5)
            style = {"color": colour, "linestyle": line, "markerfacecolor": "white" if rival else OURS, "marker": "o"}
            if own:
                label = "by hand" if rival else "funcga"
                ax.plot(*zip(*own, strict=True), label=label, markersize=size, zorder=1 if rival else 2, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    values = sorted({point.value for points in found.values() for point in points})
    shown = values[:: -(-len(values) // 3)]  # a panel has the width of some three numbers
    ax.set_xticks(shown, [_short(value) for value in shown])
    low, high = ax.get_ylim()
    middle = (low * high) ** 0.5
    ax.set_ylim(min(low, middle / 4), max(high, middle * 4))  # so that a line which is nearly level looks like it
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 50 * low else (1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=8)
    ax.legend(fontsize=7)


def _short(value: int) -> str:
    return f"{value // 10**6}M" if value >= 10**6 else f"{value:,}"
