"""The two passes of a loss that needs the whole batch, on autograd.

The second pass is a window like any other. Its first micro-batch is the last one of the batch, and the loss function of
that begins with the whole first pass, in which this micro-batch alone is recorded: its graph is not computed again.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments
from funcga._coupled import Coupled, Summaries
from funcga._fold import parts_of
from funcga._types import Scalar, Tree
from funcga.folds import FoldTree
from funcga.folds import sum as summed
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording_loss
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.layout import Layout
from torch_backend.engine.window import Engine, begun_by_others, detached, reductions_of
from torch_backend.loop import Microbatch, accumulate, cut, folded, untraced, window_of, with_totals
from torch_backend.modules import PureLoss, trainable
from torch_backend.modules.layers import called
from torch_backend.randomness import generator_states, put_generator_states
from torch_backend.reduce import Reduction
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import WrappedGradient, with_a_blank_row


def coupled(job: Coupled, backend: Backend) -> Callable[..., Tree]:
    """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from args."""

    def step(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        if job.program.totals is not None:
            kwargs = with_totals(job.program, backend, args, kwargs)
        if arrays.in_transform() and not isinstance(job.program.grad_fn, ModuleGradient):
            return _in_one_graph(job, backend, args, kwargs)
        return _Step(job, backend).run(args, kwargs)

    # The second pass is steered by the host: torch.compile is for summary_fn and loss_fn.
    return untraced(step, "funcga takes two passes here; compile summary_fn and loss_fn instead")


def _in_one_graph(job: Coupled, backend: Backend, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
    """The loss and its gradient inside of a transform, which keeps the graphs of all micro-batches anyway."""
    fold = accumulate(replace(job.program, totals=None), backend)
    arg_indices = job.arg_indices(args)
    job.check_whole([part.axes for part in job.program.read(args, backend).parts])

    def loss_of(*args: Tree, **kwargs: Tree) -> tuple[torch.Tensor, tuple[torch.Tensor, Tree]]:
        params = [args[arg_index] for arg_index in arg_indices]
        loss, aux = job.gradient.split(job.gradient.loss_fn(*params, fold(args, kwargs)), backend)
        return loss, (loss, aux)

    (_, (loss, aux)), grads = backend.gradients.value_and_grad(loss_of, arg_indices)(*args, **kwargs)
    return job.gradient.compose(loss, aux, grads)


class _Step:
    """One call of a step: the second pass, which begins with the first."""

    def __init__(self, job: Coupled, backend: Backend):
        self.job, self.backend = job, backend
        summary_fn = job.program.grad_fn
        self.module = summary_fn if isinstance(summary_fn, ModuleGradient) else None
        self.pure = summary_fn if isinstance(summary_fn, PureLoss) and _is_stateless(summary_fn) else None
        across = job.program.across if self.module is None else self.module.merged_over(job.program.across)
        # How a summary is computed in the first pass; and where the parameters of a pure_loss are in the module, as in
        # a visit of the second.
        summarise, in_place = summary_fn, summary_fn
        if self.module is not None:
            summarise = in_place = functools.partial(called, self.module.loss_fn, self.module.module)
        elif self.pure is not None:
            loss_fn, module = self.pure.loss_fn, self.pure.module
            in_place = lambda params, *batch, **kwargs: loss_fn(module, *batch, **kwargs)
        self.first = replace(job, program=replace(job.program, grad_fn=summarise, across=across)).first(backend)
        self.summarise = replace(job, program=replace(job.program, grad_fn=in_place)).first(backend).grad_fn
        self.first_pass: _FirstPass | None = None  # None before it is over

    def run(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """The loss and its gradient."""
        job = self.job
        has_state = bool(job.program.read(args, self.backend).state)
        second = self._second(args, has_state)
        with window_of(second, self.backend) as window:
            self.window = window
            self.args, self.kwargs = window.detached(args), detached(kwargs, window.records)
            self.arguments = job.program.read(self.args, self.backend)
            if self.module is None:
                job.check_whole([part.axes for part in self.arguments.parts])
            self.cuts, self.devices = cut(self.first, self.arguments, window.may_be_short)
            numbers = [*range(len(self.cuts))]
            # Threaded state has to come in order, and a wrapper may run a micro-batch more than once.
            self.keeps_last = bool(numbers) and not has_state and not self.is_padded
            if self.keeps_last:
                numbers = [*numbers[-1:], *numbers[:-1]]
            self.ends_with = numbers[-1] if numbers else None
            if not numbers and isinstance(window, Engine):
                self._run_first_pass(None)  # there is no loss function that could begin with it
            microbatches = ((self._numbered(number), *self.cuts[number]) for number in numbers)
            without = lambda: self._numbered(None)
            result = folded(second, window, microbatches, without, self.kwargs, self.devices)
        assert self.first_pass is not None
        self.first_pass.end_second()
        if self.module is not None:
            return job.gradient.compose(self.loss, self.aux, [result[1]])
        return job.gradient.compose(self.loss, self.aux, result[0] if has_state else result)

    @property
    def is_padded(self) -> bool:
        """Whether all replicas have to run the module equally often, whatever they have to fold."""
        gradient = self.module
        return isinstance(gradient, WrappedGradient) and (gradient.wrapper.in_step or gradient.sync != "last")

    def _second(self, args: tuple[Tree, ...], has_state: bool) -> Program:
        """The program of the second pass. Its grad_fn has one argument more: the number of the micro-batch."""
        job, fold = self.job, self.job.program.fold
        if self.module is not None:
            of_module = replace(self.module, loss_fn=self._of_module, has_aux=has_state, scaled=False)
            return self._with_fold(of_module, ((summed(), fold), summed()) if has_state else summed())
        arg_indices = job.arg_indices(args)
        loss_fn: Callable[..., Tree] = functools.wraps(job.program.grad_fn, updated=())(
            functools.partial(self._of_arguments)
        )
        if self.pure is not None and arg_indices == (0,):
            loss_fn = replace(self.pure, loss_fn=self._of_visited)
        else:
            self.pure = None
        gradient = replace(job.gradient, loss_fn=loss_fn, argnums=arg_indices, has_aux=has_state, with_value=False)
        return self._with_fold(gradient, (summed(), fold) if has_state else summed())

    def _with_fold(self, grad_fn: Callable[..., Tree], fold: FoldTree) -> Program:
        # The arguments are read by the program of the first pass, and so are in_axes.
        return self.job.second(grad_fn, fold, self.job.program.in_axes)

    # --- a micro-batch of the second pass

    def _numbered(self, number: int | None) -> Arguments:
        """The arguments with the number of the micro-batch that is cut from them, None for one that stands in."""
        return replace(self.arguments, parts=(*self.arguments.parts, Argument(number, [], [], None)))

    def _of_arguments(self, *args: Tree, **kwargs: Tree) -> Tree:
        *args_of_user, number = args
        params = [args[arg_index] for arg_index in self.job.arg_indices(args_of_user)]
        return self._differentiated(number, params, tuple(args_of_user), kwargs)

    def _of_visited(self, module: nn.Module, *args: Tree, **kwargs: Tree) -> Tree:
        *batch, number = args
        params = {name: operator.attrgetter(name)(module) for name in self.args[0]}
        return self._differentiated(number, [params], (params, *batch), kwargs)

    def _of_module(self, module: nn.Module, *args: Tree, **kwargs: Tree) -> Tree:
        *batch, number = args
        return self._differentiated(number, [trainable(module)], tuple(batch), kwargs)

    def _differentiated(
        self, number: int | None, params: list[Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        """The inner product of the cotangents with what this micro-batch contributes; its gradient is differentiated.

        With threaded state, also what is left of the summary for that.
        """
        if self.first_pass is None:
            self._run_first_pass(args)
        assert self.first_pass is not None
        output = self.first_pass.again(number, args, kwargs)
        weight = 1 if number is None else self.first_pass.weights[number]
        parts = self.cotangents.parts(output, weight)
        if number is None:
            cotangents: list[Any] = [torch.zeros_like(part) for part in parts]
        else:
            cotangents = self.cotangents.of(parts, functools.partial(self.first_pass.rows, number))
        terms = [
            _inner(array, cotangent)
            for pair in zip(parts, cotangents, strict=True)
            for array, cotangent in zip(*map(parts_of, pair), strict=True)
        ]
        if number == self.ends_with or number is None:
            # Once, the gradient of what the loss itself uses of the parameters: in the pass in which a wrapper waits
            # for all of them.
            pairs = zip(trees.flatten(params)[0], self.of_params, strict=True)
            terms += [_inner(leaf, gradient) for leaf, gradient in pairs if gradient is not None]
        loss = torch.stack(terms).sum()
        return (loss, self.cotangents.threaded(output)) if self.arguments.state else loss

    # --- the first pass, and the loss

    def _run_first_pass(self, args: tuple[Tree, ...] | None) -> None:
        """Folds the summaries, and computes the loss, its gradient by the parameters and the cotangents.

        args: those of the first micro-batch of the second pass, whose parameters are recorded; None if there is none.
        """
        recorded = self._with_leaves(args) if self.keeps_last and args is not None else None
        first_pass = _FirstPass(self, recorded)
        with torch.no_grad(), first_pass:
            microbatches: Iterator[Microbatch] = ((self.arguments, *each) for each in self.cuts)
            summaries = folded(self.first, first_pass, microbatches, lambda: self.arguments, self.kwargs, self.devices)
        self._differentiate(summaries, first_pass)
        first_pass.begin_second()
        if isinstance(self.window, Engine):
            self.window.listen_anew()  # what the first pass has sent is not what a loss sends
        self.first_pass = first_pass

    def _with_leaves(self, leaves: tuple[Tree, ...]) -> Callable[[tuple[Tree, ...]], tuple[Tree, ...]]:
        """What puts these recorded parameters in the place of the arguments that are differentiated."""
        arg_indices = () if self.module is not None else self.job.arg_indices(self.args)
        return lambda args: tuple([leaves[i] if i in arg_indices else arg for i, arg in enumerate(args)])

    def _differentiate(self, summaries: Summaries, first_pass: "_FirstPass") -> None:
        gradient, of_loss = self.job.gradient, self.job.gradient.loss_fn
        variables = [variable.detach().requires_grad_() for variable in summaries.variables()]
        if self.module is not None:
            params: list[Tree] = [self.module.module]
            leaves: list[Any] = [*trainable(self.module.module).values()]
        else:
            originals, structure = trees.flatten([self.args[i] for i in self.job.arg_indices(self.args)])
            leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in originals]
            params = trees.unflatten(structure, leaves)
        present = [leaf for leaf in leaves if leaf is not None]
        with torch.enable_grad(), recording_loss():
            loss, aux = gradient.split(of_loss(*params, summaries.tree(variables)), self.backend)
            self.job.check_depends(loss.requires_grad)
            grads = torch.autograd.grad(loss, [*present, *variables], allow_unused=True)
        of_variables = grads[len(present) :]
        self.job.check_depends(any(grad is not None for grad in of_variables))
        self.cotangents = summaries.cotangents(of_variables)
        # Each replica that has something to fold adds an equal share, so that all have the same sum.
        shares = iter([None if grad is None else grad / first_pass.replicas for grad in grads[: len(present)]])
        self.of_params = [None if leaf is None else next(shares) for leaf in leaves]
        self.loss, self.aux = loss.detach(), detached(aux) if gradient.has_aux else None


def _is_stateless(pure: PureLoss) -> bool:
    return not (pure.buffers or pure.statistics)


def _inner(array: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """The inner product, summed in at least 32 bits: its gradient by the array is the cotangent."""
    return (array * cotangent).sum(dtype=arrays.accumulator_dtype(array.dtype))


class _FirstPass:
    """The window of the first pass. It notes what the second one needs to go the same way.

    `recorded` puts the recorded parameters into the arguments of the last micro-batch; None if no graph is kept.
    """

    records = looks_ahead = False

    def __init__(self, step: _Step, recorded: Callable[[tuple[Tree, ...]], tuple[Tree, ...]] | None):
        self.step, self.program, self.recorded = step, step.first, recorded
        self.reductions = [] if self.program.across is None else reductions_of(self.program, step.backend)
        self.may_be_short = bool(self.reductions)
        self.buffers: Buffers | None = None
        self.likes: list[torch.Tensor | None] = []
        self.weights: list[Scalar] = []
        self.kept: Tree = None  # what the last micro-batch has returned, with its graph
        self.offsets: list[int] = []  # of this replica's rows in each collected leaf
        self.starts: list[list[int]] = []  # of each micro-batch among them
        self.replicas = 1  # how many have something to fold
        self.devices = _devices((step.args, step.kwargs), step.module)
        self.generators: list[list[torch.Tensor]] = []  # before each micro-batch
        self.put_back = self._snapshot()

    def _snapshot(self) -> Callable[[], None]:
        """The buffers of a module, as they are now; calling it puts them back."""
        module = self.step.module
        has_buffers = module is not None and any(True for _ in module.module.buffers())
        return module.snapshot() if module is not None and has_buffers else lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            for reduction in self.reductions:
                reduction.give_up()

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs."""
        return tuple([detached(arg) for arg in args])

    # --- the micro-batches

    def fold(
        self, arguments: Arguments, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar, last: bool
    ) -> list[Any]:
        """Folds the summary of one micro-batch in, and returns the state that is threaded to the next."""
        self.generators.append(generator_states(self.devices))
        self.weights.append(weight)
        is_last = len(self.weights) == len(self.step.cuts)
        if is_last and self.recorded is not None:
            # Before, nothing was recorded, and autocast must not take a cast of a parameter from there.
            _forget_casts()
            with torch.enable_grad():
                self.kept = self.step.summarise(*self.recorded(args), **kwargs)
            value = detached(self.kept)
        else:
            value = self.program.grad_fn(*args, **kwargs)
        if is_last and self.step.is_padded:
            self._pad(args, kwargs, ran=len(self.weights))
        if self.buffers is None:
            leaves = self._begin(value, arguments)
        else:
            leaves = self.buffers.outputs.leaves(value, f"micro-batch {len(self.weights)}")
        assert self.buffers is not None
        return self.buffers.add(leaves, weight)

    def _begin(self, value: Tree, arguments: Arguments) -> list[Any]:
        outputs, leaves = self.program.bind(value, arguments)
        self.buffers = Buffers(Layout(outputs))
        self.likes = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        return leaves

    def _pad(self, args: tuple[Tree, ...], kwargs: dict[str, Tree], ran: int) -> None:
        """Runs the module as often as other replicas do, for a wrapper that communicates in each forward pass."""
        put_back = self._snapshot()
        for _ in range((self.program.n or 0) - ran):
            self.program.grad_fn(*args, **kwargs)
        put_back()

    # --- what they have come to, on all replicas

    def result(self, state: list[Any]) -> Summaries:
        """The summaries of all micro-batches."""
        buffers = self.buffers
        assert buffers is not None
        buffers.settle({})
        self._note_rows(buffers)
        for reduction in self.reductions:
            reduction.begin(buffers, self.likes)
            state = reduction.finish(state)
            self._note_replicas(reduction)
        return self._summaries(buffers, state)

    def result_without_microbatches(self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]) -> Summaries:
        """The summaries of the other replicas, on one that has no micro-batch."""
        if isinstance(self.step.module, WrappedGradient):
            # A row of zeros shows what is folded, and runs the module as the others do.
            args = with_a_blank_row(arguments).cut(0, 1, state)
            put_back = self._snapshot()
            value = self.program.grad_fn(*args, **kwargs)
            put_back()
            if self.step.is_padded:
                self._pad(args, kwargs, ran=1)
            self._begin(value, arguments)
            return self.result(state)
        (reduction,) = self.reductions
        buffers = begun_by_others(lambda value: self.program.bind(value, arguments)[0], reduction, arguments)
        return self._summaries(buffers, reduction.finish(state))

    def _note_rows(self, buffers: Buffers) -> None:
        """Notes which rows of what is collected are those of each micro-batch."""
        for leaf_index, fold in zip(buffers.outputs.collected, buffers.outputs.collected_folds, strict=True):
            sizes = [chunk.shape[fold.fold.reducer.monoid.axis or 0] for chunk in buffers.collected[leaf_index]]
            self.starts.append([*itertools.accumulate(sizes, initial=0)])
            self.offsets.append(0)

    def _note_replicas(self, reduction: Reduction) -> None:
        """Notes where the rows of this replica begin, and how many replicas have something to fold."""
        buffers, channel = reduction.buffers, reduction.replicas.channel
        for position, leaf_index in enumerate(buffers.outputs.collected):
            axis = buffers.outputs.collected_folds[position].fold.reducer.monoid.axis or 0
            self.offsets[position] += sum(chunk.shape[axis] for chunk in buffers.collected[leaf_index][: channel.rank])
        if reduction is self.reductions[0]:
            self.replicas = reduction.folded
        else:
            self.replicas = sum(channel.gathered(self.replicas))

    def _summaries(self, buffers: Buffers, state: list[Any]) -> Summaries:
        buffers.hold_in(1.0)
        outputs, tally = buffers.outputs, buffers.tally
        collected = [
            torch.cat(buffers.collected.pop(leaf_index), dim=fold.fold.reducer.monoid.axis or 0).to(fold.result_dtype)
            for leaf_index, fold in zip(outputs.collected, outputs.collected_folds, strict=True)
        ]
        return Summaries(self.step.job, outputs, buffers.reduced, collected, state, lambda fold: tally)

    # --- what the second pass asks

    def begin_second(self) -> None:
        """Remembers how the generators and buffers are to be in the end."""
        self.generators_after, self.put_after = generator_states(self.devices), self._snapshot()
        self.is_rewound = False
        _forget_casts()

    def again(self, number: int | None, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """What the micro-batch of this number has returned, recorded; None stands for no micro-batch."""
        if number is None:
            return self.step.summarise(*args, **kwargs)
        if self.kept is not None:
            kept, self.kept = self.kept, None
            return kept
        if not self.is_rewound:
            # Only now, as the graph that was kept may hold on to buffers.
            self.put_back()
            self.is_rewound = True
        put_generator_states(self.devices, self.generators[number])
        return self.step.summarise(*args, **kwargs)

    def rows(self, number: int, position: int, cotangent: torch.Tensor, axis: int, size: int) -> torch.Tensor:
        """Those of the micro-batch of this number, in the cotangent of the collected leaf at this position."""
        return cotangent.narrow(axis, self.offsets[position] + self.starts[position][number], size)

    def end_second(self) -> None:
        """Leaves the generators and buffers as a single pass would."""
        if self.generators:
            put_generator_states(self.devices, self.generators_after)
        self.put_after()


def _devices(tree: Tree, module: ModuleGradient | None) -> list[torch.device]:
    """The devices whose random numbers a summary may draw, besides the host's."""
    leaves = [*trees.flatten(tree)[0], *(() if module is None else module.module.parameters())]
    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return [device for device in devices if device.type not in ("cpu", "meta")]


def _forget_casts() -> None:
    """Drops what autocast has cached."""
    if _private.is_any_autocast_enabled():
        torch.clear_autocast_cache()
