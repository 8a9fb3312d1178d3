"""The report: a table and a verdict for each problem, and the same as JSON."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from funcga._compare.report import Report
from funcga._compare.report import figure as figure
from funcga._parity.run import CAUSES, Compared, Findings
from funcga._parity.training import Trajectory
from funcga._parity.verdict import verdict
from funcga._versions import versions

WIDTH = 100
"""The columns that the tables need."""


class Line(NamedTuple):
    """A line of a table: comparisons of one kind, by the one of them in each dtype that differs most.

    figures: by dtype, the largest relative difference against its limit. status: 'within', 'BEYOND', or 'rounding' for
    what is beyond its limit in less than float64 alone.
    """

    cause: str
    what: str
    figures: dict[str, str]
    where: str
    status: str


def lines(findings: Findings) -> list[Line]:
    """The Lines of a problem, in the order of CAUSES."""
    return [line for cause in CAUSES for line in _of_cause(findings, cause)] + _of_training(findings)


def _of_cause(findings: Findings, cause: str) -> Iterator[Line]:
    for what in dict.fromkeys(compared.what for compared in findings.of(cause)):
        kind = [compared for compared in findings.of(cause) if compared.what == what]
        # Sorted, so that in the dict the last one of each dtype, the worst, is the one that stays.
        worst = {c.dtype: c for c in sorted(kind, key=lambda c: c.report.badness)}
        figures = {dtype: against(c.report) for dtype, c in worst.items()}
        status = _status(findings, kind)
        yield Line(cause, what, figures, _where(max(worst.values(), key=lambda c: c.report.badness)), status)


def _where(compared: Compared) -> str:
    path = compared.report.worst.path if compared.report.worst else ""
    if compared.micro_batch is not None:
        return f"{path}, micro-batch {compared.micro_batch + 1}"
    return f"{path}, n={compared.n}" if compared.cause == "accumulation" else path


def _of_training(findings: Findings) -> list[Line]:
    lines = []
    for optimizer in dict.fromkeys(t.optimizer for t in findings.trajectories):
        kind = [t for t in findings.trajectories if t.optimizer == optimizer]
        # The first to diverge, in whichever dtype; one that does not is behind all that do.
        first = min(kind, key=lambda t: t.diverges or len(t.reports) + 1)
        worst = first.decisive.worst
        where = f"{worst.path if worst else ''}, update {first.diverges or len(first.reports)}"
        figures = {t.dtype: against(t.decisive) for t in kind}
        what = f"{optimizer}, {len(kind[0].reports)} updates"
        lines.append(Line("training", what, figures, where, _status(findings, kind)))
    return lines


def _status(findings: Findings, kind: Sequence[Compared | Trajectory]) -> str:
    if all(result.ok for result in kind):
        return "within"
    return "rounding" if all(result.ok or findings.is_explained(result) for result in kind) else "BEYOND"


def against(report: Report) -> str:
    """The largest relative difference against its limit, such as `8.6e-7 < 2e-5`."""
    # A leaf with NaN, or of another shape, has no figure: its status stands in its place.
    row = report.worst
    if row is None:
        return ""
    if row.status not in ("equal", "within", "beyond"):
        return row.status
    limit = f" {'<' if row.ok else '>'} {figure(row.allowed, 0)}" if row.allowed else ""
    return f"{figure(row.relative)}{limit}"


def as_table(findings: Findings) -> Table:
    """The table of a problem: a line for everything that is compared, by the cause that a difference would have."""
    table = Table(title=Text(title(findings), style="bold"), title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.pad_edge = False
    for heading in ("cause", "what is compared", *findings.dtypes, "worst at", ""):
        table.add_column(heading, no_wrap=heading in ("cause", *findings.dtypes), overflow="fold")
    # A cause is written once, above the lines that have it.
    last = ""
    for line in lines(findings):
        style = {"within": "green", "rounding": "yellow"}.get(line.status, "bold red")
        shown = line.cause if line.cause != last else ""
        figures = [line.figures.get(dtype, "") for dtype in findings.dtypes]
        table.add_row(shown, line.what, *figures, line.where, Text(line.status, style))
        last = line.cause
    return table


def title(findings: Findings) -> str:
    """What a problem is, and how its rows are split."""
    problem, rows, weights = findings.problem, findings.rows, findings.weights
    text = f"{problem.name}: {problem.about}" if problem.about else problem.name
    each = f"n = {len(rows)}: {sum(rows)} rows in {len(rows)} micro-batches of {_span(rows)}"
    if problem.weight is not None:
        each += f", of weights {_span(weights)}"
    return f"{text}\n{each}"


def _span(sizes: Sequence[float]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least:g}" if least == most else f"{least:g}..{most:g}"


def sentences(findings: Findings) -> Text:
    """The verdict on a problem."""
    result = verdict(findings)
    style = "bold green" if result.ok else "bold red"
    return Text("\n".join(f"{findings.problem.name}: {line}" for line in result.sentences), style)


def conclusion(every: Sequence[Findings]) -> Text:
    """The last line: whether all problems are the same."""
    wrong = [findings.problem.name for findings in every if not findings.ok]
    if wrong:
        return Text(f"Verdict: DIFFERENT: {', '.join(wrong)}.", "bold red")
    # Of every leaf in everything that was compared, update by update.
    reports = [c.report for f in every for c in f.compared]
    reports += [report for f in every for t in f.trajectories for report in t.reports]
    within = [row.ok for report in reports for row in report.rows]
    if all(within):
        text = f"All {len(within):,} differences of a leaf are within their limits."
    else:
        text = f"{sum(within):,} of {len(within):,} differences of a leaf are within their limits, the others rounding."
    return Text(f"Verdict: the same. {text}", "bold green")


def as_json(every: Sequence[Findings]) -> dict[str, object]:
    """Everything that was found, as JSON has it: a figure that is not finite is None."""
    return {
        "ok": all(findings.ok for findings in every),
        "versions": versions(),
        "causes": CAUSES,
        "problems": [_findings_as_json(findings) for findings in every],
    }


def _findings_as_json(findings: Findings) -> dict[str, object]:
    return {
        "problem": findings.problem.name,
        "about": findings.problem.about,
        "fold": repr(findings.problem.fold),
        "ok": findings.ok,
        "verdict": verdict(findings).sentences,
        "reduction": findings.reduction,
        "microbatch_rows": findings.rows,
        "microbatch_weights": findings.weights,
        "losses": {d: {f: _finite(loss) for f, loss in losses.items()} for d, losses in findings.losses.items()},
        "compared": [_compared_as_json(findings, compared) for compared in findings.compared],
        "training": [_trajectory_as_json(findings, t) for t in findings.trajectories],
    }


def _compared_as_json(findings: Findings, c: Compared) -> dict[str, object]:
    about = {"cause": c.cause, "what": c.what, "dtype": c.dtype, "n": c.n, "micro_batch": c.micro_batch}
    return {**about, "explained": not c.ok and findings.is_explained(c), **c.report.as_dict()}


def _trajectory_as_json(findings: Findings, t: Trajectory) -> dict[str, object]:
    return {
        "optimizer": t.optimizer,
        "dtype": t.dtype,
        "n": t.n,
        "ok": t.ok,
        "explained": not t.ok and findings.is_explained(t),
        "parts": t.diverges,
        "losses": [_finite(loss) for loss in t.losses],
        "worst": [_finite(report.most) for report in t.reports],
        "last": t.reports[-1].as_dict(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
