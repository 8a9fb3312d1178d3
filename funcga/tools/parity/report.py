"""The report of a run: a table and a verdict for each problem, and the same as JSON."""

import math
from collections.abc import Iterator, Sequence

from funcga.errors import listed
from funcga.tools.compare.report import Report, figure
from funcga.tools.compare.row import Row
from funcga.tools.parity.run import CAUSES, Compared, Run
from funcga.tools.parity.sides import named
from funcga.tools.reports.commands import versions
from funcga.tools.reports.tables import text_table


def as_text(run: Run) -> str:
    """What a problem is, its table and its verdict."""
    name, parts = run.problem.name, run.first.parts
    rows = [part.rows for part in parts]
    weights = _span([float(part.weight) for part in parts])
    sizes = f"micro-batches of {_span(rows)}, of weight {weights}"
    headings = ["cause", "what is compared", *run.dtypes, "worst at", ""]
    lines = [
        f"{name}: {run.problem.about}",
        f"n = {len(rows)}: {sum(rows)} rows in {len(rows)} {sizes}",
        text_table([headings, *_lines(run)]),
    ]
    return "\n".join([*lines, *(f"{name}: {sentence}" for sentence in verdict(run))])


def _span(sizes: Sequence[float]) -> str:
    return "..".join(f"{size:g}" for size in sorted({min(sizes), max(sizes)}))


def _lines(run: Run) -> Iterator[list[str]]:
    """The cells of a line for all comparisons of one kind: in each dtype the one that differs most
    is shown, against its limit.
    """
    kinds: dict[tuple[str, str], list[Compared]] = {}
    for cause in CAUSES:
        for compared in run.of(cause):
            kinds.setdefault((cause, compared.what), []).append(compared)
    for (cause, what), kind in kinds.items():
        kind.sort(key=lambda c: c.report.badness)
        # The last one of each dtype, the worst, is the one that stays in the dict.
        reports = {c.dtype: c.report for c in kind}
        figures = [_figures(reports[dtype]) if dtype in reports else "" for dtype in run.dtypes]
        status = "BEYOND" if any(map(run.is_wrong, kind)) else "rounding"
        if all(result.ok for result in kind):
            status = "within"
        yield [cause, what, *figures, _where(kind[-1]), status]


def _where(compared: Compared) -> str:
    path = compared.report.worst.path if compared.report.worst else ""
    if compared.cause == "training":
        return f"{path}, update {compared.update}"
    if compared.micro_batch is not None:
        return f"{path}, micro-batch {compared.micro_batch + 1}"
    return f"{path}, n={compared.n}" if compared.cause == "accumulation" else path


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


def conclusion(every: Sequence[Run]) -> str:
    """The last line: whether all problems are the same."""
    different = [run.problem.name for run in every if not run.ok]
    return f"Verdict: DIFFERENT: {', '.join(different)}." if different else "Verdict: the same."


def as_json(every: Sequence[Run]) -> dict[str, object]:
    """All results, for JSON."""
    return {
        "ok": all(run.ok for run in every),
        "versions": versions(),
        "problems": [_run_as_json(run) for run in every],
    }


def _run_as_json(run: Run) -> dict[str, object]:
    return {
        "problem": run.problem.name,
        "about": run.problem.about,
        "fold": repr(run.problem.fold),
        "ok": run.ok,
        "verdict": verdict(run),
        "reduction": run.first.reduction,
        "microbatch_rows": [part.rows for part in run.first.parts],
        "microbatch_weights": [float(part.weight) for part in run.first.parts],
        "compared": [
            c.report.as_dict()
            | {name: value for name, value in c._asdict().items() if name != "reports"}
            | {"ok": c.ok, "explained": not c.ok and run.is_explained(c), "update": c.update}
            | {"worst": [report.most for report in c.reports]}
            for c in run.results
        ],
    }


def verdict(run: Run) -> list[str]:
    """The verdict in sentences. The first one is on the first cause that is found: the others may
    follow from it.
    """
    causes = (_fold, _accumulation, _model, _rounding, _training, _agreement, _aside)
    return [sentence for of_cause in causes for sentence in of_cause(run)]


def _fold(run: Run) -> Iterator[str]:
    if wrong := run.wrong("fold"):
        yield (
            f"The fold itself is wrong: {_worst(wrong)} This would be a bug of funcga; the "
            "gradients that it was given are the same."
        )


def _accumulation(run: Run) -> Iterator[str]:
    wrong = run.wrong("accumulation")
    if not wrong:
        return
    losses = f"the loss of {listed([*dict.fromkeys(str(c.framework) for c in wrong)])}"
    # Both frameworks usually have the same causes.
    causes = {cause.name: cause for verdict in run.verified.values() for cause in verdict.causes}
    if run.verified and not causes:
        yield (
            f"Accumulated, {_worst(wrong)} And verify finds no mistake in {losses}: it is the "
            f"rounding of something inside that computes in less than {wrong[0].dtype}."
        )
        return
    fold = named(run.problem.fold)
    yield f"Accumulation is not exact for {losses} with {fold}: {_worst(wrong)}"
    yield from (f"{cause.what} To fix it: {cause.fix}" for cause in causes.values())


