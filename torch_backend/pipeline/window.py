"""One window of a pipeline: its micro-batches run through the schedule, their values told to every
process.

Only torch has this file: in JAX stages are axes of a mesh in one program.

The weight of a micro-batch is its cotangent: the last stage returns to the schedule the loss times
the weight, so that every stage's `.grad`s are weighted sums, and are divided once, at the end.
Every process knows the weights, because it is given the same batch. Values and aux are known to the
last stage, which tells them at the end of the window.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import torch.distributed as dist

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._call.supported import PIPELINE
from funcga._fold.outputs import Outputs
from funcga._types import Across, Array, GradFn, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import trees
from torch_backend.dtensor import as_dtensor, local_tensors
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.inputs import Leaves, detached
from torch_backend.engine.layout import Kept
from torch_backend.engine.others import left_alone
from torch_backend.modules import trainable
from torch_backend.modules.checks import check_no_params, check_wrapped_before
from torch_backend.modules.layers import Walk
from torch_backend.modules.visits import IN_USE
from torch_backend.pipeline.schedule import Pipeline
from torch_backend.reduce import Reduction
from torch_backend.reduce.agreement import Progress
from torch_backend.reduce.header import nothing_to_fold
from torch_backend.replicas import InTurn, Replicas, channel_of
from torch_backend.wrapped.ddp import DDP, Wrapper
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import check_folds, check_no_stream, put, taken, with_a_blank_row

Values = list[tuple[torch.Tensor, Tree]]  # the loss and the aux of each micro-batch


@dataclass(frozen=True)
class Microbatch:
    """The inputs of the first stage and the target of the loss; the weight is None for one that
    only fills up.
    """

    inputs: tuple[torch.Tensor, ...]
    target: Tree
    kwargs: dict[str, Tree]
    weight: Scalar | None

    @property
    def rows(self) -> int:
        """How many rows the first stage gets."""
        return len(self.inputs[0])


class PipelineWindow:
    """One window of a PipelineGradient: `fold` each micro-batch, and say which is the last; then
    take the `result`.

    A context, in which the parameters' `.grad`s are the window's.
    """

    records = looks_ahead = may_be_short = True

    def __init__(
        self,
        program: Program,
        gradient: ModuleGradient,
        backend: Backend,
        pipeline: Pipeline,
        count: int | None,
        wrapper: Wrapper | None,
    ):
        self.program, self.gradient, self.backend = program, gradient, backend
        self.pipeline, self.wrapper, self.parts = pipeline, wrapper, gradient.parts
        # micro-batches of a step of the schedule; None if all of the window are one.
        self.count = count or program.n
        across = gradient.merged_over(program.across)
        several = (
            across
            if isinstance(across, InTurn)
            else []
            if across is None
            else [program.replicas(backend)]
        )
        progress = program.memory.keep(Progress, program.memory.step)
        self.reductions = [Reduction(progress, replicas) for replicas in several]
        # The processes that have the stages merge nothing, and meet before each step of the
        # schedule.
        self.stages = Reduction(progress, Replicas(pipeline.group))
        self.stack = ExitStack()
        self.waiting: list[Microbatch] = []  # for the next step of the schedule
        self.weights: list[Scalar] = []  # of all that are folded
        # The loss and aux of each, on the last stage.
        self.values: Values = []
        self.error: Exception | None = None  # the first one of the loss
        self.steps = 0  # of the schedule
        self.arguments: Arguments | None = None  # of the first micro-batch
        self.buffers: Buffers | None = None

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs."""
        check_no_params(args, self.gradient.module)
        return tuple([detached(arg, recorded=True) for arg in args])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            if self.wrapper is not None:
                stack.enter_context(self.wrapper.window())
            stack.enter_context(
                IN_USE.using(self.program.memory.keep(Walk).ids(self.gradient.module))
            )
            self.params: dict[str, torch.Tensor] = {**trainable(self.gradient.module)}
            inner = [] if self.wrapper is None else self.wrapper.leaves()
            # The user's `.grad`s are put aside, and come back when the stack closes.
            stack.enter_context(left_alone([*self.params.values(), *inner]))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self.stack:
            if error[0] is not None:
                for reduction in (self.stages, *self.reductions):
                    reduction.give_up()
                # Also where no step has begun here: what follows has to be the same in all
                # processes.
                self.pipeline.forget()
                if self.wrapper is not None:
                    self.wrapper.recover()

    # --- micro-batches

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Array]:
        """Keeps a micro-batch until a step of the schedule is full, and then runs it. No state
        is threaded.
        """
        if arguments.state:
            raise FuncgaError(
                "an argument is CARRY, and grad_fn is that of a pipeline, where the next "
                "micro-batch begins before the last one has ended: no state can be threaded. Pass "
                "it whole, in_axes=(0, None, 0), or close over it."
            )
        self.arguments = self.arguments or arguments
        self.waiting.append(self._microbatch(args, kwargs, weight))
        self.weights.append(weight)
        if last or len(self.waiting) == self.count:
            self._run()
        if last and self.wrapper is not None and self.program.n is not None:
            # Replicas with more rows have more micro-batches, and these stages reduce in every
            # step.
            for _ in range(-(-self.program.n // (self.count or 1)) - self.steps):
                self.waiting = [self._microbatch(args, kwargs, None)]
                self._run()
        return []

    def _microbatch(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar | None
    ) -> Microbatch:
        *inputs, target = args
        if not inputs or any(
            not isinstance(part, torch.Tensor) or not part.ndim for part in inputs
        ):
            raise FuncgaError(
                f"a micro-batch has {len(args)} arguments, and those of a pipeline are the inputs "
                "of the first stage, each a tensor with rows, and one target. Write step(x, y); "
                "several targets are one tree: "
                f'step(x, {{"labels": y, "mask": mask}}).'
            )
        return Microbatch(tuple(inputs), target, kwargs, weight)

    def _run(self) -> None:
        """A step of the schedule with the micro-batches that wait, filled up."""
        for reduction in (self.stages, *(self.reductions if self.wrapper is not None else ())):
            reduction.meet(False)
        # A window that does not say how many it has is not shorter than the last one, for which a
        # schedule is built.
        at_least = max(self.pipeline.count, self.pipeline.stages[0].num_stages)
        missing = (self.count or max(len(self.waiting), at_least)) - len(self.waiting)
        inputs = [microbatch.inputs for microbatch in self.waiting]
        inputs += [inputs[0]] * missing
        # The loss of the first micro-batch may be computed once more than the others, to learn
        # shapes.
        values: dict[int, tuple[torch.Tensor, Tree]] = {}
        with self._reducing():
            self.pipeline.run(
                inputs, lambda output, index: self._loss(output, index, values), self._together
            )
        self.values += [values[index] for index in sorted(values)]
        self.steps, self.waiting = self.steps + 1, []

    def _together(self, needed: bool) -> bool:
        """Whether a new schedule is built: with FSDP, whose forward passes communicate, if any
        replica needs one.

        In its first step a schedule runs one pass more than otherwise, to learn shapes.
        """
        if self.wrapper is None or not self.wrapper.in_step:
            return needed
        for group in self.wrapper.groups()[0]:
            channel = channel_of(group)
            channel.settle()
            needed = any(channel.gathered(needed))
        return needed

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        """The context of a step. Raises FuncgaError if the schedule leaves out the reduction of
        what wraps the stages.

        The schedule itself prepares DDP for the last backward pass. The forward pass in which it
        learns shapes must not: the first backward pass would be taken for the last.
        """
        with ExitStack() as stack:
            if self.wrapper is not None:
                stack.enter_context(self.wrapper.synchronising(self.params))
            if isinstance(self.wrapper, DDP):
                stack.enter_context(self.wrapper.waiting())
            yield

    def _loss(
        self, output: Tree, index: int, values: dict[int, tuple[torch.Tensor, Tree]]
    ) -> torch.Tensor:
        """What is differentiated of a micro-batch: its loss times its weight.

        An error of it is kept. Were it raised here, the other stages would wait for gradients.
        """
        if index < len(self.waiting) and self.error is None:
            try:
                return self._weighed(output, self.waiting[index], index, values)
            except Exception as error:
                self.error = error
        return _zero(self._tensors(output))

    def _weighed(
        self,
        output: Tree,
        microbatch: Microbatch,
        index: int,
        values: dict[int, tuple[torch.Tensor, Tree]],
    ) -> torch.Tensor:
        rows = self.pipeline.rows
        leaves, structure = self.backend.trees.flatten(output)
        if any(not leaf.ndim or len(leaf) != rows for leaf in leaves):
            raise FuncgaError(
                f"the last stage returned {', '.join(map(self.backend.arrays.describe, leaves))} "
                f"for {rows} rows, of which {microbatch.rows} count: rows are axis 0 of every "
                "output. Reduce over rows in loss_fn, which does not see the rows that a "
                "micro-batch is filled up with."
            )
        leaves = [leaf if microbatch.rows == rows else leaf[: microbatch.rows] for leaf in leaves]
        visible = self.backend.trees.unflatten(structure, leaves)
        value = self.gradient.loss_fn(visible, microbatch.target, **microbatch.kwargs)
        loss, aux = self.parts.split(value, self.backend)
        values[index] = loss.detach(), detached(aux, recorded=True)
        self._make_room(loss.detach(), aux)
        weight = microbatch.weight
        wide: torch.Tensor = loss.to(torch.promote_types(loss.dtype, torch.float32))
        if weight is not None and not self.is_weighted:
            return wide
        if isinstance(weight, torch.Tensor):
            # The host cannot see whether it is 0, and a cotangent of 0 times a NaN is NaN.
            for leaf in self._tensors(visible):
                leaf.register_hook(partial(_where_counted, weight))  # type: ignore[no-untyped-call]
        elif not weight:  # nothing of it counts, not even a NaN
            return _zero(self._tensors(output))
        return wide.mul(weight)

    def _tensors(self, output: Tree) -> list[torch.Tensor]:
        return [leaf for leaf in self.backend.trees.flatten(output)[0] if leaf.requires_grad]

    # --- the result

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Array]
    ) -> Tree:
        """The result where other replicas have rows and this one has none: passes over a row of
        zeros, not folded.
        """
        check_no_stream(self.program)
        self.arguments = with_a_blank_row(arguments)
        args = self.arguments.cut(0, 1, state)
        steps = 1 if self.wrapper is None else -(-(self.program.n or 1) // (self.count or 1))
        for _ in range(steps):
            self.waiting = [self._microbatch(args, kwargs, None)]
            self._run()
        return self.result(state)

    def result(self, state: list[Array]) -> Tree:
        """The normalised result, in the structure of grad_fn's output: the value is the same in
        every process.
        """
        values = self._values_of_all()
        self.stages.is_over, self.stages.history.finished = True, self.stages.window
        self._make_room(*values[0])
        buffers = self.buffers
        assert buffers is not None
        with torch.no_grad():
            for (loss, aux), weight in zip(values, self.weights, strict=False):
                buffers.add(self._leaves(loss, aux), weight)
            gradients = [
                taken(p, self.wrapper is not None and self.wrapper.fresh)
                for p in self.params.values()
            ]
            sums = local_tensors(gradients)  # of a DTensor only the local shard is divided
            # A wrapper has divided the sums by the number of replicas.
            scale = 1.0 if self.wrapper is None else self.wrapper.scale
            put(buffers, sums, scale)
            for reduction in self.reductions:
                beside = [None] * len(sums) if self.wrapper is not None else gradients
                reduction.begin(buffers, [*self._leaves(*values[0])[: -len(sums) or None], *beside])
                reduction.finish([])
            if self.reductions and not buffers.steps:
                raise nothing_to_fold()
            value, folded = buffers.result(state)
        named = zip(self.params, gradients, sums, strict=True)
        grads = {
            name: gradient if folded[name] is shard else as_dtensor(folded[name], gradient)
            for name, gradient, shard in named
        }
        return value, grads

    def _values_of_all(self) -> Values:
        """The loss and the aux of every micro-batch, from the last stage. Raises FuncgaError if
        that has failed.
        """
        device = next((p.device for p in self.params.values()), torch.device("cpu"))
        values = self.values if self.pipeline.has_last else None
        return _of_last_stage(self.weights, values, self.error, self.pipeline.group, device)

    def _leaves(self, loss: torch.Tensor, aux: Tree) -> list[Array | None]:
        """The leaves of what grad_fn returns, None for the gradients, which are where autograd
        adds them.
        """
        head = self.layout.rest.head.leaves(self.parts.compose(loss, aux, [()]), "a micro-batch")
        return [*head, *[None] * len(self.params)]

    def _make_room(self, loss: torch.Tensor, aux: Tree) -> None:
        """Makes room for an output with this loss, once. Raises FuncgaError for folds that a
        pipeline cannot do.
        """
        if self.buffers is not None:
            return
        arguments = self.arguments
        assert arguments is not None
        structure = self.backend.trees.flatten(self.params)[1]
        leaves = {0: Leaves(self.params, [*self.params.values()], structure, [])}
        bind = lambda value: self.program.bind(value, arguments)
        self.layout = self.program.memory.keep(Kept).layout_of(
            self.parts, (loss, aux), leaves, leaves, bind, self._check, False
        )
        folds = [
            self.layout.outputs.folds[leaf_index]
            for leaf_index in self.layout.backward.leaf_indices[:1]
        ]
        self.is_weighted = any(fold is not None and fold.fold.reducer.linear for fold in folds)
        self.buffers = Buffers(self.layout)

    def _check(self, outputs: Outputs) -> None:
        wrapper = self.wrapper
        dtypes = [p.dtype if wrapper is None else wrapper.sums_in(p) for p in self.params.values()]
        name, remedy = (
            "a pipeline",
            "Keep parameters in float32, and let stages compute under torch.autocast.",
        )
        check_folds(outputs, self.params, dtypes, name, remedy)


def _of_last_stage(
    weights: Sequence[Scalar],
    values: Values | None,
    error: Exception | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Values:
    """The values of the last stage, on this device. This process says the weights that it has
    counted, on the last stage the values, and the error of its loss.

    Raises FuncgaError, in every process, if the loss has raised an error, or if they were given
    different batches.
    """
    if group.size() == 1:
        if error is not None:
            raise error
        assert values is not None
        return values
    # A weight on a device is not looked at. An error itself may not be picklable, and values are of
    # no use beside one.
    shown = tuple([None if isinstance(w, torch.Tensor) else float(w) for w in weights])
    text = None if error is None else f"{type(error).__name__}: {error}"
    sent = None if values is None or text is not None else _moved(values, torch.device("cpu"))
    said = channel_of(group).gathered((shown, values is not None, sent, text))
    if error is not None:
        raise error
    last = next(rank for rank, (_, is_last, _, _) in enumerate(said) if is_last)
    _, _, received, text = said[last]
    if text is not None:
        raise FuncgaError(
            f"loss_fn has raised an error in the last stage of the pipeline, on rank {last} of its "
            f"group: {text} Every stage has stopped; see what that process says."
        )
    _check_alike([weights_of_rank for weights_of_rank, *_ in said], last)
    return values if values is not None else _moved(received, device)


def _check_alike(weights_of_ranks: list[tuple[float | None, ...]], last: int) -> None:
    """Raises FuncgaError if a process has counted other weights than the one of the last stage."""
    wanted = weights_of_ranks[last]
    for rank, others in enumerate(weights_of_ranks):
        if others != wanted:
            raise FuncgaError(
                f"the processes of a pipeline were given different batches: on rank {rank} of its "
                f"group the micro-batches weigh {_spelled(others)}, and on rank {last}, which has "
                f"the last stage, {_spelled(wanted)}. Pass the same batch, inputs and target, in "
                "every process of one pipeline."
            )


def _moved(values: Values, device: torch.device) -> Values:
    """The values, whose tensors are on this device."""
    leaves, structure = trees.flatten(values)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    on_device: Values = trees.unflatten(structure, moved)
    return on_device


def _spelled(weights: Sequence[float | None]) -> str:
    shown = ", ".join("?" if weight is None else f"{weight:g}" for weight in weights[:6])
    return f"({shown}{', ...' if len(weights) > 6 else ''})"


def _where_counted(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return torch.where(weight.to(gradient.device) != 0, gradient, 0)


def _zero(leaves: list[torch.Tensor]) -> torch.Tensor:
    """A zero whose gradient is zero in every one of these, even where they are not finite."""
    terms = [
        torch.where(torch.zeros_like(leaf, dtype=torch.bool), leaf, 0).sum() for leaf in leaves
    ]
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


@dataclass(frozen=True, eq=False)
class PipelineGradient(ModuleGradient):
    """The gradient function of the stages that this process has. Made by `pipeline_value_and_grad`.

    `module` has the stages by their indices, and `wrapper` is what wraps them; None if nothing
    does.
    """

    pipeline: Pipeline
    n_microbatches: int | None
    wrapper: Wrapper | None

    @property
    def kind(self) -> str:
        """Its row of the table of what is supported."""
        return PIPELINE

    @property
    def __signature__(self) -> inspect.Signature | None:
        return None  # the arguments are the first stage's, and a target

    def window(self, program: Program, backend: Backend, alone: bool = False) -> PipelineWindow:
        """One window of a program with this gradient function; one that is `alone` has a single
        micro-batch.
        """
        self.check_not_traced()
        if self.wrapper is None:
            check_wrapped_before(self.module)
        return PipelineWindow(
            program, self, backend, self.pipeline, self.n_microbatches, self.wrapper
        )

    def merged_over(self, across: Across) -> Across:
        """The wrapper's own replicas, or those of across=."""
        return across if self.wrapper is None else self.wrapper.replicas(across)

    def check_counted(self, grad_fn: GradFn) -> None:
        """Raises FuncgaError for a function around it, which is called for each micro-batch
        alone.
        """
        if grad_fn is not self:
            raise FuncgaError(
                "totals= was given, and grad_fn is a function around pipeline_value_and_grad, "
                "which runs a schedule for each micro-batch alone. Write accumulate(gradient, n, "
                "totals=totals), with the gradient function itself."
            )
