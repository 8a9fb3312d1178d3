"""The report of a run: a table and a verdict for each problem, and the same as JSON."""

import math
from collections.abc import Iterator, Sequence

from funcga.tools.compare.report import Report, figure
from funcga.tools.compare.row import Row
from funcga.tools.parity.run import CAUSES, Compared, Findings, Trajectory
from funcga.tools.parity.sides import named
from funcga.tools.reports.commands import versions
from funcga.tools.reports.tables import text_table


def as_text(findings: Findings) -> str:
    """What a problem is, its table and its verdict."""
    headings = ["cause", "what is compared", *findings.dtypes, "worst at", ""]
    sentences = [f"{findings.problem.name}: {sentence}" for sentence in verdict(findings)]
    table = text_table([headings, *_lines(findings)])
    return "\n".join([_title(findings), table, *sentences])


def _title(findings: Findings) -> str:
    problem, rows, weights = findings.problem, findings.rows, findings.weights
    about = f"{problem.name}: {problem.about}" if problem.about else problem.name
    each = f"n = {len(rows)}: {sum(rows)} rows in {len(rows)} micro-batches of {_span(rows)}"
    weighted = "" if problem.weight is None else f", of weights {_span(weights)}"
    return f"{about}\n{each}{weighted}"


def _span(sizes: Sequence[float]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least:g}" if least == most else f"{least:g}..{most:g}"


def _lines(findings: Findings) -> Iterator[list[str]]:
    """The cells of a line for all comparisons of one kind: in each dtype the one that differs most
    is shown, against its limit.
    """
    kinds: dict[tuple[str, str], list[Compared]] = {}
    for cause in CAUSES:
        for compared in findings.of(cause):
            kinds.setdefault((cause, compared.what), []).append(compared)
    for (cause, what), kind in kinds.items():
        kind = sorted(kind, key=lambda c: c.report.badness)
        # The last one of each dtype, the worst, is the one that stays in the dict.
        reports = {c.dtype: c.report for c in kind}
        yield _line(findings, cause, what, reports, _where(kind[-1]), kind)
    for optimizer in dict.fromkeys(t.optimizer for t in findings.trajectories):
        runs = [t for t in findings.trajectories if t.optimizer == optimizer]
        # The first to diverge, in whichever dtype; one that does not is behind all that do.
        first = min(runs, key=lambda t: t.diverges or len(t.reports) + 1)
        where = f"{_path(first.decisive)}, update {first.diverges or len(first.reports)}"
        reports = {t.dtype: t.decisive for t in runs}
        what = f"{optimizer}, {len(first.reports)} updates"
        yield _line(findings, "training", what, reports, where, runs)


def _line(
    findings: Findings,
    cause: str,
    what: str,
    reports: dict[str, Report],
    where: str,
    kind: Sequence[Compared | Trajectory],
) -> list[str]:
    figures = [_figures(reports[dtype]) if dtype in reports else "" for dtype in findings.dtypes]
    wrong = any(not result.ok and not findings.is_explained(result) for result in kind)
    within = all(result.ok for result in kind)
    status = "within" if within else "BEYOND" if wrong else "rounding"
    return [cause, what, *figures, where, status]


def _where(compared: Compared) -> str:
    path = _path(compared.report)
    if compared.micro_batch is not None:
        return f"{path}, micro-batch {compared.micro_batch + 1}"
    return f"{path}, n={compared.n}" if compared.cause == "accumulation" else path


def _path(report: Report) -> str:
    return report.worst.path if report.worst else ""


def _figures(report: Report) -> str:
    """The largest relative difference against its limit, such as `8.6e-7 < 2e-5`."""
    # A leaf with NaN, or of another shape, has no figure: its status stands in its place.
    row = report.worst
    if row is None:
        return ""
    if row.status not in ("equal", "within", "beyond"):
        return row.status
    limit = f" {'<' if row.ok else '>'} {figure(row.allowed, 0)}" if row.allowed else ""
    return f"{figure(row.relative)}{limit}"


