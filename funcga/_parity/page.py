"""The page and the pictures of a run: where a difference is, and how it grows."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from funcga._compare.report import Report, figure
from funcga._parity import report as tables
from funcga._parity.run import CAUSES, Findings
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


@dataclass(frozen=True)
class _Series:
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


@dataclass(frozen=True)
class _Panel:
    """What one of the axes shows. ticks: what each position is called; reports: those that the
    limits are from.

    apart: whether neighbouring positions are two things, and not steps of one course, which a line
    would join.
    """

    title: str
    xlabel: str
    ticks: list[str]
    series: list[_Series]
    reports: list[Report]
    apart: bool = False
    empty: str = "not run"

    @property
    def limits(self) -> dict[str, float]:
        """The largest limit of every dtype."""
        rows = [row for report in self.reports for row in report.rows]
        dtypes = dict.fromkeys(row.dtype for row in rows if row.dtype)
        return {dtype: max(row.limit for row in rows if row.dtype == dtype) for dtype in dtypes}


def _panels(findings: Findings) -> Iterator[_Panel]:
    yield _against_n(findings)
    yield _against_depth(findings)
    yield _by_micro_batch(findings)
    yield _by_update(findings)


def _against_n(findings: Findings) -> _Panel:
    # Of one micro-batch nothing is accumulated: both are the same call.
    compared = [c for c in findings.of("accumulation") if c.replicas == 1 and c.n != 1]
    groups = dict.fromkeys((str(c.framework), c.dtype) for c in compared)
    series = [
        _Series(
            name,
            dtype,
            [c.report.most for c in compared if (c.framework, c.dtype) == (name, dtype)],
        )
        for name, dtype in groups
    ]
    ns = [str(n) for n in dict.fromkeys(c.n for c in compared)]
    reports = [c.report for c in compared]
    return _Panel(
        "accumulated vs full batch",
        "n, micro-batches",
        ns,
        series,
        reports,
        empty="n = 1 is the full batch",
    )


def _against_depth(findings: Findings) -> _Panel:
    full = [c for c in findings.of("model") if c.micro_batch is None]
    # With one framework alone its largest n stands for the comparison.
    if not full:
        full = [
            c for c in findings.of("accumulation") if c.n == len(findings.rows) and c.replicas == 1
        ]
    leaves = {c.dtype: [row for row in c.report.rows if row.path != "loss"] for c in full}
    series = [
        _Series(dtype, dtype, [row.relative for row in rows]) for dtype, rows in leaves.items()
    ]
    paths = [row.path for row in next(iter(leaves.values()))]
    reports = [c.report for c in full]
    return _Panel(
        f"{full[0].what}, leaf by leaf",
        "leaf, in the order of the parameters",
        paths,
        series,
        reports,
        True,
    )


def _by_micro_batch(findings: Findings) -> _Panel:
    # One micro-batch is the full batch, which the panel before has.
    compared = [
        c for c in findings.of("model") if c.micro_batch is not None and len(findings.rows) > 1
    ]
    dtypes = dict.fromkeys(c.dtype for c in compared)
    series = [
        _Series(dtype, dtype, [c.report.most for c in compared if c.dtype == dtype])
        for dtype in dtypes
    ]
    numbers = [str(number) for number in range(1, len(findings.rows) + 1)]
    reports = [c.report for c in compared]
    empty = "n = 1 is the full batch" if findings.of("model") else "not run"
    return _Panel(
        "torch vs JAX, each micro-batch", "micro-batch", numbers, series, reports, True, empty
    )


def _by_update(findings: Findings) -> _Panel:
    series = [
        _Series(t.optimizer, t.dtype, [report.most for report in t.reports])
        for t in findings.trajectories
    ]
    updates = [
        str(update) for update in range(1, max((len(s.values) for s in series), default=0) + 1)
    ]
    reports = [t.reports[-1] for t in findings.trajectories]
    return _Panel("torch vs JAX, parameters in training", "update", updates, series, reports)


# What can be told apart without colours: a name by its marker, a dtype by its dashes and by the
# size of its markers, so that of two in one place the larger one is a ring around the smaller.
# Colours: Okabe and Ito (2008).
_STYLES = {"float64": ("-", 4), "float32": ("--", 8), "bfloat16": (":", 11), "float16": ("-.", 14)}
_MARKERS = "osD^vP"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_SHIFT = 0.12  # of the names at one position, against each other


def _draw(axes: Axes, panel: _Panel) -> None:
    axes.set(title=panel.title, yscale="log", ylabel="largest relative difference")
    axes.grid(alpha=0.3)
    if not panel.series:
        axes.text(0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    # One position alone has no course that a line could show.
    if len(panel.ticks) == 1:
        _draw_bars(axes, panel)
    else:
        _draw_lines(axes, panel)
    for dtype, limit in panel.limits.items():
        if limit > 0:
            axes.axhline(limit, color="0.4", linestyle=(0, (1, 4)))
            label = axes.annotate(
                f"limit, {dtype}", (1, limit), (-3, 2), ("axes fraction", "data"), "offset points"
            )
            label.set(horizontalalignment="right", fontsize="x-small", color="0.3")
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5})
    axes.margins(y=0.1)
    axes.set_ylim(bottom=FLOOR / 3)


def _draw_bars(axes: Axes, panel: _Panel) -> None:
    labels = [series.label.replace(", ", "\n") for series in panel.series]
    names = list(dict.fromkeys(series.name for series in panel.series))
    colours = [_COLOURS[names.index(series.name)] for series in panel.series]
    axes.bar(
        labels, [max(series.values[0], FLOOR) for series in panel.series], color=colours, width=0.5
    )
    axes.tick_params(axis="x", labelsize="small")
    axes.set_xlabel(f"{panel.xlabel}: {panel.ticks[0]}")


def _draw_lines(axes: Axes, panel: _Panel) -> None:
    names = list(dict.fromkeys(series.name for series in panel.series))
    for series in panel.series:
        index = names.index(series.name)
        dashes, size = _STYLES.get(series.dtype, ("-", 4))
        # A name that is a dtype has its own size of markers, and needs no place beside the others.
        shift = 0.0 if series.name == series.dtype else _SHIFT * (index - (len(names) - 1) / 2)
        axes.plot(
            [position + shift for position in range(len(series.values))],
            [max(value, FLOOR) for value in series.values],
            label=series.label,
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=size,
            markerfacecolor=None if size == 4 else "none",
            linestyle="" if panel.apart else dashes,
            markevery=0.1 if len(series.values) > 12 and not panel.apart else None,
        )
    axes.set_xlabel(panel.xlabel)
    is_named = not panel.ticks[0].isdecimal()
    # More names than these would cover one another.
    if len(panel.ticks) <= (24 if is_named else 12):
        labels = axes.set_xticks(
            range(len(panel.ticks)), panel.ticks, fontsize="x-small" if is_named else "small"
        )
        for tick in labels if is_named else ():
            tick.label1.set(rotation=60, ha="right", rotation_mode="anchor")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(lambda position, _: f"{position + (not is_named):.0f}")
    axes.legend(
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        fontsize="small",
        frameon=False,
        handlelength=3.5,
    )


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
