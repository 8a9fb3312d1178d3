"""The `.grad`s of leaves that others own are put aside for a window, or a pass, and given back."""

import operator
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager

import torch

from torch_backend.modules.visits import IN_USE

_GRAD = operator.attrgetter("grad")


class gradients_aside(AbstractContextManager[None]):  # noqa: N801 - a context, as torch.no_grad
    """A context in which these leaves have no `.grad`. Each gets its own back afterwards.

    `ids`: of what no other thread may use meanwhile, beside the leaves. Raises FuncgaError, before
    anything is changed, where another thread uses one of them.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], ids: Collection[int] = ()):
        self.leaves, self.ids = [*leaves], ids

    def __enter__(self) -> None:
        self.use = IN_USE.begin([*map(id, self.leaves), *self.ids])
        self.grads = [*map(_GRAD, self.leaves)]
        if any(grad is not None for grad in self.grads):
            for leaf in self.leaves:
                leaf.grad = None

    def __exit__(self, *error: object) -> None:
        refused = None
        for leaf, gradient in zip(self.leaves, self.grads, strict=True):
            if leaf.grad is not gradient:  # most windows find no gradient, and leave none
                try:
                    leaf.grad = gradient
                except RuntimeError as unfit:  # the leaf was changed by `.data = ` before
                    refused = unfit
        IN_USE.end(self.use)
        if refused is not None and error[0] is None:
            raise refused
