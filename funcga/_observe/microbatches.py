"""Observers of each micro-batch: `gradient_norms`, the norm of its gradient, beside that of their
mean; and `dropped`, how many were dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

from funcga._observe import Observed, Observer
from funcga._types import Array, Namespace
from funcga.folds import concat


class GradientNorms(NamedTuple):
    """What `gradient_norms` says.

    Attributes:
        microbatches: The norm of each micro-batch's gradient, [n], in order; over replicas one
            replica after the other. 0 for a micro-batch of weight 0, whatever its gradient, and NaN
            for one that is dropped.
        mean: The norm of the gradient that the step returns, before anything clips it.

    Example:
        >>> grad_fn = funcga.grad(lambda w, x: (w * x).mean())
        >>> step = funcga.accumulate(grad_fn, 2, observe=funcga.gradient_norms())
        >>> step(torch.tensor(1.0), torch.tensor([2.0, -4.0]))
        (tensor(-1.), GradientNorms(microbatches=tensor([2., 4.]), mean=tensor(1.)))
    """

    microbatches: Array
    mean: Array


def gradient_norms(groups: Callable[[str], str | None] | None = None) -> Observer:
    """An observer for `observe=`: the norm of each micro-batch's gradient, and that of their mean,
    before clipping.

    All norms are in the units of what the step returns: that of one micro-batch is the norm of what
    the step would return if all of the batch were like it. So the norm of the mean is never above
    the largest. A loss scale is divided out.

    Args:
        groups: As in `gradient_noise`: then the observation is a dict of a `GradientNorms` for each
            group.

    Returns:
        The Observer, whose observation is a `GradientNorms`.

    Raises:
        FuncgaError: groups is no function.

    Example:
        >>> loss_fn = lambda params, x: (params["a"] * x + params["b"]).mean()
        >>> norms = funcga.gradient_norms(groups=lambda path: path)
        >>> step = funcga.accumulate(funcga.grad(loss_fn), 2, observe=norms)
        >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
        >>> grads, norms = step(params, torch.tensor([3.0, -3.0]))
        >>> norms["a"]
        GradientNorms(microbatches=tensor([3., 3.]), mean=tensor(0.))
    """
    return Observer(concat(), _norms, groups=groups)


def _norms(xp: Namespace, observed: Observed) -> GradientNorms:
    # One micro-batch after the other, each with all of its groups.
    squares = observed.folded.reshape(-1, observed.result.shape[0])
    return GradientNorms(
        observed.factor * xp.sqrt(squares), observed.factor * xp.sqrt(observed.result)
    )


def dropped() -> Observer:
    """An observer for `observe=`: how many micro-batches of the window `drop=` has left out, on all
    replicas.

    With drop="window", that is none, or all of them. It is a 0-d integer array, on the device of
    the gradients: nothing waits for it.

    Returns:
        The Observer, whose observation is the number.

    Example:
        >>> grad_fn = funcga.grad(lambda w, x: (w * x).mean())
        >>> step = funcga.accumulate(grad_fn, 3, drop="microbatch", observe=funcga.dropped())
        >>> step(torch.tensor(1.0), torch.tensor([2.0, float("nan"), 4.0]))
        (tensor(3.), tensor(1))
    """
    return Observer(concat(), _count, measure=_nothing, degree=0)


def _nothing(xp: Namespace, leaf: Array) -> Array:
    return xp.zeros_like(abs(leaf.reshape(-1)[:1]).sum())  # real where the leaf is complex


def _count(xp: Namespace, observed: Observed) -> Array:
    # What is collected of a micro-batch that is dropped is NaN.
    return xp.isnan(observed.folded).sum()[None]
