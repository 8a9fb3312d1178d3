"""The report of a run as a page with pictures: where a difference is, and how it grows."""

import io
from collections.abc import Sequence
from html import escape

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from funcga.tools.parity.report import as_text, conclusion
from funcga.tools.parity.run import Compared, Run
from funcga.tools.reports.tables import new_figure

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


FLOOR = 1e-18
"""Where no difference at all is drawn, as a logarithmic axis has no 0."""


def _svg(run: Run) -> str:
    """The picture of a problem as an element of a page: the accumulated gradients by n, the models
    by depth and by micro-batch, and the training by update.
    """
    figure, text = new_figure(14, 16), io.StringIO()
    result = "the same" if run.ok else "DIFFERENT"
    title = f"{run.problem.name}: {result} (no difference at all is drawn at {FLOOR:g})"
    figure.suptitle(title, fontweight="bold")
    by_n = [(c, c.n or 1, c.report.most) for c in run.of("accumulation")]
    by_micro_batch = [
        (c, 0 if c.micro_batch is None else c.micro_batch + 1, c.report.most)
        for c in run.of("model")
    ]
    by_update = [
        (c, update, report.most)
        for c in run.of("training")
        for update, report in enumerate(c.reports, 1)
    ]
    axes = figure.subplots(4)
    _draw(axes[0], "accumulated vs full batch", "n, micro-batches", by_n)
    _draw(axes[1], "leaf by leaf", "leaf, in the order of the parameters", _by_leaf(run))
    _draw(axes[2], "torch vs JAX", "micro-batch, 0 for the full batch", by_micro_batch)
    _draw(axes[3], "torch vs JAX, parameters in training", "update", by_update)
    with rc_context({"svg.fonttype": "none"}):  # letters stay text, which can be searched
        figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _by_leaf(run: Run) -> list[tuple[Compared, int, float]]:
    full = [c for c in run.of("model") if c.micro_batch is None]
    # With one framework alone its largest n stands for the comparison of the full batches.
    full = full or [c for c in run.of("accumulation") if c.n == run.n]
    leaves = [[row.relative for row in c.report.rows if row.path != "loss"] for c in full]
    return [(c, *each) for c, of in zip(full, leaves, strict=True) for each in enumerate(of, 1)]


def _draw(
    axes: Axes, title: str, xlabel: str, points: Sequence[tuple[Compared, int, float]]
) -> None:
    """Draws relative differences at their positions, in a line for all that are alike, and the
    limits.
    """
    axes.set(title=title, xlabel=xlabel, yscale="log", ylabel="largest relative difference")
    axes.grid(alpha=0.3)
    if not points:
        axes.text(0.5, 0.5, "nothing is compared", transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    # What can be told apart without colours; of two in one place a ring is around the smaller one.
    sizes = [4, 6, 8, 10, 12, 14]
    axes.set_prop_cycle(marker=[*"osD^vP"], markersize=sizes, color=[*"brgmck"])
    lines, limits = dict[str, list[tuple[int, float]]](), dict[str, float]()
    for compared, position, difference in points:
        line = lines.setdefault(f"{compared.what}, {compared.dtype}", [])
        line.append((position, max(difference, FLOOR)))
        for row in compared.report.rows:
            limits[compared.dtype] = max(row.limit, limits.get(compared.dtype, 0.0))
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), label=name, markerfacecolor="none", linewidth=0.5)
    for dtype, limit in limits.items():
        axes.axhline(limit, color="0.4", linestyle=":")
        text, data = f"limit, {dtype}", axes.get_yaxis_transform()
        axes.text(1, limit, text, transform=data, ha="right", va="bottom", fontsize="x-small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=FLOOR / 3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)
