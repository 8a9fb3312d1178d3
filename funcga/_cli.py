"""What the commands `parity`, `verify`, `plan` and `info` do. Their arguments are read in
`__main__`.
"""

import inspect
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import Progress

from funcga import folds
from funcga._grad import GradientFunction
from funcga._loading import Loaded, is_function_of, load_object
from funcga._parity import Problem, report
from funcga._parity.problems import Choice, chosen
from funcga._parity.run import Findings, Plan, Run
from funcga._parity.sides import Side
from funcga._plan import plan
from funcga._types import Tree
from funcga._verify import Verdict, verify
from funcga._verify.of_coupled import job_of
from funcga._versions import versions
from funcga.errors import FuncgaError


def run_parity(
    problems: Sequence[Choice],
    plan: Plan,
    json_file: Path | None,
    html_file: Path | None,
    plot_file: Path | None,
) -> int:
    """The exit code: 0 if every difference is within its limit, 1 if not. The report goes to
    standard output.

    The files are written besides it; None for one that is not asked for. Raises FuncgaError for
    what does not fit a problem, and if a file cannot be written.
    """
    console = Console(highlight=False)
    # A pipe has no width, and rich would assume 80 columns where COLUMNS does not say it.
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=report.WIDTH)
    console.print(
        "funcga parity: " + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    every = [_found(Run(chosen(choice), plan, choice), console) for choice in problems]
    console.print("", report.conclusion(every), sep="\n")
    if json_file is not None:
        _write_json(json_file, report.as_json(every))
    if html_file is not None:
        from funcga._parity.page import page

        html = page(every)
        _write("--html", html_file, lambda file: file.write_text(html, encoding="utf-8"))
    if plot_file is not None:
        from funcga._parity.page import picture

        _write("--plot", plot_file, picture(every).savefig)
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


def run_verify(
    where: str,
    args: str | None,
    n: Sequence[int] | None,
    fold: str | None,
    weight: str | None,
    seed: int,
    json_file: Path | None,
) -> int:
    """The exit code: 0 if accumulation is exact, 1 if not. The verdicts go to standard output.

    args, weight: names in the file; fold: of a stock one. None: as the file has it.
    """
    # A Problem has its losses, arguments and fold; a gradient function has the rest of them in its
    # file.
    loaded = load_object(where, "grad_fn = funcga.value_and_grad(loss_fn)", _can_be_verified)
    if isinstance(loaded.value, Problem):
        for name, value in (("args", args), ("fold", fold), ("weight", weight)):
            if value:
                raise FuncgaError(
                    f"--{name} is for a gradient function, and {where} is a funcga.Problem, which "
                    "has its own: leave it out."
                )
        # In float64, where rounding hides nothing.
        sides = [Side(loaded.value, framework, "float64") for framework in loaded.value.frameworks]
        verdicts = {side.label: side.verified(n, seed) for side in sides}
    else:
        verdicts = {loaded.name: _of_function(loaded, where, args or "args", n, fold, weight, seed)}
    console = Console(highlight=False, soft_wrap=True)
    for name, verdict in verdicts.items():
        console.print(f"{name}:", verdict)
        if not verdict.gradients:
            console.print(
                f"`{name}` returns no gradients, and values that agree say nothing of them. Write "
                f"grad_fn = funcga.value_and_grad({name}) in the file, and verify "
                f"{loaded.module.__file__}:grad_fn."
            )
    if json_file is not None:
        _write_json(json_file, {name: verdict.as_dict() for name, verdict in verdicts.items()})
    return 0 if all(verdict.ok for verdict in verdicts.values()) else 1


def _can_be_verified(value: object, module: ModuleType) -> bool:
    """Whether it is a Problem, a gradient function or a step of funcga's, or a transformed
    function, as of jax.grad.
    """
    if isinstance(value, Problem | GradientFunction) or job_of(value) is not None:
        return True
    return is_function_of(value, module) and inspect.unwrap(value) is not value


def _of_function(
    loaded: Loaded,
    where: str,
    args: str,
    n: Sequence[int] | None,
    fold: str | None,
    weight: str | None,
    seed: int,
) -> Verdict:
    """The Verdict of a gradient function with the arguments that its file has."""
    if not callable(loaded.value):
        raise FuncgaError(
            f"{where} is of type {type(loaded.value).__name__}. Give a gradient function, such as "
            f"grad_fn = funcga.value_and_grad(loss_fn), or a funcga.Problem."
        )
    variables = vars(loaded.module)
    _check_arguments(loaded, (args, *([weight] if weight else [])))
    # A step of coupled brings them.
    names = {"fold", "weight", "in_axes"} if job_of(loaded.value) is None else set()
    if names and "totals" in inspect.signature(loaded.value).parameters:
        names.add("totals")
    choices: dict[str, Tree] = {name: variables[name] for name in names & variables.keys()}
    # What the command line says goes before what the file says.
    if fold is not None:
        choices["fold"] = {"mean": folds.mean, "per_weight": folds.per_weight, "sum": folds.sum}[
            fold
        ]()
    if weight is not None:
        choices["weight"] = variables[weight]
    return verify(loaded.value, *variables[args], n=n, seed=seed, **choices)


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


def run_plan(where: str, args: str, memory: str | None, json_file: Path | None) -> int:
    """The exit code: 0 if some number of micro-batches fits in memory, 1 if none does. The table is
    printed.

    args: a name in the file. memory: a number of bytes; None for what is free.
    """
    loaded = load_object(
        where, "step = funcga.accumulate(grad_fn, 1)", lambda value, _: callable(value)
    )
    _check_arguments(loaded, [args])
    errors = Console(stderr=True)
    said = int(memory) if memory is not None and memory.strip().isdecimal() else memory
    with errors.status("planning") if errors.is_terminal else nullcontext():
        found = plan(loaded.value, *vars(loaded.module)[args], memory=said)
    print(found)  # noqa: T201
    if json_file is not None:
        _write_json(json_file, asdict(found))
    return 0 if found.fits else 1


def _write_json(file: Path, figures: object) -> None:
    text = json.dumps(figures, indent=1, allow_nan=False) + "\n"
    _write("--json", file, lambda file: file.write_text(text, encoding="utf-8"))


def _write(option: str, file: Path, write: Callable[[Path], object]) -> None:
    """None; has the file written that an option names. Raises FuncgaError if it cannot be."""
    try:
        write(file)
    except OSError as error:
        raise FuncgaError(f"{option}: {file} cannot be written: {error.strerror}") from error
