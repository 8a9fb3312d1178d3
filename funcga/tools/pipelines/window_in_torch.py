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
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._call.supported import PIPELINE
from funcga._types import Args, Kwargs, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.tools.pipelines.schedule_in_torch import Pipeline
from torch_backend import _private, arrays, trees
from torch_backend.arrays import recording, recording_loss
from torch_backend.modules.checks import check_not_wrapped
from torch_backend.reduce import Reduction
from torch_backend.reduce.header import nothing_to_fold
from torch_backend.replicas import Replicas, check_alike
from torch_backend.wrapped.ddp import DDP, assigned
from torch_backend.wrapped.window import WrappedGradient, WrappedWindow

Values = list[tuple[torch.Tensor, Tree]]  # the loss and the aux of each micro-batch


class Microbatch(NamedTuple):
    """The arguments of a micro-batch: the inputs of the first stage, each a tensor with rows, and
    the target of the loss. The weight of a filler is None.
    """

    args: Args
    kwargs: Kwargs
    weight: Scalar | None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What the first stage gets."""
        return self.args[:-1]


class ScheduledWindow(WrappedWindow):
    """A window of a PipelineGradient: `fold` each micro-batch, then take the `result`."""

    def __init__(self, owner: "PipelineGradient", program: Program, *others: Any):
        super().__init__(owner, program, *others)
        # The processes that have the stages merge nothing, and meet before each step of the
        # schedule.
        self.stages, *self.reductions = self.merges
        self.pipeline = owner.pipeline
        # micro-batches of a step of the schedule; None if all of the window are one.
        self.count = owner.n_microbatches or program.split.n
        # In the last stage: the loss and the aux of each micro-batch, by its number, and the first
        # error of a loss.
        self.values: dict[int, tuple[torch.Tensor, Tree]] = {}
        self.error: Exception | None = None
        self.kept: list[Microbatch] = []  # for the next step of the schedule
        self.weights: list[Scalar] = []  # of all that are folded
        # Whether a micro-batch of weight 0 is no part of the result, so that a row of another one
        # can stand in for each of its own; and that row, of each input. There may be a NaN in its
        # own rows, which a gradient of 0 does not keep out of the parameters'.
        self.stands_in = program.weighs_all(self.backend)
        self.row: tuple[torch.Tensor, ...] | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self.loss_fn = self.gradient.loss_fn  # it takes what the last stage returns, no module
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if error[0] is not None:
            # Also where no step has begun here: what follows has to be the same in all processes.
            self.pipeline.schedule = None
        return super().__exit__(*error)

    # --- micro-batches

    def fold(self, args: Args, kwargs: Kwargs, weight: Scalar, last: bool = False) -> None:
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
        self.kept.append(Microbatch(args, kwargs, weight))
        self.weights.append(weight)
        if self._counts(weight):
            self.row = tuple([part[:1] for part in self.kept[-1].inputs])
        # Micro-batches of weight 0 wait for one that counts, whose row stands in.
        is_ready = self.count is not None and (self.row is not None or not self.stands_in)
        while self.kept and (last or (is_ready and len(self.kept) >= (self.count or 0))):
            self._run(last)
        if last:
            self._fill_up(args, kwargs)

    def _fill_up(self, args: Args, kwargs: Kwargs) -> None:
        """Runs steps that add nothing while other replicas have micro-batches: wrapped stages
        reduce in every step. Stages that are not wrapped run at least one.
        """
        while not self.is_last:
            self.kept = [Microbatch(args, kwargs, None)]
            self._run(True)

    def _run(self, last: bool) -> None:
        """Runs a step of the schedule with waiting micro-batches, filled up. `last`: whether no
        others will come. Raises FuncgaError if the schedule skips the reduction of wrapped stages.
        """
        wrapper, pipeline = self.wrapper, self.pipeline
        count = self.count or len(self.kept)
        microbatches, self.kept = self.kept[:count], self.kept[count:]
        self.stages.meet(False)
        is_last = last and not self.kept
        for reduction in self.reductions if wrapper.wrapped else ():
            is_last = reduction.meet(is_last)
        # A window that does not say how many it has is not shorter than the last one, for which a
        # schedule is built.
        at_least = max(pipeline.count, pipeline.stages[0].num_stages)
        missing = (self.count or max(len(microbatches), at_least)) - len(microbatches)
        inputs = [self._inputs(each) for each in microbatches]
        inputs += [inputs[0]] * missing
        loss = partial(self._loss, microbatches, len(self.values))
        masks: AbstractContextManager[None] = nullcontext()
        if all(each.weight is None for each in microbatches):
            masks = self.masked()
        # The schedule itself prepares DDP for the last backward pass. The forward pass that infers
        # shapes must not: DDP would take the first backward pass for the last.
        waiting = assigned(wrapper.flags(False)) if isinstance(wrapper, DDP) else nullcontext()
        with recording(), masks, wrapper.synchronising(), waiting:
            pipeline.run(inputs, loss, self._together)
        self.is_last = is_last

    def _counts(self, weight: Scalar | None) -> bool:
        """Whether the host knows that a micro-batch of this weight is a part of the result."""
        return weight is not None and bool(weight or not self.stands_in)

    def _inputs(self, microbatch: Microbatch) -> tuple[torch.Tensor, ...]:
        """The inputs of a micro-batch; a row that counts, or one of zeros, in the place of each of
        its rows if it does not count.
        """
        inputs, rows = microbatch.inputs, self.row or ()
        if self._counts(microbatch.weight):
            return inputs
        if [row.shape[1:] for row in rows] != [part.shape[1:] for part in inputs]:
            rows = tuple([part.new_zeros((1, *part.shape[1:])) for part in inputs])
        return tuple([row.expand_as(part) for part, row in zip(inputs, rows, strict=True)])

    def _together(self, needed: bool) -> bool:
        """Whether to build a new schedule: with FSDP, whose forward passes communicate, if any
        replica needs one.

        In its first step a schedule runs an extra pass, to infer shapes.
        """
        wrapper = self.wrapper
        for group in wrapper.groups[0] if wrapper.in_step else ():
            channel = Replicas(group).channel
            channel.send_owed()
            needed = any(channel.all_gather(needed))
        return needed

    # --- the last stage, where this process has it

    def _loss(
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
        return _zero(output)

    def _weighed(self, output: Tree, microbatch: Microbatch, number: int) -> torch.Tensor:
        rows, count = self.pipeline.rows, len(microbatch.inputs[0])
        leaves, structure = trees.flatten(output)
        if any(not leaf.ndim or len(leaf) != rows for leaf in leaves):
            raise FuncgaError(
                f"the last stage returned {', '.join(map(arrays.describe, leaves))} "
                f"for {rows} rows, of which {count} count: rows are axis 0 of every "
                "output. Reduce over rows in loss_fn, which does not see the rows that a "
                "micro-batch is filled up with."
            )
        leaves = [leaf if count == rows else leaf[:count] for leaf in leaves]
        visible = trees.unflatten(structure, leaves)
        args = visible, microbatch.args[-1]
        with recording_loss():
            loss, aux, objective = self.forward(args, microbatch.kwargs)
        # The loss of the first micro-batch may be computed once more than the others, to learn
        # shapes.
        self.values[number] = loss, trees.detached(aux, recorded=True)
        self.sums = self.sums or self._bind(loss, aux)
        weight = microbatch.weight
        seed = 0.0 if weight is None else self.seed_of(weight)
        if not seed:  # nothing of it counts, not even a NaN
            return _zero(output)
        return objective.to(torch.promote_types(loss.dtype, torch.float32)).mul(seed)

    def _values_of_all(self) -> Values:
        """The loss and aux of every micro-batch: those of the last stage are sent to all processes,
        and the weights that they saw are compared.

        Raises FuncgaError, in every process, if the loss raised an error, or if the processes were
        given different batches.
        """
        pipeline, error = self.pipeline, self.error
        values = [self.values[number] for number in sorted(self.values)]
        # An error itself may not be picklable, and values are of no use beside one.
        sent: object = None
        if error is not None:
            sent = f"{type(error).__name__}: {error}"
        elif pipeline.has_last:
            sent = _moved(values, torch.device("cpu"))
        said = Replicas(pipeline.group).channel.all_gather(([*map(float, self.weights)], sent))
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
        device = next((p.device for p in self.inputs), torch.device("cpu"))
        return _moved(received, device)

    # --- the result

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output: the value is the same in
        every process.
        """
        values = self._values_of_all()
        self.stages.end()
        self.arguments = Arguments((), self.owner, self.backend)
        sums = self.sums or self._bind(*values[0])
        with torch.no_grad():
            for (loss, aux), weight in zip(values, self.weights, strict=False):
                sums.add(self._rest(loss, aux, ()), weight)
            self.take_gradients()
            for reduction in self.reductions:
                if not self.wrapper.wrapped:
                    grads = {index: sums.of[index] for index in sums.folding.grads}
                    reduction.propose(sums, {**self._rest(*values[0], ()), **grads})
                reduction.merge()
            if self.reductions and not sums.steps:
                raise nothing_to_fold()
            return sums.result()