def conclusion(every: Sequence[Findings]) -> str:
    """The last line: whether all problems are the same."""
    different = [findings.problem.name for findings in every if not findings.ok]
    if different:
        return f"Verdict: DIFFERENT: {', '.join(different)}."
    # Of every leaf in everything that was compared, update by update.
    reports = [c.report for f in every for c in f.compared]
    reports += [report for f in every for t in f.trajectories for report in t.reports]
    within = [row.ok for report in reports for row in report.rows]
    if all(within):
        count, others = f"All {len(within):,}", ""
    else:
        count, others = f"{sum(within):,} of {len(within):,}", ", the others rounding"
    return f"Verdict: the same. {count} differences of a leaf are within their limits{others}."


def as_json(every: Sequence[Findings]) -> dict[str, object]:
    """All results, for JSON."""
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
        "verdict": verdict(findings),
        "reduction": findings.reduction,
        "microbatch_rows": findings.rows,
        "microbatch_weights": findings.weights,
        "losses": findings.losses,
        "compared": [
            {**_fields(findings, compared, "report"), **compared.report.as_dict()}
            for compared in findings.compared
        ],
        "training": [
            {
                **_fields(findings, t, "reports", "aside"),
                "diverges": t.diverges,
                "worst": [report.most for report in t.reports],
                "last": t.reports[-1].as_dict(),
            }
            for t in findings.trajectories
        ],
    }


def _fields(findings: Findings, result: Compared | Trajectory, *but: str) -> dict[str, object]:
    fields = {name: value for name, value in result._asdict().items() if name not in but}
    return {**fields, "ok": result.ok, "explained": not result.ok and findings.is_explained(result)}


def verdict(findings: Findings) -> list[str]:
    """The verdict in sentences. The first one is on the first cause that is found: the others may
    follow from it.
    """
    if findings.ok:
        return [_agreement(findings), *_aside(findings)]
    accumulation, model = [*_accumulation(findings)], [*_model(findings)]
    # A loss that decomposes in one framework alone is another loss there.
    first = [*model, *accumulation] if _is_in_one(findings) else [*accumulation, *model]
    causes = [*_fold(findings), *first, *_rounding(findings), *_training(findings)]
    return [*causes, *_aside(findings)]


def _wrong(findings: Findings, cause: str) -> list[Compared]:
    return [c for c in findings.wrong if isinstance(c, Compared) and c.cause == cause]


def _is_in_one(findings: Findings) -> bool:
    # The full batches differ too, so one loss is not the other.
    frameworks = {compared.framework for compared in _wrong(findings, "accumulation")}
    return len(frameworks) == 1 and bool(_wrong(findings, "model"))


def _fold(findings: Findings) -> Iterator[str]:
    wrong = _wrong(findings, "fold")
    if wrong:
        worst = _most(wrong)
        yield (
            f"The fold itself is wrong: {worst.what} ({worst.dtype}) differ by {_worst(worst)}. "
            f"This would be a bug of funcga; the gradients that it was given are the same."
        )


def _accumulation(findings: Findings) -> Iterator[str]:
    wrong = _wrong(findings, "accumulation")
    if not wrong:
        return
    worst = _most(wrong)
    labels = list(dict.fromkeys(str(compared.framework) for compared in wrong))
    is_all = len(labels) == len(findings.problem.losses)
    where = "this loss" if is_all else f"the loss of {labels[0]}"
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
            f"or couples its rows. Change the loss of {labels[0]}; or, if that is the right one, "
            "the other one, and then fold= and weight= of the Problem, which are for both."
        )
    # Both frameworks usually have the same causes, which are said once.
    causes = {cause.name: cause for verdict in verdicts for cause in verdict.causes}
    for cause in causes.values():
        line = f"For the loss of {labels[0]} alone" if _is_in_one(findings) else "To fix it"
        yield f"{cause.what} {line}: {cause.fix}"


