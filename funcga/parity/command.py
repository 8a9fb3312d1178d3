"""The command: problems computed and reported one after the other, then the verdict."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from funcga.errors import FuncgaError
from funcga.parity import report
from funcga.parity.problems import PROBLEMS, Problem
from funcga.parity.run import Case, check_counts, run
from funcga.parity.training import Trajectory, train


def parity(name: str, dtypes: Sequence[str], ns: Sequence[int], updates: int, file: Path | None = None) -> int:
    """The exit code: 0 if every difference is within its limit, 1 if not. The report goes to standard output.

    name: of a problem, or 'all'; updates: of each optimizer in training; file: where the figures are written as JSON.
    Raises FuncgaError for a number of micro-batches beyond a problem's rows, before any work, and if the file cannot
    be written.
    """
    problems = [PROBLEMS[key]() for key in (PROBLEMS if name == "all" else [name])]
    for problem in problems:
        check_counts(problem, ns)
    console = _console()
    console.print("funcga parity: " + ", ".join(f"{name} {version}" for name, version in report.versions().items()))
    cases = [case for problem in problems for case in _run(problem, dtypes, ns, console)]
    chosen = [problem for problem in problems if problem.name in _TRAINED and updates]
    trained = [found for problem in chosen for found in _train(problem, dtypes, ns[-1], updates, console)]
    console.print("", report.summary(cases), "", report.verdict(cases, trained), sep="\n")
    if file is not None:
        _write(file, report.as_json(cases, trained))
    return 0 if all(case.ok for case in cases) and all(t.ok for t in trained) else 1


_TRAINED = ("digits",)  # a mean over rows, and quick enough


def _train(problem: Problem, dtypes: Sequence[str], n: int, updates: int, console: Console) -> list[Trajectory]:
    found = train(problem, dtypes, n, updates)
    console.print("", report.training(problem, found), sep="\n")
    return found


def _console() -> Console:
    console = Console(highlight=False)
    # A pipe has no width, and rich would assume 80 columns.
    return console if console.is_terminal else Console(highlight=False, width=report.WIDTH)


def _run(problem: Problem, dtypes: Sequence[str], ns: Sequence[int], console: Console) -> list[Case]:
    cases = run(problem, dtypes, ns)
    console.print("", report.table(problem, cases), sep="\n")
    return cases


def _write(file: Path, figures: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise FuncgaError(f"--json: {file} cannot be written: {error.strerror}") from error
