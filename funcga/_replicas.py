"""Replicas: what `across=` merges over. They start from the same parameters, which can be asked for."""

import inspect
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcga._backend.dispatch import backend_of
from funcga._types import Across, Tree


def check_replicas(params: Tree, across: Across) -> None:
    """Checks that params are bitwise identical on all replicas.

    In torch each array is hashed on the host, and its 16 bytes are sent, after those of the structure. In JAX it is
    called outside of jit, on arrays that lie on the devices of a mesh; the copies of a leaf along the axis are
    compared.

    Args:
        params: a tree of arrays.
        across: as in `accumulate`; every replica has to call it.

    Raises:
        FuncgaError: if an array differs. It names the leaf and the replicas.

    Example:
        >>> funcga.check_replicas(params, dist.group.WORLD)
    """
    backend_of([params], lambda: ["params"]).replicas.check_replicas(params, across)


class Step(NamedTuple):
    """Which step this is, in words that mean the same in every process that runs this code.

    `name` is that of its function, and `number` how many steps of that name were made before.
    """

    name: str
    number: int

    def __str__(self) -> str:
        return f"the step of {self.name}" + (f" (number {self.number + 1})" if self.number else "")


@dataclass(eq=False)
class MergeMemory:
    """What is kept between the merges of one step: its name, and what the backend has learned of the replicas."""

    step: Step | None
    progress: object = None


_MADE: Counter[str] = Counter()


def step_of(function: Any) -> Step:
    """The Step that is made of this function now."""
    inner = inspect.unwrap(function)
    inner = getattr(inner, "func", getattr(inner, "loss_fn", inner))  # of a functools.partial, or a pure_loss
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    where = "" if code is None else f" in line {code.co_firstlineno} of {os.path.basename(code.co_filename)}"
    name = f"`{name}`{where}"
    _MADE[name] += 1
    return Step(name, _MADE[name] - 1)


def steps_made() -> dict[str, int]:
    """How many steps of each name this process has made."""
    return {**_MADE}
