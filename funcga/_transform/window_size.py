"""The target: when a window of `multi_steps` is full. A number of micro-batches, or a weight."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga._backend.protocols import Arrays
from funcga._fold.quantity import is_quantity
from funcga.errors import FuncgaError, check_count


@dataclass(frozen=True)
class TargetWeight:
    """For `n` in `multi_steps` and `windows`: a window is full when its micro-batches weigh this much, or more.

    weight: a number > 0, such as a number of tokens, or a schedule of it: a function of the number of updates so far.
    Raises FuncgaError for a number that is not positive.

    >>> tx = funcga.multi_steps(optax.adamw(1e-3), funcga.TargetWeight(1_000_000))
    >>> updates, state = tx.update(grads, state, params, weight=tokens)
    """

    weight: float | Callable[[Any], Any]

    def __post_init__(self) -> None:
        if getattr(self.weight, "shape", None) == () and hasattr(self.weight, "item"):
            object.__setattr__(self, "weight", self.weight.item())
        if not callable(self.weight):
            _check_target(self.weight)

    def after(self, updates: int) -> float:
        """The weight of a window after so many updates. Raises FuncgaError if a schedule returns none."""
        target: Any = self.weight(updates) if callable(self.weight) else self.weight
        target = target.item() if getattr(target, "shape", None) == () else target
        _check_target(target)
        return float(target)


def _check_target(weight: Any) -> None:
    if is_quantity(weight):
        return
    raise FuncgaError(
        f"the target weight is {weight!r}: it must be a finite number above 0, such as the tokens of one update, "
        f"funcga.TargetWeight(1_000_000); or a function of the number of updates that returns one."
    )


def check_target(n: Any) -> Any:
    """What `n` may be: an int >= 1, a TargetWeight, or a function of the number of updates. Else FuncgaError."""
    if isinstance(n, TargetWeight) or callable(n):
        return n
    if getattr(n, "shape", None) == ():
        try:
            n = n.item()
        except Exception:  # it is traced, as by optax.inject_hyperparams
            return n
    return check_count(n, "n", " (or a function of the number of updates, or funcga.TargetWeight(1_000_000))")


def target_of(n: Any, updates: Any, arrays: Arrays) -> Any:
    """What has to be reached after so many updates: a number, or an array of one. FuncgaError if it never can be."""
    of_weight = isinstance(n, TargetWeight)
    target: Any = n.weight if of_weight else n
    return _scheduled(target, arrays.scalar(updates), of_weight, arrays) if callable(target) else target


def is_full(n: Any, target: Any, steps: Any, weight: Callable[[], Any], arrays: Arrays) -> Any:
    """Whether a window of so many micro-batches, or of such a weight, is full: a bool, or an array where traced."""
    of_weight = isinstance(n, TargetWeight)
    amount = weight() if of_weight else steps
    if of_weight and isinstance(target, int):
        target = float(target)  # more than 31 bits are no operand in JAX
    if arrays.is_array(amount) and arrays.is_array(target) and amount.dtype != target.dtype:
        dtype = amount.dtype if of_weight else target.dtype  # a weight is a float, a number of steps an int
        amount, target = arrays.cast(amount, dtype), arrays.cast(target, dtype)
    return _holds(amount >= target, arrays)


def _scheduled(schedule: Callable[[Any], Any], updates: Any, of_weight: bool, arrays: Arrays) -> Any:
    """What a schedule says. Raises FuncgaError if it is seen to be nothing that can be reached."""
    target = schedule(updates)
    seen = arrays.scalar(target) if arrays.is_array(target) else target
    if arrays.is_array(seen):
        return target
    if of_weight:
        _check_target(seen)
    elif isinstance(seen, bool) or not isinstance(seen, numbers.Real) or not 1 <= float(seen) < float("inf"):
        raise FuncgaError(
            f"the schedule of n returned {target!r} after {updates} updates: it must be a number of micro-batches, at "
            f"least 1, or a 0-d array of one."
        )
    return target


def _holds(condition: Any, arrays: Arrays) -> Any:
    return arrays.scalar(condition) if arrays.is_array(condition) else bool(condition)
