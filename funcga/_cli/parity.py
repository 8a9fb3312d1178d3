"""The command: problems run and reported one after the other, then the verdict."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from funcga._parity import report
from funcga._parity.problems import Choice, chosen
from funcga._parity.run import Findings, Plan, run
from funcga._versions import versions
from funcga.errors import FuncgaError


class Outputs(NamedTuple):
    """The files that a run writes besides what it prints; None for one that is not asked for."""

    json: Path | None = None
    html: Path | None = None
    plot: Path | None = None


def parity(problems: Sequence[Choice], plan: Plan, outputs: Outputs) -> int:
    """The exit code: 0 if every difference is within its limit, 1 if not. The report goes to standard output.

    Raises FuncgaError for what does not fit a problem, and if a file cannot be written.
    """
    console = _console()
    console.print("funcga parity: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    every = [_run(choice, plan, console) for choice in problems]
    console.print("", report.conclusion(every), sep="\n")
    _write_all(every, outputs)
    return 0 if all(findings.ok for findings in every) else 1


def _run(choice: Choice, plan: Plan, console: Console) -> Findings:
    # Progress goes to standard error, so that a report in a file has none.
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(choice.name)
        problem = chosen(choice)
        progress.update(task, description=problem.name, total=plan.ticks(problem))
        findings = run(problem, replace(plan, tick=lambda: progress.advance(task)), choice)
    console.print("", report.as_table(findings), report.sentences(findings), sep="\n")
    return findings


def _console() -> Console:
    console = Console(highlight=False)
    # A pipe has no width, and rich would assume 80 columns.
    return console if console.is_terminal else Console(highlight=False, width=report.WIDTH)


def _write_all(every: Sequence[Findings], outputs: Outputs) -> None:
    if outputs.json is not None:
        text = json.dumps(report.as_json(every), indent=1, allow_nan=False) + "\n"
        write_file("--json", outputs.json, lambda file: file.write_text(text, encoding="utf-8"))
    if outputs.html is not None:
        from funcga._parity.page import page

        html = page(every)
        write_file("--html", outputs.html, lambda file: file.write_text(html, encoding="utf-8"))
    if outputs.plot is not None:
        from funcga._parity.page import picture

        write_file("--plot", outputs.plot, picture(every).savefig)


def write_file(option: str, file: Path, write: Callable[[Path], object]) -> None:
    """None; has the file written that an option names. Raises FuncgaError if it cannot be."""
    try:
        write(file)
    except OSError as error:
        raise FuncgaError(f"{option}: {file} cannot be written: {error.strerror}") from error
