"""The autograd engine: a window of a gradient that funcga itself made, at the cost of the hand-written loop.

Only torch has this file: XLA fuses the sum into the loop by itself.

Each parameter becomes a leaf of the call's own, `p.detach().requires_grad_()`, which shares its memory. So arguments,
modules and their `.grad`s are left alone, and everything that autograd can do works: checkpointing, saved-tensor hooks,
custom functions, compiled losses.
"""

from contextlib import ExitStack
from typing import Any

import torch

from funcga.arguments import Arguments
from funcga.backend import Backend
from funcga.gradients import GradientFunction
from funcga.outputs import Outputs
from funcga.program import Program
from torch_backend.backward import Backward
from torch_backend.buffers import Buffers
from torch_backend.modules import PureLoss


class Engine:
    """One window of a program whose grad_fn is a GradientFunction: `fold` each micro-batch, then take the `result`.

    A context, in which the parameters of a `pure_loss` are in its module.
    """

    def __init__(self, program: Program, gradient: GradientFunction, backend: Backend):
        self.program, self.gradient, self.backend = program, gradient, backend
        self.loss_fn, self.first = gradient.loss_fn, 0
        self.trees: dict[int, Any] | None = None
        self.stack = ExitStack()

    def __enter__(self) -> "Engine":
        if torch.is_inference_mode_enabled():
            self.stack.enter_context(torch.inference_mode(False))  # what is made in it has no gradient
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            torch.clear_autocast_cache()  # of the casts of leaves that nobody will see again

    def fold(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        begins = self.trees is None
        if self.trees is None:
            self.trees = self._enter(arguments, args)
        moving = {i: self._leafy(args[i], i) for i, tree in self.trees.items() if tree is None}
        found = {**self.trees, **moving}
        called = [found.get(i, arg) for i, arg in enumerate(args)][self.first :]
        with torch.enable_grad():
            loss, aux = self.gradient.split(self.loss_fn(*called, **kwargs), self.backend)
        if self.gradient.has_aux:
            aux = self._map(aux, _detached)
        if begins:
            self._bind(loss, aux, found, arguments)
        self.backward.check_untouched()
        self.backward(loss, weight, self._leaves(moving))
        grads = {i: self._map(tree, _gradient) for i, tree in moving.items()}
        leaves: list[Any] = [None] * self.count
        value = self._compose(loss.detach(), aux, grads)
        for i, leaf in zip(
            self.own, self.head.leaves(value, f"micro-batch {self.buffers.tally.steps + 1}"), strict=True
        ):
            leaves[i] = leaf
        state = self.buffers.add(leaves, weight)
        self.backward.settle()
        return state

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output."""
        self.backward.release()
        return self.buffers.result(state)

    def _enter(self, arguments: Arguments, args: tuple[Any, ...]) -> dict[int, Any]:
        """What is differentiated as trees of leaves, by argument; None for an argument that changes on the way.

        The parameters of a pure_loss go into its module, once for the whole window.
        """
        whole = [not part.axes for part in arguments.parts]
        trees = {i: self._leafy(args[i], i) if whole[i] else None for i in self.gradient.places(len(args))}
        if isinstance(self.loss_fn, PureLoss) and args and whole[0]:
            self.loss_fn, self.first = self.stack.enter_context(self.loss_fn.entered(trees.get(0, args[0]))), 1
        return trees

    def _leafy(self, tree: Any, i: int) -> Any:
        self.gradient.check_leaves(tree, i, self.backend)
        return self._map(tree, _leaf)

    def _leaves(self, trees: dict[int, Any]) -> list[torch.Tensor]:
        found = [leaf for tree in trees.values() for leaf in self.backend.trees.flatten(tree)[0]]
        return [leaf for leaf in found if leaf is not None]

    def _map(self, tree: Any, function: Any) -> Any:
        leaves, structure = self.backend.trees.flatten(tree)
        return self.backend.trees.unflatten(structure, [leaf if leaf is None else function(leaf) for leaf in leaves])

    def _compose(self, loss: Any, aux: Any, grads: dict[int, Any]) -> Any:
        """What grad_fn returns, with nothing where the gradients of an argument are not given."""
        assert self.trees is not None
        return self.gradient.compose(loss, aux, [grads.get(i, ()) for i in self.trees])

    def _bind(self, loss: Any, aux: Any, found: dict[int, Any], arguments: Arguments) -> None:
        """Decides with the first loss what becomes of every leaf, and allocates the accumulators."""
        flatten = self.backend.trees.flatten
        outputs, leaves = self.program.bind(self._compose(loss, aux, found), arguments)
        assert self.trees is not None
        held = {i: self._map_all(tree, _GIVEN) for i, tree in self.trees.items() if tree is not None}
        marked = flatten(self._compose(loss, aux, {**found, **held}))[0]
        self.own = [i for i, leaf in enumerate(marked) if leaf is not _GIVEN]
        given = [i for i, leaf in enumerate(marked) if leaf is _GIVEN]
        moving = {i: found[i] for i, tree in self.trees.items() if tree is None}
        self.head = outputs.part(self.own, flatten(self._compose(loss, aux, moving))[1])
        self.count = len(leaves)
        self.buffers = Buffers(outputs, given)
        self.backward = Backward(self.buffers, {i: leaves[i] for i in given if leaves[i] is not None})

    def _map_all(self, tree: Any, leaf: Any) -> Any:
        leaves, structure = self.backend.trees.flatten(tree)
        return self.backend.trees.unflatten(structure, [leaf] * len(leaves))


_GIVEN = object()


def _leaf(parameter: Any) -> torch.Tensor:
    return torch.as_tensor(parameter).detach().requires_grad_()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a leaf that belongs to one micro-batch alone."""
    return torch.zeros_like(leaf, requires_grad=False) if leaf.grad is None else leaf.grad
