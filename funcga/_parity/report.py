"""The report: a table and a verdict for each problem, and the same as JSON."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from funcga._commands import versions
from funcga._compare.report import Report
from funcga._compare.report import figure as figure
from funcga._compare.row import Row
from funcga._parity.run import CAUSES, Compared, Findings, Trajectory
from funcga._parity.sides import named
from funcga._tables import rich_table

WIDTH = 100
"""The columns that the tables need."""


class Line(NamedTuple):
    """A line of a table: comparisons of one kind, by the one of them in each dtype that differs
    most.

    figures: by dtype, the largest relative difference against its limit. status: 'within',
    'BEYOND', or 'rounding' for what is beyond its limit in less than float64 alone.
    """

    cause: str
    what: str
    figures: dict[str, str]
    where: str
    status: str


def lines(findings: Findings) -> list[Line]:
    """The Lines of a problem, in the order of CAUSES."""
    return [line for cause in CAUSES for line in _of_cause(findings, cause)] + _of_training(
        findings
    )


def _of_cause(findings: Findings, cause: str) -> Iterator[Line]:
    for what in dict.fromkeys(compared.what for compared in findings.of(cause)):
        kind = [compared for compared in findings.of(cause) if compared.what == what]
        # Sorted, so that in the dict the last one of each dtype, the worst, is the one that stays.
        worst = {c.dtype: c for c in sorted(kind, key=lambda c: c.report.badness)}
        figures = {dtype: against(c.report) for dtype, c in worst.items()}
        status = _status(findings, kind)
        yield Line(
            cause,
            what,
            figures,
            _where(max(worst.values(), key=lambda c: c.report.badness)),
            status,
        )


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
    return (
        "rounding"
        if all(result.ok or findings.is_explained(result) for result in kind)
        else "BEYOND"
    )


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
    """The table of a problem: a line for everything that is compared, by the cause that a
    difference would have.
    """
    cells: list[list[str | Text]] = []
    last = ""
    for line in lines(findings):
        style = {"within": "green", "rounding": "yellow"}.get(line.status, "bold red")
        # A cause is written once, above the lines that have it.
        cause = line.cause if line.cause != last else ""
        figures = [line.figures.get(dtype, "") for dtype in findings.dtypes]
        cells.append([cause, line.what, *figures, line.where, Text(line.status, style)])
        last = line.cause
    return rich_table(
        ("cause", "what is compared", *findings.dtypes, "worst at", ""),
        cells,
        ("cause", *findings.dtypes),
        title=Text(title(findings), style="bold"),
        title_justify="left",
    )


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
        text = (
            f"{sum(within):,} of {len(within):,} differences of a leaf are within their limits, "
            "the others rounding."
        )
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
        "losses": {
            d: {f: _finite(loss) for f, loss in losses.items()}
            for d, losses in findings.losses.items()
        },
        "compared": [_compared_as_json(findings, compared) for compared in findings.compared],
        "training": [_trajectory_as_json(findings, t) for t in findings.trajectories],
    }


def _compared_as_json(findings: Findings, c: Compared) -> dict[str, object]:
    about = {name: value for name, value in c._asdict().items() if name != "report"}
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


class Verdict(NamedTuple):
    """Whether a problem is the same in both frameworks, whole and accumulated, and sentences
    that say why not.
    """

    ok: bool
    sentences: list[str]


def verdict(findings: Findings) -> Verdict:
    """The Verdict. The first sentence is on the first cause that is found: what comes after may
    be its consequence.
    """
    if findings.ok:
        return Verdict(True, [_agreement(findings), *_aside(findings)])
    accumulation, model = list(_accumulation(findings)), list(_model(findings))
    # A loss that decomposes in one framework alone is another loss there.
    first = [*model, *accumulation] if _is_in_one(findings) else [*accumulation, *model]
    causes = [*_fold(findings), *first, *_rounding(findings), *_training(findings)]
    return Verdict(False, [*causes, *_aside(findings)])


def _is_in_one(findings: Findings) -> bool:
    # The full batches differ too, so one loss is not the other.
    wrong = {compared.framework for compared in _unexplained(findings, "accumulation")}
    return len(wrong) == 1 and bool(_unexplained(findings, "model"))


def _fold(findings: Findings) -> Iterator[str]:
    wrong = _unexplained(findings, "fold")
    if wrong:
        worst = _most(wrong)
        yield (
            f"The fold itself is wrong: {worst.what} ({worst.dtype}) differ by {_worst(worst)}. "
            f"This would be a bug of funcga; the gradients that it was given are the same."
        )


def _accumulation(findings: Findings) -> Iterator[str]:
    wrong = _unexplained(findings, "accumulation")
    if not wrong:
        return
    worst = _most(wrong)
    labels = list(dict.fromkeys(str(compared.framework) for compared in wrong))
    where = (
        "this loss"
        if len(labels) == len(findings.problem.frameworks)
        else f"the loss of {labels[0]}"
    )
    text = (
        f"over n = {worst.n} micro-batches ({worst.dtype}) it differs from the full batch by "
        f"{_worst(worst)}"
    )
    verdicts = findings.verified.values()
    if verdicts and all(verdict.ok for verdict in verdicts):
        notes = [note for verdict in verdicts for note in verdict.notes]
        yield (
            f"{text[0].upper()}{text[1:]}, and verify finds no mistake in {where}: it is the "
            f"rounding of something inside that computes in less than {worst.dtype}."
            + "".join(f" ({note}.)" for note in notes[:1])
        )
        return
    yield f"Accumulation is not exact for {where} with {named(findings.problem.fold)}: {text}."
    if _is_in_one(findings):
        yield (
            f"The other framework's is exact: the loss of {labels[0]} divides by something else, "
            "or couples its rows."
        )
    # Both frameworks usually have the same causes, which are said once.
    causes = {cause.name: cause for verdict in verdicts for cause in verdict.causes}
    for cause in causes.values():
        yield f"{cause.what} To fix it: {cause.fix}"


def _model(findings: Findings) -> Iterator[str]:
    wrong = _unexplained(findings, "model")
    if not wrong:
        return
    # The run ends with float64: the finest dtype in which they differ says most.
    finest = wrong[-1].dtype
    wrong = [compared for compared in wrong if compared.dtype == finest]
    where = _which([compared for compared in findings.of("model") if compared.dtype == finest])
    text = f"The models differ, in {finest}: {where}. {_how(wrong)}"
    yield (
        text
        if finest == findings.finest
        else f"{text} In {findings.finest} they agree, so it is not mere rounding."
    )


def _which(compared: list[Compared]) -> str:
    """In which micro-batches."""
    # The comparison of the full batch has no micro-batch.
    parts = [c for c in compared if c.micro_batch is not None]
    wrong = [c for c in parts if not c.ok]
    if len(wrong) == len(parts):
        return "in every micro-batch"
    if not wrong:
        return "in the full batch, but in none of its micro-batches"
    numbers = ", ".join(str((c.micro_batch or 0) + 1) for c in wrong[:6]) + (
        ", ..." if len(wrong) > 6 else ""
    )
    noun = "micro-batch" if len(wrong) == 1 else "micro-batches"
    return (
        f"in {noun} {numbers} of {len(parts)}, and not in the others: look at what those rows have"
    )


def _how(wrong: list[Compared]) -> str:
    """In which leaves, and in what way."""
    beyond = [row for row in wrong[0].report.rows if not row.ok]
    unmatched = [
        f"{row.path} ({row.status})"
        for row in beyond
        if row.status in ("missing", "extra", "shape")
    ]
    if unmatched:
        return f"The parameters do not match: {', '.join(unmatched)}."
    not_finite = [row for row in beyond if row.status in ("nan", "inf")]
    if not_finite:
        return _not_finite(not_finite[0])
    leaves, total = [row for row in beyond if row.path != "loss"], len(wrong[0].report.rows) - 1
    count = f"beyond the limit are {len(leaves)} of {total} gradients"
    if leaves and len(leaves) == len(beyond):
        text = f"The loss is the same and its gradient is not; {count}"
        if len(leaves) < total:
            text += f", the last of them {leaves[-1].path}: backward passes come to it first"
    else:
        text = f"The loss itself differs, by {beyond[0].relative:.1e}; {count}"
    # Leaves that do not match, and NaN, are said above; here all differ by numbers.
    factor = _factor(beyond)
    if factor is not None:
        return (
            f"{text}. All are torch = {factor:.6g} x JAX: another normaliser, such as a mean "
            "against a sum."
        )
    return f"{text}{_most_in(leaves)}.{_hint(beyond, leaves)}"


def _most_in(leaves: list[Row]) -> str:
    worst = sorted(leaves, key=lambda row: row.relative, reverse=True)[:3]
    return (
        f"; most in {', '.join(f'{row.path} ({row.relative:.1e})' for row in worst)}"
        if worst
        else ""
    )


def _hint(beyond: list[Row], leaves: list[Row]) -> str:
    # The loss is the first of the rows. If it is the same, or very different, it is no such
    # constant.
    if len(leaves) == len(beyond) or beyond[0].relative >= 1e-2:
        return ""
    return (
        " So little may be a constant or an approximation: the eps of a normalisation, tanh for "
        "erf in GELU."
    )


def _not_finite(row: Row) -> str:
    counts = row.nans if row.status == "nan" else row.infs
    kind = {"nan": "NaN", "inf": "infinities"}[row.status]
    where = "both" if all(counts) else "torch" if counts[0] else "JAX"
    return f"{row.path} has {kind} in {where}: {counts[0]} in torch, {counts[1]} in JAX."


def _factor(rows: list[Row]) -> float | None:
    """The one number that all leaves differ by, if there is one."""
    # The ratio in one place of each leaf, and the angle between the leaves, for all other places.
    ratios = [
        row.values[0] / row.values[1] for row in rows if row.values is not None and row.values[1]
    ]
    straight = all(row.cosine is None or row.cosine > 1 - 1e-9 for row in rows)
    alike = len(ratios) == len(rows) > 0 and all(
        math.isclose(ratio, ratios[0], rel_tol=1e-6) for ratio in ratios
    )
    return (
        ratios[0] if straight and alike and not math.isclose(ratios[0], 1, rel_tol=1e-4) else None
    )


def _rounding(findings: Findings) -> Iterator[str]:
    wrong = [c for c in _unexplained(findings, "rounding") if math.isfinite(c.report.most)]
    if wrong:
        worst = _most(wrong)
        yield (
            f"{worst.what} ({worst.dtype}) differs by {_worst(worst)}, which is more than rounding "
            f"explains in sums of {findings.reduction} terms, and more than rounded arguments "
            f"would do: something in this loss computes in less than {worst.dtype}."
        )


def _training(findings: Findings) -> Iterator[str]:
    wrong = [t for t in findings.trajectories if not t.ok and not findings.is_explained(t)]
    if not wrong:
        return
    first = min(wrong, key=lambda t: t.diverges or 0)
    worst = first.decisive.worst
    others = "".join(f", {t.optimizer} ({t.dtype}) {_since(t)}" for t in wrong if t is not first)
    where = f"; first {worst.path}" if worst else ""
    text = (
        f"The training diverges: {first.optimizer} ({first.dtype}) {_since(first)}{others}{where}."
    )
    same = not _unexplained(findings, "model")
    yield (
        f"{text} The gradients agree, so compare what the two optimizers do with them."
        if same
        else text
    )


def _since(t: Trajectory) -> str:
    return f"from update {t.diverges} on"


def _aside(findings: Findings) -> Iterator[str]:
    """Which parameters the training has no say on."""
    aside = dict.fromkeys(path for t in findings.trajectories for path in t.aside)
    if aside:
        names = ", ".join([*aside][:4]) + (" and others" if len(aside) > 4 else "")
        yield (
            f"Left out of the training with Adam: {names}. The gradient there is 0 except for "
            "rounding, which Adam divides by itself, so that updates are noise in both frameworks."
        )


def _unexplained(findings: Findings, cause: str) -> list[Compared]:
    return [
        compared
        for compared in findings.of(cause)
        if not compared.ok and not findings.is_explained(compared)
    ]


def _agreement(findings: Findings) -> str:
    """What a problem is told that is the same everywhere."""
    figures = {
        cause: max(
            (c.report.most for c in findings.of(cause) if c.dtype == findings.finest), default=None
        )
        for cause in ("accumulation", "model")
    }
    accumulation = figures["accumulation"] or 0
    text = f"The same. In {findings.finest} accumulated is the full batch to {accumulation:.0e}"
    if figures["model"] is not None:
        text += f", and torch is JAX to {figures['model']:.0e}"
    if any(c.dtype != findings.finest for c in findings.compared):
        text += "; what is left in less precision is rounding"
    # Beyond its limit, and explained, or the problem would not be the same.
    large = [c for c in findings.of("rounding") if not c.ok]
    if large:
        text += (
            f", which this loss makes large: {_worst(_most(large))}, as it does that of its "
            "arguments"
        )
    grown = [t for t in findings.trajectories if not t.ok]
    if grown:
        first = grown[0]
        text += f", which training makes larger ({first.optimizer}, {first.dtype}: {_since(first)})"
    return text + "."


def _most(compared: list[Compared]) -> Compared:
    return max(compared, key=lambda c: c.report.badness)


def _worst(compared: Compared) -> str:
    row = compared.report.worst
    assert row is not None
    return f"{row.relative:.1e} in {row.path or 'the array'} (limit {row.limit:.0e})"
