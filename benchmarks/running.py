"""Runs cases, each in a process of its own, and keeps what each has found as soon as it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.cases import Case
from benchmarks.comparison import Figures
from benchmarks.results import ROOT, Results, saved

TIMEOUT = 1800  # seconds

Measure = Callable[[Case], Figures]


class CaseError(Exception):
    """A case that has failed, with the last lines that it has written."""


class Run(NamedTuple):
    """What became of a run: all the results, and why some cases have none."""

    results: Results
    failed: dict[str, str]


def run(cases: list[Case], results: Results, file: Path, console: Console, measure: Measure | None = None) -> Run:
    """The Run of those cases that the results do not have yet; each is saved in the file when it ends."""
    measure = measured if measure is None else measure
    failed: dict[str, str] = {}
    rest = [case for case in cases if not results.has(case)]
    if len(rest) < len(cases):
        console.print(f"{len(cases) - len(rest)} of {len(cases)} cases are in {file}; --again measures them again.")
    with _progress(console) as progress:
        task = progress.add_task("", total=len(rest))
        for case in rest:
            progress.update(task, description=case.name)
            start = time.perf_counter()
            try:
                figures = measure(case)
            except CaseError as error:
                failed[case.name] = str(error)
                progress.console.print(f"[bold red]{case.name} has failed[/]", highlight=False)
            else:
                results = results.plus(case, figures)
                saved(results, file)
                took = f"{len(figures['contenders'])} contenders, {time.perf_counter() - start:.1f} s"
                progress.console.print(f"{case.name}: {took}", highlight=False)
            progress.advance(task)
    return Run(results, failed)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    remaining = TimeRemainingColumn()  # of cases that take as long as those before
    return Progress(*columns, remaining, console=console, transient=True, speed_estimate_period=3600)


def measured(case: Case) -> Figures:
    """The figures of a case, which a process of its own finds. Raises CaseError if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        with (Path(folder) / "written.txt").open("w+") as written:
            code = _finished(_command(case, file), _environment(case), written.fileno())
            written.seek(0)
            if code or not file.exists():
                raise CaseError(_last_lines(written.read()) or f"its process ended with {code}, and wrote nothing")
        return dict(json.loads(file.read_text()))


def _command(case: Case, file: Path) -> list[str]:
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    launcher = ranks if case.setting == "torch_ranks" else []
    return [sys.executable, *launcher, "-m", "benchmarks.worker", json.dumps(case._asdict()), str(file)]


def _environment(case: Case) -> dict[str, str]:
    own = dict(os.environ)
    if case.threads or case.setting == "torch_ranks":  # ranks share the cores
        own["OMP_NUM_THREADS"] = str(case.threads or max(1, (os.cpu_count() or 1) // case.ranks))
    if case.setting == "jax_devices":
        own["JAX_NUM_CPU_DEVICES"] = str(case.ranks)
    if case.device == "cpu":
        own["JAX_PLATFORMS"] = "cpu"
    else:
        own["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return own


def _finished(command: list[str], environment: dict[str, str], written: int) -> int:
    """The exit code of a command, which is not left running whatever happens here."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=written, stderr=written, start_new_session=True
    )
    try:
        return process.wait(TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise CaseError(f"it took more than {TIMEOUT} s") from error
    finally:
        _ended(process)


def _ended(process: "subprocess.Popen[bytes]") -> None:
    """The launcher of ranks ends those when it is asked to; what is deaf to that is killed."""
    for sign, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _last_lines(text: str, count: int = 12) -> str:
    """The last lines that the case has written itself: behind them the launcher of ranks reports that it failed."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    report = next((k for k, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
    return "\n".join((lines[:report] or lines)[-count:])
