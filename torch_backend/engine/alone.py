"""A gradient function that is called by itself, on autograd: its gradients are those of one
backward pass.

Only torch has this file: JAX has one way to take a gradient.
"""

import operator
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from funcga._backend import Backend
from funcga._call import Program
from funcga._grad import GradientFunction
from funcga._types import Tree
from funcga.folds import mean
from torch_backend import _private, trees
from torch_backend.arrays import recording_loss
from torch_backend.engine.backward import Pass, are_alone, autocasting, ran_backward
from torch_backend.engine.layout import Leaves
from torch_backend.engine.others import applied, reach
from torch_backend.engine.window import (
    Arrivals,
    Engine,
    changed_in_place,
    detached,
    explain,
    tensors_of,
)
from torch_backend.gradients import needs_autograd, recorded_gradients
from torch_backend.modules.functional import noted, recomputing

_FOLD = mean()  # of the one micro-batch: nothing is folded
_GRAD, _IS_CPU, _LAYOUT = (operator.attrgetter(name) for name in ("grad", "is_cpu", "layout"))
_ON_FUNC = object()  # in place of a result: torch.func has to find it


def value_alone(gradient: GradientFunction, backend: Backend, *args: Tree, **kwargs: Tree) -> Tree:
    """What a gradient function returns at these arguments, outside of windows and transforms.

    An argument that is part of a graph has second-order terms, which torch.func records.
    """
    with Alone(Program(gradient, _FOLD), gradient, backend, None) as window:
        result = _ON_FUNC if window.begin(args, kwargs) else window.value(args, kwargs)
    return gradient.bound(backend)(*args, **kwargs) if result is _ON_FUNC else result


class Alone(Engine):
    """A window of one micro-batch, in which nothing is added: aux may be anything, and each dtype
    is the leaf's own.

    The results have no graph, but for this: if autograd records what the caller does, and the loss
    leads to somebody else's tensor that requires grad, such as a parameter that loss_fn closes
    over, their graph leads there too.
    """

    detaches_aux = False

    def __enter__(self) -> Self:
        # Whether autograd records what the caller does. Leaving inference mode switches it on.
        self.keeps_graphs = torch.is_grad_enabled()
        return super().__enter__()

    def begin(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> bool:
        """Makes the leaves, and says whether an argument is part of a graph."""
        self._begin(self.whole(args), args)
        if not self.keeps_graphs:
            return False
        if self.watched:  # parameters that require grad
            return True
        others = [arg for index, arg in enumerate(args) if index not in self.leaves]
        return any(_requires_grad(trees.flatten(tree)[0]) for tree in (*others, *kwargs.values()))

    def value(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """What the gradient function returns at these arguments, once begun with them; or
        `_ON_FUNC`.
        """
        args = self.detached(args)
        kwargs = {name: detached(value, recorded=True) for name, value in kwargs.items()}
        called = [
            self.leaves[index].tree if index in self.leaves else arg
            for index, arg in enumerate(args)
        ]
        leaves = tuple(tensors_of(self.leaves))
        versions = sum(map(_private.version, leaves))
        arrivals = None if self.gradient.reached else Arrivals(self.gradient)
        loss, aux, gradients = self._run(called[self.first :], kwargs, leaves, arrivals)
        if gradients is None:
            return _ON_FUNC
        if arrivals is not None and arrivals.are_missed(loss, 1, alone=True):
            raise self.gradient.unreached(self.arity, self.backend)
        if sum(map(_private.version, leaves)) != versions:
            raise changed_in_place()
        if self.watch is not None:
            self.watch.check()
        each, ids = iter(gradients), {*map(id, leaves)}
        grads = [_like(argument, each) for argument in self.leaves.values()]
        aux = self._aux(aux, ids) if self.gradient.has_aux else None
        return self.gradient.compose(loss if self.leads_elsewhere else loss.detach(), aux, grads)

    def _run(
        self,
        args: list[Tree],
        kwargs: dict[str, Tree],
        leaves: tuple[torch.Tensor, ...],
        arrivals: Arrivals | None,
    ) -> tuple[torch.Tensor, Tree, list[torch.Tensor] | None]:
        """(the loss, its aux, the gradients of the leaves or None), by a forward and a backward
        pass.
        """
        noted.calls = []
        with self.visit as loss_fn:
            loss, aux, differentiated = self._evaluate(loss_fn, args, kwargs)
            if {*map(type, map(_GRAD, leaves))} - {type(None)}:
                raise ran_backward()
            # A checkpoint runs parts of the loss again in the backward pass, and needs the
            # parameters in the module.
            with recomputing(applied.last is self.since) if noted.calls else recording_loss():
                try:
                    if arrivals is not None:
                        arrivals.watch(leaves)
                    return loss, aux, self._gradients(differentiated, leaves)
                except BaseException as error:
                    explain(error, self.leaves, arrivals)
                    raise

    def _gradients(
        self, loss: torch.Tensor, leaves: tuple[torch.Tensor, ...]
    ) -> list[torch.Tensor] | None:
        """The gradients of the leaves; None where torch.func has to find them."""
        self.leads_elsewhere = (
            False  # whether the loss has a graph that leads to somebody else's tensor
        )
        if not (loss.requires_grad and leaves):
            return _taken(leaves)
        others: list[torch.Tensor] = []
        custom = False
        if self.keeps_graphs or applied.last is not self.since:
            others, custom = reach(loss, {*map(id, leaves)})
        self.leads_elsewhere = self.keeps_graphs and _foreign(others)
        if self.leads_elsewhere:
            if custom:  # it may run a backward pass of its own, of which nothing would be recorded
                return None
            with _refused_recomputing():
                return recorded_gradients(loss, leaves)
        autocast = (
            autocasting({leaf.device.type for leaf in leaves})
            if _private.is_any_autocast_enabled()
            else []
        )
        backward = Pass(lambda: self.around, autocast, all(map(_IS_CPU, leaves)))
        if custom:
            backward.run_by_hand(loss, 1.0, leaves, others)
        else:
            backward.run(loss, 1.0, leaves)
        return _taken(leaves)

    def _aux(self, aux: Tree, ids: set[int]) -> Tree:
        """The aux, whose tensors have a graph only where it leads to somebody else's tensor."""
        tensors, structure = trees.flatten(aux)
        if not _requires_grad(tensors):
            return aux
        is_kept = [
            not _requires_grad([leaf]) or (self.keeps_graphs and _foreign(reach(leaf, ids)[0]))
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


def _foreign(leaves: list[torch.Tensor]) -> bool:
    """Whether one of these is not a leaf that a pure_loss has put into a module, for a parameter
    that is left out.
    """
    return not all(hasattr(leaf, "_stands_in") for leaf in leaves)


def _taken(leaves: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
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
        alone = are_alone(gradients)
        if not all(alone):
            return [
                gradient if own else gradient.clone()
                for gradient, own in zip(gradients, alone, strict=True)
            ]
    return gradients


def _like(argument: Leaves, gradients: Iterator[torch.Tensor]) -> Tree:
    """The tree of an argument with the next gradients in the place of its leaves; None stays
    None.
    """
    return trees.unflatten(
        argument.structure, [None if leaf is None else next(gradients) for leaf in argument.leaves]
    )
