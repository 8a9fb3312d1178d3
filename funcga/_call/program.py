"""What `accumulate` and `stream` hand to a backend's loop: the user's functions and choices, checked."""

import inspect
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from funcga._backend.protocols import Backend, backend_of
from funcga._call.arguments import Arguments, argument_names, read_arguments
from funcga._call.outputs import Outputs, sort_outputs
from funcga._fold.weight import check_weight
from funcga._grad import GradientFunction, OwningGradient
from funcga.errors import FuncgaError


class Step(NamedTuple):
    """Which step this is, in words that mean the same in every process that runs this code.

    `name` is that of its function, and `number` how many steps of that name were made before.
    """

    name: str
    number: int

    def __str__(self) -> str:
        return f"the step of {self.name}" + (f" (number {self.number + 1})" if self.number else "")


_MADE: Counter[str] = Counter()


def step_of(function: Any) -> Step:
    """The Step that is made of this function now."""
    inner = inspect.unwrap(function)
    inner = getattr(inner, "func", getattr(inner, "loss_fn", inner))  # of a functools.partial, or a pure_loss
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    name = f"`{name}`" if code is None else f"`{name}` in line {code.co_firstlineno} of {Path(code.co_filename).name}"
    _MADE[name] += 1
    return Step(name, _MADE[name] - 1)


def steps_made() -> dict[str, int]:
    """How many steps of each name this process has made."""
    return {**_MADE}


@dataclass(frozen=True, eq=False)
class Program:
    """grad_fn and how its values are to be folded."""

    grad_fn: Callable[..., Any]
    fold: Any
    weight: Callable[..., Any] | None = None
    in_axes: Any = None
    n: int | None = None
    microbatch_size: int | None = None
    device: Any = None
    across: Any = None
    step: Step | None = None  # of one that is merged over replicas
    compiled: dict[Any, Any] = field(
        default_factory=dict, repr=False
    )  # what a backend works out once, not at every call

    def bound(self, backend: Backend) -> "Program":
        """The same, with a gradient function of funcga's made the framework's own once, not at every micro-batch."""
        if isinstance(self.grad_fn, GradientFunction):
            return replace(self, grad_fn=self.grad_fn.bound(backend))
        return self

    def backend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Backend:
        """The backend that owns the arrays of a call."""
        return backend_of([*args, *kwargs.values()], lambda: [*argument_names(self.grad_fn, len(args)), *kwargs])

    def replicas(self, backend: Backend) -> Any:
        """What `across=` names, as the backend takes it; None without it. FuncgaError for what names none."""
        return None if self.across is None else backend.replicas.replicas_of(self.across)

    def read(self, args: tuple[Any, ...], backend: Backend) -> Arguments:
        """The positional arguments, with what in_axes says of them."""
        in_axes = 0 if self.in_axes is None and isinstance(self.grad_fn, OwningGradient) else self.in_axes
        return read_arguments(args, in_axes, self.grad_fn, backend, assumed=self.in_axes is None)

    def weigh(self, arguments: Arguments, args: tuple[Any, ...], rows: int | None) -> Any:
        """The weight of a micro-batch: a number, or a 0-d array that the host does not see yet. Default: its rows.

        They are those of the arguments if they are None.
        """
        if self.weight is None:
            return arguments.rows() if rows is None else rows
        split = arguments.split_args(args)
        try:
            weight = self.weight(*split)
        except TypeError as error:
            _check_arity(self.weight, len(split), error)
            raise
        return check_weight(weight, arguments.backend.arrays)

    def bind(self, value: Any, arguments: Arguments) -> tuple[Outputs, list[Any]]:
        """The Outputs of a first micro-batch with this output, and the leaves of it."""
        outputs, leaves = sort_outputs(self.fold, value, arguments.carried(), arguments.backend)
        if outputs.threads:
            _check_state([leaves[i] for i in outputs.threads], arguments)
        return outputs, leaves


def _check_arity(weight: Callable[..., Any], count: int, error: TypeError) -> None:
    """Raises FuncgaError if what went wrong is that weight cannot be called with so many arguments."""
    try:
        inspect.signature(weight).bind(*range(count))
    except TypeError:
        raise FuncgaError(
            f"weight is called with each argument that is split, here {count}, and does not take so many ({error}). "
            f"Write it with one parameter for each: weight=lambda x, y: ..., for micro-batches (x, y)."
        ) from error
    except ValueError:  # a builtin without a signature
        return


def _check_state(returned: list[Any], arguments: Arguments) -> None:
    describe, is_array = arguments.backend.arrays.describe, arguments.backend.arrays.is_array
    for (_, path), before, after in zip(arguments.carried(), arguments.state(), returned, strict=True):
        found = (getattr(after, "shape", None), getattr(after, "dtype", None))
        if is_array(before) and (before.shape, before.dtype) != found:
            raise FuncgaError(
                f"the carried state `{path}` came in as {describe(before)} and grad_fn returned it as "
                f"{describe(after)}. Every micro-batch gets what the one before returned: return the shape and dtype "
                f"that came in."
            )


def check_callable(function: Any, name: str, like: str) -> None:
    """Raises FuncgaError if it cannot be called."""
    if not callable(function):
        raise FuncgaError(f"{name} is {function!r}, which is no function. Pass one, such as {like}")


def check_count(value: Any, name: str, instead: str = "") -> int:
    """A number of micro-batches or rows as an int >= 1. Raises FuncgaError, which names what may stand instead."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise FuncgaError(f"{name} is {value!r}: it must be an int, at least 1. Write {name}=8{instead}.") from None
    if count < 1:
        raise FuncgaError(f"{name} is {count}: it must be at least 1. Write {name}=1 for one micro-batch.")
    return count
