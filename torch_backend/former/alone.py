"""A gradient function that is called by itself, on autograd: its gradients are those of one
backward pass.

Only torch has this file: JAX has one way to take a gradient.
"""

import operator
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from funcga._backend import Backend
from funcga._grad import GradientFunction
from funcga._types import Tree
from torch_backend import _private, arrays, trees
from torch_backend.engine import graphs
from torch_backend.former.inputs import (
    DifferentiatedArguments,
    Inputs,
    Leaves,
    detached,
    unsplit,
)
from torch_backend.former.passes import Pass, check_no_grads
from torch_backend.gradients import needs_autograd, recorded_gradients

_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")


def value_alone(gradient: GradientFunction, backend: Backend, *args: Tree, **kwargs: Tree) -> Tree:
    """What a gradient function returns at these arguments, outside of windows and transforms.

    An argument that is part of a graph has second-order terms, which torch.func records.
    """
    inputs = DifferentiatedArguments(gradient, backend, {})
    try:
        return value_of(inputs, args, kwargs, keeps_graphs=torch.is_grad_enabled())
    except _NotByAutogradError:
        pass
    return gradient.bound(backend)(*args, **kwargs)


class _NotByAutogradError(Exception):
    """Raised to leave the gradient to torch.func."""


def value_of(
    inputs: Inputs, args: tuple[Tree, ...], kwargs: dict[str, Tree], keeps_graphs: bool
) -> Tree:
    """What the gradient function of these inputs returns. `keeps_graphs` as in Alone."""
    with Pass(inputs) as passes:
        passes.begin(unsplit(args, inputs.gradient, inputs.backend), args, stays=False)
        if keeps_graphs and _are_recorded(inputs, args, kwargs):
            raise _NotByAutogradError
        return Alone(passes, keeps_graphs).value(args, kwargs)


def _are_recorded(inputs: Inputs, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> bool:
    """Whether an argument is part of a graph."""
    if inputs.watch is not None:  # parameters that require grad
        return True
    others = [arg for index, arg in enumerate(args) if index not in inputs.leaves]
    return any(_requires_grad(trees.flatten(tree)[0]) for tree in (*others, *kwargs.values()))


class Alone:
    """One micro-batch, in which nothing is added: aux may be anything, and each dtype is the leaf's
    own.

    The results have no graph, but for this: if autograd records what the caller does
    (`keeps_graphs`), and the loss leads to somebody else's tensor that requires grad, such as a
    parameter that loss_fn closes over, their graph leads there too.
    """

    def __init__(self, passes: Pass, keeps_graphs: bool):
        self.passes, self.keeps_graphs = passes, keeps_graphs
        self.leads_elsewhere = False  # whether the loss leads to somebody else's tensor

    def value(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """What the gradient function returns."""
        passes, inputs = self.passes, self.passes.inputs
        args = inputs.detached(args)
        kwargs = {name: detached(value, recorded=True) for name, value in kwargs.items()}
        leaves = tuple(inputs.tensors)
        called = [
            inputs.leaves[index].tree if index in inputs.leaves else arg
            for index, arg in enumerate(args)
        ]
        with inputs.visit as loss_fn:
            loss, aux, differentiated = passes.forward(loss_fn, called[inputs.first :], kwargs)
            check_no_grads(leaves)
            gradients = passes.backwards(
                inputs.leaves, lambda: self._gradients(differentiated, leaves)
            )
        if passes.arrivals is not None and passes.arrivals.are_missed(loss, 1, alone=True):
            raise inputs.unreached()
        inputs.check_unchanged()
        each, ids = iter(gradients), {*map(id, leaves)}
        grads = [_tree_of(argument, each) for argument in inputs.leaves.values()]
        gradient = inputs.gradient
        aux = self._aux(aux, ids) if gradient.has_aux else None
        return gradient.compose(loss if self.leads_elsewhere else loss.detach(), aux, grads)

    def _gradients(
        self, loss: torch.Tensor, leaves: tuple[torch.Tensor, ...]
    ) -> list[torch.Tensor]:
        """The gradients of the leaves, by a backward pass."""
        if not (loss.requires_grad and leaves):
            return _own_grads(leaves)
        reached = graphs.reach(loss, {*map(id, leaves)})
        self.leads_elsewhere = self.keeps_graphs and graphs.leads_elsewhere(reached.foreign)
        if self.leads_elsewhere:
            if (
                reached.custom
            ):  # it may run a backward pass of its own, of which nothing would be recorded
                raise _NotByAutogradError
            with _refused_recomputing():
                return recorded_gradients(loss, leaves)
        if reached.custom:
            self.passes.run_by_hand(loss, 1.0, leaves, reached.foreign)
        else:
            self.passes.run(loss, 1.0, leaves)
        return _own_grads(leaves)

    def _aux(self, aux: Tree, ids: set[int]) -> Tree:
        """The aux, whose tensors have a graph only where it leads to somebody else's tensor."""
        tensors, structure = trees.flatten(aux)
        if not _requires_grad(tensors):
            return aux
        is_kept = [
            not _requires_grad([leaf])
            or (self.keeps_graphs and graphs.leads_elsewhere(graphs.reach(leaf, ids).foreign))
            for leaf in tensors
        ]
        return trees.unflatten(
            structure,
            [leaf if kept else leaf.detach() for leaf, kept in zip(tensors, is_kept, strict=True)],
        )


@contextmanager
def _refused_recomputing() -> Iterator[None]:
    """A context in which no backward pass may run a module again, as a checkpoint does.

    A second derivative would run it once more, later, when it has other parameters.
    """
    thread = threading.get_ident()

    def refuse(module: nn.Module, args: object) -> None:
        if threading.get_ident() == thread or _private.in_backward():
            raise needs_autograd()

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _requires_grad(leaves: Iterable[Any]) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _own_grads(leaves: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The gradients that are left in the leaves, in memory of their own; zeros where there is
    none.
    """
    gradients = [*map(_GRAD, leaves)]
    kinds = {*map(type, gradients)}
    if type(None) in kinds:
        gradients = [
            torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]
    if kinds <= {torch.Tensor, type(None)} and {*map(_LAYOUT, gradients)} <= {torch.strided}:
        alone = arrays.are_alone(gradients)
        if not all(alone):
            return [
                gradient if own else gradient.clone()
                for gradient, own in zip(gradients, alone, strict=True)
            ]
    return gradients


def _tree_of(argument: Leaves, gradients: Iterator[torch.Tensor]) -> Tree:
    """The tree of an argument with the next gradients in the place of its leaves; None stays
    None.
    """
    return trees.unflatten(
        argument.structure, [None if leaf is None else next(gradients) for leaf in argument.leaves]
    )