def _moved(values: Values, device: torch.device) -> Values:
    """The values, whose tensors are on this device."""
    on_device = partial(torch.Tensor.to, device=device)
    return _private.pytree.tree_map_only(torch.Tensor, on_device, values)  # type: ignore[no-any-return]


def _zero(output: Tree) -> torch.Tensor:
    """A zero whose gradient is zero for all tensors of an output, finite or not."""
    total = torch.zeros(())
    for leaf in trees.flatten(output)[0]:
        if leaf.requires_grad:
            nothing = torch.where(torch.zeros_like(leaf, dtype=torch.bool), leaf, 0)
            total = total.to(leaf.device) + nothing.sum()
    return total


@dataclass(frozen=True, eq=False, kw_only=True)
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

    def prepare(self) -> None:
        """Lets the stages have the parameters that get gradients."""
        if not self.wrapper.wrapped:
            check_not_wrapped(self.module)
        super().prepare()

    def window(self, program: Program, *others: Any) -> ScheduledWindow:
        """One window of a program with this gradient function."""
        return ScheduledWindow(self, program, *others)

    def reductions(self, program: Program) -> list[Reduction]:
        """What lets the processes with the stages meet, then what merges over replicas."""
        stages = Reduction(program.memory, Replicas(self.pipeline.group))
        return [stages, *super().reductions(program)]
