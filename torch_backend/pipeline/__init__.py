"""The tool that accumulates over a pipeline's stages: torch.distributed.pipelining, whose schedules
are accumulators.

    gradient = torch_backend.pipeline_value_and_grad(ScheduleGPipe, stage, F.cross_entropy)
    loss, grads = funcga.accumulate(gradient, n=4)(x, y)

The gradient function and a window of it are in `window.py`, and a schedule that takes
any micro-batches in `schedule.py`. It stands on the engine's buffers, on the reduction over
replicas and on what drives wrapped modules; nothing stands on it. Only torch has this package: in
JAX stages are axes of a mesh in one program.

Design note: docs/concepts/inside_pipelines.md.
"""

from collections.abc import Sequence

from torch import nn

from funcga._types import LossFn
from funcga.errors import FuncgaError, check_callable, check_count
from torch_backend.pipeline.schedule import Pipeline, ScheduleFactory, Stage
from torch_backend.pipeline.window import PipelineGradient, Unwrapped
from torch_backend.wrapped import check_covered, wrapper_of
from torch_backend.wrapped.ddp import Wrapper

__all__ = ["pipeline_value_and_grad"]


def pipeline_value_and_grad(
    schedule_factory: ScheduleFactory,
    stages: Stage | Sequence[Stage],
    loss_fn: LossFn,
    *,
    n_microbatches: int | None = None,
    has_aux: bool = False,
) -> PipelineGradient:
    """`f(*inputs, target) -> (value, {name: gradient})` of a pipeline of
    torch.distributed.pipelining.

    For `accumulate` and `stream`: their micro-batches are those of the schedule, and the result is
    that of the whole model on one device, however unevenly micro-batches weigh. Every process of
    the pipeline gives the same batch, and gets the value, and what comes with it, of the last
    stage. The weights are the cotangents of the micro-batches' losses, which the schedule adds; one
    division at the end is by what was folded over micro-batches, steps of the schedule and
    replicas. All arguments are split on axis 0. Keyword arguments go to loss_fn.

    A schedule runs one number of micro-batches of one shape. Micro-batches with fewer rows than
    others are padded with their last row, and windows with fewer micro-batches are filled up;
    loss_fn does not see what is added, and it gets no gradient. Layers that mix rows, such as
    BatchNorm, do see added rows.

    Data-parallel replicas of the pipeline are merged by `across=`, which names the processes that
    have the same stages, such as mesh["dp"]; a replica may have fewer micro-batches than others, or
    none. Stages that DistributedDataParallel or fully_shard wraps reduce by themselves, and all
    replicas then need equally many steps of the schedule.

    The parameters and their `.grad`s are as before, whatever happens. The gradients' fold is a sum:
    mean(), per_weight(), sum(), or Fold(reducers.weighted, normalizers.by_steps); that of value and
    aux is any. An error in loss_fn is raised in every process of the pipeline.

    Args:
        schedule_factory: a schedule's class, such as ScheduleGPipe, Schedule1F1B,
            ScheduleInterleaved1F1B or ScheduleInterleavedZeroBubble; or a function that is called
            as they are, with (stages, n_microbatches, loss_fn=..., scale_grads=False), and returns
            a new schedule.
        stages: the PipelineStage of this process, or a list of them for schedules of several,
            without input_args: the shapes are those of the batch.
        loss_fn: `loss_fn(output, target)` returns a scalar, or (scalar, aux) with has_aux: the loss
            of one micro-batch, from the output of the last stage. The target is any tree.
        n_microbatches: how many micro-batches the schedule runs in one step; a window takes as many
            steps as it needs. By default all micro-batches of a window are one step.
        has_aux: whether loss_fn returns (scalar, aux).

    Returns:
        A gradient function. `f.module` has the stages of this process, in a ModuleDict with their
        indices. The gradients are those of `dict(f.module.named_parameters())` that require grad,
        such as "1.weight" of stage 1: for an optimizer of `f.module.parameters()`, and
        `torch_backend.assign_grads(f.module, grads)`.

    Raises:
        FuncgaError: for schedules that would scale what they sum, for stages wrapped by anything
            but DistributedDataParallel and fully_shard, for folds that are no sums, and where
            processes of one pipeline are given different batches.

    Example:
        >>> from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
        >>> stage = PipelineStage(nn.Linear(3, 2), 0, 1, torch.device("cpu"))  # of one
        >>> gradient = torch_backend.pipeline_value_and_grad(ScheduleGPipe, stage, F.cross_entropy)
        >>> step = funcga.accumulate(gradient, n=4)
        >>> loss, grads = step(torch.randn(10, 3), torch.randint(2, (10,)))
        >>> list(grads)
        ['0.weight', '0.bias']
        >>> torch_backend.assign_grads(gradient.module, grads)
    """
    check_callable(loss_fn, "loss_fn", "lambda output, target: F.cross_entropy(output, target)")
    if not callable(schedule_factory):
        raise FuncgaError(
            f"schedule_factory is a {type(schedule_factory).__name__}, which is built already, "
            "with a loss and a scale of its own. Pass the class: "
            f"pipeline_value_and_grad({type(schedule_factory).__name__}, stage, loss_fn)."
        )
    for stage in stages if isinstance(stages, Sequence) else [stages]:
        if not hasattr(stage, "submod"):
            raise FuncgaError(
                f"stages holds a {type(stage).__name__}. Pass what torch.distributed.pipelining "
                "runs: PipelineStage(module, stage_index, num_stages, device, group=group)."
            )
    pipeline = Pipeline(schedule_factory, stages)
    if n_microbatches is not None:
        n_microbatches = check_count(n_microbatches, "n_microbatches")
    module = nn.ModuleDict({str(stage.stage_index): stage.submod for stage in pipeline.stages})
    wrapper = wrapper_of(module, "every") or Unwrapped([], "a pipeline", "every")
    if wrapper.wrapped:
        _check_wrapper(wrapper, module)
    return PipelineGradient(module, loss_fn, has_aux, False, pipeline, n_microbatches, wrapper)


def _check_wrapper(wrapper: Wrapper, module: nn.ModuleDict) -> None:
    """Raises FuncgaError unless schedules know how to drive what wraps the stages."""
    if wrapper.name not in ("DistributedDataParallel", "fully_shard") or {*wrapper.wrapped} != {
        *module.values()
    }:
        raise FuncgaError(
            f"a stage is wrapped by {wrapper.name}, or a part of it is, and schedules drive the "
            "reduction of stages that are wrapped as a whole, by DistributedDataParallel or "
            "fully_shard. Wrap the module of every stage in one of the two; or in nothing, and let "
            "funcga reduce: accumulate(gradient, n, across=group)."
        )
    wrapper.check()
    check_covered(module, wrapper)
