"""What `accumulate` and `stream` hand to a backend's loop: the user's functions and choices, checked."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from funcga.arguments import Arguments, argument_names, read_arguments
from funcga.backend import Backend
from funcga.errors import FuncgaError
from funcga.gradients import GradientFunction
from funcga.outputs import Outputs, sort_outputs
from funcga.weights import check_weight


@dataclass(frozen=True, eq=False)
class Program:
    """grad_fn and how its values are to be folded."""

    grad_fn: Callable[..., Any]
    fold: Any
    weight: Callable[..., Any] | None = None
    in_axes: Any = None
    n: int | None = None
    microbatch_size: int | None = None

    def bound(self, backend: Backend) -> "Program":
        """The same, with a gradient function of funcga's made the framework's own once, not at every micro-batch."""
        if isinstance(self.grad_fn, GradientFunction):
            return replace(self, grad_fn=self.grad_fn.bound(backend))
        return self

    def names(self, count: int) -> list[str]:
        """What grad_fn calls its positional arguments."""
        return argument_names(self.grad_fn, count)

    def read(self, args: tuple[Any, ...], backend: Backend) -> Arguments:
        """The positional arguments, with what in_axes says of them."""
        return read_arguments(args, self.in_axes, self.names(len(args)), backend)

    def weigh(self, arguments: Arguments, args: tuple[Any, ...], rows: Callable[[], int]) -> Any:
        """The weight of a micro-batch: a number, or a 0-d array that the host does not see yet. Default: its rows."""
        if self.weight is None:
            return rows()
        return check_weight(self.weight(*arguments.split_args(args)), arguments.backend.arrays)

    def bind(self, value: Any, arguments: Arguments) -> Outputs:
        """The Outputs of a first micro-batch with this output."""
        outputs = sort_outputs(self.fold, value, arguments.carried, arguments.backend)
        _check_state(outputs, value, arguments)
        return outputs


def _check_state(outputs: Outputs, value: Any, arguments: Arguments) -> None:
    leaves = arguments.backend.trees.flatten(value)[0]
    describe, is_array = arguments.backend.arrays.describe, arguments.backend.arrays.is_array
    for (_, path), before, i in zip(arguments.carried, arguments.state, outputs.threads, strict=True):
        after = leaves[i]
        if is_array(before) and (before.shape, before.dtype) != (
            getattr(after, "shape", None),
            getattr(after, "dtype", None),
        ):
            raise FuncgaError(
                f"the carried state `{path}` came in as {describe(before)} and grad_fn returned it as "
                f"{describe(after)}. Every micro-batch gets what the one before returned: return the shape and dtype "
                f"that came in."
            )


def check_callable(function: Any, name: str, like: str) -> None:
    """Raises FuncgaError if it cannot be called."""
    if not callable(function):
        raise FuncgaError(f"{name} is {function!r}, which is no function. Pass one, such as {like}")


def check_count(value: Any, name: str) -> int:
    """A number of micro-batches or rows as an int >= 1. Raises FuncgaError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise FuncgaError(f"{name} is {value!r}: it must be an int, at least 1. Write {name}=8.") from None
    if count < 1:
        raise FuncgaError(f"{name} is {count}: it must be at least 1. Write {name}=1 for one micro-batch.")
    return count


def check_across(across: Any) -> None:
    """Raises FuncgaError: merging over replicas is not part of this version."""
    if across is not None:
        raise FuncgaError(
            "across= merges over replicas, which this version of funcga does not do yet. Reduce the result yourself, "
            "or leave across out on one replica."
        )
