"""A schedule of torch.distributed.pipelining for any number of micro-batches of any size.

A schedule itself runs a fixed number of micro-batches, with the shapes of its first batch. So it is
rebuilt for other shapes, and shorter micro-batches are padded with rows that the loss does not get.
The schedule's target is the index of a micro-batch, by which the loss looks up everything else.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from funcga.errors import FuncgaError
from funcga.tools.pipelines import private_in_torch


class Stage(Protocol):
    """What is read of a stage: public attributes of torch.distributed.pipelining.PipelineStage."""

    submod: nn.Module
    stage_index: int
    num_stages: int
    group: dist.ProcessGroup | None
    is_first: bool
    is_last: bool


# A class of torch's schedules, or a function that is called like one:
# schedule_factory(stage or list of stages, n_microbatches, loss_fn=..., scale_grads=False)
ScheduleFactory = Callable[..., Any]
# loss(output, index): what is differentiated of micro-batch `index`, whose output the last stage
# has computed.
LossAt = Callable[[Any, int], torch.Tensor]


class Pipeline:
    """The stages of this process, and the last schedule that was built for them.

    A schedule keeps its state in its stages, so they have one schedule at a time.
    """

    def __init__(self, schedule_factory: ScheduleFactory, stages: Stage | Sequence[Stage]):
        self.factory, self.given = schedule_factory, stages
        self.stages: list[Stage] = [*stages] if isinstance(stages, Sequence) else [stages]
        self.has_first = any(stage.is_first for stage in self.stages)
        self.has_last = any(stage.is_last for stage in self.stages)
        self.schedule: Any = None
        self.count = 0  # micro-batches of the schedule
        self.rows = 0  # of each of them
        self.shapes: object = None
        self.loss: LossAt | None = None  # of the window that runs

    @property
    def group(self) -> dist.ProcessGroup:
        """The processes that have the stages."""
        group: Any = self.stages[0].group or dist.group.WORLD
        return group  # type: ignore[no-any-return]

    def run(
        self,
        microbatches: Sequence[tuple[torch.Tensor, ...]],
        loss: LossAt,
        together: Callable[[bool], bool],
    ) -> None:
        """Runs forward and backward passes of all stages, which add to the parameters' `.grad`s.

        `microbatches` are the inputs of the first stage, the same in all processes of the pipeline.
        `together(needed)` is whether to build a schedule, because one is needed here, or on a
        replica that has to build at the same time.
        """
        self._fit(microbatches, together)
        inputs = [
            torch.cat([_padded(part, self.rows) for part in column])
            for column in zip(*microbatches, strict=True)
        ]
        self.loss = loss
        try:
            with torch.enable_grad():  # also under the user's torch.no_grad()
                self.schedule.step(
                    *(inputs if self.has_first else ()),
                    target=torch.arange(self.count, device="cpu") if self.has_last else None,
                    return_outputs=False,
                )
        finally:
            self.loss = None

    def _fit(
        self, microbatches: Sequence[tuple[torch.Tensor, ...]], together: Callable[[bool], bool]
    ) -> None:
        """Builds a schedule for these micro-batches, unless the last one fits."""
        rows = max(len(part) for inputs in microbatches for part in inputs)
        shapes = [(part.shape[1:], part.dtype) for part in microbatches[0]]
        fits = (self.count, self.shapes) == (len(microbatches), shapes) and rows <= self.rows
        if together(self.schedule is None or not fits):
            self.schedule = None  # should the factory raise
            self.count, self.rows, self.shapes = len(microbatches), rows, shapes
            self.schedule = self._built()

    def _built(self) -> Any:
        """A new schedule. Raises FuncgaError if it would not sum the losses that it is given."""

        # Of each schedule its own, so that a schedule that was built before can be told from this
        # one.
        def loss_fn(output: Any, index: torch.Tensor) -> torch.Tensor:
            assert self.loss is not None
            return self.loss(output, int(index))

        schedule = self.factory(self.given, self.count, loss_fn=loss_fn, scale_grads=False)
        if getattr(schedule, "scale_grads", False):
            raise FuncgaError(
                "schedule_factory returned a schedule with scale_grads=True, which divides by its "
                "number of micro-batches whatever they weigh, and again what earlier steps have "
                "summed. Pass on the keyword arguments that it is called with: lambda stage, n, "
                "**options: Schedule1F1B(stage, n, **options)."
            )
        if private_in_torch.loss_of_schedule(schedule, loss_fn) is not loss_fn:
            raise FuncgaError(
                "schedule_factory returned a schedule with a loss of its own, or one that was "
                "stepped before. Pass the class, such as Schedule1F1B, or a function that builds a "
                "new schedule at each call, with the keyword arguments that it gets: lambda stage, "
                "n, **options: Schedule1F1B(stage, n, **options)."
            )
        is_ddp = any(
            isinstance(stage.submod, nn.parallel.DistributedDataParallel) for stage in self.stages
        )
        if is_ddp and private_in_torch.has_weight_passes(schedule):
            raise FuncgaError(
                "stages are wrapped by DistributedDataParallel, which reduces nothing in a "
                f"{type(schedule).__name__}: it computes the gradients of parameters in passes "
                "that DDP does not see. Wrap stages by fully_shard; or by nothing, and let funcga "
                "reduce: accumulate(gradient, n, across=group)."
            )
        return schedule


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with its last row repeated: a real row, on which a model behaves as usual."""
    missing = rows - len(tensor)
    return (
        torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing else tensor
    )
