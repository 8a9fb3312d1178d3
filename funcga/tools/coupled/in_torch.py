"""The two passes of a loss that needs the whole batch, on autograd.

Both are windows like any other. The first folds the summaries, without a graph. The loss of what
they come to has a gradient with respect to the parameters that it uses itself, and one with respect
to the summaries, the cotangents. The second folds gradients: the loss of a micro-batch is the inner
product of its summary with the cotangents.
"""

import operator
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import OwningGradient
from funcga._call.arguments import Arguments
from funcga._types import Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold
from funcga.normalizers import identity
from funcga.reducers import weighted
from funcga.tools.coupled import Coupled, Summaries
from funcga.tools.example_keys.in_torch import (
    devices_of,
    generator_states,
    put_generator_states,
)
from torch_backend import arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.engine.alone import value_of
from torch_backend.engine.called import Called
from torch_backend.engine.distributed import with_a_blank_row
from torch_backend.engine.leaves import Own, any_requires_grad
from torch_backend.engine.plan import Plans, call_key
from torch_backend.loop import (
    Source,
    accumulate,
    begin,
    cut,
    run_window,
    untraced,
    weights_of,
)
from torch_backend.modules import PureLoss
from torch_backend.reduce import reductions_of
from torch_backend.sums import Sums
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import WrappedGradient

Args = tuple[Tree, ...]
Kwargs = dict[str, Tree]
# What is differentiated: of summary_fn as it is called where the parameters are recorded, and its
# arguments.
Loss = Callable[[Callable[..., Tree], Args, Kwargs], Tree]

# The sum of gradients of weight 1. One of weight 0 adds nothing, not even a NaN.
_SUM = Fold(weighted, identity)


def coupled(job: Coupled, backend: Backend) -> Callable[..., Tree]:
    """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from
    args.
    """

    def step(args: Args, kwargs: Kwargs) -> Tree:
        if job.program.prologue is not None:
            kwargs = begin(job.program, backend, args, kwargs)
        parameters = _Parameters(job, backend, args)
        # A transform keeps the graphs of all micro-batches anyway.
        if arrays.in_transform() and parameters.own is None:
            return parameters.in_one_graph(args, kwargs)
        return _in_two_passes(parameters, args, kwargs)

    # The passes are steered by the host: torch.compile is for summary_fn and loss_fn.
    return untraced(step, "funcga takes two passes here; compile summary_fn and loss_fn instead")


