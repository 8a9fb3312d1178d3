"""A window of a pipeline: its micro-batches run through the schedule, and every process gets their
values.

Only torch has this file: in JAX stages are axes of a mesh in one program.

The weight of a micro-batch is its cotangent: the last stage returns the loss times the weight to
the schedule, so the `.grad`s of every stage are weighted sums, which are divided once, at the end.
Every process knows the weights, because it has the same batch. The last stage knows the values and
aux, and sends them at the end of the window.
"""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._call.supported import PIPELINE
from funcga._types import Across, Array, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold
from funcga.tools.pipelines.schedule_in_torch import Pipeline
from torch_backend import arrays, trees
from torch_backend.arrays import recording, recording_loss
from torch_backend.engine.distributed import with_a_blank_row
from torch_backend.modules.checks import check_not_wrapped
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce.header import nothing_to_fold
from torch_backend.replicas import Replicas, channel_of, check_alike
from torch_backend.wrapped.ddp import DDP
from torch_backend.wrapped.window import OwnGrads, WrappedGradient, check_no_stream, masked

Values = list[tuple[torch.Tensor, Tree]]  # the loss and the aux of each micro-batch


@dataclass(frozen=True)
class Microbatch:
    """The inputs of the first stage and the target of the loss; the weight of a filler is None."""

    inputs: tuple[torch.Tensor, ...]
    target: Tree
    kwargs: dict[str, Tree]
    weight: Scalar | None

    @property
    def rows(self) -> int:
        """How many rows the first stage gets."""
        return len(self.inputs[0])


