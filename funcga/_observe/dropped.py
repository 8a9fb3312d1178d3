"""`dropped`: how many micro-batches of a window were dropped."""

from funcga._observe import Observed, Observer
from funcga._types import Array, Namespace
from funcga.folds import concat


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
