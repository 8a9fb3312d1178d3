"""The `.grad`s of leaves that others own stay as they are: they are put aside for a window, or a
pass, and given back; or they are watched.
"""

import operator
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.engine.guards.unchanged import other_hooks
from torch_backend.modules.visits import InUse

_GRAD = operator.attrgetter("grad")


@contextmanager
def gradients_aside(leaves: Iterable[torch.Tensor], ids: Collection[int] = ()) -> Iterator[None]:
    """A context in which these leaves have no `.grad`. Each gets its own back afterwards.

    `ids`: of what no other thread may use meanwhile, beside the leaves. Raises FuncgaError, before
    anything is changed, where another thread uses one of them.
    """
    own, refused = [*leaves], None
    with InUse([*map(id, own), *ids]):
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
    if refused is not None:
        raise refused


@contextmanager
def grads_watched(originals: Iterable[Any]) -> Iterator[None]:
    """A context at whose end FuncgaError is raised if the `.grad` of one of these was changed, or
    one got a hook.

    A `.grad` that was replaced is put back, after an error too.
    """
    tensors = [tensor for tensor in originals if isinstance(tensor, torch.Tensor)]
    leaves = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
    grads = [*map(_GRAD, leaves)]
    present = [gradient for gradient in grads if gradient is not None]
    writes, hooked = sum(map(_private.version, present)), any(map(_private.has_hooks, leaves))
    try:
        yield
    finally:
        is_replaced = any(map(operator.is_not, map(_GRAD, leaves), grads))
        for leaf, gradient in zip(leaves, grads, strict=True) if is_replaced else ():
            leaf.grad = gradient
    if any(map(_private.has_hooks, leaves)) != hooked:
        raise other_hooks()
    if is_replaced or sum(map(_private.version, present)) != writes:
        raise FuncgaError(
            "a parameter's .grad changed during the call: loss_fn, or another thread, called "
            ".backward() on the module's own parameters. Return the loss without calling "
            ".backward(), and use the parameters that loss_fn is given: "
            "functional_call(module, params, ...), or torch_backend.pure_loss(module, loss_fn)."
        )
