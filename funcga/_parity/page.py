"""The page and the pictures of a run: where a difference is, and how it grows."""

import io
from collections.abc import Callable, Sequence
from importlib.resources import files

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from funcga._compare.report import Report
from funcga._parity import report as tables
from funcga._parity.run import CAUSES, Compared, Findings
from funcga._parity.verdict import verdict
from funcga._versions import versions


def page(every: Sequence[Findings]) -> str:
    """The page of all problems: tables, verdicts and pictures; it loads nothing.

    It needs jinja2 and matplotlib.
    """
    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    ).from_string(files("funcga._parity").joinpath("page.html").read_text(encoding="utf-8"))
    problems = [
        {
            "findings": findings,
            "lines": tables.lines(findings),
            "verdict": verdict(findings),
            "title": tables.title(findings).split("\n"),
            "picture": _svg(picture([findings])),
        }
        for findings in every
    ]
    return template.render(
        problems=problems,
        ok=all(findings.ok for findings in every),
        conclusion=tables.conclusion(every).plain,
        versions=versions(),
        causes=CAUSES,
        figure=tables.figure,
    )


def _svg(figure: Figure) -> str:
    """The figure as an element of a page."""
    import matplotlib

    text = io.StringIO()
    # Letters stay text, which can be searched; without the date a picture is the same each time.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


FLOOR = 1e-18
"""Where no difference at all is drawn, as a logarithm has no place for it."""

# What can be told apart without colours: a dtype by its dashes, the rest by markers. Colours: Okabe and Ito (2008).
_LINES = {"float64": "-", "float32": "--", "bfloat16": ":", "float16": "-."}
_MARKERS = "osD^vP"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def picture(every: Sequence[Findings]) -> Figure:
    """A figure with four axes for each problem: against n, against depth, by micro-batch, and by update."""
    figure = Figure(figsize=(11, 7 * len(every)), layout="constrained")
    parts = figure.subfigures(len(every), 1, squeeze=False)[:, 0]
    for part, findings in zip(parts, every, strict=True):
        result = "the same" if findings.ok else "DIFFERENT"
        text = f"{findings.problem.name}: {result} (no difference at all is drawn at {FLOOR:g})"
        part.suptitle(text, fontweight="bold")
        axes = part.subplots(2, 2).flatten()
        for ax, draw in zip(axes, (_against_n, _against_depth, _by_micro_batch, _by_update), strict=True):
            draw(ax, findings)
            _finish(ax)
    return figure


def _finish(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.margins(y=0.1)
    ax.set_ylim(bottom=FLOOR / 2)
    ax.set_ylabel("largest relative difference")
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="x-small", ncols=2, handlelength=3.5)
    else:
        ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center")


def _against_n(ax: Axes, findings: Findings) -> None:
    ax.set(title="accumulated vs full batch", xlabel="n, micro-batches")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    alone = [c for c in findings.of("accumulation") if c.replicas == 1]
    _limits(ax, [compared.report for compared in alone])
    _lines(ax, alone, lambda c: str(c.framework), lambda c: c.n or 0)


def _against_depth(ax: Axes, findings: Findings) -> None:
    full = [compared for compared in findings.of("model") if compared.micro_batch is None]
    # With one framework alone its largest n stands for the comparison.
    if not full:
        full = [c for c in findings.of("accumulation") if c.n == len(findings.rows) and c.replicas == 1]
    ax.set(title=f"{full[0].what}, leaf by leaf", xlabel="leaf, in the order of the parameters")
    _limits(ax, [compared.report for compared in full])
    for marker, color, compared in zip(_MARKERS, _COLOURS, full, strict=False):
        rows = [row for row in compared.report.rows if row.path != "loss"]
        values = [max(row.relative, FLOOR) for row in rows]
        ax.plot(range(len(rows)), values, label=compared.dtype, marker=marker, color=color, linestyle="")
        # More names than these would cover one another.
        if len(rows) <= 24:
            ax.set_xticks(range(len(rows)), [row.path for row in rows], rotation=60, ha="right", fontsize="x-small")


def _by_micro_batch(ax: Axes, findings: Findings) -> None:
    ax.set(title="torch vs JAX, each micro-batch", xlabel="micro-batch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    compared = [compared for compared in findings.of("model") if compared.micro_batch is not None]
    _limits(ax, [point.report for point in compared])
    _lines(ax, compared, lambda c: c.dtype, lambda c: 1 + (c.micro_batch or 0))


def _by_update(ax: Axes, findings: Findings) -> None:
    ax.set(title="torch vs JAX, parameters in training", xlabel="update")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = list(dict.fromkeys(t.optimizer for t in findings.trajectories))
    _limits(ax, [t.reports[-1] for t in findings.trajectories])
    for t in findings.trajectories:
        values = [report.most for report in t.reports]
        label = f"{t.optimizer}, {t.dtype}"
        _line(ax, range(1, len(values) + 1), values, label, names.index(t.optimizer), t.dtype, every=0.1)


def _limits(ax: Axes, reports: Sequence[Report]) -> None:
    """A dotted line for the largest limit of every dtype."""
    limits: dict[str, float] = {}
    for report in reports:
        for row in report.rows:
            if row.dtype:
                limits[row.dtype] = max(row.limit, limits.get(row.dtype, 0.0))
    for limit in limits.values():
        ax.axhline(limit, color="0.4", linestyle=(0, (1, 4)))


def _lines(
    ax: Axes, compared: list[Compared], name: Callable[[Compared], str], position: Callable[[Compared], float]
) -> None:
    """A line for every name and dtype."""
    # A name has one colour in all its dtypes.
    groups: dict[tuple[str, str], list[Compared]] = {}
    for point in compared:
        groups.setdefault((name(point), point.dtype), []).append(point)
    names = list(dict.fromkeys(label for label, _ in groups))
    for (label, dtype), group in groups.items():
        full = label if label == dtype else f"{label}, {dtype}"
        _line(ax, list(map(position, group)), [point.report.most for point in group], full, names.index(label), dtype)


def _line(
    ax: Axes, x: Sequence[float], y: Sequence[float], label: str, number: int, dtype: str, every: float | None = None
) -> None:
    """One line: its number says the colour and the marker, its dtype the dashes."""
    shown = [max(value, FLOOR) for value in y]
    style = _LINES.get(dtype, "-")
    ax.plot(x, shown, label=label, color=_COLOURS[number], marker=_MARKERS[number], linestyle=style, markevery=every)
