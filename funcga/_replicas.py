"""Replicas, which `across=` merges over: that they have the same parameters, and which step they
run.
"""

import inspect
import os
from collections import Counter
from typing import Any, NamedTuple

from funcga._backend.dispatch import backend_of
from funcga._types import Across, Tree


def check_replicas(params: Tree, across: Across) -> None:
    """Checks that params are bitwise identical on all replicas.

    In torch each array is hashed on the host, and its 16 bytes are sent, after those of the
    structure. In JAX it is called outside of jit, on arrays that lie on the devices of a mesh; the
    copies of a leaf along the axis are compared.

    Args:
        params: A tree of arrays.
        across: As in `accumulate`. Every replica has to call it.

    Raises:
        FuncgaError: An array differs. The text names the leaf and the replicas.

    Example:
        >>> funcga.check_replicas({"w": torch.ones(3)}, dist.group.WORLD)
    """
    backend_of([params], lambda: ["params"]).replicas.check_replicas(params, across)


class Step(NamedTuple):
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


def step_of(function: Any) -> Step:
    """The Step for this function, counted as one more of its name."""
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
    return Step(name, _STEPS_MADE[name] - 1)


def steps_made() -> dict[str, int]:
    """How many steps of each name this process has made."""
    return {**_STEPS_MADE}
