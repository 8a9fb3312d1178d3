"""The report: a table for each problem, the verdict, and the same as JSON."""

import importlib
import math
import platform
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from funcga.parity.differences import Difference, rank
from funcga.parity.problems import Problem
from funcga.parity.run import COMPARISONS, Case, Comparison
from funcga.parity.training import LIMITS, Trajectory

WIDTH = 100
"""The columns that the tables need."""

_CAPTION = (
    "abs: the largest absolute difference of a leaf. rel: that / the largest absolute element of the leaf's gradient "
    "(or the loss), on the right of 'vs'. Each rel must be within its column's limit; one with a ! is not."
)


def versions() -> dict[str, str]:
    """The versions of what the figures depend on, by name."""
    modules = {name: importlib.import_module(name) for name in ("funcga", "torch", "jax", "numpy")}
    return {"python": platform.python_version()} | {name: module.__version__ for name, module in modules.items()}


def table(problem: Problem, cases: Sequence[Case]) -> Table:
    """The table of a problem: a section for each dtype and n, a row for each leaf, a pair for each comparison."""
    made = Table(title=_title(problem, cases), title_justify="left", caption=_CAPTION, caption_justify="left")
    made.box, made.padding, made.show_edge = SIMPLE_HEAD, (0, 0), False
    made.add_column("leaf", vertical="bottom", min_width=18)
    made.add_column("shape", vertical="bottom", min_width=10)
    for comparison in COMPARISONS:
        heading = comparison.name.replace(": ", ":\n")
        made.add_column(f"{heading}\n    abs     rel", vertical="bottom", width=16)
    for case in cases:
        limits = [f"{f'limit {c.limits[case.dtype]:g}':>15}" for c in COMPARISONS]
        made.add_row(f"{case.dtype}, n = {case.n}", "", *limits, style="bold")
        for row in case.rows:
            leaf = f"loss = {case.losses['torch full']:.6f}" if row.leaf == "loss" else row.leaf
            made.add_row(leaf, "x".join(map(str, row.shape)), *map(_pair, row.differences))
        made.add_section()
    return made


def _title(problem: Problem, cases: Sequence[Case]) -> Text:
    lines = [f"{problem.name}: {problem.about}"]
    for case in {case.n: case for case in cases}.values():
        parts = [(case.microbatch_rows, "rows")]
        if problem.unit != "rows":
            parts.append((case.microbatch_items, problem.unit))
        total = " and ".join(f"{sum(sizes)} {unit}" for sizes, unit in parts)
        each = " and ".join(f"{_span(sizes)} {unit}" for sizes, unit in parts)
        lines.append(f"n = {case.n}: {total} in {case.n} micro-batches of {each}")
    return Text("\n".join(lines), style="bold")


def _span(sizes: list[int]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least}" if least == most else f"{least}..{most}"


def _pair(difference: Difference) -> Text:
    mark, style = (" ", "") if difference.ok else ("!", "bold red")
    return Text(f"{_figure(difference.absolute):>7} {_figure(difference.relative):>7}{mark}", style=style)


def _figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


class Worst(NamedTuple):
    """The leaf of some cases at which a comparison differs most, and how many leaves are beyond the limit, of all."""

    case: Case
    leaf: str
    difference: Difference
    beyond: int
    leaves: int


def worst(cases: Sequence[Case], comparison: Comparison) -> Worst:
    """The Worst of a comparison in these cases."""
    place = COMPARISONS.index(comparison)
    found = [(case, row.leaf, row.differences[place]) for case in cases for row in case.rows]
    return Worst(*max(found, key=lambda entry: rank(entry[2])), sum(not entry[2].ok for entry in found), len(found))


