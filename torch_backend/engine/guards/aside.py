"""The `.grad`s of leaves that others own are put aside for a window, or a pass, and given back."""

import operator
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from itertools import filterfalse
from typing import Any

import torch

from funcga.errors import FuncgaError
from torch_backend import arrays
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
        self.in_use = IN_USE.begin([*map(id, self.leaves), *self.ids])
        self.grads = [*map(_GRAD, self.leaves)]
        if any(grad is not None for grad in self.grads):
            for leaf in self.leaves:
                leaf.grad = None

    def __exit__(self, *error: object) -> None:
        try:
            pairs = zip(self.leaves, self.grads, strict=True)
            # Most windows find no gradient, and leave none.
            changed = [pair for pair in pairs if pair[0].grad is not pair[1]]
            unfit = [*filterfalse(_put_back, changed)]
        finally:
            IN_USE.end(self.in_use)
        if unfit and error[0] is None:
            leaf, gradient = unfit[0]
            raise FuncgaError(
                f"a parameter, {arrays.describe(leaf.detach())}, has a .grad that does not fit it, "
                f"{arrays.describe(gradient)}, as it was changed by `.data = `, and that cannot be "
                "put back. Clear it after such a change: module.zero_grad()."
            )


def _put_back(pair: tuple[torch.Tensor, Any]) -> bool:
    """Gives a leaf its gradient; False if that does not fit it."""
    leaf, gradient = pair
    try:
        leaf.grad = gradient
    except RuntimeError:
        return False
    return True
