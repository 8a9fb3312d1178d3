"""The tool that is the command line: what `parity`, `verify`, `plan` and `doctor` do with their
options, which `__main__` reads.

It stands on the tools of these names; nothing stands on it.
"""

import os
import runpy
import signal
import sys
import traceback
from argparse import Namespace
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path

from funcga._types import Tree
from funcga.errors import FuncgaError
from funcga.tools.doctor import watch
from funcga.tools.parity import Problem, report
from funcga.tools.parity.problems import PROBLEMS, chosen
from funcga.tools.parity.run import Run
from funcga.tools.parity.sides import Side
from funcga.tools.plan import plan
from funcga.tools.reports.commands import Loaded, load_object, versions
from funcga.tools.reports.tables import json_text
from funcga.tools.reports.terminal import show, show_progress
from funcga.tools.verify import job_of, verify


def run_parity(options: Namespace) -> int:
    """Prints the report of parity, and writes the files that the options name.

    Returns:
        The exit code: 0 if every difference is within its limit, 1 if not.

    Raises:
        FuncgaError: If parts of a problem do not fit.
    """
    if options.html:  # before anything is computed, as it may not be installed
        from funcga.tools.parity.page import page
    how = options.dtype, options.n, options.updates, options.device
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    show(f"funcga parity: {installed}")
    names = PROBLEMS if options.problem == "all" else [options.problem]
    every = [Run(chosen(name, options.seed), *how) for name in names]
    for run in every:
        show(f"\n{report.as_text(run)}")
    show(f"\n{report.conclusion(every)}")
    _write_json(options, report.as_json(every))
    if options.html:
        options.html.write_text(page(every), encoding="utf-8")
    return 0 if all(run.ok for run in every) else 1


def run_verify(options: Namespace) -> int:
    """Prints the verdict of verify on a gradient function, or on each loss of a Problem.

    Returns:
        The exit code: 0 if accumulation is exact, 1 if not.
    """
    # A Problem has its losses, arguments and fold; those of a gradient function are in its file.
    loaded = load_object(options.grad_fn, "grad_fn = funcga.value_and_grad(loss_fn)")
    if isinstance(loaded.value, Problem):
        # In float64, where rounding hides nothing.
        sides = [Side(loaded.value, framework, "float64") for framework in loaded.value.losses]
        verdicts = {side.label: side.verified(options.n) for side in sides}
    else:
        variables, args = vars(loaded.module), _arguments(loaded, options.args)
        # A step of coupled brings them.
        names = () if job_of(loaded.value) else ("fold", "weight", "in_axes", "totals")
        chosen: dict[str, Tree] = {name: variables[name] for name in names if name in variables}
        verdicts = {loaded.name: verify(loaded.value, *args, n=options.n, **chosen)}
    for name, verdict in verdicts.items():
        show(f"{name}: {verdict}")
    _write_json(options, {name: verdict.as_dict() for name, verdict in verdicts.items()})
    return 0 if all(verdict.ok for verdict in verdicts.values()) else 1


def _arguments(loaded: Loaded, name: str) -> tuple[Tree, ...]:
    """The tuple of this name in the file. Raises FuncgaError if there is none."""
    args = vars(loaded.module).get(name)
    if not isinstance(args, tuple | list):
        raise FuncgaError(
            f"{loaded.module.__file__} has no tuple `{name}`. A gradient function is called with "
            "the arguments that its file has: args = (params, batch). --args NAME says another "
            "name."
        )
    return tuple(args)


def run_plan(options: Namespace) -> int:
    """Prints the table of a plan.

    Returns:
        The exit code: 0 if some number of micro-batches fits in memory, 1 if none does.
    """
    loaded = load_object(options.step, "step = funcga.accumulate(grad_fn, 1)")
    found = plan(loaded.value, *_arguments(loaded, options.args), memory=options.memory)
    show(str(found))
    _write_json(options, asdict(found))
    return 0 if found.fits else 1


def run_doctor(options: Namespace) -> int | str:
    """Runs a script as Python does, and prints what was seen of its training loop: as soon as all
    steps that are watched were seen, or when the script ends or is ended.

    Returns:
        The exit code of the script, or its last message, if it is not 0; else 0 if the loop is
        exact, 1 if not, 2 if that cannot be told or the script has raised an error.
    """
    if not (options.module or Path(options.script).exists()):
        raise FuncgaError(f"there is no script {options.script!r}.")
    sys.argv = [options.script, *options.arguments]
    folder = Path() if options.module else Path(options.script).parent
    sys.path.insert(0, str(folder.resolve()))
    # With --across all processes have the same to say.
    is_first = os.environ.get("RANK", "0") == "0"
    steps, code = count(1), None

    def on_step(watched: watch) -> None:
        step = next(steps)
        if step == options.steps:
            _report(watched, options)
        else:
            show_progress(f"funcga: {step}/{options.steps} steps")

    across = "world" if options.across else None
    watched = watch(across=across, steps=options.steps, on_step=on_step if is_first else None)
    before = signal.signal(signal.SIGTERM, partial(_end, os.getpid()))
    try:
        with watched:
            if options.module:
                runpy.run_module(options.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
        code = 2
    finally:
        # When one process has failed, its launcher stops the others: time for a report is left.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if is_first and next(steps) <= options.steps:
            _report(watched, options)
        signal.signal(signal.SIGTERM, before)
    return code or (2 if watched.ok is None else int(not watched.ok))


def _end(process: int, number: int, _: object) -> None:
    """Ends a script that got a signal, with the exit code that shells give it."""
    # Processes that it has forked end as they would anyway.
    if os.getpid() != process:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(128 + number)


def _report(watched: watch, options: Namespace) -> None:
    show_progress("")
    try:
        if options.json:
            options.json.write_text(watched.to_json(), encoding="utf-8")
    finally:
        show(str(watched))


def _write_json(options: Namespace, figures: object) -> None:
    if options.json:
        options.json.write_text(json_text(figures) + "\n", encoding="utf-8")