def summary(cases: Sequence[Case]) -> Table:
    """The table of the largest relative difference of each comparison, in each dtype."""
    made = Table(
        "comparison", "dtype", "worst rel", "limit", "where", "", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for dtype in dict.fromkeys(case.dtype for case in cases):
        for comparison in COMPARISONS:
            w = worst([case for case in cases if case.dtype == dtype], comparison)
            figures = (_figure(w.difference.relative), f"{w.difference.limit:g}")
            verdict = Text("within", "green") if w.difference.ok else Text("BEYOND", "bold red")
            made.add_row(comparison.name, dtype, *figures, f"{w.case.problem} n = {w.case.n}, {w.leaf}", verdict)
    return made


def training(problem: Problem, trajectories: Sequence[Trajectory]) -> Table:
    """The table of what the same training makes of the parameters in both frameworks, a row for each optimizer."""
    first = trajectories[0]
    title = (
        f"{problem.name}: {first.updates} updates by funcga.multi_steps, n = {first.n}; torch.optim vs optax, "
        f"the parameters at the end"
    )
    made = Table(
        title=Text(title, style="bold"), title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for heading in ("optimizer", "dtype", "loss, first and last", "worst rel", "limit", "where", ""):
        made.add_column(heading)
    for t in trajectories:
        leaf, found = t.worst
        figures = (f"{t.first:.4f} {t.last:.4f}", _figure(found.relative), f"{found.limit:g}")
        verdict = Text("within", "green") if t.ok else Text("BEYOND", "bold red")
        made.add_row(t.optimizer, t.dtype, *figures, leaf, verdict)
    return made


def verdict(cases: Sequence[Case], trajectories: Sequence[Trajectory] = ()) -> Text:
    """The verdict: one line if every difference is within its limit, else one more for each comparison that is not."""
    count = sum(len(row.differences) for case in cases for row in case.rows)
    count += sum(len(t.differences) for t in trajectories)
    if all(case.ok for case in cases) and all(t.ok for t in trajectories):
        what = "the same gradients, and the same training" if trajectories else "the same gradients"
        return Text(f"Verdict: {what}. All {count} differences are within their limits.", "bold green")
    complaints = [*_complaints(cases), *_strayed(trajectories)]
    what = "gradients" if any(not case.ok for case in cases) else "training"
    return Text("\n".join([f"Verdict: DIFFERENT {what}. Beyond the limits:", *complaints]), "bold red")


def _strayed(trajectories: Sequence[Trajectory]) -> Iterator[str]:
    for t in trajectories:
        if not t.ok:
            leaf, found = t.worst
            yield f"  {t.optimizer} {t.dtype} after {t.updates} updates: worst {leaf} {_figure(found.relative)}"


def _complaints(cases: Sequence[Case]) -> Iterator[str]:
    for case in cases:
        for comparison in COMPARISONS:
            w = worst([case], comparison)
            if w.beyond:
                yield (
                    f"  {case.problem} {case.dtype} n = {case.n}, {comparison.name}: {w.beyond} of {w.leaves} leaves, "
                    f"worst {w.leaf} {_figure(w.difference.relative)}"
                )


def as_json(cases: Sequence[Case], trajectories: Sequence[Trajectory] = ()) -> dict[str, Any]:
    """Everything that the tables show, as JSON has it: a figure that is not finite is None."""
    return {
        "ok": all(case.ok for case in cases) and all(t.ok for t in trajectories),
        "versions": versions(),
        "limits": {comparison.name: comparison.limits for comparison in COMPARISONS},
        "cases": [_case_as_json(case) for case in cases],
        "training": [_trajectory_as_json(t) for t in trajectories],
    }


def _trajectory_as_json(t: Trajectory) -> dict[str, Any]:
    leaves = [{"leaf": leaf, **_difference_as_json(found)} for leaf, found in t.differences.items()]
    losses = {"first": _finite(t.first), "last": _finite(t.last)}
    about = {"optimizer": t.optimizer, "dtype": t.dtype, "n": t.n, "updates": t.updates, "limit": LIMITS[t.dtype]}
    return {**about, "ok": t.ok, "losses": losses, "rows": leaves}


def _difference_as_json(d: Difference) -> dict[str, Any]:
    return {"absolute": _finite(d.absolute), "relative": _finite(d.relative), "ok": d.ok}


def _case_as_json(case: Case) -> dict[str, Any]:
    leaves = [
        {
            "leaf": row.leaf,
            "shape": list(row.shape),
            "differences": {c.name: _difference_as_json(d) for c, d in zip(COMPARISONS, row.differences, strict=True)},
        }
        for row in case.rows
    ]
    losses = {run: _finite(loss) for run, loss in case.losses.items()}
    return {**case._asdict(), "ok": case.ok, "losses": losses, "rows": leaves}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
