"""A gradient function that is called by itself: a window of one micro-batch, of which nothing is
divided, whose aux may be anything, and where each dtype is the leaf's own.
"""

import operator
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call.arguments import Argument, Arguments
from funcga._grad import GradientFunction
from funcga._types import Args, Kwargs, Tree
from torch_backend import arrays, trees
from torch_backend.dtensor import without_partials
from torch_backend.engine.guards import unchanged
from torch_backend.engine.leaves import Own, any_requires_grad
from torch_backend.engine.plan import Plan, Plans, call_key
from torch_backend.engine.window import Window

_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")


def value_of(
    gradient: GradientFunction,
    backend: Backend,
    args: Args,
    kwargs: Kwargs,
    may_record: bool = False,
    own: Own | None = None,
) -> Tree:
    """What a gradient function returns at these arguments, outside of windows and transforms.
    `own`: the module whose own parameters are differentiated, in place of arguments.

    Where it `may_record` and an argument requires grad, torch.func computes it: the result has a
    graph then. Of what loss_fn closes over it has none.
    """
    flat = [*map(trees.flatten, (*args, *kwargs.values()))]
    if may_record and any(any_requires_grad(leaves) for leaves, _ in flat):
        return gradient.bound(backend)(*args, **kwargs)
    key = call_key(own, flat, tuple(kwargs))
    plans = gradient.memory.keep(Plans)
    plan: Plan | None = plans.get(key)
    parts = tuple([Argument(arg, [], [], None) for arg in args])  # none is split
    with Alone(None, gradient, backend, Arguments(parts, gradient, backend), plan, own) as window:
        arguments, kwargs = window.prepared(window.arguments, kwargs)
        with window.passes():
            window.fold(tuple([part.value for part in arguments.parts]), kwargs, 1, True)
        result = window.result()
    if plan is None:
        plans.put(key, window.plan)
    return result


class Alone(Window):
    """The window of a gradient that is computed alone."""

    value: tuple[torch.Tensor, Tree]  # the loss and its aux; set by `fold`

    def fold(self, args: Args, kwargs: Kwargs, weight: float, last: bool = False) -> None:
        """Computes the loss, and leaves its gradients in the `.grad`s of the leaves."""
        loss, aux, objective = self.forward(args, kwargs)
        if any(leaf.grad is not None for leaf in self.inputs):
            raise unchanged.grads_changed()
        self.backward(objective, 1.0, ())
        self.value = loss.clone(), trees.detached(aux, True)

    def result(self) -> Tree:
        """The value and the gradients, in memory of their own; zeros where none has come."""
        self.check()
        grads: list[Any] = [
            torch.zeros_like(leaf, requires_grad=False) if grad is None else grad
            for leaf, grad in zip(self.inputs, map(_GRAD, self.inputs), strict=True)
        ]
        if {*map(type, grads)} <= {torch.Tensor} and {*map(_LAYOUT, grads)} <= {torch.strided}:
            grads = arrays.in_own_memory(grads)
        else:
            grads = [*map(without_partials, grads, self.inputs)]
        each = iter(grads)
        in_order = [
            trees.unflatten(structure, [None if leaf is None else next(each) for leaf in leaves])
            for leaves, structure in map(trees.flatten, self.leaves.trees.values())
        ]
        return self.gradient.compose(*self.value, in_order)
