"""The report of a run as a page and as pictures: where a difference is, and how it grows."""

import io
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from funcga.tools.compare.report import Report
from funcga.tools.parity.report import as_text, conclusion
from funcga.tools.parity.run import Compared, Run

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>funcga parity</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; }}
  pre {{ overflow-x: auto; font-size: .85rem; }}
  svg {{ width: 100%; height: auto; }}
</style>
<h1>funcga parity</h1>
{}
</html>
"""


def page(every: Sequence[Run]) -> str:
    """A page of all problems, with tables, verdicts and pictures; it loads nothing."""
    sections = [f"<p><strong>{escape(conclusion(every))}</strong></p>"]
    for run in every:
        full = [c for c in run.of("model") + run.of("rounding") if c.micro_batch is None]
        leaves = "\n\n".join(f"{c.what}, {c.dtype}\n{c.report}" for c in full)
        sections += [
            f"<h2>{escape(run.problem.name)}</h2>",
            f"<pre>{escape(as_text(run))}</pre>",
            _svg(run),
            "<details><summary>Every leaf of the full batch</summary>",
            f"<pre>{escape(leaves)}</pre></details>",
        ]
    return _PAGE.format("\n".join(sections))


def _svg(run: Run) -> str:
    """The picture of a problem as an element of a page."""
    text = io.StringIO()
    # Letters stay text, which can be searched; with a salt and without the date a picture is the
    # same each time.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": run.problem.name}):
        picture([run]).savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def picture(every: Sequence[Run]) -> Figure:
    """A figure with four axes for each problem: by n, by leaf, by micro-batch and by update."""
    whole = Figure(figsize=(14, 7.5 * len(every)), layout="constrained")
    parts = whole.subfigures(len(every), 1, squeeze=False)[:, 0]
    for part, run in zip(parts, every, strict=True):
        result = "the same" if run.ok else "DIFFERENT"
        text = f"{run.problem.name}: {result} (no difference at all is drawn at {FLOOR:g})"
        part.suptitle(text, fontweight="bold")
        panels = (_by_n, _by_leaf, _by_micro_batch, _by_update)
        for axes, panel in zip(part.subplots(2, 2).flatten(), panels, strict=True):
            _draw(axes, panel(run))
    return whole


FLOOR = 1e-18
"""Where no difference at all is drawn, as a logarithmic axis has no 0."""


class _Panel(NamedTuple):
    """What one of the axes shows: the largest relative differences, by name, at each tick.

    `reports` have the limits. `empty` stands there if there is no series.
    """

    title: str
    xlabel: str
    ticks: list[str]
    series: dict[str, list[float]]
    reports: list[Report]
    empty: str = "not run"


_WHOLE = "n = 1 is the full batch"  # of which nothing is accumulated: both are the same call


def _by_n(run: Run) -> _Panel:
    accumulated = [c for c in run.of("accumulation") if c.n != 1]
    ticks = [str(n) for n in dict.fromkeys(c.n for c in accumulated)]
    series, reports = _series(accumulated), [c.report for c in accumulated]
    title, xlabel = "accumulated vs full batch", "n, micro-batches"
    return _Panel(title, xlabel, ticks, series, reports, _WHOLE)


def _by_leaf(run: Run) -> _Panel:
    full = [c for c in run.of("model") if c.micro_batch is None]
    # With one framework alone its largest n stands for the comparison of the full batches.
    full = full or [c for c in run.of("accumulation") if c.n == run.n]
    leaves = {c.dtype: [row for row in c.report.rows if row.path != "loss"] for c in full}
    ticks = [row.path for row in leaves[full[0].dtype]]
    series = {dtype: [row.relative for row in rows] for dtype, rows in leaves.items()}
    title, xlabel = f"{full[0].what}, leaf by leaf", "leaf, in the order of the parameters"
    return _Panel(title, xlabel, ticks, series, [c.report for c in full])


def _by_micro_batch(run: Run) -> _Panel:
    model, n = run.of("model"), run.n
    micro = [c for c in model if c.micro_batch is not None and n > 1]
    ticks = [str(number) for number in range(1, n + 1)]
    series, reports = _series(micro), [c.report for c in micro]
    title, empty = "torch vs JAX, each micro-batch", _WHOLE if model else "not run"
    return _Panel(title, "micro-batch", ticks, series, reports, empty)


def _by_update(run: Run) -> _Panel:
    trained = run.of("training")
    series = {f"{c.optimizer}, {c.dtype}": [each.most for each in c.reports] for c in trained}
    ticks = [str(update) for update in range(1, run.updates + 1)]
    reports, title = [c.reports[-1] for c in trained], "torch vs JAX, parameters in training"
    return _Panel(title, "update", ticks, series, reports)


def _series(compared: list[Compared]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for each in compared:
        name = f"{each.framework}, {each.dtype}" if each.framework else each.dtype
        values.setdefault(name, []).append(each.report.most)
    return values


def _draw(axes: Axes, panel: _Panel) -> None:
    axes.set(
        title=panel.title,
        yscale="log",
        xlabel=panel.xlabel,
        ylabel="largest relative difference",
    )
    axes.grid(alpha=0.3)
    if not panel.series:
        axes.text(0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    # What can be told apart without colours; of two in one place a ring is around the smaller one.
    sizes = [4, 6, 8, 10, 12, 14]
    axes.set_prop_cycle(marker=[*"osD^vP"], markersize=sizes, color=[*"brgmck"])
    for name, values in panel.series.items():
        shown = [max(value, FLOOR) for value in values]
        axes.plot(shown, label=name, markerfacecolor="none", linewidth=0.5)
    rows = [row for report in panel.reports for row in report.rows if row.dtype and row.limit]
    limits = {row.dtype: row.limit for row in sorted(rows, key=lambda row: row.limit)}
    for dtype, limit in limits.items():
        axes.axhline(limit, color="0.4", linestyle=":")
        text, data = f"limit, {dtype}", axes.get_yaxis_transform()
        axes.text(1, limit, text, transform=data, ha="right", va="bottom", fontsize="x-small")
    # More names than these would cover one another.
    every = -(-len(panel.ticks) // 24)
    positions = range(0, len(panel.ticks), every)
    axes.set_xticks(positions, panel.ticks[::every], fontsize="x-small", rotation=60)
    axes.set_ylim(bottom=FLOOR / 3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)
