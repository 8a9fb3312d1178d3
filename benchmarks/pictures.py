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
OURS, OTHERS = "#0072b2", "#767676"  # funcga is blue in every picture, what it is compared with is grey

_UNITS = {"micro-batches": "micro-batches of an update", "leaves": "leaves, parameters of 16 elements"}
_UNITS |= {"parameters": "elements of all parameters", "ranks": "replicas"}


def draw(results: Results, file: Path) -> list[Path]:
    """The pictures that it writes beside each other, in the format of the suffix, .png or .svg.

    One a framework, `NAME-torch` and `NAME-jax`, and `NAME-summary` with the rows of the README. What there are no
    figures of is not drawn: with imports alone there is no picture.
    """
    pairs, grown = standing.pairs(results), standing.growth(results)
    written = []
    for name in ("torch", "JAX"):
        own = [pair for pair in pairs if framework(pair.setting) == name]
        lines = {key: points for key, points in grown.items() if framework(key[1]) == name}
        if own or lines:
            written.append(file.with_stem(f"{file.stem}-{name.lower()}"))
            save(_framework_figure(own, lines), written[-1])
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
    figure.set_dpi(110)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")
    image.quantize(64).save(file, optimize=True)  # a third of the bytes


def _summary_figure(rows: Sequence[Pair]) -> Figure:
    """Time and bytes against the best-known rival of each setting: bars of ours, a line for the rival."""
    figure = Figure(figsize=(8, 0.9 + 0.36 * len(rows)), layout="constrained")
    panels: Any = figure.subplots(1, 2, sharey=True)
    labels = [
        f"{setting(pair.setting, pair.ranks)}: {pair.rival_name}\n{workload(pair.workload)}".replace("`", "")
        for pair in rows
    ]
    for ax, values, what in (
        (panels[0], [pair.time[1] for pair in rows], "time"),
        (panels[1], [pair.peak for pair in rows], "bytes at the peak"),
    ):
        ax.barh(range(len(rows)), [value or 0 for value in values], color=OURS, height=0.55)
        ax.bar_label(ax.containers[0], [f" {value:.2f}" if value else " not counted" for value in values], fontsize=7)
        ax.axvline(1, color=OTHERS, linewidth=1.2)
        ax.set_xlim(0, max(1.25, *(1.15 * (value or 0) for value in values)))
        ax.set_xlabel(f"{what}; 1 is the alternative", fontsize=7)
        ax.tick_params(labelsize=7, left=False)
        ax.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), labels)
    panels[0].invert_yaxis()
    return figure


def _framework_figure(pairs: Sequence[Pair], grown: dict[tuple[str, str], list[Point]]) -> Figure:
    """The ratios to every rival, and below them how time and memory grow."""
    axes = list(dict.fromkeys(axis for axis, _ in grown))
    above = 1.6 + 0.22 * len(_rows(pairs)) if pairs else 0.2
    figure = Figure(figsize=(9, above + (4.6 if axes else 0)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(above, 4.6)) if axes and pairs else [figure, figure]
    if pairs:
        _draw_ratios(parts[0], pairs)
    if axes:
        _draw_growth(parts[1], axes, grown)
    return figure


Row = tuple[str, str, str]  # a setting, a rival, what of ours it is compared with; "" and "" are the setting's heading


def _rows(pairs: Sequence[Pair]) -> list[Row]:
    """The rows from the top; each setting has a heading."""
    rows = list(dict.fromkeys((pair.setting, pair.rival, pair.ours) for pair in pairs))
    settings = dict.fromkeys(setting for setting, _, _ in rows)
    return [row for key in settings for row in [(key, "", ""), *(row for row in rows if row[0] == key)]]


def _draw_ratios(part: Any, pairs: Sequence[Pair]) -> None:
    rows = _rows(pairs)
    places = {row: place for place, row in enumerate(rows)}
    workloads = list(dict.fromkeys(pair.workload for pair in pairs))
    left, right = part.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for k, name in enumerate(workloads):
        mine = [pair for pair in pairs if pair.workload == name]
        shift = 0.7 * ((k + 0.5) / len(workloads) - 0.5)
        style: dict[str, Any] = {"marker": _MARKERS[k % 8], "color": OURS, "linestyle": "", "markersize": 5}
        style["markerfacecolor"] = "white" if k % 2 else OURS
        where = [places[pair.setting, pair.rival, pair.ours] + shift for pair in mine]
        medians = [pair.time[1] for pair in mine]
        whiskers = [[max(p.time[1] - p.time[0], 0) for p in mine], [max(p.time[2] - p.time[1], 0) for p in mine]]
        left.errorbar(medians, where, xerr=whiskers, label=workload(name), elinewidth=0.9, **style)
        peaks = [(pair.peak, place) for pair, place in zip(mine, where, strict=True) if pair.peak]
        right.plot([peak for peak, _ in peaks], [place for _, place in peaks], **style)
    left.set_yticks(range(len(rows)), [_label(row, pairs) for row in rows], fontsize="x-small")
    for label, (_, rival, _) in zip(left.get_yticklabels(), rows, strict=True):
        label.set_fontweight("normal" if rival else "bold")
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.set_xlabel("time: median and quartiles")
    right.set_xlabel("bytes at the peak")
    for ax in (left, right):
        _ratio_axis(ax)
    part.suptitle("funcga over the other; left of 1, funcga is faster or leaner", fontsize="small")
    part.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="x-small")


def _ratio_axis(ax: Any) -> None:
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.8), max(high, 1.25))
    ticks = [
        t for t in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10) if ax.get_xlim()[0] <= t <= ax.get_xlim()[1]
    ]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.axvline(1, color="k", linewidth=0.9)
    ax.grid(axis="x", alpha=0.3)
    ax.xaxis.label.set_size("x-small")
    ax.tick_params(axis="x", labelsize="x-small")


def _label(row: Row, pairs: Sequence[Pair]) -> str:
    key, rival, _ = row
    mine = [pair for pair in pairs if pair.setting == key]
    if not rival:
        return setting(key, mine[0].ranks)
    pair = next(pair for pair in mine if (pair.setting, pair.rival, pair.ours) == row)
    alone = pair.ours_name == "funcga" or len({pair.ours for pair in mine}) == 1
    ours = "" if alone else f" | {pair.ours_name.removeprefix('funcga, ')}"
    return f"{pair.rival_name}{ours}".replace("`", "")


def _draw_growth(part: Any, axes: Sequence[str], grown: dict[tuple[str, str], list[Point]]) -> None:
    grid = part.subplots(2, len(axes), squeeze=False)
    for (above, below), axis in zip(grid.T, axes, strict=True):
        found = {key: points for (of, key), points in grown.items() if of == axis}
        _lines(above, found, lambda point, own: 1e3 * own["seconds"][1] / point.microbatches)
        _lines(below, found, lambda point, own: own.get("peak_bytes", 0) / 2**20)
        above.set_title(f"growth with {axis}", fontsize="small")
        below.set_xlabel(_UNITS.get(axis, axis), fontsize="x-small")
    grid[0][0].set_ylabel("time of a micro-batch, ms", fontsize="x-small")
    grid[1][0].set_ylabel("peak, MiB", fontsize="x-small")


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
    ax.set_xticks(values, [_short(value) for value in values])
    low, high = ax.get_ylim()
    middle = (low * high) ** 0.5
    ax.set_ylim(min(low, middle / 4), max(high, middle * 4))  # so that a line which is nearly level looks like it
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}")
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize="x-small")
    ax.legend(fontsize="xx-small")


def _short(value: int) -> str:
    return f"{value // 10**6}M" if value >= 10**6 else f"{value:,}"
