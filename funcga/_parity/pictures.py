"""The pictures of a run: where a difference is, and how it grows."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from funcga._compare.report import Report
from funcga._parity.run import Compared, Findings

FLOOR = 1e-18
"""Where no difference at all is drawn, as a logarithm has no place for it."""

_LINES = {"float64": "-", "float32": "--", "bfloat16": ":", "float16": "-."}
_MARKERS = "osD^vP"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito (2008)


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


def _finish(ax: Any) -> None:
    ax.set_yscale("log")
    ax.margins(y=0.1)
    ax.set_ylim(bottom=FLOOR / 2)
    ax.set_ylabel("largest relative difference")
    ax.grid(alpha=0.3)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize="x-small", ncols=2, handlelength=3.5)
    else:
        ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center")


def _against_n(ax: Any, findings: Findings) -> None:
    ax.set(title="accumulated vs full batch", xlabel="n, micro-batches")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    alone = [c for c in findings.of("accumulation") if c.replicas == 1]
    _limits(ax, [compared.report for compared in alone])
    _lines(ax, alone, lambda c: str(c.framework), lambda c: c.n)


def _against_depth(ax: Any, findings: Findings) -> None:
    full = [compared for compared in findings.of("model") if compared.micro_batch is None]
    if not full:  # one framework alone
        full = [c for c in findings.of("accumulation") if c.n == len(findings.rows) and c.replicas == 1]
    ax.set(title=f"{full[0].what}, leaf by leaf", xlabel="leaf, in the order of the parameters")
    _limits(ax, [compared.report for compared in full])
    for i, compared in enumerate(full):
        rows = [row for row in compared.report.rows if row.path != "loss"]
        values = [max(row.relative, FLOOR) for row in rows]
        style = {"marker": _MARKERS[i], "color": _COLOURS[i], "linestyle": ""}
        ax.plot(range(len(rows)), values, label=compared.dtype, **style)
        if len(rows) <= 24:
            ax.set_xticks(range(len(rows)), [row.path for row in rows], rotation=60, ha="right", fontsize="x-small")


def _by_micro_batch(ax: Any, findings: Findings) -> None:
    ax.set(title="torch vs JAX, each micro-batch", xlabel="micro-batch")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    parts = [compared for compared in findings.of("model") if compared.micro_batch is not None]
    _limits(ax, [compared.report for compared in parts])
    _lines(ax, parts, lambda c: c.dtype, lambda c: c.micro_batch + 1)


def _by_update(ax: Any, findings: Findings) -> None:
    ax.set(title="torch vs JAX, parameters in training", xlabel="update")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = list(dict.fromkeys(t.optimizer for t in findings.trajectories))
    _limits(ax, [t.reports[-1] for t in findings.trajectories])
    for t in findings.trajectories:
        i = names.index(t.optimizer)
        values = [max(report.most, FLOOR) for report in t.reports]
        style = {"color": _COLOURS[i], "linestyle": _LINES.get(t.dtype, "-"), "marker": _MARKERS[i]}
        ax.plot(range(1, len(values) + 1), values, label=f"{t.optimizer}, {t.dtype}", markevery=0.1, **style)


def _limits(ax: Any, reports: Sequence[Report]) -> None:
    """A dotted line for the largest limit of every dtype."""
    limits: dict[str, float] = {}
    for row in (row for report in reports for row in report.rows if row.dtype):
        limits[str(row.dtype)] = max(row.limit, limits.get(str(row.dtype), 0.0))
    for limit in limits.values():
        ax.axhline(limit, color="0.4", linestyle=(0, (1, 4)))


def _lines(ax: Any, compared: list[Compared], name: Callable[[Compared], str], place: Callable[[Any], float]) -> None:
    """A line for every name and dtype."""
    groups: dict[tuple[str, str], list[Compared]] = {}
    for each in compared:
        groups.setdefault((name(each), each.dtype), []).append(each)
    names = list(dict.fromkeys(label for label, _ in groups))
    for (label, dtype), group in groups.items():
        i = names.index(label)
        values = [max(each.report.most, FLOOR) for each in group]
        full = label if label == dtype else f"{label}, {dtype}"
        style = {"color": _COLOURS[i], "linestyle": _LINES.get(dtype, "-"), "marker": _MARKERS[i]}
        ax.plot([place(each) for each in group], values, label=full, **style)
