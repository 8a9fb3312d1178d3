"""The report of a run: a table and a verdict for each problem, and the same as JSON."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from funcga.errors import listed
from funcga.tools.compare.report import Report, figure
from funcga.tools.compare.row import Row
from funcga.tools.parity.run import CAUSES, Compared, Run
from funcga.tools.parity.sides import named
from funcga.tools.reports.commands import versions
from funcga.tools.reports.tables import text_table


def as_text(run: Run) -> str:
    """What a problem is, its table and its verdict."""
    name, (rows, weights) = run.problem.name, _sizes(run)
    sizes = f"micro-batches of {_span(rows)}, of weight {_span(weights)}"
    headings = ["cause", "what is compared", *run.dtypes, "worst at", ""]
    lines = [
        f"{name}: {run.problem.about}",
        f"n = {len(rows)}: {sum(rows)} rows in {len(rows)} {sizes}",
        text_table([headings, *_lines(run)]),
    ]
    return "\n".join([*lines, *(f"{name}: {sentence}" for sentence in verdict(run))])


def _sizes(run: Run) -> tuple[list[int], list[float]]:
    """The rows and the weights of the micro-batches."""
    parts = run.first.parts
    return [part.rows for part in parts], [float(part.weight) for part in parts]


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
    if different:
        return f"Verdict: DIFFERENT: {', '.join(different)}."
    return "Verdict: the same."


def as_json(every: Sequence[Run]) -> dict[str, object]:
    """All results, for JSON."""
    return {
        "ok": all(run.ok for run in every),
        "versions": versions(),
        "causes": CAUSES,
        "problems": [_run_as_json(run) for run in every],
    }


def _run_as_json(run: Run) -> dict[str, object]:
    results, (rows, weights) = [(c, _as_json(run, c)) for c in run.results], _sizes(run)
    return {
        "problem": run.problem.name,
        "about": run.problem.about,
        "fold": repr(run.problem.fold),
        "ok": run.ok,
        "verdict": verdict(run),
        "reduction": run.first.reduction,
        "microbatch_rows": rows,
        "microbatch_weights": weights,
        "losses": {
            dtype: {side.framework: float(side.whole.loss) for side in sides}
            for dtype, sides in run.sides.items()
        },
        "compared": [figures for c, figures in results if c.cause != "training"],
        "training": [figures for c, figures in results if c.cause == "training"],
    }


def _as_json(run: Run, result: Compared) -> dict[str, object]:
    """The figures of a result: its fields, and those of its reports."""
    dtype, n, ok, report = result.dtype, result.n, result.ok, result.report
    common = {"dtype": dtype, "n": n, "ok": ok, "explained": not ok and run.is_explained(result)}
    if result.cause == "training":
        return common | {
            "optimizer": result.optimizer,
            "losses": result.losses,
            "diverges": None if ok else result.update,
            "worst": [report.most for report in result.reports],
            "last": result.reports[-1].as_dict(),
        }
    fields = ("cause", "what", "framework", "micro_batch")
    return report.as_dict() | {name: getattr(result, name) for name in fields} | common


def verdict(run: Run) -> list[str]:
    """The verdict in sentences. The first one is on the first cause that is found: the others may
    follow from it.
    """
    if run.ok:
        return [_agreement(run), *_aside(run)]
    causes = (_fold, _accumulation, _model, _rounding, _training, _aside)
    return [sentence for of_cause in causes for sentence in of_cause(run)]


def _fold(run: Run) -> Iterator[str]:
    wrong = run.wrong("fold")
    if wrong:
        worst = _most(wrong)
        yield (
            f"The fold itself is wrong: {worst.what} ({worst.dtype}) differ by {_worst(worst)}. "
            f"This would be a bug of funcga; the gradients that it was given are the same."
        )


def _accumulation(run: Run) -> Iterator[str]:
    wrong = run.wrong("accumulation")
    if not wrong:
        return
    worst, verdicts = _most(wrong), run.verified.values()
    labels = {compared.framework for compared in wrong}
    label = worst.framework if len(labels) < len(run.problem.losses) else None
    where = f"the loss of {label}" if label else "this loss"
    text = (
        f"over n = {worst.n} micro-batches ({worst.dtype}) it differs from the full batch by "
        f"{_worst(worst)}"
    )
    # Both frameworks usually have the same causes.
    causes = {cause.name: cause for verdict in verdicts for cause in verdict.causes}
    if verdicts and not causes:
        notes = "".join(f" ({note}.)" for verdict in verdicts for note in verdict.notes)
        yield (
            f"Accumulated {text}, and verify finds no mistake in {where}: it is the rounding of "
            f"something inside that computes in less than {worst.dtype}.{notes}"
        )
        return
    yield f"Accumulation is not exact for {where} with {named(run.problem.fold)}: {text}."
    yield from (f"{cause.what} To fix it: {cause.fix}" for cause in causes.values())


def _model(run: Run) -> Iterator[str]:
    wrong = run.wrong("model")
    if not wrong:
        return
    # The run ends with float64: the finest dtype in which they differ says most.
    finest = wrong[-1].dtype
    compared = [c for c in run.of("model") if c.dtype == finest]
    first = next(c for c in wrong if c.dtype == finest)
    text = f"The models differ, in {finest}: {_which(compared)}. {_how(first.report)}"
    agree = f" In {run.finest} they agree, so it is not mere rounding."
    yield text if finest == run.finest else text + agree


def _which(compared: list[Compared]) -> str:
    """In which micro-batches."""
    # The comparison of the full batch has no micro-batch.
    parts = {c.micro_batch + 1: c.ok for c in compared if c.micro_batch is not None}
    wrong = [str(number) for number, ok in parts.items() if not ok]
    if len(wrong) == len(parts):
        return "in every micro-batch"
    if not wrong:
        return "in the full batch, but in none of its micro-batches"
    return (
        f"in micro-batch {listed(wrong)} of {len(parts)}, and not in the others: look at what "
        "those rows have"
    )


def _how(report: Report) -> str:
    """In which leaves, and in what way."""
    beyond = [row for row in report.rows if not row.ok]
    for row in beyond:
        torch, jax = np.add(row.nans, row.infs)
        if torch + jax:
            return f"{row.path} has NaN or infinities: {torch} in torch, {jax} in JAX."
    return _how_much(beyond, len(report.rows) - 1)


def _how_much(beyond: list[Row], total: int) -> str:
    """How the loss or the gradients differ by numbers alone, in the rows that are beyond."""
    leaves = [row for row in beyond if row.path != "loss"]
    count = f"beyond the limit are {len(leaves)} of {total} gradients"
    is_of_loss = len(leaves) < len(beyond)
    if is_of_loss:
        text = f"The loss itself differs, by {beyond[0].relative:.1e}; {count}"
    else:
        text = f"The loss is the same and its gradient is not; {count}"
        if len(leaves) < total:
            text += f", the last of them {leaves[-1].path}: backward passes come to it first"
    factor = _factor(beyond)
    if factor is not None:
        return (
            f"{text}. All are torch = {factor:.6g} x JAX: another normaliser, such as a mean "
            "against a sum."
        )
    worst = sorted(leaves, key=lambda row: row.relative, reverse=True)[:3]
    if worst:
        text += "; most in " + ", ".join(f"{row.path} ({row.relative:.1e})" for row in worst)
    # If the loss is the same, or very different, it is no such constant.
    if is_of_loss and beyond[0].relative < 1e-2:
        text += (
            ". A difference this small often comes from a constant or an approximation: the eps of "
            "a normalisation, tanh for erf in GELU"
        )
    return f"{text}."


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
        worst = _most(wrong)
        yield (
            f"{worst.what} ({worst.dtype}) differs by {_worst(worst)}, which is more than rounding "
            f"explains in sums of {run.first.reduction} terms, and more than rounded arguments "
            f"would do: something in this loss computes in less than {worst.dtype}."
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


def _aside(run: Run) -> Iterator[str]:
    """The parameters that are left out of the training."""
    aside = dict.fromkeys(path for c in run.results for path in c.aside)
    if aside:
        yield (
            f"Left out of the training with Adam: {listed([*aside])}. The gradient there is 0 "
            "except for rounding, which Adam divides by itself, so that updates are noise in both "
            "frameworks."
        )


def _agreement(run: Run) -> str:
    """The verdict on a problem that is the same everywhere."""
    accumulated, between = (
        [c.report.most for c in run.of(cause) if c.dtype == run.finest]
        for cause in ("accumulation", "model")
    )
    text = f"The same. In {run.finest} accumulated is the full batch to {max(accumulated):.0e}"
    if between:
        text += f", and torch is JAX to {max(between):.0e}"
    if len(run.dtypes) > 1:
        text += "; what is left in less precision is rounding"
    # What is beyond its limit is explained, or the problem would not be the same.
    large = [c for c in run.of("rounding") if not c.ok]
    if large:
        text += f", which this loss makes large: {_worst(_most(large))}, as rounded arguments do"
    for c in run.of("training"):
        if not c.ok:
            where = f"{c.optimizer}, {c.dtype}: from update {c.update} on"
            return f"{text}, which training makes larger ({where})."
    return f"{text}."


def _most(compared: list[Compared]) -> Compared:
    return max(compared, key=lambda c: c.report.badness)


def _worst(compared: Compared) -> str:
    row = compared.report.worst
    assert row is not None
    return f"{row.relative:.1e} in {row.path or 'the array'} (limit {row.limit:.0e})"
