"""Learning rates for another batch size: rules that carry one over from the batch size that it was tuned for."""

import numbers
from typing import Any

from funcga._fold.quantity import is_quantity
from funcga.errors import FuncgaError


def linear_scaling(lr: float, base_batch_size: float, batch_size: Any) -> Any:
    """`lr * batch_size / base_batch_size`: the rule for SGD, whose noise it leaves as it was.

    lr: tuned for base_batch_size, in whatever unit batch_size has: rows, or tokens. batch_size: that of an update, all
    its micro-batches on all replicas; a number, or a 0-d array of what was really folded, whose value is not looked at.
    For a larger batch begin at `lr` and warm up to this over some epochs: `optax.linear_schedule(lr, scaled, updates)`,
    or torch's LinearLR with start_factor=lr / scaled and total_iters=updates.

    Raises FuncgaError for numbers that are not finite and above 0.
    Source: Goyal et al. (2017), "Accurate, large minibatch SGD: training ImageNet in 1 hour".

    >>> funcga.linear_scaling(0.1, 256, 1024)
    0.4
    """
    return lr * _ratio(lr, base_batch_size, batch_size)


def sqrt_scaling(lr: float, base_batch_size: float, batch_size: Any) -> Any:
    """`lr * sqrt(batch_size / base_batch_size)`: the rule for Adam and others that divide by the gradient's size.

    The arguments and errors are those of `linear_scaling`.
    Source: Krizhevsky (2014), "One weird trick for parallelizing convolutional neural networks", by the variance of a
    step; Malladi et al. (2022), "On the SDEs and scaling rules for adaptive gradient algorithms", for Adam, of
    which they scale the betas and epsilon as well.

    >>> funcga.sqrt_scaling(1e-3, 256, 1024)
    0.002
    """
    return lr * _ratio(lr, base_batch_size, batch_size) ** 0.5


def _ratio(lr: Any, base_batch_size: Any, batch_size: Any) -> Any:
    _check("lr", lr, "0.1")
    _check("base_batch_size", base_batch_size, "256")
    if isinstance(batch_size, numbers.Real) or getattr(batch_size, "shape", None) != ():
        _check("batch_size", batch_size, "1024")
    return batch_size / base_batch_size


def _check(name: str, number: Any, example: str) -> None:
    if not is_quantity(number):
        raise FuncgaError(f"{name} is {number!r}: it must be a finite number above 0, such as {name}={example}.")
