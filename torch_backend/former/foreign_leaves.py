"""Leaves of autograd that are not the window's: a backward pass may reach them, and must not change
their `.grad`s.

Only torch has this file: JAX differentiates a program, which reaches no other tensors.

A backward pass that is restricted to its own leaves writes to no others, with one exception:
functions written in Python, subclasses of torch.autograd.Function, may run passes of their own, as
a reentrant checkpoint does. Searching every graph for them would take 5 % of the time of a loop
over small layers.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from funcga._grad import GradientFunction
from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.engine.guards.reachable import reachable
from torch_backend.modules.visits import IN_USE

# --- gradients of others


class gradients_aside(AbstractContextManager[None]):  # noqa: N801 - a context, as torch.no_grad
    """A context in which these leaves have no `.grad`. Each gets its own back afterwards.

    Leaves of less than 32 bits may get wider gradients meanwhile. Raises FuncgaError, before
    anything is changed, for leaves that another thread has in such a context.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]):
        self.leaves = [*leaves]

    def __enter__(self) -> None:
        self.in_use = IN_USE.begin(map(id, self.leaves))
        self.grads = [*map(_GRAD, self.leaves)]
        is_narrow = any(dtype.itemsize < 4 for dtype in {*map(_DTYPE, self.leaves)})
        self.narrow = (
            [(leaf, leaf.grad_dtype) for leaf in self.leaves if leaf.dtype.itemsize < 4]
            if is_narrow
            else []
        )
        if {*map(type, self.grads)} != {type(None)}:
            for leaf in self.leaves:
                leaf.grad = None

    def __exit__(self, *error: object) -> None:
        for leaf, dtype in self.narrow:
            # One that has become None stays so where it was the leaf's own dtype, which is the
            # default. Set, it would no longer follow the parameter: after module.float(), gradients
            # would still be rounded to 16 bits.
            if leaf.grad_dtype != dtype != leaf.dtype:
                leaf.grad = None
                leaf.grad_dtype = dtype
        for leaf, gradient in zip(self.leaves, self.grads, strict=True):
            leaf.grad = gradient
        IN_USE.end(self.in_use)


_GRAD, _DTYPE = operator.attrgetter("grad"), operator.attrgetter("dtype")


class GradsWatch:
    """The `.grad`s of some tensors that require grad, which a call must leave alone."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self.leaves = [tensor for tensor in tensors if tensor.is_leaf]
        self.grads = [*map(_GRAD, self.leaves)]
        # Usually there are none, as after zero_grad().
        self.present = [gradient for gradient in self.grads if gradient is not None]
        self.writes = sum(map(_private.version, self.present))

    def changed(self) -> bool:
        """Whether a `.grad` was replaced, which is undone, or written to, which cannot be."""
        is_replaced = any(map(operator.is_not, map(_GRAD, self.leaves), self.grads))
        changed = is_replaced or sum(map(_private.version, self.present)) != self.writes
        for leaf, gradient in zip(self.leaves, self.grads, strict=True) if changed else ():
            if leaf.grad is not gradient:
                leaf.grad = gradient
        # The answer is final, and the gradients need not be kept alive for another one.
        self.leaves, self.grads, self.present, self.writes = [], [], [], 0
        return changed

    def check(self) -> None:
        """Raises FuncgaError if one was changed."""
        if self.changed():
            raise FuncgaError(
                "a parameter's .grad changed during the call: loss_fn, or another thread, called "
                ".backward() on the module's own parameters. Return the loss without calling "
                ".backward(), and use the parameters that loss_fn is given: "
                "functional_call(module, params, ...), or torch_backend.pure_loss(module, loss_fn)."
            )


class Surroundings:
    """The leaves of autograd around a loss, which backward passes of the functions in it may write
    to.

    `originals`: the tensors that the window's leaves are made of, with `paths`. `gradient`: the
    gradient function of the loss. `in_module`: whether the leaves are in a module during the
    backward pass too, as those of a pure_loss are.
    """

    def __init__(
        self,
        originals: list[object],
        paths: Callable[[], list[str]],
        gradient: GradientFunction,
        in_module: bool,
    ):
        self.originals, self.paths = originals, paths
        self.gradient, self.in_module = gradient, in_module

    @functools.cached_property
    def objects(self) -> list[torch.Tensor | nn.Module]:
        """The tensors and modules that the loss leads to, by closures, modules, and the
        attributes of objects.
        """
        # By its type, because proxies answer isinstance() for the object that they stand for.
        kinds = torch.Tensor | nn.Module
        return [it for it in reachable(self.gradient) if issubclass(type(it), kinds)]  # type: ignore[misc]

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves of autograd among these objects and the originals."""
        tensors = [
            value for value in [*self.originals, *self.objects] if isinstance(value, torch.Tensor)
        ]
        return [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]

    def check(self, written: Sequence[torch.Tensor]) -> None:
        """Raises FuncgaError if an inner backward pass has written to other leaves instead of the
        window's.

        Those are the originals. Or they have the name and the shape of one: functional_call has put
        the module's own parameters back by the time a checkpoint runs the module again.
        """
        ids = {id(leaf) for leaf in written}
        if ids.isdisjoint(map(id, self.originals)) and (
            self.in_module or not self._are_namesakes(ids)
        ):
            return
        raise FuncgaError(
            "loss_fn runs a module again in the backward pass, as a checkpoint with "
            "use_reentrant=True does, and then with the module's own parameters instead of those "
            "that loss_fn is given: functional_call has taken them out by then. Use "
            "torch_backend.pure_loss(module, loss_fn), or use_reentrant=False."
        )

    def _are_namesakes(self, written: set[int]) -> bool:
        """Whether a module has a parameter among these, with the name and shape of what is
        differentiated.
        """
        if not written:
            return False
        slots = [
            (name, parameter)
            for module in self.objects
            if isinstance(module, nn.Module)
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in written
        ]
        for path, original in zip(self.paths(), self.originals, strict=True):
            # `params['layer.weight']` becomes params.layer.weight, which ends in the parameter's
            # name.
            dotted = ".".join(re.findall(r"[\w-]+", path))
            # Of a list: it has no name, so the shape alone decides.
            is_item = dotted.rpartition(".")[2].isdigit()
            for name, parameter in slots:
                is_named = is_item or dotted.endswith(f".{name}")
                if (
                    is_named
                    and isinstance(original, torch.Tensor)
                    and original.shape == parameter.shape
                ):
                    return True
        return False