class _Parameters:
    """Where the parameters of a summary are.

    They are arguments of summary_fn; those of a pure_loss are put into its module by the engine. Or
    they are a module's `own`, which may have a `wrapper`.
    """

    def __init__(self, job: Coupled, backend: Backend, args: Args):
        summary_fn: Any = job.program.grad_fn
        self.job, self.backend, self.summary_fn = job, backend, summary_fn
        self.own = summary_fn if isinstance(summary_fn, ModuleGradient) else None
        self.owner = self.own or OwningGradient()
        self.wrapper = summary_fn.wrapper if isinstance(summary_fn, WrappedGradient) else None
        self.arg_indices: tuple[int, ...] = ()
        if self.own is None:
            self.arg_indices = job.arg_indices(job.program.read(args, backend))
        self.params = [args[arg_index] for arg_index in self.arg_indices]
        # Buffers that come with the summary are composed by the pure_loss itself.
        is_plain = isinstance(summary_fn, PureLoss) and not summary_fn.buffers
        self.pure = summary_fn if is_plain and self.arg_indices == (0,) else None

    def gradient(self, loss: Loss, has_aux: bool, reached: set[bool]) -> Any:
        """The gradient function of a loss, with its value; `reached` as in GradientFunction."""
        loss_fn = self._recorded(loss)
        if self.own is None:
            return replace(self.job.gradient, loss_fn=loss_fn, has_aux=has_aux, reached=reached)
        of_module = replace(self.own, loss_fn=loss_fn, has_aux=has_aux)
        of_module.parts.reached.update(reached)
        return of_module

    def _recorded(self, loss: Loss) -> Callable[..., Tree]:
        """The loss as a function of what summary_fn takes, or of a module and that."""
        summary_fn, params = self.summary_fn, self.params
        if self.own is None and self.pure is None:
            of_arguments = lambda *args, **kwargs: loss(summary_fn, args, kwargs)
            return wraps(summary_fn, updated=())(of_arguments)

        def of_module(module: torch.nn.Module, *batch: Tree, **kwargs: Tree) -> Tree:
            summarise = lambda *args, **kwargs: summary_fn.loss_fn(
                module, *args[len(params) :], **kwargs
            )
            return loss(summarise, (*params, *batch), kwargs)

        return of_module if self.pure is None else replace(self.pure, loss_fn=of_module)

    def in_one_graph(self, args: Args, kwargs: Kwargs, own: Own | None = None) -> Tree:
        """The loss and its gradient, by a graph of all micro-batches."""
        of_loss = self.job.gradient
        gradient = self.gradient(self._whole, of_loss.has_aux, of_loss.reached)
        if self.own is None:
            return gradient(*args, **kwargs)
        of_module = replace(gradient.parts, memory=self.job.memory)
        return value_of(of_module, self.backend, args, kwargs, own=own)

    def _whole(self, summarise: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        """The loss of all micro-batches."""
        job = self.job
        fold = accumulate(job.first(grad_fn=summarise), self.backend)
        summaries = fold(args, kwargs)
        job.check_reached(any_requires_grad(trees.flatten(summaries)[0]))
        params: list[Tree] = [args[arg_index] for arg_index in self.arg_indices]
        if self.own is not None:
            params = [self.own.module]
        if self.pure is not None:  # then the module has them
            params = [{name: operator.attrgetter(name)(self.pure.module) for name in args[0]}]
        loss, aux = job.loss_of(params, summaries, self.backend)
        return (loss, aux) if job.gradient.has_aux else loss


# --- the passes


def _in_two_passes(parameters: _Parameters, args: Args, kwargs: Kwargs) -> Tree:
    """The loss and its gradient; of a single micro-batch in one pass, as its graph is there
    already.
    """
    job, program, put_back = parameters.job, parameters.job.program, parameters.owner.snapshot()
    is_merged = parameters.wrapper is not None or program.across is not None
    Source(program, parameters.backend)  # refuses what it cannot be
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        arguments, cuts, devices = cut(program, parameters.backend, args, is_merged)
        weights = weights_of(program, arguments, cuts, devices)
        has_state = bool(arguments.state)
        # What the second window differentiates is known after the first one.
        gradient = parameters.gradient(lambda *call: after.inner_product(*call), has_state, {True})
        fold = ((_SUM, program.fold), _SUM) if has_state else _SUM
        second = job.second(gradient, fold, program.in_axes)
        source, plans = Source(second, parameters.backend), second.memory.keep(Plans)
        # A weight may be 0, where NaN has to be kept out.
        if len(cuts) == 1 and not is_merged and program.weight is None:
            return parameters.in_one_graph(args, kwargs, source.own)
        key = call_key(source.params, [*map(trees.flatten, args)], tuple(kwargs))
        # Before the first pass, as no forward pass in it makes a wrapped module synchronise.
        window = stack.enter_context(source.window(arguments, plans.get(key)))
        first = _FirstPass(parameters, arguments, (args, kwargs))
        with first, torch.no_grad():
            prepared = first.prepared(arguments, kwargs)
            summaries = run_window(first, *prepared, cuts, devices, weights)
        arguments, kwargs = window.prepared(arguments, kwargs)
        # Its leaves have the hooks of the parameters.
        after = _SecondPass(first, summaries, weights, [*window.leaves.trees.values()])
        del summaries
        generators, put_after = generator_states(first.devices), parameters.owner.snapshot()
        put_back()
        _, grads = run_window(window, arguments, kwargs, cuts, devices, after.counts)
        # The loss is the same on every replica, and so is its own gradient.
        leaves, structure = trees.flatten(grads)
        pairs = zip(leaves, after.of_params, strict=True)
        grads = trees.unflatten(structure, [g if own is None else g + own for g, own in pairs])
        put_generator_states(first.devices, generators)
        put_after()
    job.check_reached(after.is_reached or not cuts)
    plans.put(key, window.plan)
    return ((after.loss, after.aux) if job.gradient.has_aux else after.loss), grads


class _FirstPass(Called):
    """The window of the first pass. It notes what the second one needs to go the same way.

    `generators`: the states of those of the host and the `devices`, before each micro-batch.
    `starts`: in each collected leaf, how many rows of other replicas come before those of this one.
    `is_last`: whether no replica runs the module again that this one has to wait for.
    """

    def __init__(self, parameters: _Parameters, arguments: Arguments, call: Tree):
        own, wrapper, job = parameters.own, parameters.wrapper, parameters.job
        summarise: Any = parameters.summary_fn
        tensors = trees.flatten(call)[0]
        if own is not None:
            summarise = partial(own.loss_fn, own.module)
            tensors += own.parameters()
        across = parameters.owner.merged_over(job.program.across)
        program = job.first(grad_fn=summarise, across=across)
        self.reductions = reductions_of(across, program.memory)
        super().__init__(program, summarise, arguments, merges=self.reductions)
        self.parameters, self.devices = parameters, devices_of(tensors)
        # Whether all replicas run the module equally often, because each run communicates. Others
        # meet before the first one, which may broadcast buffers.
        self.in_step = wrapper is not None and wrapper.meets_in_every_pass
        self.is_last = not (self.in_step or (wrapper and wrapper.begins_with_buffers))
        self.generators: list[list[torch.Tensor]] = []

    def fold(self, args: Args, kwargs: Kwargs, weight: Scalar, last: bool = False) -> None:
        """Folds the summary of one micro-batch in."""
        if not self.is_last:
            self.is_last = self._meet(last)
        self.generators.append(generator_states(self.devices))
        super().fold(args, kwargs, weight, last)
        if last:
            self._fill_up(args, kwargs)

    def _meet(self, last: bool) -> bool:
        """Waits for the other replicas before the module communicates; whether no other run comes.
        FuncgaError if one has failed.
        """
        for reduction in self.reductions:
            last = reduction.meet(last)
        return last or not self.in_step

    def _fill_up(self, args: Args, kwargs: Kwargs, runs_later: bool = False) -> None:
        """Runs the module as often as the replicas do that have more micro-batches; if it
        `runs_later`, once less.
        """
        put_back = self.parameters.owner.snapshot()
        while not self.is_last:
            self.is_last = self._meet(True)
            if not (self.is_last and runs_later):
                self.grad_fn(*args, **kwargs)
        put_back()

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: Kwargs, state: list[Any]
    ) -> Tree:
        """The summaries of the other replicas, on one that has no micro-batch."""
        put_back = self.parameters.owner.snapshot()
        if not self.is_last:
            blank = with_a_blank_row(arguments).cut(0, 1, state)
            # Over several groups it runs once more, to see what is folded.
            self._fill_up(blank, kwargs, runs_later=len(self.reductions) > 1)
        result = super().result_without_microbatches(arguments, kwargs, state)
        put_back()
        return result

    def _merged(self, sums: Sums) -> Summaries:
        """The summaries of all micro-batches, on all replicas."""
        outputs = sums.folding.outputs
        leaves = [*outputs.collected.items()]
        self.starts = [0 for _ in leaves]
        for reduction in self.reductions:
            reduction.merge()
            # Now there is a chunk for each replica, in the order of their ranks.
            for position, (index, fold) in enumerate(leaves):
                before = sums.collected[index][: reduction.replicas.channel.rank]
                self.starts[position] += sum([chunk.shape[fold.axis or 0] for chunk in before])
        tallies = [sums.tally for _ in outputs.reduced]
        summaries = Summaries(outputs, outputs.in_order(sums.result()), tallies)
        # Nothing of it stays here: summaries are freed before the second pass.
        self.sums, self.merges, self.reductions = None, [], []
        return summaries


