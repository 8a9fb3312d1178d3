"""The `.grad`s of leaves that others own are put aside for a window, or a pass, and given back."""

import operator
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch

from torch_backend.modules.visits import IN_USE

_GRAD = operator.attrgetter("grad")


@contextmanager
def gradients_aside(leaves: Iterable[torch.Tensor], ids: Collection[int] = ()) -> Iterator[None]:
    """A context in which these leaves have no `.grad`. Each gets its own back afterwards.

    `ids`: of what no other thread may use meanwhile, beside the leaves. Raises FuncgaError, before
    anything is changed, where another thread uses one of them.
    """
    own, refused = [*leaves], None
    use = IN_USE.begin([*map(id, own), *ids])
    grads = [*map(_GRAD, own)]
    for leaf in own if any(grad is not None for grad in grads) else ():
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(own, grads, strict=True):
            if leaf.grad is not gradient:  # most windows find no gradient, and leave none
                try:
                    leaf.grad = gradient
                except RuntimeError as unfit:  # the leaf was changed by `.data = ` before
                    refused = unfit
        IN_USE.end(use)
    if refused is not None:
        raise refused
