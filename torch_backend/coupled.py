"""The two passes of a loss that needs the whole batch, on autograd.

Both are windows like any other. The first folds the summaries, without a graph. The loss of what
they come to has a gradient with respect to the parameters that it uses itself, and one with respect
to the summaries, the cotangents. The second folds gradients: the loss of a micro-batch is the inner
product of its summary with the cotangents.
"""

import operator
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import accumulate as accumulate_numbers
from typing import Any

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import OwningGradient
from funcga._call.arguments import Argument, Arguments
from funcga._coupled import Coupled, Summaries
from funcga._types import GradFn, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold, FoldTree
from funcga.normalizers import identity
from funcga.reducers import weighted
from torch_backend import arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.former.alone import value_of
from torch_backend.former.buffers import Buffers
from torch_backend.former.inputs import (
    DifferentiatedArguments,
    OwnParameters,
    detached,
    with_a_blank_row,
)
from torch_backend.former.loop import (
    Calls,
    accumulate,
    cut,
    run_window,
    untraced,
    window_of,
    with_totals,
)
from torch_backend.former.window import Engine
from torch_backend.modules import PureLoss, trainable
from torch_backend.modules.layers import Walk, call_loss
from torch_backend.randomness import devices_of, generator_states, put_generator_states
from torch_backend.reduce import reductions_of
from torch_backend.wrapped.ddp import Wrapper
from torch_backend.wrapped.gradient import LossOfModule, ModuleGradient
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
        if job.program.totals is not None:
            kwargs = with_totals(job.program, backend, args, kwargs)
        parameters = _Parameters(job, backend, args)
        # It keeps the graphs of all micro-batches anyway.
        if arrays.in_transform() and parameters.own is None:
            job.check_whole(job.program.read(args, backend), parameters.arg_indices)
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
        self.own: ModuleGradient | None = (
            summary_fn if isinstance(summary_fn, ModuleGradient) else None
        )
        if self.own is not None and (self.own.has_aux or self.own.scaled):
            raise FuncgaError(
                "module_value_and_grad was given has_aux=True or scaled=True, and in `coupled` it "
                "only says whose parameters are differentiated. Leave them out there; has_aux=True "
                "of coupled is for loss_fn."
            )
        self.owner = self.own or OwningGradient()
        self.wrapper = summary_fn.wrapper if isinstance(summary_fn, WrappedGradient) else None
        self.arg_indices = () if self.own is not None else job.arg_indices(args)
        self.params = [args[arg_index] for arg_index in self.arg_indices]
        # Buffers and statistics that come with the summary are composed by the pure_loss itself.
        is_plain = isinstance(summary_fn, PureLoss) and not (
            summary_fn.buffers or summary_fn.statistics
        )
        self.pure: PureLoss | None = summary_fn if is_plain and self.arg_indices == (0,) else None

    def recorded(self, loss: Loss) -> Callable[..., Tree]:
        """The loss as a function of what summary_fn takes, or of a module and that, for a
        gradient function.
        """
        source = self.own or self.pure
        if source is None:
            of_arguments = lambda *args, **kwargs: loss(self.summary_fn, args, kwargs)
            return wraps(self.summary_fn, updated=())(of_arguments)

        def of_module(module: nn.Module, *batch: Tree, **kwargs: Tree) -> Tree:
            summarise = partial(call_loss, source.loss_fn, module)
            if self.own is not None:
                return loss(summarise, batch, kwargs)
            without_params = lambda _, *batch, **kwargs: summarise(*batch, **kwargs)
            return loss(without_params, (*self.params, *batch), kwargs)

        return of_module if self.pure is None else replace(self.pure, loss_fn=of_module)

    def in_one_graph(self, args: Args, kwargs: Kwargs) -> Tree:
        """The loss and its gradient, by a graph of all micro-batches."""
        gradient, loss_fn = self.job.gradient, self.recorded(self._whole)
        if self.own is None:
            return replace(gradient, loss_fn=loss_fn)(*args, **kwargs)
        of_module = LossOfModule(loss_fn, 0, gradient.has_aux, with_value=True)
        inputs = OwnParameters(of_module, self.backend, self.own.module, Walk())
        return value_of(inputs, args, kwargs, keeps_graphs=False)

    def _whole(self, summarise: Callable[..., Tree], args: Args, kwargs: Kwargs) -> Tree:
        """The loss of all micro-batches."""
        fold = accumulate(replace(self.job.program, grad_fn=summarise, totals=None), self.backend)
        summaries = fold(args, kwargs)
        leaves = trees.flatten(summaries)[0]
        self.job.check_reached(
            any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        )
        params = (
            [args[arg_index] for arg_index in self.arg_indices]
            if self.own is None
            else [self.own.module]
        )
        if self.pure is not None:  # then the module has them
            params = [
                {name: operator.attrgetter(name)(self.pure.module) for name in self.params[0]}
            ]
        loss, aux = self.job.loss_of(params, summaries, self.backend)
        return (loss, aux) if self.job.gradient.has_aux else loss

    def gradient(self, loss: Loss, has_aux: bool) -> GradFn:
        """The gradient function of a loss, with its value; it is not asked whether it reaches
        the parameters.
        """
        loss_fn = self.recorded(loss)
        if self.own is None:
            argnums, reached = self.arg_indices, {True}
            return replace(
                self.job.gradient,
                loss_fn=loss_fn,
                argnums=argnums,
                has_aux=has_aux,
                reached=reached,
            )
        of_module = replace(self.own, loss_fn=loss_fn, has_aux=has_aux)
        of_module.parts.reached.add(True)
        return of_module


