"""A gradient function that is called by itself: a window of one micro-batch, of which nothing is
divided, whose aux may be anything, and where each dtype is the leaf's own.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments
from funcga._grad import GradientFunction, evaluations
from funcga._types import GradFn, Tree
from torch_backend import arrays, trees
from torch_backend.engine import bound
from torch_backend.engine.distributed import window_of
from torch_backend.engine.guards import unchanged
from torch_backend.engine.leaves import Own, any_requires_grad, detached
from torch_backend.engine.plan import Plan, Plans, call_key
from torch_backend.engine.window import Window

_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")


def value_of(
    gradient: GradientFunction,
    backend: Backend,
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
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
    key = call_key(None if own is None else own.params, flat, tuple(kwargs))
    plans = gradient.memory.keep(Plans)
    plan: Plan | None = plans.get(key)
    arguments = uncut(args, gradient, backend)
    with Window(None, gradient, backend, arguments, plan, own) as window:
        arguments, kwargs = window.prepared(arguments, kwargs)
        loss, aux = _run(window, tuple([part.value for part in arguments.parts]), kwargs)
        window.check()
        grads = iter(_own_grads(window.inputs))
        in_order = [
            trees.unflatten(structure, [None if leaf is None else next(grads) for leaf in leaves])
            for leaves, structure in map(trees.flatten, window.leaves.trees.values())
        ]
    if plan is None:
        plans.put(key, window.plan)
    return gradient.compose(loss.detach().clone(), detached(aux, True), in_order)


def value_of_module(
    program: Program,
    gradient: GradientFunction,
    backend: Backend,
    own: Own,
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
) -> Tree:
    """What the gradient function of a module returns: the fold of one micro-batch."""
    key = call_key(own.params, [*map(trees.flatten, args)], tuple(kwargs))
    plans = program.memory.keep(Plans)
    plan: Plan | None = plans.get(key)
    arguments = uncut(args, program.grad_fn, backend)
    with window_of(program, gradient, backend, arguments, plan, own) as window:
        arguments, kwargs = window.prepared(arguments, kwargs)
        with window.passes():
            window.fold(tuple([part.value for part in arguments.parts]), kwargs, 1)
        result = window.result()
    if window.plan is not plan:
        plans.put(key, window.plan)
    return result


def uncut(args: tuple[Tree, ...], grad_fn: GradFn, backend: Backend) -> Arguments:
    """The arguments of a call of which none is split."""
    return Arguments(tuple([Argument(arg, [], [], None) for arg in args]), grad_fn, backend)


def _run(
    window: Window, args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> tuple[torch.Tensor, Tree]:
    """(the loss, its aux), with the gradients in the `.grad`s of the leaves."""
    gradient, before = window.gradient, evaluations()
    scale, kwargs = gradient.read_scale(kwargs, window.backend)
    with window.passes(), window.visit as loss_fn:
        loss, aux, objective = window.forward(loss_fn, args, kwargs, scale)
        if any(leaf.grad is not None for leaf in window.inputs):
            raise unchanged.grads_changed()
        if not gradient.reached:
            is_alone = evaluations() == before
            window.unreached = bound.is_unreached(window, objective, (), 1.0, is_alone)
        window.backward(objective, 1.0, ())
    return loss, aux


def _own_grads(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that are left in the leaves, in memory of their own; zeros where none is."""
    grads: list[Any] = [
        torch.zeros_like(leaf, requires_grad=False) if grad is None else grad
        for leaf, grad in zip(leaves, map(_GRAD, leaves), strict=True)
    ]
    if {*map(type, grads)} <= {torch.Tensor} and {*map(_LAYOUT, grads)} <= {torch.strided}:
        alone = arrays.are_alone(grads)
        grads = [grad if own else grad.clone() for grad, own in zip(grads, alone, strict=True)]
    return grads
