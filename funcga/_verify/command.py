"""The command: `python -m funcga verify FILE.py:grad_fn`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from funcga import folds
from funcga._cli.loading import Loaded, load_object
from funcga._parity.command import write_file
from funcga._parity.problem import Problem
from funcga._parity.sides import Side
from funcga._verify.verdict import Verdict
from funcga._verify.verify import verify
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
    loaded = load_object(options.where, "grad_fn")
    verdicts = (
        _of_problem(loaded.value, options) if isinstance(loaded.value, Problem) else _of_function(loaded, options)
    )
    console = Console(highlight=False, soft_wrap=True)
    for name, verdict in verdicts.items():
        console.print(f"{name}:", verdict)
    if options.json is not None:
        found = {name: verdict.as_dict() for name, verdict in verdicts.items()}
        text = json.dumps(found, indent=1, allow_nan=False) + "\n"
        write_file("--json", options.json, lambda file: file.write_text(text, encoding="utf-8"))
    return 0 if all(verdict.ok for verdict in verdicts.values()) else 1


def _of_problem(problem: Problem, options: Options) -> dict[str, Verdict]:
    """A Verdict for each framework that the problem has a loss for."""
    given = [f"--{name}" for name in ("args", "fold", "weight") if getattr(options, name) is not None]
    if given:
        raise FuncgaError(
            f"{given[0]} is for a gradient function, and {options.where} is a funcga.Problem, which has its own: leave "
            f"it out."
        )
    sides = [Side(problem, name, "float64") for name in problem.frameworks]
    return {side.label: side.verified(options.n, options.seed) for side in sides}


def _of_function(loaded: Loaded, options: Options) -> dict[str, Verdict]:
    """The Verdict of a gradient function with the arguments that its file has."""
    if not callable(loaded.value):
        raise FuncgaError(
            f"{options.where} is of type {type(loaded.value).__name__}. Give a gradient function, such as "
            f"grad_fn = funcga.value_and_grad(loss_fn), or a funcga.Problem."
        )
    args = _named(loaded, options.args or "args")
    if not isinstance(args, tuple | list):
        raise FuncgaError(
            f"`{options.args or 'args'}` is of type {type(args).__name__}; it has to be a tuple: (params, batch)."
        )
    given: dict[str, Any] = {
        name: getattr(loaded.module, name) for name in ("fold", "weight", "in_axes") if hasattr(loaded.module, name)
    }
    if options.fold is not None:
        given["fold"] = getattr(folds, options.fold)()
    if options.weight is not None:
        given["weight"] = _named(loaded, options.weight)
    if options.n is not None:
        given["n"] = options.n[0] if len(options.n) == 1 else tuple(options.n)
    return {loaded.name: verify(loaded.value, *args, seed=options.seed, **given)}


def _named(loaded: Loaded, name: str) -> Any:
    if not hasattr(loaded.module, name):
        raise FuncgaError(
            f"{loaded.module.__file__} has no `{name}`. A gradient function is called with the arguments that its file "
            f"has: args = (params, batch). --args NAME and --weight NAME say other names."
        )
    return getattr(loaded.module, name)
