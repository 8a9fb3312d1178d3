"""The tool that is the command line: what `parity`, `verify` and `plan` do with their options,
which `__main__` reads.

It stands on the tools of these names; nothing stands on it.
"""

import inspect
import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import Progress

from funcga import folds
from funcga._commands import Loaded, check_installed, is_function_of, load_object, versions
from funcga._grad import GradientFunction
from funcga._parity import Problem, report
from funcga._parity.problems import choices, chosen
from funcga._parity.run import Findings, Plan, Run
from funcga._parity.sides import Side
from funcga._plan import plan
from funcga._types import Tree
from funcga._verify import Verdict, job_of, verify
from funcga.errors import FuncgaError


def run_parity(options: Namespace) -> int:
    """The exit code: 0 if every difference is within its limit, 1 if not. The report goes to
    standard output, and the files that the options name are written besides it.

    Raises FuncgaError for what does not fit a problem, and if a file cannot be written.
    """
    drawn = [*(["matplotlib"] if options.plot or options.html else [])]
    check_installed(*drawn, *(["jinja2"] if options.html else []))
    plan = Plan(options.dtype, sorted(options.n), options.updates, options.device, options.ranks)
    problems = choices(options.problem, options.seed)
    console = Console(highlight=False)
    # A pipe has no width, and rich would assume 80 columns where COLUMNS does not say it.
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=report.WIDTH)
    console.print(
        "funcga parity: " + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    every = [_found(Run(chosen(choice), plan, choice), console) for choice in problems]
    console.print("", report.conclusion(every), sep="\n")
    _write_json(options, report.as_json(every))
    if options.html or options.plot:
        from funcga._parity.page import page, picture

        html = page(every) if options.html else ""
        _write(options, "html", lambda file: file.write_text(html, encoding="utf-8"))
        _write(options, "plot", lambda file: picture(every).savefig(file))
    return 0 if all(findings.ok for findings in every) else 1


SECONDS = 5
"""Between two lines that say how far a run is, where there is no terminal to draw a bar in."""


def _found(run: Run, console: Console) -> Findings:
    # Progress goes to standard error, so that a report in a file has none.
    errors = Console(stderr=True, highlight=False)
    said = time.monotonic()
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        bar = progress.add_task(run.problem.name)
        for done, total in run.steps():
            progress.update(bar, completed=done, total=total)
            if not errors.is_terminal and time.monotonic() - said >= SECONDS:
                said = time.monotonic()
                errors.print(f"{run.problem.name}: {done} of {total} steps are done")
        findings = run.findings()
    console.print("", report.as_table(findings), report.sentences(findings), sep="\n")
    return findings


def run_verify(options: Namespace) -> int:
    """The exit code: 0 if accumulation is exact, 1 if not. The verdicts go to standard output.

    args, weight: names in the file; fold: of a stock one. None: as the file has it.
    """
    # A Problem has its losses, arguments and fold; a gradient function has the rest of them in its
    # file.
    where = options.grad_fn
    loaded = load_object(where, "grad_fn = funcga.value_and_grad(loss_fn)", _can_be_verified)
    if isinstance(loaded.value, Problem):
        for name in ("args", "fold", "weight"):
            if vars(options)[name]:
                raise FuncgaError(
                    f"--{name} is for a gradient function, and {where} is a funcga.checks.Problem, "
                    "which has its own: leave it out."
                )
        # In float64, where rounding hides nothing.
        sides = [Side(loaded.value, framework, "float64") for framework in loaded.value.frameworks]
        verdicts = {side.label: side.verified(options.n, options.seed) for side in sides}
    else:
        verdicts = {loaded.name: _of_function(loaded, options)}
    console = Console(highlight=False, soft_wrap=True)
    for name, verdict in verdicts.items():
        console.print(f"{name}:", verdict)
        if not verdict.gradients:
            console.print(
                f"`{name}` returns no gradients, and values that agree say nothing of them. Write "
                f"grad_fn = funcga.value_and_grad({name}) in the file, and verify "
                f"{loaded.module.__file__}:grad_fn."
            )
    _write_json(options, {name: verdict.as_dict() for name, verdict in verdicts.items()})
    return 0 if all(verdict.ok for verdict in verdicts.values()) else 1


def _can_be_verified(value: object, module: ModuleType) -> bool:
    """Whether it is a Problem, a gradient function or a step of funcga's, or a transformed
    function, as of jax.grad.
    """
    if isinstance(value, Problem | GradientFunction) or job_of(value) is not None:
        return True
    return is_function_of(value, module) and inspect.unwrap(value) is not value


def _of_function(loaded: Loaded, options: Namespace) -> Verdict:
    """The Verdict of a gradient function with the arguments that its file has."""
    if not callable(loaded.value):
        raise FuncgaError(
            f"{options.grad_fn} is of type {type(loaded.value).__name__}. Give a gradient "
            "function, such as grad_fn = funcga.value_and_grad(loss_fn), or a "
            "funcga.checks.Problem."
        )
    variables = vars(loaded.module)
    args, weight = options.args or "args", options.weight
    _check_arguments(loaded, (args, *([weight] if weight else [])))
    # A step of coupled brings them.
    names = {"fold", "weight", "in_axes"} if job_of(loaded.value) is None else set()
    if names and "totals" in inspect.signature(loaded.value).parameters:
        names.add("totals")
    chosen: dict[str, Tree] = {name: variables[name] for name in names & variables.keys()}
    # What the command line says goes before what the file says.
    if options.fold is not None:
        chosen["fold"] = vars(folds)[options.fold]()
    if weight is not None:
        chosen["weight"] = variables[weight]
    return verify(loaded.value, *variables[args], n=options.n, seed=options.seed, **chosen)


def _check_arguments(loaded: Loaded, names: Sequence[str]) -> None:
    """Raises FuncgaError if the file has nothing of these names, or if the first is not a tuple
    of arguments.
    """
    variables = vars(loaded.module)
    for name in names:
        if name not in variables:
            raise FuncgaError(
                f"{loaded.module.__file__} has no `{name}`. A gradient function is called with the "
                "arguments that its file has: args = (params, batch). --args NAME and --weight "
                "NAME say other names."
            )
    if not isinstance(variables[names[0]], tuple | list):
        raise FuncgaError(
            f"`{names[0]}` is of type {type(variables[names[0]]).__name__}; it has to be a tuple: "
            "(params, batch)."
        )


def run_plan(options: Namespace) -> int:
    """The exit code: 0 if some number of micro-batches fits in memory, 1 if none does. The table is
    printed.
    """
    definition = "step = funcga.accumulate(grad_fn, 1)"
    loaded = load_object(options.step, definition, lambda value, _: callable(value))
    _check_arguments(loaded, [options.args])
    memory = options.memory
    if memory is not None and memory.strip().isdecimal():
        memory = int(memory)
    errors = Console(stderr=True)
    with errors.status("planning") if errors.is_terminal else nullcontext():
        found = plan(loaded.value, *vars(loaded.module)[options.args], memory=memory)
    print(found)  # noqa: T201
    _write_json(options, asdict(found))
    return 0 if found.fits else 1


def _write_json(options: Namespace, figures: object) -> None:
    text = json.dumps(figures, indent=1, allow_nan=False) + "\n"
    _write(options, "json", lambda file: file.write_text(text, encoding="utf-8"))


def _write(options: Namespace, name: str, write: Callable[[Path], object]) -> None:
    """None; has the file written that an option names, if it was given. Raises FuncgaError if it
    cannot be.
    """
    file = vars(options)[name]
    if file is None:
        return
    try:
        write(file)
    except OSError as error:
        raise FuncgaError(f"--{name}: {file} cannot be written: {error.strerror}") from error