class PipelineWindow(OwnGrads):
    """A window of a PipelineGradient: `fold` each micro-batch, then take the `result`."""

    def __init__(
        self,
        program: Program,
        gradient: "PipelineGradient",
        backend: Backend,
        arguments: Arguments,
    ):
        self.reductions: list[Reduction] = []
        across = gradient.merged_over(program.across)
        if across is not None:
            self.reductions = reductions_of(replace(program, across=across), backend)
        # The processes that have the stages merge nothing, and meet before each step of the
        # schedule.
        self.stages = Reduction(program.memory, Replicas(gradient.pipeline.group))
        every = [self.stages, *self.reductions]
        super().__init__(program, gradient, backend, arguments, every)
        self.pipeline = gradient.pipeline
        # micro-batches of a step of the schedule; None if all of the window are one.
        self.count = gradient.n_microbatches or program.n
        self.last_stage = LastStage(self)
        self.waiting: list[Microbatch] = []  # for the next step of the schedule
        self.weights: list[Scalar] = []  # of all that are folded
        self.is_over = False  # whether no replica has another step of the schedule
        # Whether a micro-batch of weight 0 is no part of the result, so that a row of another one
        # can stand in for each of its own; and that row, of each input. There may be a NaN in its
        # own rows, which a gradient of 0 does not keep out of the parameters'.
        folds = trees.flatten(program.fold)[0]
        self.stands_in = all(isinstance(fold, Fold) and fold.reducer.linear for fold in folds)
        self.row: tuple[torch.Tensor, ...] | None = None
        self.first: Arguments | None = None  # those of the first micro-batch

    def __enter__(self) -> Self:
        super().__enter__()
        self.loss_fn = self.gradient.loss_fn  # it takes what the last stage returns, no module
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if error[0] is not None:
            # Also where no step has begun here: what follows has to be the same in all processes.
            self.pipeline.forget()
        return super().__exit__(*error)

    # --- micro-batches

    def fold(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar, last: bool = False
    ) -> None:
        """Keeps a micro-batch until a step of the schedule is full, and then runs it. No state
        is threaded.
        """
        assert self.arguments is not None
        if self.arguments.state:
            raise FuncgaError(
                "an argument is CARRY, and grad_fn is that of a pipeline, where the next "
                "micro-batch begins before the last one has ended: no state can be threaded. Pass "
                "it whole, in_axes=(0, None, 0), or close over it."
            )
        self.first = self.first or self.arguments
        self.waiting.append(self._microbatch(args, kwargs, weight))
        self.weights.append(weight)
        if self._counts(weight):
            self.row = self._inputs(weight, tuple([part[:1] for part in self.waiting[-1].inputs]))
        # Micro-batches of weight 0 wait for one that counts, whose row stands in.
        is_ready = self.count is not None and (self.row is not None or not self.stands_in)
        while self.waiting and (last or (is_ready and len(self.waiting) >= (self.count or 0))):
            self._run(last)
        if last:
            self._fill_up(args, kwargs)

    def _fill_up(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
        """Runs steps that add nothing while other replicas have micro-batches: wrapped stages
        reduce in every step. Stages that are not wrapped run at least one.
        """
        while not self.is_over:
            self.waiting = [self._microbatch(args, kwargs, None)]
            self._run(True)

    def _microbatch(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar | None
    ) -> Microbatch:
        *inputs, target = args
        if not inputs or any(
            not isinstance(part, torch.Tensor) or not part.ndim for part in inputs
        ):
            raise FuncgaError(
                f"a micro-batch has {len(args)} arguments, and those of a pipeline are the inputs "
                "of the first stage, each a tensor with rows, and one target, which is a tree: "
                "step(x, y)."
            )
        return Microbatch(tuple(inputs), target, kwargs, weight)

    def _run(self, last: bool) -> None:
        """Runs a step of the schedule with waiting micro-batches, filled up. `last`: whether no
        others will come. Raises FuncgaError if the schedule skips the reduction of wrapped stages.
        """
        wrapper, pipeline = self.wrapper, self.pipeline
        count = self.count or len(self.waiting)
        microbatches, self.waiting = self.waiting[:count], self.waiting[count:]
        self.stages.meet(False)
        is_over = last and not self.waiting
        for reduction in self.reductions if wrapper.wrapped else ():
            is_over = reduction.meet(is_over)
        # A window that does not say how many it has is not shorter than the last one, for which a
        # schedule is built.
        at_least = max(pipeline.count, pipeline.stages[0].num_stages)
        missing = (self.count or max(len(microbatches), at_least)) - len(microbatches)
        inputs = [self._inputs(each.weight, each.inputs) for each in microbatches]
        inputs += [inputs[0]] * missing
        loss = partial(self.last_stage.loss, microbatches, len(self.last_stage.values))
        masks: AbstractContextManager[None] = nullcontext()
        if all(each.weight is None for each in microbatches):
            masks = masked([*self.module.children()], self.reached, torch.zeros_like)
        # The schedule itself prepares DDP for the last backward pass. The forward pass that infers
        # shapes must not: DDP would take the first backward pass for the last.
        waiting = wrapper.waiting() if isinstance(wrapper, DDP) else nullcontext()
        with recording(), masks, wrapper.synchronising(), waiting:
            pipeline.run(inputs, loss, self._together)
        self.is_over = is_over

    def _counts(self, weight: Scalar | None) -> bool:
        """Whether the host knows that a micro-batch of this weight is a part of the result."""
        return weight is not None and bool(weight or not self.stands_in)

    def _inputs(
        self, weight: Scalar | None, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """The inputs of a micro-batch of this weight; a row that counts, or one of zeros, in the
        place of each of its rows if it does not.
        """
        if self._counts(weight):
            return inputs
        rows = [] if self.row is None else [*self.row]
        if [row.shape[1:] for row in rows] != [part.shape[1:] for part in inputs]:
            rows = [part.new_zeros((1, *part.shape[1:])) for part in inputs]
        return tuple([row.expand_as(part) for part, row in zip(inputs, rows, strict=True)])

    def _together(self, needed: bool) -> bool:
        """Whether to build a new schedule: with FSDP, whose forward passes communicate, if any
        replica needs one.

        In its first step a schedule runs an extra pass, to infer shapes.
        """
        wrapper = self.wrapper
        for group in wrapper.groups()[0] if wrapper.in_step else ():
            channel = channel_of(group)
            channel.send_owed()
            needed = any(channel.all_gather(needed))
        return needed

    # --- the result

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Array]
    ) -> Tree:
        """The result if only other replicas have rows: passes over a row of zeros, not folded."""
        check_no_stream(self.program)
        self.arguments = self.first = with_a_blank_row(arguments)
        self._fill_up(self.arguments.cut(0, 1, state), kwargs)
        return self.result()

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output: the value is the same in
        every process.
        """
        values = self.last_stage.values_of_all(self.weights)
        self.stages.end()
        self.arguments = self.first
        self.bind(*values[0])
        sums = self.sums
        assert sums is not None
        with torch.no_grad():
            for value, weight in zip(values, self.weights, strict=False):
                self.add(*value, weight)
            gradients = self.gradients()
            self.put(gradients)
            for reduction in self.reductions:
                if not self.wrapper.wrapped:
                    head = self.beside(*values[0])[: -len(gradients)]
                    reduction.propose(sums, [*head, *gradients])
                reduction.merge()
            if self.reductions and not sums.steps:
                raise nothing_to_fold()
            return sums.result()


class LastStage:
    """The losses of a window's micro-batches, where this process has the last stage.

    `values`: the loss and the aux of each, by its number. `error`: the first one of a loss.
    """

    def __init__(self, window: PipelineWindow):
        self.window, self.pipeline = window, window.pipeline
        self.values: dict[int, tuple[torch.Tensor, Tree]] = {}
        self.error: Exception | None = None

    def loss(
        self, microbatches: Sequence[Microbatch], first: int, output: Tree, index: int
    ) -> torch.Tensor:
        """The loss of a micro-batch times its weight. `first` is the step's first one.

        An error is kept until the end: raised here, the other stages would hang.
        """
        if index < len(microbatches) and self.error is None:
            try:
                return self._weighed(output, microbatches[index], first + index)
            except Exception as error:
                self.error = error
        return _zero(_recorded(output))

    def _weighed(self, output: Tree, microbatch: Microbatch, number: int) -> torch.Tensor:
        rows, window = self.pipeline.rows, self.window
        leaves, structure = trees.flatten(output)
        if any(not leaf.ndim or len(leaf) != rows for leaf in leaves):
            raise FuncgaError(
                f"the last stage returned {', '.join(map(arrays.describe, leaves))} "
                f"for {rows} rows, of which {microbatch.rows} count: rows are axis 0 of every "
                "output. Reduce over rows in loss_fn, which does not see the rows that a "
                "micro-batch is filled up with."
            )
        leaves = [leaf if microbatch.rows == rows else leaf[: microbatch.rows] for leaf in leaves]
        visible = trees.unflatten(structure, leaves)
        args = visible, microbatch.target
        with recording_loss():
            loss, aux, *_ = window.forward(args, microbatch.kwargs, None)
        # The loss of the first micro-batch may be computed once more than the others, to learn
        # shapes.
        self.values[number] = loss.detach(), trees.detached(aux, recorded=True)
        window.arguments = window.first
        window.bind(loss.detach(), aux)
        weight = microbatch.weight
        wide: torch.Tensor = loss.to(torch.promote_types(loss.dtype, torch.float32))
        if weight is not None and not window.is_weighted:
            return wide
        if not weight:  # nothing of it counts, not even a NaN
            return _zero(_recorded(output))
        return wide.mul(weight)

    def values_of_all(self, weights: Sequence[Scalar]) -> Values:
        """The loss and aux of every micro-batch: those of the last stage are sent to all processes,
        and the weights that they saw are compared.

        Raises FuncgaError, in every process, if the loss raised an error, or if the processes were
        given different batches.
        """
        pipeline, error = self.pipeline, self.error
        values = [self.values[number] for number in sorted(self.values)]
        if pipeline.group.size() == 1:
            if error is not None:
                raise error
            return values
        # An error itself may not be picklable, and values are of no use beside one.
        sent: object = None
        if error is not None:
            sent = f"{type(error).__name__}: {error}"
        elif pipeline.has_last:
            sent = _moved(values, torch.device("cpu"))
        said = channel_of(pipeline.group).all_gather(([*map(float, weights)], sent))
        if error is not None:
            raise error
        last, received = next(
            (rank, each) for rank, (_, each) in enumerate(said) if each is not None
        )
        if isinstance(received, str):
            raise FuncgaError(
                f"loss_fn has raised an error in the last stage of the pipeline, on rank {last} of "
                f"its group: {received} Every stage has stopped; see what that process says."
            )
        check_alike(
            [{"the weights of the micro-batches": str(weights)} for weights, *_ in said],
            "of a pipeline were given different batches",
            "Pass the same batch, inputs and target, in every process of one pipeline.",
        )
        if pipeline.has_last:
            return values
        device = next((p.device for p in self.window.inputs), torch.device("cpu"))
        return _moved(received, device)


def _moved(values: Values, device: torch.device) -> Values:
    """The values, whose tensors are on this device."""
    leaves, structure = trees.flatten(values)
    moved = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    on_device: Values = trees.unflatten(structure, moved)
    return on_device


def _recorded(output: Tree) -> list[torch.Tensor]:
    return [leaf for leaf in trees.flatten(output)[0] if leaf.requires_grad]


def _zero(leaves: list[torch.Tensor]) -> torch.Tensor:
    """A zero whose gradient is zero for all of these tensors, even where they are not finite."""
    terms = [
        torch.where(torch.zeros_like(leaf, dtype=torch.bool), leaf, 0).sum() for leaf in leaves
    ]
    return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


@dataclass(frozen=True, eq=False)
class PipelineGradient(WrappedGradient):
    """The gradient function of the stages of this process, made by `pipeline_value_and_grad`.

    `module` has the stages by their indices; `wrapper` describes how they are wrapped.
    """

    pipeline: Pipeline
    n_microbatches: int | None

    @property
    def kind(self) -> str:
        """Its row of the table of what is supported."""
        return PIPELINE

    @property
    def __signature__(self) -> inspect.Signature | None:
        return None  # the arguments are the first stage's, and a target

    def window(self, program: Program, backend: Backend, arguments: Arguments) -> PipelineWindow:
        """One window of a program with this gradient function."""
        self.check_not_traced()
        if not self.wrapper.wrapped:
            check_not_wrapped(self.module)
        return PipelineWindow(program, self, backend, arguments)

    def merged_over(self, across: Across) -> Across:
        """The wrapper's own replicas, or those of across=."""
        return super().merged_over(across) if self.wrapper.wrapped else across
