"""A gradient function that is called by itself: a window of one micro-batch, of which nothing is
divided, whose aux may be anything, and where each dtype is the leaf's own.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments
from funcga._grad import GradientFunction, evaluations
from funcga._types import Tree
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.engine import bound, graphs
from torch_backend.engine.distributed import window_of
from torch_backend.engine.guards import unchanged
from torch_backend.engine.leaves import Own, any_requires_grad
from torch_backend.engine.plan import Plan, Plans, call_key
from torch_backend.engine.window import Window
from torch_backend.gradients import needs_autograd, recorded_gradients

_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")


def value_alone(gradient: GradientFunction, backend: Backend, *args: Tree, **kwargs: Tree) -> Tree:
    """What a gradient function returns at these arguments, outside of windows and transforms.

    An argument that is part of a graph has second-order terms, which torch.func records. The
    results have no graph, but for this: if autograd records what the caller does, and the loss
    leads to somebody else's tensor that requires grad, such as a parameter that loss_fn closes
    over, their graph leads there too.
    """
    return value_of(gradient, backend, None, args, kwargs, torch.is_grad_enabled())


def value_of(
    gradient: GradientFunction,
    backend: Backend,
    own: Own | None,
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    keeps_graphs: bool,
) -> Tree:
    """The same; if it is asked for (`keeps_graphs`), with a graph. `own`: the module whose own
    parameters are differentiated, in place of arguments.
    """
    flat = [*map(trees.flatten, (*args, *kwargs.values()))]
    if keeps_graphs and any(any_requires_grad(leaves) for leaves, _ in flat):
        return gradient.bound(backend)(*args, **kwargs)
    key = call_key(None if own is None else own.params, flat, tuple(kwargs))
    plans = gradient.memory.keep(Plans)
    plan: Plan | None = plans.get(key)
    parts = tuple([Argument(arg, [], [], None) for arg in args])
    arguments = Arguments(parts, gradient, backend)
    with Window(None, gradient, backend, arguments, plan, own) as window:
        arguments, kwargs = window.prepared(arguments, kwargs)
        args = tuple([part.value for part in arguments.parts])
        loss, aux, grads, leads = _run(window, args, kwargs, keeps_graphs)
        if grads is None:
            return gradient.bound(backend)(*args, **kwargs)
        window.check()
        each = iter(grads)
        in_order = [
            trees.unflatten(structure, [None if leaf is None else next(each) for leaf in leaves])
            for leaves, structure in map(trees.flatten, window.opened.leaves.trees.values())
        ]
        if gradient.has_aux:
            aux = _without_graphs(aux, window, keeps_graphs)
        loss = loss if leads else loss.detach().clone()
    if plan is None:
        plans.put(key, window.plan)
    return gradient.compose(loss, aux, in_order)


def value_of_module(
    program: Program,
    gradient: GradientFunction,
    backend: Backend,
    own: Own,
    arguments: Arguments,
    kwargs: dict[str, Tree],
) -> Tree:
    """What the gradient function of a module returns: the fold of one micro-batch."""
    args = tuple([part.value for part in arguments.parts])
    key = call_key(own.params, [*map(trees.flatten, args)], tuple(kwargs))
    plans = program.memory.keep(Plans)
    plan: Plan | None = plans.get(key)
    with window_of(program, gradient, backend, arguments, plan, own) as window:
        arguments, kwargs = window.prepared(arguments, kwargs)
        window.fold(tuple([part.value for part in arguments.parts]), kwargs, 1)
        result = window.result()
    if window.plan is not plan:
        plans.put(key, window.plan)
    return result


def _run(
    window: Window, args: tuple[Tree, ...], kwargs: dict[str, Tree], keeps_graphs: bool
) -> tuple[Any, Tree, Sequence[torch.Tensor] | None, bool]:
    """(the loss, its aux, its gradients, whether these have graphs); None for gradients that
    torch.func has to take.
    """
    inputs, gradients = window.inputs, evaluations()
    scale, kwargs = window.gradient.read_scale(kwargs, window.backend)
    with recording_loss(), window.opened.visit as loss_fn:
        loss, aux, objective = window.forward(loss_fn, args, kwargs, scale)
        if any(leaf.grad is not None for leaf in inputs):
            raise unchanged.ran_backward()
        if not window.gradient.reached:
            is_alone = evaluations() == gradients
            window.unreached = bound.is_unreached(window, objective, (), 1.0, is_alone)
        if not (objective.requires_grad and inputs):
            return loss, aux, _own_grads(inputs), False
        leads = False
        if keeps_graphs:
            found = graphs.reach(objective, {*map(id, inputs)})
            leads = graphs.leads_elsewhere(found.foreign)
            if leads and found.custom:  # it may run a pass of its own, of which nothing is recorded
                return loss, aux, None, False
        if leads:
            with _refused_recomputing():
                return loss, aux, recorded_gradients(objective, inputs), True
        window.backward(objective, 1.0, ())
        return loss, aux, _own_grads(inputs), False


@contextmanager
def _refused_recomputing() -> Iterator[None]:
    """A context in which no backward pass may run a module again, as a checkpoint does.

    A second derivative would run it once more, later, when it has other parameters.
    """

    def refuse(module: object, args: object) -> None:
        if _private.in_backward():
            raise needs_autograd()

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _without_graphs(aux: Tree, window: Window, keeps_graphs: bool) -> Tree:
    """The aux, whose tensors have a graph only where it leads to somebody else's tensor."""
    leaves, structure = trees.flatten(aux)
    ids = {*map(id, window.inputs)}

    def without(leaf: Any) -> Any:
        if not any_requires_grad([leaf]):
            return leaf
        leads = keeps_graphs and graphs.leads_elsewhere(graphs.reach(leaf, ids).foreign)
        return leaf if leads else leaf.detach()

    return trees.unflatten(structure, [*map(without, leaves)]) if any_requires_grad(leaves) else aux


def _own_grads(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that are left in the leaves, in memory of their own; zeros where none is."""
    grads = [
        torch.zeros_like(leaf, requires_grad=False) if grad is None else grad
        for leaf, grad in zip(leaves, map(_GRAD, leaves), strict=True)
    ]
    if {*map(type, grads)} <= {torch.Tensor} and {*map(_LAYOUT, grads)} <= {torch.strided}:
        alone = arrays.are_alone(grads)
        grads = [grad if own else grad.clone() for grad, own in zip(grads, alone, strict=True)]
    return grads
