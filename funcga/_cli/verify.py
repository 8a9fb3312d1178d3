"""The command: `python -m funcga verify FILE.py:grad_fn`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from funcga import folds
from funcga._cli.parity import write_file
from funcga._loading import Loaded, load_object
from funcga._parity.problem import Problem
from funcga._parity.sides import Side
from funcga._types import Tree
from funcga._verify.verify import Verdict, verify
from funcga.errors import FuncgaError


class Options(NamedTuple):
    """What the command line says. args, weight: names in the file; fold: of a stock one; None: as the file has it."""

    where: str
    args: str | None
    n: Sequence[int] | None
    fold: str | None
    weight: str | None
    seed: int
    json: Path | None


def verify_file(options: Options) -> int:
    """The exit code: 0 if accumulation is exact, 1 if not. The verdicts go to standard output."""
    # A Problem has its losses, arguments and fold; a gradient function has the rest of them in its file.
    loaded = load_object(options.where, "grad_fn")
    if isinstance(loaded.value, Problem):
        verdicts = _of_problem(loaded.value, options)
    else:
        verdicts = {loaded.name: _of_function(loaded, options)}
    console = Console(highlight=False, soft_wrap=True)
    for name, verdict in verdicts.items():
        console.print(f"{name}:", verdict)
    if options.json is not None:
        figures = {name: verdict.as_dict() for name, verdict in verdicts.items()}
        text = json.dumps(figures, indent=1, allow_nan=False) + "\n"
        write_file("--json", options.json, lambda file: file.write_text(text, encoding="utf-8"))
    return 0 if all(verdict.ok for verdict in verdicts.values()) else 1


def _of_problem(problem: Problem, options: Options) -> dict[str, Verdict]:
    """A Verdict for each framework that the problem has a loss for."""
    for name, value in (("args", options.args), ("fold", options.fold), ("weight", options.weight)):
        if value is not None:
            raise FuncgaError(
                f"--{name} is for a gradient function, and {options.where} is a funcga.Problem, which has its own: "
                f"leave it out."
            )
    # In float64, where rounding hides nothing.
    sides = [Side(problem, framework, "float64") for framework in problem.frameworks]
    return {side.label: side.verified(options.n, options.seed) for side in sides}


def _of_function(loaded: Loaded, options: Options) -> Verdict:
    """The Verdict of a gradient function with the arguments that its file has."""
    if not callable(loaded.value):
        raise FuncgaError(
            f"{options.where} is of type {type(loaded.value).__name__}. Give a gradient function, such as "
            f"grad_fn = funcga.value_and_grad(loss_fn), or a funcga.Problem."
        )
    name = options.args or "args"
    args = _named(loaded, name)
    if not isinstance(args, tuple | list):
        raise FuncgaError(f"`{name}` is of type {type(args).__name__}; it has to be a tuple: (params, batch).")
    variables = vars(loaded.module)
    choices: dict[str, Tree] = {name: variables[name] for name in ("fold", "weight", "in_axes") if name in variables}
    # What the command line says goes before what the file says.
    if options.fold is not None:
        choices["fold"] = {"mean": folds.mean, "per_weight": folds.per_weight, "sum": folds.sum}[options.fold]()
    if options.weight is not None:
        choices["weight"] = _named(loaded, options.weight)
    if options.n is not None:
        choices["n"] = options.n[0] if len(options.n) == 1 else tuple(options.n)
    return verify(loaded.value, *args, seed=options.seed, **choices)


def _named(loaded: Loaded, name: str) -> Tree:
    variables = vars(loaded.module)
    if name not in variables:
        raise FuncgaError(
            f"{loaded.module.__file__} has no `{name}`. A gradient function is called with the arguments that its file "
            f"has: args = (params, batch). --args NAME and --weight NAME say other names."
        )
    return variables[name]
