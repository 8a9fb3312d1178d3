"""Window sizes: when a window of `multi_steps` is full, and learning rates for other batch
sizes.
"""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from funcga._backend import Arrays
from funcga._fold import check_quantity, has_no_axes, is_quantity
from funcga._types import Array, Scalar
from funcga.errors import FuncgaError, check_count


@dataclass(frozen=True)
class TargetWeight:
    """For `n` in `multi_steps` and `windows`: a window is full when its micro-batches weigh this
    much, or more.

    Args:
        weight: A number > 0, such as a number of tokens, or a schedule of it: a function of the
            number of updates so far.

    Raises:
        FuncgaError: The number is not positive.

    Example:
        >>> params = {"w": jnp.ones(2)}
        >>> tx = funcga.multi_steps(optax.sgd(0.1), funcga.transforms.TargetWeight(1000))
        >>> state = tx.init(params)
        >>> for tokens in (600, 300, 200):
        ...     updates, state = tx.update({"w": jnp.ones(2)}, state, params, weight=tokens)
        ...     print(bool(tx.has_updated(state)))
        False
        False
        True
    """

    weight: float | Callable[[Any], Scalar]

    def __post_init__(self) -> None:
        if not callable(self.weight):
            object.__setattr__(self, "weight", _as_number(self.weight))
            _check_target(self.weight)

    def after(self, updates: int) -> float:
        """The weight of a window after so many updates.

        Args:
            updates: The number of updates so far.

        Returns:
            The number, or what the schedule returns for it.

        Raises:
            FuncgaError: The schedule returns no finite number above 0.

        Example:
            >>> funcga.transforms.TargetWeight(lambda updates: 256 * (1 + updates)).after(3)
            1024.0
        """
        target = _as_number(self.weight(updates) if callable(self.weight) else self.weight)
        _check_target(target)
        return float(target)


# What `n` of multi_steps may be.
WindowSize: TypeAlias = int | TargetWeight | Callable[[Any], Scalar]


def _as_number(target: Scalar) -> Scalar:
    """A 0-d array as a Python number; anything else as it is."""
    return target.item() if has_no_axes(target) else target


def _check_target(weight: object) -> None:
    if is_quantity(weight):
        return
    raise FuncgaError(
        f"the target weight is {weight!r}: it must be a finite number above 0, such as the tokens "
        "of one update, funcga.transforms.TargetWeight(1_000_000); or a function of the number of "
        "updates that returns one."
    )


def check_target(n: WindowSize) -> WindowSize:
    """What `n` may be: an int >= 1, a TargetWeight, or a function of the number of updates. Else
    FuncgaError.
    """
    if isinstance(n, TargetWeight) or callable(n):
        return n
    number: Scalar = n
    try:
        number = _as_number(n)
    # A traced number, as optax.inject_hyperparams passes one, has no value here.
    except Exception:
        return n
    return check_count(
        number,
        "n",
        " (or a function of the number of updates, or funcga.transforms.TargetWeight(1_000_000))",
    )


def target_of(n: WindowSize, updates: Array, arrays: Arrays) -> Scalar:
    """The target after so many updates: a number or a 0-d array. FuncgaError if it cannot be
    reached.
    """
    of_weight = isinstance(n, TargetWeight)
    target = n.weight if isinstance(n, TargetWeight) else n
    return (
        _scheduled(target, arrays.scalar(updates), of_weight, arrays)
        if callable(target)
        else target
    )


def _scheduled(
    schedule: Callable[[Any], Scalar], updates: Scalar, of_weight: bool, arrays: Arrays
) -> Scalar:
    """The value of a schedule. Raises FuncgaError if the host sees that it cannot be reached."""
    # Checked only if the host sees it.
    target = schedule(updates)
    seen = arrays.scalar(target) if arrays.is_array(target) else target
    if arrays.is_array(seen):
        return target
    if of_weight:
        _check_target(seen)
    else:
        _check_scheduled(seen, target, updates)
    return target


def _check_scheduled(number: object, target: object, updates: Scalar) -> None:
    """Raises FuncgaError if the `number` that a schedule returned, as `target`, is no size."""
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_number or not 1 <= float(number) < float("inf"):  # type: ignore[arg-type]
        raise FuncgaError(
            f"the schedule of n returned {target!r} after {updates} updates: it must be a number "
            "of micro-batches, at least 1, or a 0-d array of one."
        )


def scheduled_size(schedule: Callable[[Any], Scalar], updates: int) -> int:
    """How many micro-batches the window after so many updates has, by a schedule; FuncgaError if it
    returns no such number.
    """
    target = schedule(updates)
    number = _as_number(target)
    _check_scheduled(number, target, updates)
    # A window is full when it has at least as many.
    size: int = math.ceil(number)
    return size


