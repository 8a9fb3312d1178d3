"""Where the parameters of a summary are: among the arguments, in a module that is visited, or a module's own.

Each of these calls summary_fn in its way, finds the parameters of a micro-batch of the second pass, and knows how
gradients with respect to them are folded.
"""

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from funcga._call.arguments import Arguments
from funcga._coupled import Coupled
from funcga._types import Across, GradFn, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, sum
from torch_backend import trees
from torch_backend.modules import PureLoss, trainable
from torch_backend.modules.layers import called
from torch_backend.modules.visits import Visit
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import WrappedGradient

# What the second pass makes of a micro-batch: loss(number, params, args, kwargs), whose gradient by the params is
# folded. `params()` are the trees that are differentiated, and `args` those that summary_fn is called with.
Terms = Callable[[int | None, Callable[[], list[Tree]], tuple[Tree, ...], dict[str, Tree]], Tree]


class Parameters:
    """Parameters that are arguments of summary_fn.

    `summarise` computes the summary of a micro-batch in the first pass, `summarise_in_place` in the second, where the
    parameters are recorded. `is_wrapped`: whether the module that has them is wrapped. `is_padded`: whether all
    replicas have to run it equally often. `are_searched`: whether a backward pass may not reach what no forward pass
    has used.
    """

    is_wrapped = is_padded = are_searched = False
    summarise: Callable[..., Tree]
    summarise_in_place: Callable[..., Tree]

    def __init__(self, job: Coupled, args: tuple[Tree, ...]):
        self.job, self.arg_indices = job, job.arg_indices(args)
        self.summarise = self.summarise_in_place = job.program.grad_fn

    def check(self, arguments: Arguments) -> None:
        """Raises FuncgaError if what is differentiated is split."""
        self.job.check_whole([part.axes for part in arguments.parts])

    def gradient(self, terms: Terms, has_aux: bool) -> GradFn:
        """The gradient function of the second pass. It takes one argument more: the number of the micro-batch."""

        @functools.wraps(self.job.program.grad_fn, updated=())
        def loss_fn(*args: Tree, **kwargs: Tree) -> Tree:
            *of_user, number = args
            params = lambda: [of_user[index] for index in self.arg_indices]
            return terms(number, params, tuple(of_user), kwargs)

        return self._gradient_of(loss_fn, has_aux)

    def _gradient_of(self, loss_fn: Callable[..., Tree], has_aux: bool) -> GradFn:
        # Of loss_fn's own gradient function, which notes whether a parameter was reached.
        return replace(self.job.gradient, loss_fn=loss_fn, argnums=self.arg_indices, has_aux=has_aux, with_value=False)

    def fold(self, of_state: FoldTree | None) -> FoldTree:
        """The fold of what that returns. `of_state`: that of its aux, threaded state."""
        return sum() if of_state is None else (sum(), of_state)

    def grads(self, result: Tree, has_aux: bool) -> list[Tree]:
        """The gradients in what the fold has come to."""
        return [*(result[0] if has_aux else result)]

    def across(self) -> Across:
        """What summaries are merged over."""
        return self.job.program.across

    def of_loss(self, args: tuple[Tree, ...]) -> tuple[list[Any], list[torch.Tensor | None]]:
        """What loss_fn is given before the summaries, and the recorded tensors of it."""
        originals, structure = trees.flatten([args[index] for index in self.arg_indices])
        leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in originals]
        return trees.unflatten(structure, leaves), leaves

    def check_of_loss(self, loss: torch.Tensor) -> None:
        """Raises FuncgaError if the loss itself uses parameters whose gradients it cannot have."""

    def in_module(self, params: list[Tree]) -> AbstractContextManager[object]:
        """A context in which a module has what loss_fn is given, where it may use that as well."""
        return nullcontext()

    def tensors(self) -> list[torch.Tensor]:
        """The parameters that are no arguments."""
        return []

    def snapshot(self) -> Callable[[], None]:
        """The buffers that summary_fn may write to, as they are now; calling it puts them back."""
        return lambda: None


