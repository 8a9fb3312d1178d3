"""The page and the pictures of a run: where a difference is, and how it grows."""

import io
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from funcga._commands import versions
from funcga._compare.report import Report, figure
from funcga._parity import report as tables
from funcga._parity.run import CAUSES, Compared, Findings, Trajectory


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
            "verdict": tables.verdict(findings),
            "title": tables.title(findings).split("\n"),
            "pictures": [
                (panel.title, _svg(panel, findings.problem.name)) for panel in _panels(findings)
            ],
        }
        for findings in every
    ]
    return template.render(
        problems=problems,
        ok=all(findings.ok for findings in every),
        conclusion=tables.conclusion(every).plain,
        versions=versions(),
        causes=CAUSES,
        figure=figure,
    )


def picture(every: Sequence[Findings]) -> Figure:
    """A figure with four axes for each problem: against n, against depth, by micro-batch, and by
    update.
    """
    whole = Figure(figsize=(14, 7.5 * len(every)), layout="constrained")
    parts = whole.subfigures(len(every), 1, squeeze=False)[:, 0]
    for part, findings in zip(parts, every, strict=True):
        result = "the same" if findings.ok else "DIFFERENT"
        text = f"{findings.problem.name}: {result} (no difference at all is drawn at {FLOOR:g})"
        part.suptitle(text, fontweight="bold")
        for axes, panel in zip(part.subplots(2, 2).flatten(), _panels(findings), strict=True):
            _draw(axes, panel)
    return whole


FLOOR = 1e-18
"""Where no difference at all is drawn, as a logarithm has no place for it."""


class _Series(NamedTuple):
    """Largest relative differences in one dtype, at positions from 0 on: of a framework, or of
    an optimizer.
    """

    name: str
    dtype: str
    values: list[float]

    @property
    def label(self) -> str:
        """What the legend calls it."""
        return self.dtype if self.name == self.dtype else f"{self.name}, {self.dtype}"


class _Panel(NamedTuple):
    """What one of the axes shows. ticks: what each position is called; reports: those that the
    limits are from; empty: what stands there if there is no series.

    apart: whether neighbouring positions are two things, and not steps of one course, which a line
    would join.
    """

    title: str
    xlabel: str
    ticks: list[str]
    series: list[_Series]
    reports: list[Report]
    apart: bool
    empty: str = "not run"

    @property
    def limits(self) -> dict[str, float]:
        """The largest limit of every dtype."""
        rows = [row for report in self.reports for row in report.rows]
        dtypes = dict.fromkeys(row.dtype for row in rows if row.dtype)
        return {dtype: max(row.limit for row in rows if row.dtype == dtype) for dtype in dtypes}


_WHOLE = "n = 1 is the full batch"


def _panels(findings: Findings) -> list[_Panel]:
    model, ns = findings.of("model"), len(findings.rows)
    accumulated = [c for c in findings.of("accumulation") if c.replicas == 1]
    # With one framework alone its largest n stands for the comparison of the full batches.
    full = [c for c in model if c.micro_batch is None] or [c for c in accumulated if c.n == ns]
    # Of one micro-batch nothing is accumulated: both are the same call.
    return [
        _by_n([c for c in accumulated if c.n != 1]),
        _by_leaf(full),
        _by_micro_batch(model, ns),
        _by_update(findings.trajectories),
    ]


def _by_n(accumulated: list[Compared]) -> _Panel:
    return _Panel(
        "accumulated vs full batch",
        "n, micro-batches",
        [str(n) for n in dict.fromkeys(c.n for c in accumulated)],
        _series(accumulated, lambda c: str(c.framework)),
        [c.report for c in accumulated],
        apart=False,
        empty=_WHOLE,
    )


def _by_micro_batch(model: list[Compared], n: int) -> _Panel:
    parts = [c for c in model if c.micro_batch is not None and n > 1]
    return _Panel(
        "torch vs JAX, each micro-batch",
        "micro-batch",
        [str(number) for number in range(1, n + 1)],
        _series(parts, lambda c: c.dtype),
        [c.report for c in parts],
        apart=True,
        empty=_WHOLE if model else "not run",
    )


def _by_leaf(full: list[Compared]) -> _Panel:
    leaves = {c.dtype: [row for row in c.report.rows if row.path != "loss"] for c in full}
    return _Panel(
        f"{full[0].what}, leaf by leaf",
        "leaf, in the order of the parameters",
        [row.path for row in next(iter(leaves.values()))],
        [_Series(dtype, dtype, [r.relative for r in rows]) for dtype, rows in leaves.items()],
        [c.report for c in full],
        apart=True,
    )


def _by_update(trained: list[Trajectory]) -> _Panel:
    updates = max((len(t.reports) for t in trained), default=0)
    return _Panel(
        "torch vs JAX, parameters in training",
        "update",
        [str(update) for update in range(1, updates + 1)],
        [_Series(t.optimizer, t.dtype, [r.most for r in t.reports]) for t in trained],
        [t.reports[-1] for t in trained],
        apart=False,
    )


def _series(compared: list[Compared], name: Callable[[Compared], str]) -> list[_Series]:
    """A series for each name and dtype."""
    values: dict[tuple[str, str], list[float]] = {}
    for each in compared:
        values.setdefault((name(each), each.dtype), []).append(each.report.most)
    return [_Series(*key, found) for key, found in values.items()]


# What can be told apart without colours: a name by its marker, a dtype by its dashes and by the
# size of its markers, so that of two in one place the larger one is a ring around the smaller.
# Colours: Okabe and Ito (2008).
_STYLES = {"float64": ("-", 4), "float32": ("--", 8), "bfloat16": (":", 11), "float16": ("-.", 14)}
_MARKERS = "osD^vP"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


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
    names = list(dict.fromkeys(series.name for series in panel.series))
    for series in panel.series:
        index = names.index(series.name) % len(_MARKERS)
        dashes, size = _STYLES[series.dtype]
        axes.plot(
            [max(value, FLOOR) for value in series.values],
            label=series.label,
            color=_COLOURS[index],
            marker=_MARKERS[index],
            markersize=size,
            markerfacecolor=None if size == 4 else "none",
            linestyle="" if panel.apart else dashes,
        )
    for dtype, limit in panel.limits.items():
        if limit > 0:
            axes.axhline(limit, color="0.4", linestyle=(0, (1, 4)))
            axes.annotate(
                f"limit, {dtype}",
                (1, limit),
                (-3, 2),
                ("axes fraction", "data"),
                "offset points",
                ha="right",
                fontsize="x-small",
                color="0.3",
            )
    # More names than these would cover one another.
    every = -(-len(panel.ticks) // 24)
    rotation = 0 if panel.ticks[0].isdecimal() else 60
    positions = range(0, len(panel.ticks), every)
    axes.set_xticks(positions, panel.ticks[::every], fontsize="x-small", rotation=rotation)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=FLOOR / 3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize="small", frameon=False)


def _svg(panel: _Panel, name: str) -> str:
    """The panel as an element of a page."""
    text = io.StringIO()
    # Letters stay text, which can be searched; with a salt and without the date a picture is the
    # same each time.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{name}, {panel.title}"}):
        whole = Figure(figsize=(5.6, 3.7), layout="constrained")
        _draw(whole.subplots(), panel)
        whole.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
