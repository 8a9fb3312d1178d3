"""The two passes of a loss that needs the whole batch, on autograd.

Both are windows like any other. The first folds the summaries, without a graph. The loss of what
they come to has a gradient with respect to the parameters that it uses itself, and one with respect
to the summaries, the cotangents. The second folds gradients: the loss of a micro-batch is the inner
product of its summary with the cotangents.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import OwningGradient
from funcga._call.arguments import Arguments
from funcga._types import Args, Kwargs, Scalar, Structure, Tree, TreeFn
from funcga.errors import FuncgaError
from funcga.tools.coupled import SUM, Coupled, Summaries, unused
from funcga.tools.example_keys.in_torch import devices_of, generator_states, put_generator_states
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.engine.alone import value_of
from torch_backend.engine.called import Called
from torch_backend.engine.leaves import any_requires_grad
from torch_backend.engine.plan import Plans, call_key
from torch_backend.loop import Source, Take, cut, run_window, weights_of
from torch_backend.modules import PureLoss
from torch_backend.reduce import Reduction
from torch_backend.reduce.absent import zero_rows
from torch_backend.sums import Sums
from torch_backend.wrapped.ddp import Wrapper
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import WrappedGradient


def coupled(job: Coupled, backend: Backend) -> TreeFn:
    """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from
    args.
    """

    def step(args: Args, kwargs: Kwargs) -> Tree:
        if arrays.in_transform():
            raise FuncgaError(
                "a step of coupled is called inside of a torch.func transform, or of a loss that "
                "is differentiated, where the graphs of all micro-batches are kept anyway. Fold "
                "the summaries there: loss_fn(params, funcga.accumulate(summary_fn, n, "
                "fold=funcga.concat())(params, *batch))."
            )
        program, summary = job.program, _Summary(job, backend, args)
        Source(program, backend)  # refuses what it cannot be
        is_merged = bool(summary.replicas)
        with torch.inference_mode(False), torch.no_grad():
            arguments, cuts, take = cut(program, backend, args, is_merged)
            # A weight may be 0, where NaN has to be kept out.
            if len(cuts) == 1 and not is_merged and program.weight is None:
                return _in_one_pass(summary, arguments, kwargs)
            return _in_two_passes(summary, arguments, args, kwargs, cuts, take)

    # The passes are steered by the host: torch.compile is for summary_fn and loss_fn.
    return _private.untraced(
        step, why="funcga takes two passes here; compile summary_fn and loss_fn instead"
    )


class _Summary:
    """A summary as a `function`, and where its parameters are.

    They are arguments of the function; or those of a `pure` loss, which the engine puts into its
    module; or a module's `own`, which a `wrapper` may reduce. The function then takes the module in
    the place of its parameters. `replicas`: what is merged over, one group after the other.
    """

    def __init__(self, job: Coupled, backend: Backend, args: Args):
        summary_fn: Any = job.program.grad_fn
        self.job, self.backend = job, backend
        self.own = summary_fn if isinstance(summary_fn, ModuleGradient) else None
        self.owner = self.own or OwningGradient()
        self.wrapper = Wrapper([], "nothing", "last")
        if isinstance(summary_fn, WrappedGradient):
            self.wrapper = summary_fn.wrapper
        self.replicas = self.wrapper.replicas(job.program.across)
        self.arg_indices: tuple[int, ...] = ()
        if self.own is None:
            self.arg_indices = job.arg_indices(job.program.read(args, backend))
        # Buffers that come with the summary are composed by the pure_loss itself.
        is_plain = isinstance(summary_fn, PureLoss) and not summary_fn.buffers
        self.pure = summary_fn if is_plain and self.arg_indices == (0,) else None
        self.function = summary_fn.loss_fn if self.own or self.pure else summary_fn

    def source(self, loss: TreeFn, has_aux: bool) -> Source:
        """Where the gradient of a loss comes from that is called as the function is. With has_aux
        it returns threaded state as well.
        """
        job, loss_fn = self.job, wraps(self.function, updated=())(loss)
        if self.pure is not None:
            loss_fn = replace(self.pure, loss_fn=loss_fn)
        gradient: Any = replace(self.own or job.gradient, loss_fn=loss_fn, has_aux=has_aux)
        fold = ((SUM, job.program.fold), SUM) if has_aux else SUM
        second = replace(job.second, grad_fn=gradient, fold=fold, weight=lambda *_: 1)
        source = Source(second, self.backend)
        gradient = source.gradient
        source.gradient = replace(gradient, memory=second.memory, reached=job.gradient.reached)
        return source


def _in_one_pass(summary: _Summary, arguments: Arguments, kwargs: Kwargs) -> Tree:
    """The loss and its gradient, of a batch that is one micro-batch: its graph is kept."""
    job = summary.job

    def loss(*called: Tree, **named: Tree) -> Tree:
        first = Called(job.program, summary.function, arguments)
        first.fold(called, named, arguments.rows())
        summaries = first.result()
        if not any_requires_grad(trees.flatten(summaries)[0]):
            raise job.gradient.unreached(len(called))
        params = [called[k] for k in summary.arg_indices or (0,)]
        if summary.pure is not None:  # now the module has them
            names: Any = arguments.parts[0].value
            params = [{name: operator.attrgetter(name)(called[0]) for name in names}]
        return job.gradient.loss_fn(*params, summaries)

    source = summary.source(loss, job.gradient.has_aux)
    # State may be written to in place.
    state = [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in arguments.state]
    args, gradient = arguments.cut(0, None, state), source.gradient
    assert gradient is not None
    return value_of(gradient, summary.backend, args, kwargs, own=source.own)


def _in_two_passes(
    summary: _Summary,
    arguments: Arguments,
    args: Args,
    kwargs: Kwargs,
    cuts: Sequence[tuple[int, int]],
    take: Take | None,
) -> Tree:
    """The loss and its gradient, of the micro-batches that are cut from the arguments."""
    job, owner, threads = summary.job, summary.owner, bool(arguments.state)

    # The loss of the second window, whose other names are known after the first one.
    def inner_product(*called: Tree, **named: Tree) -> Tree:
        states, weight = next(microbatches, (None, 1))
        # Of blank rows, which do not count.
        rows_of: Callable[..., torch.Tensor] = lambda index, part, axis: part.detach()
        if states is not None:
            put_generator_states(first.devices, states)
            rows_of = partial(first.next_rows, cotangents)
        output, weights = summary.function(*called, **named), dict.fromkeys(tallies, weight)
        total, threaded = summaries.inner_product(cotangents, output, weights, rows_of, value)
        for leaf in waiting:
            total = total + 0 * leaf.sum()
        return (total, threaded) if threads else total

    source, plans = summary.source(inner_product, threads), job.second.memory.keep(Plans)
    key = call_key(source.own, [*map(trees.flatten, args)], tuple(kwargs))
    weights, put_back = weights_of(job.program, arguments, cuts, take), owner.snapshot()
    # Begun before the first pass, as no forward pass in it makes a wrapped module synchronise.
    with source.window(arguments, plans.get(key)) as window:
        first = _FirstPass(summary, arguments, (args, kwargs))
        prepared = first.prepared(arguments, kwargs)
        summaries: Summaries = run_window(first, *prepared, cuts, take, weights)
        arguments, kwargs = window.prepared(arguments, kwargs)

        # The loss, with the leaves of the window, which have the hooks of the parameters.
        params, structure = trees.flatten([*window.leaves.trees.values()])
        value, aux, used, grad_of = _differentiated(summary, summaries, params, structure)
        wrapper, tallies = summary.wrapper, summaries.tallies
        # A wrapper waits for the gradients of parameters that only the loss uses, unless it
        # searches for such.
        waiting = [*grad_of] if wrapper.wrapped and not wrapper.searches else []
        cotangents, are_weighed = summaries.cotangents(used), summaries.are_weighed(used)
        summaries = summaries._replace(leaves=[])  # these are freed before the second pass

        # Micro-batches of weight 0 that contribute nothing are masked as a whole.
        counts = [int(weight != 0 or not are_weighed) for weight in weights]
        weights = [w if count else 1 for w, count in zip(weights, counts, strict=True)]
        microbatches = zip(first.generators, weights, strict=True)
        generators, put_after = generator_states(first.devices), owner.snapshot()
        put_back()
        _, grads = run_window(window, arguments, kwargs, cuts, take, counts)
        put_generator_states(first.devices, generators)
        put_after()
    plans.put(key, window.plan)
    # The loss is the same on every replica, and so is its own gradient.
    leaves, structure = trees.flatten(grads)
    pairs = zip(leaves, map(grad_of.get, params), strict=True)
    leaves = [g if own is None else arrays.strided(g) + own for g, own in pairs]
    grads = trees.unflatten(structure, leaves)
    return (value, aux) if job.gradient.has_aux else value, grads


class _FirstPass(Called):
    """The window of the first pass. It notes what the second one needs to go the same way.

    `generators`: the states of those of the host and the `devices`, before each micro-batch.
    `starts`: in each collected leaf, how many rows of other replicas come before those of this one.
    `is_last`: whether no replica runs the module again that this one has to wait for.
    """

    def __init__(self, summary: _Summary, arguments: Arguments, call: Tree):
        own, wrapper, program = summary.own, summary.wrapper, summary.job.program
        tensors = trees.flatten(call)[0]
        if own is not None:
            program = replace(program, grad_fn=partial(own.loss_fn, own.module))
            tensors += own.parameters()
        merges = [Reduction(program.memory, replicas) for replicas in summary.replicas]
        super().__init__(program, program.grad_fn, arguments, merges=merges)
        self.devices, self.snapshot = devices_of(tensors), summary.owner.snapshot
        # Whether all replicas run the module equally often, because each run communicates. Others
        # meet before the first one, which may broadcast buffers.
        self.in_step = wrapper.meets_in_every_pass
        self.is_last = not (self.in_step or wrapper.begins_with_buffers)
        self.generators: list[list[torch.Tensor]] = []
        self.starts: dict[int, int] = {}

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
        for merge in self.merges:
            last = merge.meet(last)
        return last or not self.in_step

    def _fill_up(self, args: Args, kwargs: Kwargs, runs_later: bool = False) -> None:
        """Runs the module as often as the replicas do that have more micro-batches; if it
        `runs_later`, once less.
        """
        put_back = self.snapshot()
        while not self.is_last:
            self.is_last = self._meet(True)
            if not (self.is_last and runs_later):
                self.grad_fn(*args, **kwargs)
        put_back()

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: Kwargs, state: list[Any]
    ) -> Tree:
        """The summaries of the other replicas, on one that has no micro-batch."""
        put_back = self.snapshot()
        if not self.is_last:
            # Over several groups it runs once more, to see what is folded.
            blank = arguments.cut(0, 1, state, zero_rows)
            self._fill_up(blank, kwargs, runs_later=len(self.merges) > 1)
        result = super().result_without_microbatches(arguments, kwargs, state)
        put_back()
        return result

    def next_rows(
        self, cotangents: dict[int, torch.Tensor], index: int, part: torch.Tensor, axis: int
    ) -> torch.Tensor:
        """The rows of the next micro-batch in the cotangent of a collected leaf."""
        start, size = self.starts[index], part.shape[axis]
        self.starts[index] += size
        return torch.narrow(cotangents[index], axis, start, size)

    def _merged(self, sums: Sums) -> Summaries:
        """The summaries of all micro-batches, on all replicas."""
        outputs = sums.folding.outputs
        self.starts = dict.fromkeys(outputs.collected, 0)
        for merge in self.merges:
            merge.merge()
            # Now there is a chunk for each replica, in the order of their ranks.
            for index, fold in outputs.collected.items():
                before = sums.collected[index][: merge.replicas.channel.rank]
                self.starts[index] += sum([chunk.shape[fold.axis or 0] for chunk in before])
        # Nothing of it stays here: summaries are freed before the second pass.
        self.sums, self.merges = None, []
        leaves = outputs.in_order(sums.result())
        return Summaries(outputs, leaves, dict.fromkeys(outputs.reduced, sums.tally))


def _differentiated(
    summary: _Summary, summaries: Summaries, params: list[Any], structure: Structure
) -> tuple[torch.Tensor, Tree, dict[int, torch.Tensor], dict[torch.Tensor, torch.Tensor]]:
    """(the loss, its aux, its gradient by the summaries that it uses, by their leaf indices, and
    that by all else).
    """
    variables = {i: leaf.detach().requires_grad_() for i, leaf in summaries.variables.items()}
    wrapper, own, grads = summary.wrapper, summary.own, tuple[torch.Tensor, ...]()
    # Autocast must not take a cast that was not recorded, or is part of another graph.
    torch.clear_autocast_cache()
    with torch.enable_grad(), recording_loss():
        given = trees.unflatten(structure, params) if own is None else [own.module]
        loss, aux = summary.job.loss(given, summaries, variables)
        leaves = [*variables.values(), *params, *wrapper.leaves().values()]
        # What is gathered of a frozen parameter is frozen, too.
        leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    torch.clear_autocast_cache()
    pairs = zip(leaves, grads, strict=False)
    grad_of = {leaf: grad for leaf, grad in pairs if grad is not None}
    used = {i: grad_of.pop(leaf) for i, leaf in variables.items() if leaf in grad_of}
    if wrapper.in_step and grad_of:
        raise FuncgaError(
            f"loss_fn uses parameters of the module itself, which {wrapper.name} shards, so that "
            "their gradients would not be those of the whole. Let the module return what the loss "
            "needs of them, and summary_fn "
            f'too, under mean(): fold={{"x": funcga.concat(), "scale": funcga.mean()}}.'
        )
    if not used:
        raise unused()
    return loss.detach(), trees.detached(aux, recorded=True), used, grad_of
