"""The report: a table and a verdict for each problem, and the same as JSON."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from funcga.comparison.report import Report
from funcga.information import versions
from funcga.parity.run import CAUSES, Compared, Findings
from funcga.parity.training import Trajectory
from funcga.parity.verdict import verdict

WIDTH = 100
"""The columns that the tables need."""


class Line(NamedTuple):
    """A line of a table: a group of comparisons, by the one of them that differs most."""

    cause: str
    what: str
    dtype: str
    worst: str
    limit: str
    where: str
    status: str


def lines(findings: Findings) -> list[Line]:
    """The Lines of a problem, in the order of CAUSES."""
    found = [line for cause in CAUSES for line in _of_cause(findings, cause)]
    return found + [_of_trajectory(findings, t) for t in findings.trajectories]


def _of_cause(findings: Findings, cause: str) -> Iterator[Line]:
    groups: dict[tuple[str, str], list[Compared]] = {}
    for compared in findings.of(cause):
        groups.setdefault((compared.what, compared.dtype), []).append(compared)
    for (what, dtype), group in groups.items():
        worst = max(group, key=lambda c: c.report.worst.badness if c.report.worst else (False, 0.0))
        yield Line(cause, what, dtype, *_figures(worst), "within" if all(c.ok for c in group) else "BEYOND")


def _figures(compared: Compared) -> tuple[str, str, str]:
    """What differs most, the limit of that, and where it is."""
    row = compared.report.worst
    assert row is not None
    if row.status in ("missing", "extra", "shape", "dtype"):
        return row.status, "", row.path
    part = "" if compared.micro_batch is None else f"#{compared.micro_batch + 1} "
    n = f"n = {compared.n} " if compared.cause == "accumulation" else part
    return figure(row.relative), figure(row.limit), f"{n}{row.path}"


def _of_trajectory(findings: Findings, t: Trajectory) -> Line:
    report = t.reports[(t.parts or len(t.reports)) - 1]
    worst = report.worst
    assert worst is not None
    status = "within" if t.ok else "rounding" if findings.is_explained(t) else "BEYOND"
    where = f"{worst.path}, " + (f"from update {t.parts}" if t.parts else f"update {len(t.reports)}")
    what = f"torch vs JAX: {t.optimizer}, {len(t.reports)} updates"
    return Line("training", what, t.dtype, figure(worst.relative), figure(worst.limit), where, status)


def figure(value: float) -> str:
    """A difference in a few characters."""
    return "0" if value == 0 else f"{value:.1e}"


def table(findings: Findings) -> Table:
    """The table of a problem: a line for everything that is compared, by the cause that a difference would have."""
    made = Table(title=Text(title(findings), style="bold"), title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    made.pad_edge = False
    for heading in ("cause", "what is compared", "dtype", "worst", "limit", "where", ""):
        made.add_column(heading, no_wrap=heading == "worst")
    last = ""
    for line in lines(findings):
        style = {"within": "green", "rounding": "yellow"}.get(line.status, "bold red")
        if last and last != line.cause:
            made.add_section()
        shown = line.cause if line.cause != last else ""
        made.add_row(shown, *line[1:-1], Text(line.status, style))
        last = line.cause
    return made


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
    found = verdict(findings)
    style = "bold green" if found.ok else "bold red"
    return Text("\n".join(f"{findings.problem.name}: {line}" for line in found.sentences), style)


def conclusion(every: Sequence[Findings]) -> Text:
    """The last line: whether all problems are the same."""
    wrong = [findings.problem.name for findings in every if not findings.ok]
    count = sum(len(c.report.rows) for f in every for c in f.compared)
    count += sum(len(report.rows) for f in every for t in f.trajectories for report in t.reports)
    if wrong:
        return Text(f"Verdict: DIFFERENT: {', '.join(wrong)}.", "bold red")
    return Text(f"Verdict: the same. All {count:,} differences of a leaf are within their limits.", "bold green")


def as_json(every: Sequence[Findings]) -> dict[str, Any]:
    """Everything that was found, as JSON has it: a figure that is not finite is None."""
    return {
        "ok": all(findings.ok for findings in every),
        "versions": versions(),
        "causes": CAUSES,
        "problems": [_findings_as_json(findings) for findings in every],
    }


def _findings_as_json(findings: Findings) -> dict[str, Any]:
    return {
        "problem": findings.problem.name,
        "about": findings.problem.about,
        "fold": repr(findings.problem.fold),
        "ok": findings.ok,
        "verdict": verdict(findings).sentences,
        "reduction": findings.reduction,
        "microbatch_rows": findings.rows,
        "microbatch_weights": findings.weights,
        "losses": {d: {f: _finite(loss) for f, loss in found.items()} for d, found in findings.losses.items()},
        "compared": [_compared_as_json(compared) for compared in findings.compared],
        "training": [_trajectory_as_json(findings, t) for t in findings.trajectories],
    }


def _compared_as_json(c: Compared) -> dict[str, Any]:
    about = {"cause": c.cause, "what": c.what, "dtype": c.dtype, "n": c.n, "micro_batch": c.micro_batch}
    return {**about, **c.report.as_dict()}


def _trajectory_as_json(findings: Findings, t: Trajectory) -> dict[str, Any]:
    return {
        "optimizer": t.optimizer,
        "dtype": t.dtype,
        "n": t.n,
        "ok": t.ok,
        "explained": findings.is_explained(t),
        "parts": t.parts,
        "losses": [_finite(loss) for loss in t.losses],
        "worst": [_finite(most(report)) for report in t.reports],
        "last": t.reports[-1].as_dict(),
    }


def most(report: Report) -> float:
    """The largest relative difference of a report."""
    return max((row.relative for row in report.rows), key=lambda r: math.inf if math.isnan(r) else r, default=0.0)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
