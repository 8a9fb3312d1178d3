"""Which step replicas run."""

import inspect
import os
from collections import Counter
from typing import Any, NamedTuple


class StepId(NamedTuple):
    """Identifies a step in every process that runs this code: the name of its function, and how
    many steps of that name were made before.
    """

    name: str
    number: int

    def __str__(self) -> str:
        return f"the step of {self.name}" + (f" (number {self.number + 1})" if self.number else "")


# How many steps of each name this process has made. Every replica runs the same code, so the
# numbers agree.
_STEPS_MADE: Counter[str] = Counter()


def step_of(function: Any) -> StepId:
    """The StepId for this function, counted as one more of its name."""
    inner = inspect.unwrap(function)
    # The function inside of a functools.partial, or the loss inside of a pure_loss.
    inner = getattr(inner, "func", getattr(inner, "loss_fn", inner))
    code = getattr(inner, "__code__", None)
    # The file's name without its folder, which may differ from machine to machine.
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    where = (
        ""
        if code is None
        else f" in line {code.co_firstlineno} of {os.path.basename(code.co_filename)}"
    )
    name = f"`{name}`{where}"
    _STEPS_MADE[name] += 1
    return StepId(name, _STEPS_MADE[name] - 1)


def steps_made() -> dict[str, int]:
    """How many steps of each name this process has made."""
    return {**_STEPS_MADE}