def is_full(
    n: WindowSize, target: Scalar, steps: Array, weight: Callable[[], Scalar], arrays: Arrays
) -> bool | Array:
    """Whether a window of so many micro-batches, or of this weight, is full: a bool, or an array
    if traced.
    """
    of_weight = isinstance(n, TargetWeight)
    amount = in_full(weight()) if of_weight else steps
    # JAX takes no int of more than 31 bits as an operand.
    if of_weight and isinstance(target, int):
        target = float(target)
    # One dtype for both. A weight is a float, and the target is cast to it; the number of steps is
    # an int, and is cast to what the schedule returns, which may be a float.
    if arrays.is_array(amount) and arrays.is_array(target) and amount.dtype != target.dtype:
        dtype = amount.dtype if of_weight else target.dtype
        amount, target = arrays.cast(amount, dtype), arrays.cast(target, dtype)
    full = amount >= target
    return arrays.scalar(full) if arrays.is_array(full) else bool(full)


def in_full(weight: Scalar) -> Scalar:
    """A total weight, increased by the possible rounding error of its sum, as of ten times 0.1.
    Counts of up to 10**12 are compared exactly.
    """
    return weight * (1 + 2.0**-40)


_Size = TypeVar("_Size")


def linear_scaling(lr: float, base_batch_size: float, batch_size: _Size) -> _Size | float:
    """`lr * batch_size / base_batch_size`: the rule for SGD, whose noise it leaves as it was.

    For a larger batch begin at `lr` and warm up to this over some epochs:
    `optax.linear_schedule(lr, scaled, updates)`, or torch's LinearLR with start_factor=lr / scaled
    and total_iters=updates.

    Source: Goyal et al. (2017), "Accurate, large minibatch SGD: training ImageNet in 1 hour".

    Args:
        lr: The learning rate that was tuned for base_batch_size.
        base_batch_size: A batch size in whatever unit batch_size has: rows, or tokens.
        batch_size: That of an update, all its micro-batches on all replicas; a number, or a 0-d
            array of what was really folded, whose value is not looked at.

    Returns:
        The learning rate, a number or a 0-d array as batch_size is.

    Raises:
        FuncgaError: A number is not finite and above 0.

    Example:
        >>> funcga.transforms.linear_scaling(0.1, 256, 1024)
        0.4
    """
    return lr * _ratio(lr, base_batch_size, batch_size)  # type: ignore[no-any-return]


def sqrt_scaling(lr: float, base_batch_size: float, batch_size: _Size) -> _Size | float:
    """`lr * sqrt(batch_size / base_batch_size)`: the rule for Adam and others that divide by the
    gradient's size.

    Source: Krizhevsky (2014), "One weird trick for parallelizing convolutional neural networks", by
    the variance of a step; Malladi et al. (2022), "On the SDEs and scaling rules for adaptive
    gradient algorithms", for Adam, of which they scale the betas and epsilon as well.

    Args:
        lr: The learning rate that was tuned for base_batch_size.
        base_batch_size: A batch size in whatever unit batch_size has.
        batch_size: That of an update, a number or a 0-d array, as for `linear_scaling`.

    Returns:
        The learning rate, a number or a 0-d array as batch_size is.

    Raises:
        FuncgaError: A number is not finite and above 0.

    Example:
        >>> funcga.transforms.sqrt_scaling(1e-3, 256, 1024)
        0.002
    """
    return lr * _ratio(lr, base_batch_size, batch_size) ** 0.5  # type: ignore[no-any-return]


def _ratio(lr: float, base_batch_size: float, batch_size: Scalar) -> Scalar:
    check_quantity("lr", lr, "0.1")
    check_quantity("base_batch_size", base_batch_size, "256")
    _check_size("batch_size", batch_size, "1024")
    return batch_size / base_batch_size


def _check_size(name: str, size: Scalar, like: str) -> None:
    # A 0-d array is not looked at, so that nothing waits for it.
    if isinstance(size, numbers.Real) or not has_no_axes(size):
        check_quantity(name, size, like)


def beta_for_half_life(tokens: _Size, half_life: float) -> _Size | float:
    """`2 ** (-tokens / half_life)`: the beta of a moving average that forgets half of what it has
    after so many tokens.

    With it Adam's second moment remembers equally many tokens for every batch size, so that a batch
    of another size trains alike without accumulation. Give it to the optimizer as beta2; in torch
    also as an option that follows the window's tokens, `betas=lambda count, weight: (0.9,
    funcga.transforms.beta_for_half_life(weight, half_life))`.

    Source: Marek et al. (2025), "Small batch size training for language models: when vanilla SGD
    works, and why gradient accumulation is wasteful", arXiv 2507.07101.

    Args:
        tokens: How many tokens an update has, or rows, in the unit of half_life; a number, or a 0-d
            array of what was really folded, whose value is not looked at.
        half_life: After how many tokens half is forgotten, in their unit: `-tokens / log2(beta)` of
            a tuned beta.

    Returns:
        The beta, a number or a 0-d array as tokens is.

    Raises:
        FuncgaError: A number is not finite and above 0.

    Example:
        >>> funcga.transforms.beta_for_half_life(500_000, 10_000_000)
        0.9659363289248456
        >>> import math
        >>> half_life = -500_000 / math.log2(0.95)  # that of 0.95 at 500,000 tokens an update
        >>> round(funcga.transforms.beta_for_half_life(4_000, half_life), 5)
        0.99959
    """
    check_quantity("half_life", half_life, "10_000_000")
    _check_size("tokens", tokens, "500_000")
    return 2.0 ** (-tokens / half_life)  # type: ignore[no-any-return, operator]