def _differentiated(
    parameters: _Parameters,
    params: list[Tree],
    summaries: Summaries,
    variables: dict[int, torch.Tensor],
) -> tuple[torch.Tensor, Tree, dict[torch.Tensor, torch.Tensor]]:
    """(the loss of the summaries, its aux, its gradients by the leaves that it depends on)."""
    own, wrapper, leaves = parameters.own, parameters.wrapper, trees.flatten(params)[0]
    params = params if own is None else [own.module]
    with torch.enable_grad(), recording_loss():
        loss, aux = parameters.job.loss_of(params, summaries.tree(variables), parameters.backend)
        leaves = [
            *variables.values(),
            *leaves,
            *({} if wrapper is None else wrapper.leaves()).values(),
        ]
        # What is gathered of a frozen parameter is frozen, too.
        leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
    pairs = zip(leaves, grads, strict=False)
    return loss, aux, {leaf: grad for leaf, grad in pairs if grad is not None}


class _SecondPass:
    """The loss of the summaries, and what the second pass differentiates in its place.

    `of_params`: the gradient of the parameters that loss_fn uses itself. `counts`: 0 for
    micro-batches that contribute nothing, as their weight is 0, and 1 for all others. `is_reached`:
    whether a summary depends on a parameter.
    """

    def __init__(
        self,
        first: _FirstPass,
        summaries: Summaries,
        weights: list[Scalar],
        params: list[Tree],
    ):
        wrapper = first.parameters.wrapper
        variables = {
            index: leaf.detach().requires_grad_() for index, leaf in summaries.variables.items()
        }
        # Autocast must not take a cast that was not recorded, or is part of another graph.
        torch.clear_autocast_cache()
        loss, aux, grad_of = _differentiated(first.parameters, params, summaries, variables)
        torch.clear_autocast_cache()
        self.loss, self.aux = loss.detach(), trees.detached(aux, recorded=True)
        self.of_params = [grad_of.get(leaf) for leaf in trees.flatten(params)[0]]
        of_variables = {index: grad_of.pop(leaf, None) for index, leaf in variables.items()}
        if wrapper is not None and wrapper.in_step and grad_of:
            raise FuncgaError(
                f"loss_fn uses parameters of the module itself, which {wrapper.name} shards, so "
                "that their gradients would not be those of the whole. Let the module return what "
                "the loss needs of them, and summary_fn "
                f'too, under mean(): fold={{"x": funcga.concat(), "scale": funcga.mean()}}.'
            )
        cotangents = summaries.cotangents(of_variables)
        first.parameters.job.check_depends(bool(cotangents.of))
        # A wrapper waits for the gradients of parameters that only the loss uses, unless it
        # searches for such.
        self.waiting = [] if wrapper is None or wrapper.searches else [*grad_of]
        self.first, self.cotangents = first, cotangents
        are_weighed, self.is_reached = cotangents.are_weighed, False
        self.counts = [int(weight != 0 or not are_weighed) for weight in weights]
        # One that counts for nothing is masked as a whole.
        weights = [w if count else 1 for w, count in zip(weights, self.counts, strict=True)]
        self.microbatches = zip(first.generators, weights, strict=True)  # those to come

    def inner_product(self, summarise: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        """The inner product of the cotangents with what the next micro-batch contributes; blank
        rows come after the last one.

        With threaded state, also what is left of the summary for that.
        """
        cotangents = self.cotangents
        states, weight = next(self.microbatches, (None, 1))
        if states is not None:
            put_generator_states(self.first.devices, states)
        output = summarise(*args, **kwargs)
        parts = cotangents.parts(output, [weight] * len(cotangents.outputs.reduced))
        leaves = [*parts.values()]
        # Of weights that are all 0 a loss may have no derivative at all.
        self.is_reached |= not leaves or any_requires_grad(leaves)
        of_leaves = [*map(torch.zeros_like, leaves)]
        if states is not None:
            of_leaves = [*cotangents.of_parts(parts, self._next_rows).values()]
        leaves += self.waiting
        of_leaves += map(torch.zeros_like, self.waiting)
        # Summed in at least 32 bits.
        terms = [
            (leaf * cotangent).sum(dtype=arrays.accumulator_dtype(leaf.dtype))
            for leaf, cotangent in zip(leaves, of_leaves, strict=True)
        ]
        device = self.loss.device
        loss = sum([term.to(device) for term in terms], torch.zeros((), device=device))
        return (loss, cotangents.threaded(output)) if cotangents.outputs.threads else loss

    def _next_rows(
        self, position: int, cotangent: torch.Tensor, axis: int, size: int
    ) -> torch.Tensor:
        """The rows of the micro-batch in the cotangent of a collected leaf."""
        starts = self.first.starts
        starts[position] += size
        return cotangent.narrow(axis, starts[position] - size, size)
