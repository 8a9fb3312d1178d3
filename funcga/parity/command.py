"""The command: problems run and reported one after the other, then the verdict."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from funcga.errors import FuncgaError
from funcga.information import versions
from funcga.loading import load_object
from funcga.parity import report
from funcga.parity.problems import PROBLEMS
from funcga.parity.run import Findings, Plan, run
from funcga.problem import Problem


class Outputs(NamedTuple):
    """The files that a run writes besides what it prints; None for one that is not asked for."""

    json: Path | None = None
    html: Path | None = None
    plot: Path | None = None


def problems_of(where: str, seed: int) -> list[Problem]:
    """The Problems that the command line names: all built-in ones, one of them, or that of `FILE.py:NAME`.

    Raises FuncgaError if there is none, or if what is there is no Problem.
    """
    if where == "all" or where in PROBLEMS:
        return [PROBLEMS[name](seed) for name in (PROBLEMS if where == "all" else [where])]
    if ".py" not in where:
        raise FuncgaError(f"{where!r} is no problem: {', '.join(PROBLEMS)}, all, or one of your own, FILE.py:problem.")
    value, name, _ = load_object(where, "problem")
    if callable(value) and not isinstance(value, Problem):
        value = value(seed) if inspect.signature(value).parameters else value()
    if not isinstance(value, Problem):
        raise FuncgaError(
            f"{where} is of type {type(value).__name__}, and parity takes a funcga.Problem, or a function that returns "
            f"one: problem = funcga.Problem(params, batch, torch_loss=..., jax_loss=...)."
        )
    return [value if value.name else replace(value, name=name)]


def parity(problems: Sequence[Problem], plan: Plan, outputs: Outputs) -> int:
    """The exit code: 0 if every difference is within its limit, 1 if not. The report goes to standard output.

    Raises FuncgaError for what does not fit a problem, and if a file cannot be written.
    """
    console = _console()
    console.print("funcga parity: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    every = [_run(problem, plan, console) for problem in problems]
    console.print("", report.conclusion(every), sep="\n")
    _write_all(every, outputs)
    return 0 if all(findings.ok for findings in every) else 1


def _run(problem: Problem, plan: Plan, console: Console) -> Findings:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(problem.name, total=plan.ticks(problem))
        findings = run(problem, replace(plan, tick=lambda: progress.advance(task)))
    console.print("", report.table(findings), report.sentences(findings), sep="\n")
    return findings


def _console() -> Console:
    console = Console(highlight=False)
    # A pipe has no width, and rich would assume 80 columns.
    return console if console.is_terminal else Console(highlight=False, width=report.WIDTH)


def _write_all(every: Sequence[Findings], outputs: Outputs) -> None:
    if outputs.json is not None:
        text = json.dumps(report.as_json(every), indent=1, allow_nan=False) + "\n"
        _write("--json", outputs.json, lambda file: file.write_text(text, encoding="utf-8"))
    if outputs.html is not None:
        from funcga.parity.page import page

        made = page(every)
        _write("--html", outputs.html, lambda file: file.write_text(made, encoding="utf-8"))
    if outputs.plot is not None:
        from funcga.parity.pictures import picture

        _write("--plot", outputs.plot, picture(every).savefig)


def _write(option: str, file: Path, write: Callable[[Path], Any]) -> None:
    try:
        write(file)
    except OSError as error:
        raise FuncgaError(f"{option}: {file} cannot be written: {error.strerror}") from error
