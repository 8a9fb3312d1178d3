"""The report of a run as a page and as pictures: where a difference is, and how it grows."""

import io
from collections.abc import Sequence
from html import escape

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
    """The picture of a problem as an element of a page, with four axes: by n, by leaf, by
    micro-batch and by update.
    """
    figure, text = Figure(figsize=(14, 7.5), layout="constrained"), io.StringIO()
    result = "the same" if run.ok else "DIFFERENT"
    title = f"{run.problem.name}: {result} (no difference at all is drawn at {FLOOR:g})"
    figure.suptitle(title, fontweight="bold")
    by_n, by_leaf, by_micro_batch, by_update = figure.subplots(2, 2).flatten()
    _draw_full_batch(by_n, by_leaf, run)
    _draw_steps(by_micro_batch, by_update, run)
    with rc_context({"svg.fonttype": "none"}):  # letters stay text, which can be searched
        figure.savefig(text, format="svg")
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


FLOOR = 1e-18
"""Where no difference at all is drawn, as a logarithmic axis has no 0."""


def _draw_full_batch(by_n: Axes, by_leaf: Axes, run: Run) -> None:
    # With n = 1 nothing is accumulated: both are the same call.
    accumulated = [c for c in run.of("accumulation") if c.n != 1]
    by_n.set(title="accumulated vs full batch", xlabel="n, micro-batches")
    _draw(by_n, [*dict.fromkeys(c.n or 1 for c in accumulated)], _series(accumulated), accumulated)

    full = [c for c in run.of("model") if c.micro_batch is None]
    # With one framework alone its largest n stands for the comparison of the full batches.
    full = full or [c for c in run.of("accumulation") if c.n == run.n]
    leaves = {c.dtype: [row.relative for row in c.report.rows if row.path != "loss"] for c in full}
    label = "leaf, in the order of the parameters"
    by_leaf.set(title=f"{full[0].what}, leaf by leaf", xlabel=label)
    _draw(by_leaf, range(1, len(leaves[full[0].dtype]) + 1), leaves, full)


def _draw_steps(by_micro_batch: Axes, by_update: Axes, run: Run) -> None:
    micro = [c for c in run.of("model") if c.micro_batch is not None]
    by_micro_batch.set(title="torch vs JAX, each micro-batch", xlabel="micro-batch")
    _draw(by_micro_batch, range(1, run.n + 1), _series(micro), micro)

    trained = run.of("training")
    by_update.set(title="torch vs JAX, parameters in training", xlabel="update")
    series = {f"{c.optimizer}, {c.dtype}": [each.most for each in c.reports] for c in trained}
    _draw(by_update, range(1, run.updates + 1), series, trained)


def _series(compared: list[Compared]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for each in compared:
        name = f"{each.framework}, {each.dtype}" if each.framework else each.dtype
        values.setdefault(name, []).append(each.report.most)
    return values


def _draw(
    axes: Axes,
    positions: Sequence[float],
    series: dict[str, list[float]],
    compared: list[Compared],
) -> None:
    """Draws the largest relative differences, by name, at each position, and the limits of what was
    compared.
    """
    axes.set(yscale="log", ylabel="largest relative difference")
    axes.grid(alpha=0.3)
    if not series:
        axes.text(0.5, 0.5, "nothing is compared", transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    # What can be told apart without colours; of two in one place a ring is around the smaller one.
    sizes = [4, 6, 8, 10, 12, 14]
    axes.set_prop_cycle(marker=[*"osD^vP"], markersize=sizes, color=[*"brgmck"])
    for name, values in series.items():
        shown = [max(value, FLOOR) for value in values]
        axes.plot(positions, shown, label=name, markerfacecolor="none", linewidth=0.5)
    rows = [row for c in compared for row in c.reports[-1].rows if row.dtype and row.limit]
    limits = {row.dtype: row.limit for row in sorted(rows, key=lambda row: row.limit)}
    for dtype, limit in limits.items():
        axes.axhline(limit, color="0.4", linestyle=":")
        text, data = f"limit, {dtype}", axes.get_yaxis_transform()
        axes.text(1, limit, text, transform=data, ha="right", va="bottom", fontsize="x-small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=FLOOR / 3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)
