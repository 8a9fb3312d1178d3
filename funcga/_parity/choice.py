"""Which problem is meant: by what the command line says, so that another process finds the same."""

import inspect
from dataclasses import replace
from typing import NamedTuple

from funcga._cli.information import check_installed
from funcga._cli.loading import load_object
from funcga._parity.problem import Problem
from funcga._parity.problems import PROBLEMS
from funcga._parity.training import OPTIMIZERS
from funcga.errors import FuncgaError


class Choice(NamedTuple):
    """A problem: `where` the command line says it is, the seed, and its name, if there are several."""

    where: str
    seed: int
    name: str = ""


def choices(where: str, seed: int) -> list[Choice]:
    """The Choices of the command line: all built-in problems, or one."""
    return [Choice(name, seed, name) for name in (PROBLEMS if where == "all" else [where])]


def chosen(choice: Choice) -> Problem:
    """The Problem: a built-in one, or that of `FILE.py:NAME`, which may be a function that returns one.

    A function that has a parameter `seed` is called with it. Raises FuncgaError if there is none, or for what is none.
    """
    where = choice.where
    if where in PROBLEMS:
        check_installed("torch", "jax", "optax", "sklearn")
        return PROBLEMS[where](choice.seed)
    if ".py" not in where:
        raise FuncgaError(f"{where!r} is no problem: {', '.join(PROBLEMS)}, all, or one of your own, FILE.py:problem.")
    value, name, _ = load_object(where, "problem")
    if callable(value) and not isinstance(value, Problem):
        value = value(seed=choice.seed) if "seed" in inspect.signature(value).parameters else value()
    if not isinstance(value, Problem):
        raise FuncgaError(
            f"{where} is of type {type(value).__name__}, and parity takes a funcga.Problem, or a function that returns "
            f"one: problem = funcga.Problem(params, batch, torch_loss=..., jax_loss=...)."
        )
    problem = value if value.name else replace(value, name=name)
    check_installed(*problem.frameworks, *(["optax"] if problem.jax_loss is not None else []))
    _check(problem)
    return problem


def _check(problem: Problem) -> None:
    """Raises FuncgaError for a problem without a loss, and for optimizers that there are none of."""
    if problem.torch_loss is None and problem.jax_loss is None:
        raise FuncgaError(
            f"the problem {problem.name!r} has neither a torch_loss nor a jax_loss: there is nothing to run."
        )
    unknown = [name for name in problem.optimizers if name not in OPTIMIZERS]
    if unknown:
        raise FuncgaError(
            f"the problem {problem.name!r} is trained with {unknown[0]!r}, and parity has {', '.join(OPTIMIZERS)}."
        )
