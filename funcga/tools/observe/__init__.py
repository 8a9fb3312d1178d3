"""`observe=`: statistics of a window's gradients, computed while they are folded.

An observer is another fold of the same values. Every leaf of a micro-batch's gradient is
measured where it is computed, which gives one number. These numbers are folded over all
micro-batches and replicas, as any output of grad_fn. At the end the observer gets their fold,
and the same measure of the gradient that the step returns. So no gradient is stored, copied or
read twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from funcga import monoids, normalizers
from funcga._types import Array, Namespace, Reduced, Scalar, Tree
from funcga.folds import Fold
from funcga.reducers import Reducer


def squared_norm(xp: Namespace, leaf: Array) -> Array:
    """The sum of the squared absolute values of all elements. Each backend has a faster version."""
    return abs(leaf * leaf).sum()


class Observed(NamedTuple):
    """What `Observer.finish` gets. Groups of leaves are on the last axis of each array.

    Attributes:
        folded: The fold of the measures of all micro-batches.
        result: The measure of the weighted mean of the micro-batches' gradients, [groups].
        factor: What that mean is to be multiplied by to be the gradient without a loss scale: 1 for
            mean() and per_weight(), the total weight for sum().

    Example:
        >>> finish = lambda xp, observed: observed.factor * xp.sqrt(observed.result)
        >>> # the norm of the gradient that the step returns
        >>> norm = funcga.observers.Observer(funcga.mean(), finish)
        >>> step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 2, observe=norm)
        >>> step(torch.tensor(1.0), torch.tensor([2.0, 4.0]))
        (tensor(3.), tensor(3.))
    """

    folded: Reduced
    result: Array
    factor: Scalar


@dataclass(frozen=True)
class Observer:
    """What `observe=` takes: a fold over the measures of the micro-batches' gradients, and what is
    made of it.

    A micro-batch's gradient is in the units of a mean: what grad_fn returns under `mean()`, and
    under `per_weight()` and `sum()` that divided by the micro-batch's weight.

    Args:
        fold: What is folded: for each micro-batch the measures of its gradient, [groups], with its
            weight.
        finish: `finish(xp, observed)` of an `Observed` returns the observation: an array, or a tree
            of arrays, with the groups on the last axis of each. It is an array function, and in JAX
            it is traced.
        measure: `measure(xp, leaf)` of an array, a number: a sum over its elements, so that the
            measure of a group is the sum of those of its leaves. By default the squared norm.
        degree: The degree of the measure: that of `c * leaf` is `c**degree` times that of the leaf,
            for c > 0.
        groups: `groups(path)` of a leaf's dotted path in the gradient, such as "layers.0.weight",
            returns the name of its group, a string, or None to leave it out. Then the observation
            is a dict, with an entry for each group. By default all leaves together are one group,
            and its observation comes as it is.

    Example:
        >>> norm = lambda xp, observed: xp.sqrt(observed.folded)
        >>> largest = funcga.observers.Observer(funcga.max(), norm)
        >>> step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 2, observe=largest)
        >>> # the largest norm of a micro-batch's gradient
        >>> step(torch.tensor(1.0), torch.tensor([2.0, 4.0]))
        (tensor(3.), tensor(4.))
    """

    fold: Fold
    finish: Callable[[Namespace, Observed], Tree]
    measure: Callable[[Namespace, Array], Array] = squared_norm
    degree: int = 2
    groups: Callable[[str], str | None] | None = None


ObserverTree: TypeAlias = Observer | Mapping[str, Any] | Sequence[Any]
"""An Observer, or a dict, tuple or list of such trees."""


def _counted(xp: Namespace, value: Array, weight: Scalar) -> Array:
    return xp.stack([value[0] * weight, value[1]])


# The total weight and the number of micro-batches, of values [1, 1].
COUNTS = Fold(Reducer(_counted, monoids.sum, kinds=("float",)), normalizers.identity)
