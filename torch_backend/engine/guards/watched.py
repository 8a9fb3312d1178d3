"""Parameters that were given, and require grad themselves: their `.grad`s stay as they are."""

import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.engine.guards.unchanged import other_hooks

_GRAD = operator.attrgetter("grad")


class grads_watched(AbstractContextManager[None]):  # noqa: N801 - a context, as torch.no_grad
    """A context at whose end FuncgaError is raised if the `.grad` of one of these was changed.

    One that was replaced is put back, after an error too.
    """

    def __init__(self, originals: Iterable[Any]):
        tensors = [tensor for tensor in originals if isinstance(tensor, torch.Tensor)]
        self.leaves = [t for t in tensors if t.requires_grad and t.is_leaf]

    def __enter__(self) -> None:
        self.grads = [*map(_GRAD, self.leaves)]
        self.present = [gradient for gradient in self.grads if gradient is not None]
        self.writes = sum(map(_private.version, self.present))
        self.hooked = any(map(_private.has_hooks, self.leaves))

    def __exit__(self, kind: object, *error: object) -> None:
        is_replaced = any(map(operator.is_not, map(_GRAD, self.leaves), self.grads))
        for leaf, gradient in zip(self.leaves, self.grads, strict=True) if is_replaced else ():
            leaf.grad = gradient
        if kind is None and any(map(_private.has_hooks, self.leaves)) != self.hooked:
            raise other_hooks()
        is_written = sum(map(_private.version, self.present)) != self.writes
        if kind is None and (is_replaced or is_written):
            raise FuncgaError(
                "a parameter's .grad changed during the call: loss_fn, or another thread, called "
                ".backward() on the module's own parameters. Return the loss without calling "
                ".backward(), and use the parameters that loss_fn is given: "
                "functional_call(module, params, ...), or torch_backend.pure_loss(module, loss_fn)."
            )