class Visited(Parameters):
    """Parameters of a pure_loss: the engine visits the module, which then has them."""

    def __init__(self, job: Coupled, args: tuple[Tree, ...], pure: PureLoss):
        super().__init__(job, args)
        self.pure, self.params = pure, args[0]
        self.visit: Visit | None = None  # None before the first pass
        self.summarise = functools.wraps(pure, updated=())(functools.partial(self._of_visit))
        self.summarise_in_place = self._of_module

    def _of_visit(self, params: Tree, *batch: Tree, **kwargs: Tree) -> Tree:
        # What stands in for the parameters is worked out once: they are the same in all micro-batches.
        if self.visit is None:
            self.visit = self.pure.entered(params)
        with self.visit as summary_fn:
            return summary_fn(*batch, **kwargs)

    def _of_module(self, params: Tree, *batch: Tree, **kwargs: Tree) -> Tree:
        return called(self.pure.loss_fn, self.pure.module, *batch, **kwargs)

    def gradient(self, terms: Terms, has_aux: bool) -> GradFn:
        """The gradient function of the second pass. It takes one argument more: the number of the micro-batch."""

        def loss_fn(module: nn.Module, *args: Tree, **kwargs: Tree) -> Tree:
            *batch, number = args
            params = lambda: [{name: operator.attrgetter(name)(module) for name in self.params}]
            return terms(number, params, (self.params, *batch), kwargs)

        return self._gradient_of(replace(self.pure, loss_fn=loss_fn), has_aux)

    def in_module(self, params: list[Tree]) -> AbstractContextManager[object]:
        """A context in which a module has what loss_fn is given, where it may use that as well."""
        return self.pure.entered(params[0], recorded=True)


class OwnParameters(Parameters):
    """A module's own parameters."""

    def __init__(self, job: Coupled, module_gradient: ModuleGradient):
        if module_gradient.has_aux or module_gradient.scaled:
            raise FuncgaError(
                "module_value_and_grad was given has_aux=True or scaled=True, and in `coupled` it only says whose "
                "parameters are differentiated. Leave them out there; has_aux=True of coupled is for loss_fn."
            )
        self.job, self.module_gradient, self.module = job, module_gradient, module_gradient.module
        self.summarise = self.summarise_in_place = functools.partial(called, module_gradient.loss_fn, self.module)
        if isinstance(module_gradient, WrappedGradient):
            self.is_wrapped = True
            self.is_padded = module_gradient.wrapper.in_step or module_gradient.sync != "last"
            self.are_searched = module_gradient.wrapper.searches

    def check(self, arguments: Arguments) -> None:
        """Raises FuncgaError if what is differentiated is split: here it is no argument."""

    def gradient(self, terms: Terms, has_aux: bool) -> GradFn:
        """The gradient function of the second pass. It takes one argument more: the number of the micro-batch."""

        def loss_fn(module: nn.Module, *args: Tree, **kwargs: Tree) -> Tree:
            *batch, number = args
            return terms(number, lambda: [trainable(module)], tuple(batch), kwargs)

        return replace(self.module_gradient, loss_fn=loss_fn, has_aux=has_aux, scaled=False)

    def fold(self, of_state: FoldTree | None) -> FoldTree:
        """The fold of what that returns. `of_state`: that of its aux, threaded state."""
        return sum() if of_state is None else ((sum(), of_state), sum())

    def grads(self, result: Tree, has_aux: bool) -> list[Tree]:
        """The gradients in what the fold has come to."""
        return [result[1]]

    def across(self) -> Across:
        """What summaries are merged over."""
        return self.module_gradient.merged_over(self.job.program.across)

    def of_loss(self, args: tuple[Tree, ...]) -> tuple[list[Any], list[torch.Tensor | None]]:
        """What loss_fn is given before the summaries, and the recorded tensors of it."""
        return [self.module], [*trainable(self.module).values()]

    def check_of_loss(self, loss: torch.Tensor) -> None:
        """Raises FuncgaError if the loss itself uses parameters that are sharded, or what is gathered of them."""
        gradient = self.module_gradient
        if not (isinstance(gradient, WrappedGradient) and gradient.wrapper.in_step):
            return
        parameters = [*trainable(self.module).values(), *gradient.wrapper.leaves()]
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        if any(grad is not None for grad in grads):
            raise FuncgaError(
                f"loss_fn uses parameters of the module itself, which {gradient.wrapper.name} shards, so that their "
                f"gradients would not be those of the whole. Let the module return what the loss needs of them, and "
                f'summary_fn too, under mean(): fold={{"x": funcga.concat(), "scale": funcga.mean()}}.'
            )

    def tensors(self) -> list[torch.Tensor]:
        """The parameters that are no arguments."""
        return [*self.module.parameters()]

    def snapshot(self) -> Callable[[], None]:
        """The buffers that summary_fn may write to, as they are now; calling it puts them back."""
        has_buffers = any(True for _ in self.module.buffers())
        return self.module_gradient.snapshot() if has_buffers else lambda: None


def parameters_of(job: Coupled, args: tuple[Tree, ...]) -> Parameters:
    """Where the parameters are that a step differentiates by."""
    summary_fn = job.program.grad_fn
    if isinstance(summary_fn, ModuleGradient):
        return OwnParameters(job, summary_fn)
    # Buffers and statistics that come with the summary are composed by the pure_loss itself.
    is_plain = isinstance(summary_fn, PureLoss) and not (summary_fn.buffers or summary_fn.statistics)
    if isinstance(summary_fn, PureLoss) and is_plain and job.arg_indices(args) == (0,):
        return Visited(job, args, summary_fn)
    return Parameters(job, args)