def _model(run: Run) -> Iterator[str]:
    wrong = run.wrong("model")
    if not wrong:
        return
    # The run ends with float64: the finest dtype in which they differ says most.
    finest = wrong[-1].dtype
    full, *parts = [c for c in run.of("model") if c.dtype == finest]
    where = [str(number) for number, part in enumerate(parts, 1) if not part.ok]
    first = next(c for c in (full, *parts) if run.is_wrong(c))
    yield (
        f"The models differ, in {finest}, in micro-batch {listed(where, 16)} of {len(parts)}. "
        f"{_how(first.report)}"
    )
    if finest != "float64":
        yield "In float64 they agree, so it is not mere rounding."


def _how(report: Report) -> str:
    """In which leaves the loss or the gradients differ, and in what way."""
    if not math.isfinite(report.most):
        return report.verdict
    beyond = [row for row in report.rows if not row.ok]
    if beyond[0].path == "loss":
        text = f"The loss itself differs, by {beyond[0].relative:.1e}."
        if beyond[0].relative < 1e-2:
            text += (
                " A difference this small often comes from a constant or an approximation: the eps "
                "of a normalisation, tanh for erf in GELU."
            )
    else:
        text = (
            "The loss is the same and its gradient is not, the last of them that of "
            f"{beyond[-1].path}: backward passes come to it first."
        )
    factor = _factor(beyond)
    if factor is None:
        return f"{text} {report.verdict}"
    return (
        f"{text} All are torch = {factor:.6g} x JAX: another normaliser, such as a mean against a "
        "sum."
    )


def _factor(rows: list[Row]) -> float | None:
    """The one number that all leaves differ by, if there is one."""
    # The ratio in one place of each leaf, and the angle between the leaves, for all other places.
    ratios = [row.values[0] / row.values[1] for row in rows if row.values and row.values[1]]
    is_straight = all(row.cosine is None or row.cosine > 1 - 1e-9 for row in rows)
    if not is_straight or len(ratios) < len(rows):
        return None
    is_alike = all(math.isclose(ratio, ratios[0], rel_tol=1e-6) for ratio in ratios)
    return ratios[0] if is_alike and not math.isclose(ratios[0], 1, rel_tol=1e-4) else None


def _rounding(run: Run) -> Iterator[str]:
    wrong = [c for c in run.wrong("rounding") if math.isfinite(c.report.most)]
    if wrong:
        yield (
            f"{_worst(wrong)} This is more than rounding explains in sums of "
            f"{run.first.reduction} terms, and more than rounded arguments would do: something in "
            f"this loss computes in less than {wrong[0].dtype}."
        )


def _training(run: Run) -> Iterator[str]:
    wrong = sorted(run.wrong("training"), key=lambda c: c.update)
    if not wrong:
        return
    each = [f"{c.optimizer} ({c.dtype}) from update {c.update} on" for c in wrong]
    where = _where(wrong[0]).partition(",")[0]
    yield f"The training diverges: {', '.join(each)}; first {where}."
    if not run.wrong("model"):
        yield "The gradients agree, so compare what the two optimizers do with them."


def _agreement(run: Run) -> Iterator[str]:
    """The verdict on a problem that is the same everywhere."""
    if not run.ok:
        return
    accumulated, between = (
        [c.report.most for c in run.of(cause) if c.dtype == "float64"]
        for cause in ("accumulation", "model")
    )
    text = f"The same. In float64 accumulated is the full batch to {max(accumulated):.0e}"
    if between:
        text += f", and torch is JAX to {max(between):.0e}"
    if len(run.dtypes) > 1:
        text += "; what is left in less precision is rounding"
    yield f"{text}."
    # What is beyond its limit is explained, or the problem would not be the same.
    if large := [f"{c.what} ({c.dtype})" for c in run.results if not c.ok]:
        yield (
            f"Beyond its limit is {listed(large)}: this loss makes rounding large, as rounded "
            "arguments show, or training does."
        )


def _aside(run: Run) -> Iterator[str]:
    """The parameters that are left out of the training."""
    aside = dict.fromkeys(path for c in run.results for path in c.aside)
    if aside:
        yield (
            f"Left out of the training with Adam: {listed([*aside])}. The gradient there is 0 "
            "except for rounding, which Adam divides by itself, so that updates are noise in both "
            "frameworks."
        )


def _worst(compared: list[Compared]) -> str:
    """The comparison that is furthest beyond its limit, and by how much."""
    worst = max(compared, key=lambda c: c.report.badness)
    at = f", n = {worst.n}" if worst.cause == "accumulation" else ""
    return f"{worst.what} ({worst.dtype}{at}): {worst.report.verdict}"
