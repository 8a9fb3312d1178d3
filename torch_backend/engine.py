"""The autograd engine: a window of a gradient that funcga itself made, at the cost of the hand-written loop.

Only torch has this file: XLA fuses the sum into the loop by itself.

Each parameter becomes a leaf of the call's own, `p.detach().requires_grad_()`, which shares its memory. So arguments,
modules and their `.grad`s are left alone, and everything that autograd can do works: checkpointing, saved-tensor hooks,
custom functions, compiled losses.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from funcga.arguments import Arguments
from funcga.backend import Backend
from funcga.gradients import GradientFunction
from funcga.program import Program
from torch_backend.backward import Backward, autocasting
from torch_backend.buffers import Buffers
from torch_backend.modules import PureLoss


class Engine:
    """One window of a program whose grad_fn is a GradientFunction: `fold` each micro-batch, then take the `result`.

    A context, in which the parameters of a `pure_loss` are in its module.
    """

    def __init__(self, program: Program, gradient: GradientFunction, backend: Backend):
        self.program, self.gradient, self.backend = program, gradient, backend
        self.loss_fn: Callable[..., Any] = gradient.loss_fn
        self.whole: dict[int, _Leaves] = {}  # what is differentiated and the same for every micro-batch, by argument
        self.places: tuple[int, ...] = ()  # of all arguments that are differentiated
        self.first = 0  # the first argument that loss_fn takes
        self.stack = ExitStack()

    def __enter__(self) -> "Engine":
        if torch.is_inference_mode_enabled():
            self.stack.enter_context(torch.inference_mode(False))  # what is made in it has no gradient
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)
        if autocasting("cuda"):
            torch.clear_autocast_cache()  # of the casts of leaves that nobody will see again

    def fold(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        begins = not self.places
        if begins:
            self._enter(arguments, args)
        found = {i: self.whole[i] if i in self.whole else self._leafy(args[i], i) for i in self.places}
        called = [found[i].tree if i in found else arg for i, arg in enumerate(args)][self.first :]
        with torch.enable_grad():
            loss, aux = self.gradient.split(self.loss_fn(*called, **kwargs), self.backend)
        if self.gradient.has_aux:
            leaves, structure = self.backend.trees.flatten(aux)
            aux = self.backend.trees.unflatten(structure, [_detached(leaf) for leaf in leaves])
        if begins:
            self._bind(loss.detach(), aux, found, arguments)
        self.backward.check_untouched()
        moving = [leaf for i in self.places if i not in self.whole for leaf in found[i].leaves if leaf is not None]
        self.backward(loss, weight, moving)
        state = self.buffers.add(self._leaves(loss.detach(), aux, found), weight)
        self.backward.settle()
        return state

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output."""
        self.backward.release()
        return self.buffers.result(state)

    def _enter(self, arguments: Arguments, args: tuple[Any, ...]) -> None:
        """Makes leaves of what is differentiated; those of a pure_loss go into its module once for the whole window."""
        self.places = self.gradient.places(len(args))
        whole = [not part.axes for part in arguments.parts]
        self.whole = {i: self._leafy(args[i], i) for i in self.places if whole[i]}
        if isinstance(self.loss_fn, PureLoss) and whole[0]:
            params = self.whole[0].tree if 0 in self.whole else args[0]
            self.loss_fn, self.first = self.stack.enter_context(self.loss_fn.entered(params)), 1

    def _leafy(self, tree: Any, i: int) -> "_Leaves":
        leaves, structure = self.backend.trees.flatten(tree)
        try:
            made = [leaf if leaf is None else _leaf(leaf) for leaf in leaves]
        except (RuntimeError, TypeError, ValueError):
            self.gradient.check_leaves(tree, i, self.backend)
            raise
        return _Leaves(self.backend.trees.unflatten(structure, made), made, structure)

    def _bind(self, loss: Any, aux: Any, found: "dict[int, _Leaves]", arguments: Arguments) -> None:
        """Decides with the first loss what becomes of every leaf of the output, and allocates the accumulators."""
        compose, trees = self.gradient.compose, self.backend.trees
        outputs, leaves = self.program.bind(compose(loss, aux, [found[i].tree for i in self.places]), arguments)
        self.count = len(leaves)
        # the gradients are the last of what grad_fn returns, or the first
        place = self.count - sum(len(found[i].leaves) for i in self.places) if self.gradient.with_value else 0
        given: dict[int, torch.Tensor | None] = {}
        for i in self.places:
            if i in self.whole:
                given.update(enumerate(found[i].leaves, place))
            place += len(found[i].leaves)
        self.own = [k for k in range(self.count) if k not in given]
        rest = [() if i in self.whole else found[i].tree for i in self.places]
        self.head = outputs.part(self.own, trees.flatten(compose(loss, aux, rest))[1])
        self.buffers = Buffers(outputs, given)
        self.backward = Backward(self.buffers, {k: leaf for k, leaf in given.items() if leaf is not None})

    def _leaves(self, loss: Any, aux: Any, found: "dict[int, _Leaves]") -> list[Any]:
        """The leaves of what grad_fn returns, None where the gradient is added already."""
        leaves: list[Any] = [None] * self.count
        if self.own == [0] and not self.gradient.has_aux and self.head.dtypes[0] == loss.dtype:
            leaves[0] = loss  # nothing else, as usual
            return leaves
        rest = [() if i in self.whole else found[i].gradients(self.backend) for i in self.places]
        value = self.gradient.compose(loss, aux, rest)
        for k, leaf in zip(
            self.own, self.head.leaves(value, f"micro-batch {self.buffers.tally.steps + 1}"), strict=True
        ):
            leaves[k] = leaf
        return leaves


class _Leaves(NamedTuple):
    """One argument that is differentiated: its tree, made of leaves that autograd records; None is none of them."""

    tree: Any
    leaves: list[torch.Tensor | None]
    structure: Any

    def gradients(self, backend: Backend) -> Any:
        """The tree of what the last backward pass has left in the leaves; zeros where it did not come."""
        grads = [
            None if leaf is None else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves
        ]
        return backend.trees.unflatten(self.structure, [_detached(grad) for grad in grads])


def _leaf(parameter: Any) -> torch.Tensor:
    leaf = parameter.detach() if isinstance(parameter, torch.Tensor) else torch.as_tensor(parameter)
    return (leaf.clone() if leaf.is_inference() else leaf).requires_grad_()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
