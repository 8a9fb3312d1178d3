"""Windows by weight, and learning rates for other batch sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from funcga._fold import check_quantity, has_no_axes, is_quantity, weight_on_host
from funcga._fold.accumulator import Accumulation
from funcga._types import Array, Scalar
from funcga.errors import FuncgaError
from funcga.tools.finite import summed

Item = TypeVar("Item")
_Size = TypeVar("_Size")


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
            self.after(0)

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
        return float(self._after(updates, lambda target: target.item()))

    def _after(self, updates: Scalar, on_host: Callable[[Array], Scalar]) -> Scalar:
        """The weight after so many updates; an array if it stays one `on_host`."""
        target = self.weight(updates) if callable(self.weight) else self.weight
        target = on_host(target) if has_no_axes(target) else target
        if not has_no_axes(target) and not is_quantity(target):
            raise FuncgaError(
                f"the target weight is {target!r}: it must be a finite number above 0, such as the "
                "tokens of one update, funcga.transforms.TargetWeight(1_000_000); or a function of "
                "the number of updates that returns one."
            )
        return target

    def is_full(self, window: Accumulation, updates: Scalar) -> Scalar:
        """Whether a window is full after so many updates, with its parts on all replicas."""
        backend, weight = window.outputs.backend, window.total
        if window.across:  # not None, and not the () of JAX, which merges nothing
            weight = summed(weight, window.across, backend)
        arrays, amount = backend.arrays, _in_full(weight)
        target = self._after(updates, arrays.scalar)
        if not arrays.is_array(target):
            return amount >= float(target)  # JAX takes no int of more than 31 bits
        if arrays.is_array(amount):
            target = arrays.as_array(target, amount.dtype)
        return amount >= target

    def windows(self, items: Iterator[Item], weight: Any) -> Iterator[list[Item]]:
        """Lists of micro-batches that weigh so much by `weight(*item)`, the last one less."""
        window: list[Item] = []
        total, updates = 0.0, 0
        for item in items:
            target = self.after(updates)
            window.append(item)
            fields = item if isinstance(item, tuple | list) else (item,)
            total += weight_on_host(weight(*fields))
            if _in_full(total) >= target:
                yield window
                window, total, updates = [], 0.0, updates + 1
        if window:
            yield window


def _in_full(weight: Scalar) -> Scalar:
    """A total weight, increased by the possible rounding error of its sum, as of ten times 0.1.
    Counts of up to 10**12 are compared exactly.
    """
    return weight * (1 + 2.0**-40)


# -- learning rates


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
    if not has_no_axes(batch_size):  # an array is not looked at, so that nothing waits for it
        check_quantity("batch_size", batch_size, "1024")
    return batch_size / base_batch_size


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
    if not has_no_axes(tokens):
        check_quantity("tokens", tokens, "500_000")
    return 2.0 ** (-tokens / half_life)  # type: ignore[no-any-return, operator]