# --- the passes


def _in_two_passes(parameters: _Parameters, args: Args, kwargs: Kwargs) -> Tree:
    """The loss and its gradient; of a single micro-batch in one pass, as its graph is there
    already.
    """
    job, backend, program = parameters.job, parameters.backend, parameters.job.program
    has_state = bool(program.read(args, backend).state)
    # There is one argument more than in the first pass, which says what the loss is.
    gradient = parameters.gradient(
        lambda summarise, args, kwargs: args[-1](summarise, args[:-1], kwargs), has_state
    )
    counts: list[Scalar] = []  # the weights of the second pass
    next_count = iter(counts).__next__
    fold: FoldTree = ((_SUM, program.fold), _SUM) if has_state else _SUM
    second = replace(job.second(gradient, fold, program.in_axes), weight=lambda *args: next_count())
    window, is_wrapped = window_of(second, backend), parameters.wrapper is not None
    put_back = parameters.owner.snapshot()
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        if is_wrapped:
            stack.enter_context(window)  # in which no forward pass makes the module synchronise
        with _FirstPass(parameters, (args, kwargs)) as first:
            args, kwargs = window.detached(args), detached(kwargs, recorded=True)
            arguments = program.read(args, backend)
            job.check_whole(arguments, parameters.arg_indices)
            pairs = zip(parameters.params, parameters.arg_indices, strict=True)
            params = (
                [window.inputs.leaves_of(*pair).tree for pair in pairs]
                if isinstance(window, Engine) and isinstance(window.inputs, DifferentiatedArguments)
                else []
            )
            cuts, devices = cut(first.program, arguments, first.may_be_short)
            # A weight may be 0, where NaN has to be kept out.
            if len(cuts) == 1 and (program.across, program.weight, parameters.wrapper) == (
                None,
                None,
                None,
            ):
                return parameters.in_one_graph(args, kwargs)
            microbatches = ((arguments, *each) for each in cuts)
            summaries = run_window(
                first.program, first, microbatches, lambda: arguments, kwargs, devices
            )
        if not is_wrapped:
            stack.enter_context(window)  # from here on it listens to what losses send
        after = _SecondPass(parameters, first, summaries, params)
        del summaries
        counts += after.counts
        generators, put_after = generator_states(first.devices), parameters.owner.snapshot()
        put_back()

        def numbered(number: int | None) -> Arguments:
            loss = Argument(partial(after.inner_product, number), [], [], None)
            return replace(arguments, parts=(*arguments.parts, loss))

        microbatches = ((numbered(number), *each) for number, each in enumerate(cuts))
        _, grads = run_window(second, window, microbatches, lambda: numbered(None), kwargs, devices)
        # The loss is the same on every replica, and so is its own gradient.
        leaves, structure = trees.flatten([*grads] if parameters.own is None else [grads])
        leaves = [
            grad if own is None else grad + own
            for grad, own in zip(leaves, after.of_params, strict=True)
        ]
        put_generator_states(first.devices, generators)
        put_after()
    job.check_reached(after.is_reached or not cuts)
    return job.gradient.compose(after.loss, after.aux, trees.unflatten(structure, leaves))


