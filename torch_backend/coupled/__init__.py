"""The two passes of a loss that needs the whole batch, on autograd.

The second pass is a window like any other. Its first micro-batch is the last one of the batch, and the loss function of
that begins with the whole first pass, in which this micro-batch alone is recorded: its graph is not computed again.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from funcga._backend import Backend
from funcga._call.arguments import Argument, Arguments
from funcga._coupled import Coupled, Summaries
from funcga._types import Scalar, Tree
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.coupled.first_pass import FirstPass
from torch_backend.coupled.parameters import parameters_of
from torch_backend.engine.window import Engine, detached
from torch_backend.loop import Microbatch, accumulate, cut, folded, untraced, window_of, with_totals
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import ModuleWindow


def coupled(job: Coupled, backend: Backend) -> Callable[..., Tree]:
    """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from args."""

    def step(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        if job.program.totals is not None:
            kwargs = with_totals(job.program, backend, args, kwargs)
        if arrays.in_transform() and not isinstance(job.program.grad_fn, ModuleGradient):
            return _in_one_graph(job, backend, args, kwargs)
        call = _Step(job, backend, args)
        try:
            return call.run(args, kwargs)
        finally:
            # Its parts refer to one another, and would hold their tensors until Python collects its garbage.
            vars(call).clear()

    # The second pass is steered by the host: torch.compile is for summary_fn and loss_fn.
    return untraced(step, "funcga takes two passes here; compile summary_fn and loss_fn instead")


def _in_one_graph(job: Coupled, backend: Backend, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
    """The loss and its gradient inside of a transform, which keeps the graphs of all micro-batches anyway."""
    fold = accumulate(replace(job.program, totals=None), backend)
    arg_indices = job.arg_indices(args)
    job.check_whole([part.axes for part in job.program.read(args, backend).parts])

    def loss_of(*args: Tree, **kwargs: Tree) -> tuple[torch.Tensor, tuple[torch.Tensor, Tree]]:
        params = [args[arg_index] for arg_index in arg_indices]
        loss, aux = job.loss_of(params, fold(args, kwargs), backend)
        return loss, (loss, aux)

    (_, (loss, aux)), grads = backend.gradients.value_and_grad(loss_of, arg_indices)(*args, **kwargs)
    return job.gradient.compose(loss, aux, grads)


class _Step:
    """One call of a step: the second pass, which begins with the first."""

    def __init__(self, job: Coupled, backend: Backend, args: tuple[Tree, ...]):
        self.job, self.backend = job, backend
        self.parameters = parameters_of(job, args)
        self.has_state = bool(job.program.read(args, backend).state)
        program = replace(job.program, grad_fn=self.parameters.summarise, across=self.parameters.across())
        self.first = replace(job, program=program).first(backend)
        # The same where the parameters are in place.
        program = replace(program, grad_fn=self.parameters.summarise_in_place)
        self.summarise = replace(job, program=program).first(backend).grad_fn
        self.first_pass: FirstPass | None = None  # None before it is over
        self.is_reached = False  # whether a summary depends on a parameter

    def run(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """The loss and its gradient."""
        job, parameters = self.job, self.parameters
        gradient = parameters.gradient(self._terms, self.has_state)
        fold = parameters.fold(job.program.fold if self.has_state else None)
        # The arguments are read by the program of the first pass, and so are in_axes.
        second = job.second(gradient, fold, job.program.in_axes)
        with window_of(second, self.backend) as window:
            self.window = window
            self.args, self.kwargs = window.detached(args), detached(kwargs, window.records)
            self.arguments = job.program.read(self.args, self.backend)
            parameters.check(self.arguments)
            self.cuts, self.devices = cut(self.first, self.arguments, window.may_be_short)
            numbers = [*range(len(self.cuts))]
            # Threaded state has to come in order, and a wrapper may run a micro-batch more than once.
            self.keeps_last = not self.has_state and not parameters.is_padded
            if self.keeps_last:
                numbers = [*numbers[-1:], *numbers[:-1]]
            # In which one the gradient joins of what the loss itself uses of the parameters: a wrapper waits for all of
            # them in the last backward pass, and without one all sums begin in the first.
            self.joins_in = None if not numbers else numbers[-1] if parameters.is_wrapped else numbers[0]
            if not numbers and isinstance(window, Engine):
                self._run_first_pass(None)  # there is no loss function that could begin with it
            microbatches = ((self._numbered(number), *self.cuts[number]) for number in numbers)
            without = lambda: self._numbered(None)
            result = folded(second, window, microbatches, without, self.kwargs, self.devices)
        assert self.first_pass is not None
        self.first_pass.end_second()
        job.check_reached(self.is_reached or not numbers)
        grads = parameters.grads(result, self.has_state)
        if parameters.are_searched:
            # The loss is the same on every replica, and so is its own gradient.
            leaves, structure = trees.flatten(grads)
            pairs = zip(leaves, self.of_params, strict=True)
            grads = trees.unflatten(structure, [grad if own is None else grad + own for grad, own in pairs])
        return job.gradient.compose(self.loss, self.aux, grads)

    def _numbered(self, number: int | None) -> Arguments:
        """The arguments with the number of the micro-batch that is cut from them, None for one that stands in."""
        return replace(self.arguments, parts=(*self.arguments.parts, Argument(number, [], [], None)))

    # --- the first pass, and the loss

    def _run_first_pass(self, args: tuple[Tree, ...] | None) -> None:
        """Folds the summaries, and computes the loss, its gradient by the parameters and the cotangents.

        args: those of the first micro-batch of the second pass, whose parameters are recorded; None if there is none.
        """
        recorded = functools.partial(self._recorded, args) if self.keeps_last and args is not None else None
        leaves = (self.args, self.kwargs)
        first_pass = FirstPass(self.job, self.first, self.backend, self.parameters, leaves, len(self.cuts), recorded)
        with torch.no_grad(), first_pass:
            microbatches: Iterator[Microbatch] = ((self.arguments, *each) for each in self.cuts)
            summaries = folded(self.first, first_pass, microbatches, lambda: self.arguments, self.kwargs, self.devices)
        self._differentiate(summaries, first_pass.replicas)
        first_pass.begin_second()
        if isinstance(self.window, Engine):
            self.window.listen_anew()  # what the first pass has sent is not what a loss sends
        self.first_pass = first_pass

    def _recorded(self, in_second: tuple[Tree, ...], *args: Tree, **kwargs: Tree) -> Tree:
        """The summary of the last micro-batch, for which these arguments of the second pass are recorded."""
        # They are the same micro-batch: the second pass begins with it.
        return self.summarise(*in_second, **kwargs)

    def _differentiate(self, summaries: Summaries, replicas: int) -> None:
        variables = [variable.detach().requires_grad_() for variable in summaries.variables()]
        params, leaves = self.parameters.of_loss(self.args)
        present = [leaf for leaf in leaves if leaf is not None]
        with torch.enable_grad(), recording_loss(), self.parameters.in_module(params):
            loss, aux = self.job.loss_of(params, summaries.tree(variables), self.backend)
            grads: Sequence[torch.Tensor | None] = [None] * len([*present, *variables])
            if loss.requires_grad:
                self.parameters.check_of_loss(loss)
                with _without_hooks(present):
                    grads = torch.autograd.grad(loss, [*present, *variables], allow_unused=True)
        of_variables = grads[len(present) :]
        self.job.check_depends(summaries.weigh_nothing or any(grad is not None for grad in of_variables))
        self.cotangents = summaries.cotangents(of_variables)
        # Each replica that has something to fold adds an equal share, so that all have the same sum.
        shares = 1 if self.parameters.are_searched else replicas
        of_present = iter([None if grad is None else grad / shares for grad in grads[: len(present)]])
        self.of_params = [None if leaf is None else next(of_present) for leaf in leaves]
        self.loss, self.aux = loss.detach(), detached(aux, recorded=True)

    # --- a micro-batch of the second pass

    def _terms(
        self,
        number: int | None,
        params: Callable[[], list[Tree]],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
    ) -> Tree:
        """The inner product of the cotangents with what this micro-batch contributes; its gradient is folded.

        With threaded state, also what is left of the summary for that.
        """
        if self.first_pass is None:
            self._run_first_pass(args)
        output, pairs = self._contribution(number, args, kwargs)
        if (number == self.joins_in or number is None) and not self.parameters.are_searched:
            # Once, the gradient of what the loss itself uses of the parameters: in the pass in which a wrapper waits
            # for all of them.
            of_leaves = zip(trees.flatten(params())[0], self.of_params, strict=True)
            pairs += [(leaf, gradient) for leaf, gradient in of_leaves if gradient is not None]
        # Of weights that are all 0 a loss may have no derivative at all.
        terms = [_inner(*pair) for pair in pairs]
        loss = torch.stack(terms).sum() if terms else torch.zeros_like(self.loss)
        return (loss, self.cotangents.threaded(output)) if self.has_state else loss

    def _contribution(
        self, number: int | None, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> tuple[Tree, list[tuple[torch.Tensor, torch.Tensor]]]:
        """(the output for this micro-batch, what it contributes to the summaries, each with its cotangent)."""
        first_pass, cotangents = self.first_pass, self.cotangents
        assert first_pass is not None
        weight: Scalar = 0 if number is None else first_pass.weights[number]
        weighs_nothing = not isinstance(weight, torch.Tensor) and not weight
        if number is None:  # a row of zeros stands in for a micro-batch
            output = self.summarise(*args, **kwargs)
        else:
            # A wrapper needs a backward pass, and a cotangent of 0 makes NaN of what is infinite.
            masks = weighs_nothing and cotangents.are_weighed
            with self.window.masked(None) if masks and isinstance(self.window, ModuleWindow) else nullcontext():
                output = first_pass.again(number, self.summarise, args, kwargs)
        if number is None or (weighs_nothing and cotangents.are_weighed):
            self.is_reached |= weighs_nothing
            parts = trees.flatten(cotangents.parts(output, 1))[0] if self.parameters.is_wrapped else []
            return output, [(part, torch.zeros_like(part)) for part in parts]
        parts = cotangents.parts(output, weight)
        of_parts = cotangents.of(parts, functools.partial(first_pass.rows, number))
        pairs = [*zip(trees.flatten(parts)[0], trees.flatten(of_parts)[0], strict=True)]
        self.is_reached |= any(part.requires_grad for part, _ in pairs)
        return output, pairs


@contextmanager
def _without_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which no hook of these is called: it is to see the whole gradient once, in the second pass."""
    tables = [table for table in map(_private.hooks_of, leaves) if table]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, of_table in zip(tables, hooks, strict=True):
            table.update(of_table)


def _inner(array: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """The inner product, summed in at least 32 bits: its gradient by the array is the cotangent."""
    return (array * cotangent).sum(dtype=arrays.accumulator_dtype(array.dtype))