def _model(findings: Findings) -> Iterator[str]:
    wrong = _wrong(findings, "model")
    if not wrong:
        return
    # The run ends with float64: the finest dtype in which they differ says most.
    finest = wrong[-1].dtype
    wrong = [compared for compared in wrong if compared.dtype == finest]
    where = _which([compared for compared in findings.of("model") if compared.dtype == finest])
    text = f"The models differ, in {finest}: {where}. {_how(wrong)}"
    agree = f" In {findings.finest} they agree, so it is not mere rounding."
    yield text if finest == findings.finest else text + agree


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
    most = ", ".join(f"{row.path} ({row.relative:.1e})" for row in worst)
    return f"; most in {most}" if most else ""


def _hint(beyond: list[Row], leaves: list[Row]) -> str:
    # The loss is the first of the rows. If it is the same, or very different, it is no such
    # constant.
    if len(leaves) == len(beyond) or beyond[0].relative >= 1e-2:
        return ""
    return (
        " A difference this small often comes from a constant or an approximation: the eps of a "
        "normalisation, tanh for erf in GELU."
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
    is_factor = straight and alike and not math.isclose(ratios[0], 1, rel_tol=1e-4)
    return ratios[0] if is_factor else None


def _rounding(findings: Findings) -> Iterator[str]:
    wrong = [c for c in _wrong(findings, "rounding") if math.isfinite(c.report.most)]
    if wrong:
        worst = _most(wrong)
        yield (
            f"{worst.what} ({worst.dtype}) differs by {_worst(worst)}, which is more than rounding "
            f"explains in sums of {findings.reduction} terms, and more than rounded arguments "
            f"would do: something in this loss computes in less than {worst.dtype}."
        )


def _training(findings: Findings) -> Iterator[str]:
    wrong = [result for result in findings.wrong if isinstance(result, Trajectory)]
    if not wrong:
        return
    wrong.sort(key=lambda t: t.diverges or 0)
    each = ", ".join(f"{t.optimizer} ({t.dtype}) from update {t.diverges} on" for t in wrong)
    text = f"The training diverges: {each}; first {_path(wrong[0].decisive)}."
    same = " The gradients agree, so compare what the two optimizers do with them."
    yield text if _wrong(findings, "model") else text + same


def _aside(findings: Findings) -> Iterator[str]:
    """The parameters that are left out of the training."""
    aside = dict.fromkeys(path for t in findings.trajectories for path in t.aside)
    if aside:
        names = ", ".join([*aside][:4]) + (" and others" if len(aside) > 4 else "")
        yield (
            f"Left out of the training with Adam: {names}. The gradient there is 0 except for "
            "rounding, which Adam divides by itself, so that updates are noise in both frameworks."
        )


def _agreement(findings: Findings) -> str:
    """The verdict on a problem that is the same everywhere."""
    finest = [c for c in findings.compared if c.dtype == findings.finest]
    accumulated = [c.report.most for c in finest if c.cause == "accumulation"]
    between = [c.report.most for c in finest if c.cause == "model"]
    text = f"The same. In {findings.finest} accumulated is the full batch to {max(accumulated):.0e}"
    if between:
        text += f", and torch is JAX to {max(between):.0e}"
    if len(finest) < len(findings.compared):
        text += "; what is left in less precision is rounding"
    # What is beyond its limit is explained, or the problem would not be the same.
    large = [c for c in findings.of("rounding") if not c.ok]
    if large:
        text += f", which this loss makes large: {_worst(_most(large))}, as rounded arguments do"
    grown = next((t for t in findings.trajectories if not t.ok), None)
    if grown:
        where = f"{grown.optimizer}, {grown.dtype}: from update {grown.diverges} on"
        text += f", which training makes larger ({where})"
    return text + "."


def _most(compared: list[Compared]) -> Compared:
    return max(compared, key=lambda c: c.report.badness)


def _worst(compared: Compared) -> str:
    row = compared.report.worst
    assert row is not None
    return f"{row.relative:.1e} in {row.path or 'the array'} (limit {row.limit:.0e})"