class _FirstPass(Calls):
    """The window of the first pass. It notes what the second one needs to go the same way.

    `starts` are those of each micro-batch, among the rows of all replicas, in each collected leaf.
    """

    def __init__(self, parameters: _Parameters, args: Tree):
        backend, own = parameters.backend, parameters.own
        across = parameters.owner.merged_over(parameters.job.program.across)
        summarise = (
            parameters.summary_fn if own is None else partial(call_loss, own.loss_fn, own.module)
        )
        program = parameters.job.first(grad_fn=summarise, across=across)
        super().__init__(
            program, program.grad_fn, [] if across is None else reductions_of(program, backend)
        )
        self.source, self.starts, self.weights = parameters, list[list[int]](), list[Scalar]()
        wrapper = parameters.wrapper
        # Whether all replicas run the module equally often, because each run communicates; or meet
        # before the first one, which may broadcast buffers.
        self.in_step = self.looks_ahead = wrapper is not None and wrapper.meets_in_every_pass
        self.meets_first = wrapper is not None and wrapper.begins_with_buffers
        self.is_last = not self.in_step  # whether no replica has another micro-batch
        tensors = [*trees.flatten(args)[0], *([] if own is None else own.parameters())]
        self.devices = devices_of(tensors)
        self.generators: list[list[torch.Tensor]] = []  # before each micro-batch

    def fold(
        self, arguments: Arguments, args: Args, kwargs: Kwargs, weight: Scalar, last: bool
    ) -> list[Any]:
        """Folds the summary of one micro-batch in, and returns the state that is threaded to the
        next.
        """
        if self.in_step or (self.meets_first and self.buffers is None):
            self.is_last = self._meet(last)
        self.generators.append(generator_states(self.devices))
        self.weights.append(weight)
        state = super().fold(arguments, args, kwargs, weight, last)
        if last:
            self._fill_up(args, kwargs)
        return state

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
        put_back, is_last = self.source.owner.snapshot(), self.is_last
        while not is_last:
            is_last = self._meet(True)
            if not (is_last and runs_later):
                self.grad_fn(*args, **kwargs)
        put_back()

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: Kwargs, state: list[Any]
    ) -> Tree:
        """The summaries of the other replicas, on one that has no micro-batch."""
        put_back = self.source.owner.snapshot()
        self.is_last = not (self.in_step or self.meets_first)
        if not self.is_last:
            blank = with_a_blank_row(arguments).cut(0, 1, state)
            # Over several groups it runs once more, to see what is folded.
            self._fill_up(blank, kwargs, runs_later=len(self.reductions) > 1)
        result = super().result_without_microbatches(arguments, kwargs, state)
        put_back()
        return result

    def _merged(self, buffers: Buffers, state: list[Any]) -> Summaries:
        """The summaries of all micro-batches, on all replicas."""
        outputs = buffers.outputs
        pairs = zip(outputs.collected, outputs.collected_folds, strict=True)
        leaves = [(leaf_index, fold, fold.axis or 0) for leaf_index, fold in pairs]
        starts: Callable[[], list[list[int]]] = lambda: [
            [
                *accumulate_numbers(
                    [chunk.shape[axis] for chunk in buffers.collected[leaf_index]], initial=0
                )
            ]
            for leaf_index, _, axis in leaves
        ]
        self.starts = starts()
        for reduction in self.reductions:
            state = reduction.finish(state)
            # Now there is a chunk for each replica. The rows of this one come after those of the
            # replicas before it.
            offsets = [of_leaf[reduction.replicas.channel.rank] for of_leaf in starts()]
            self.starts = [
                [offset + start for start in own]
                for offset, own in zip(offsets, self.starts, strict=True)
            ]
        buffers.hold_in(1.0)
        tally = buffers.tally
        collected = [
            torch.cat(buffers.collected.pop(leaf_index), dim=axis).to(fold.result_dtype)
            for leaf_index, fold, axis in leaves
        ]
        # Nothing of it stays here: summaries are freed before the second pass.
        self.buffers, self.reductions = None, []
        reduced = [buffers.sums.accumulators[leaf_index] for leaf_index in outputs.reduced]
        return Summaries(self.source.job, outputs, reduced, collected, state, lambda fold: tally)


