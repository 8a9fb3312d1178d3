"""What the command line does: measures, shows what a file has, and lists what there is to measure."""

import functools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks import registry
from benchmarks.cases import Case, cases
from benchmarks.choice import chosen
from benchmarks.pictures import draw
from benchmarks.results import Results, empty, loaded, resumed
from benchmarks.running import Measure, run
from benchmarks.tables import show as show_tables

CONSOLE = Console(highlight=False)


def measure(
    mode: str, device: str, only: Sequence[str], file: Path, again: bool, measured: Measure | None = None
) -> int:
    """The exit code of a run: 1 if a case failed, else 0. Its results are in the file, its pictures beside it."""
    wanted = chosen(cases(mode, device), only)
    results = _again(wanted, file, empty(mode, device)) if again else resumed(file, empty(mode, device))
    found = run(wanted, results, file, CONSOLE, measured)
    shown = found.results._replace(cases={case.name: found.results.cases[case.name] for case in wanted
                                          if case.name in found.results.cases})  # fmt: skip
    show_tables(shown, CONSOLE)
    if shown.cases:
        pictures = ", ".join(map(str, draw(found.results, file.with_suffix(".png"))))
        CONSOLE.print(f"The figures are in {file}, the pictures are {pictures or 'none'}.", soft_wrap=True)
    for name, reason in found.failed.items():
        CONSOLE.print(f"\n[bold red]{name} has failed:[/]")
        CONSOLE.print(reason, markup=False, soft_wrap=True)
    return 1 if found.failed else 0


def _again(wanted: list[Case], file: Path, fresh: Results) -> Results:
    """The results in the file without those that are wanted; none if they are of another run."""
    there = loaded(file) if file.exists() else fresh
    if there._replace(cases={}) != fresh:
        return fresh
    names = {case.name for case in wanted}
    return there._replace(cases={name: figures for name, figures in there.cases.items() if name not in names})


def show(file: Path) -> int:
    """0; prints the tables of a file's results."""
    show_tables(loaded(file), CONSOLE)
    return 0


def overview(mode: str, device: str) -> int:
    """0; prints the cases of a mode, the contenders of each setting, and what is not installed."""
    line = functools.partial(CONSOLE.print, soft_wrap=True)
    every = cases(mode, device)
    for case in every:
        line(f"[bold]{case.name}[/]" + (f"  only {', '.join(case.only)}" if case.only else ""))
    for setting in dict.fromkeys(case.setting for case in every if case.kind != "imports"):
        line()
        runs = [registry.contenders(setting, kind) for kind in registry.KINDS]
        for contender in dict.fromkeys(contender for found, _ in runs for contender in found):
            line(f"[bold]{setting}: {contender.key}[/]  {contender.name}  {contender.source or ''}")
        for key, reason in runs[0][1].items():
            line(Text(f"{setting}: {key}  {reason}", style="bold red"))
    return 0