class _SecondPass:
    """The loss of the summaries, and what the second pass differentiates in its place.

    `of_params`: the gradient of the parameters that loss_fn uses itself. `counts`: 0 for
    micro-batches that contribute nothing, as their weight is 0, and 1 for all others. `is_reached`:
    whether a summary depends on a parameter.
    """

    def __init__(
        self, parameters: _Parameters, first: _FirstPass, summaries: Summaries, params: list[Any]
    ):
        self.parameters, self.first, self.is_reached = parameters, first, False
        self.waiting: list[torch.Tensor] = []
        job, own = parameters.job, parameters.own
        variables = [variable.detach().requires_grad_() for variable in summaries.variables()]
        # Autocast must not take a cast that was not recorded, or is part of another graph.
        torch.clear_autocast_cache()
        grad_of = self._differentiate(params if own is None else [own.module], variables, summaries)
        torch.clear_autocast_cache()
        of_variables = [grad_of.get(variable) for variable in variables]
        job.check_depends(summaries.weigh_nothing or any(grad is not None for grad in of_variables))
        self.cotangents = summaries.cotangents(of_variables)
        self.counts = [
            (weight != 0) * 1 if self.cotangents.are_weighed else 1 for weight in first.weights
        ]

    def _differentiate(
        self, params: list[Any], variables: list[torch.Tensor], summaries: Summaries
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Computes the loss, and returns its gradients by the leaves that it depends on."""
        own, pure, wrapper = self.parameters.own, self.parameters.pure, self.parameters.wrapper
        # loss_fn may use its module.
        visit = nullcontext() if pure is None else pure.entered(params[0], recorded=True)
        with torch.enable_grad(), recording_loss(), visit:
            loss, aux = self.parameters.job.loss_of(
                params, summaries.tree(variables), self.parameters.backend
            )
            leaves = (
                [*trainable(own.module).values()] if own is not None else trees.flatten(params)[0]
            )
            shards = [] if wrapper is None else wrapper.leaves()
            # What is gathered of a frozen parameter is frozen, too.
            shards = [shard for shard in shards if shard.requires_grad]
            inputs = [leaf for leaf in (*variables, *leaves, *shards) if leaf is not None]
            grads = (
                torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else ()
            )
        self.loss, self.aux = loss.detach(), detached(aux, recorded=True)
        grad_of = {
            leaf: grad for leaf, grad in zip(inputs, grads, strict=False) if grad is not None
        }
        self.of_params = [grad_of.get(leaf) for leaf in leaves]
        if wrapper is not None:
            self._check_wrapped(wrapper, grad_of.keys() - {*variables})
        return grad_of

    def _check_wrapped(self, wrapper: Wrapper, used: set[torch.Tensor]) -> None:
        """Raises FuncgaError if the loss itself uses parameters that are sharded, or what is
        gathered of them.
        """
        if wrapper.in_step and used:
            raise FuncgaError(
                f"loss_fn uses parameters of the module itself, which {wrapper.name} shards, so "
                "that their gradients would not be those of the whole. Let the module return what "
                "the loss needs of them, and summary_fn "
                f'too, under mean(): fold={{"x": funcga.concat(), "scale": funcga.mean()}}.'
            )
        # It waits for the gradients of parameters that only the loss uses, unless it searches for
        # such.
        self.waiting = [] if wrapper.searches else [*used]

    def inner_product(
        self, number: int | None, summarise: Callable[..., Tree], args: Args, kwargs: Kwargs
    ) -> Tree:
        """The inner product of the cotangents with what the micro-batch of this number contributes.

        None stands for a blank row. With threaded state, also what is left of the summary for that.
        """
        first, cotangents, weight = self.first, self.cotangents, 1
        if number is not None:
            put_generator_states(first.devices, first.generators[number])
            # One that counts for nothing is masked as a whole.
            weight = first.weights[number] + (1 - self.counts[number])
        output = summarise(*args, **kwargs)
        parts = cotangents.parts(output, weight)
        leaves = trees.flatten(parts)[0]
        # Of weights that are all 0 a loss may have no derivative at all.
        self.is_reached |= not leaves or any(part.requires_grad for part in leaves)
        of_leaves = [*map(torch.zeros_like, leaves)]
        if number is not None:
            rows = lambda position, cotangent, axis, size: cotangent.narrow(
                axis, first.starts[position][number], size
            )
            of_leaves = trees.flatten(cotangents.of(parts, rows))[0]
        pairs = [
            *zip(leaves, of_leaves, strict=True),
            *[(leaf, torch.zeros_like(leaf)) for leaf in self.waiting],
        ]
        # Summed in at least 32 bits.
        terms = [
            (leaf * cotangent).sum(dtype=arrays.accumulator_dtype(leaf.dtype))
            for leaf, cotangent in pairs
        ]
        device = self.loss.device
        loss = sum([term.to(device) for term in terms], torch.zeros((), device=device))
        return (loss, cotangents.threaded(output)) if cotangents.outputs.threads else loss
