"""The gradient function of a pipeline, from its stages, its schedule and a loss."""

from collections.abc import Sequence

from torch import nn

from funcga._types import LossFn
from funcga.errors import FuncgaError, check_count
from funcga.tools.pipelines.schedule_in_torch import Pipeline, ScheduleFactory, Stage
from funcga.tools.pipelines.window_in_torch import PipelineGradient
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
    """Returns `f(*inputs, target) -> (value, {name: gradient})` for a pipeline.

    Use it with `accumulate` and `stream`: the schedule runs their micro-batches, and the result is
    that of the whole model on one device, for any weights of the micro-batches. Every process of
    the pipeline passes the same batch, and gets the value and aux of the last stage. All arguments
    are split on axis 0. Keyword arguments are passed to loss_fn.

    A schedule runs a fixed number of micro-batches of the same shape. Shorter micro-batches are
    padded with their last row, and shorter windows are filled up; loss_fn does not get what is
    added, and it has no gradient. Layers that mix rows, such as BatchNorm, do see padding.

    `across=` merges data-parallel replicas of the pipeline: pass the processes that have the same
    stages, such as mesh["dp"]. A replica may have fewer micro-batches than others, or none. Stages
    wrapped by DistributedDataParallel or fully_shard reduce by themselves, and all replicas then
    need the same number of schedule steps.

    The parameters and their `.grad`s are never changed. The fold of the gradients has to be a sum:
    mean(), per_weight(), sum(), or Fold(reducers.weighted, normalizers.by_steps); value and aux may
    have any fold. An error in loss_fn is raised in every process of the pipeline.

    Args:
        schedule_factory: A schedule class, such as ScheduleGPipe, Schedule1F1B,
            ScheduleInterleaved1F1B or ScheduleInterleavedZeroBubble; or a function with the same
            arguments, (stages, n_microbatches, loss_fn=..., scale_grads=False), that returns a new
            schedule.
        stages: The PipelineStage of this process, or a list of them for schedules of several
            stages, without input_args: shapes come from the batch.
        loss_fn: `loss_fn(output, target)` -> a scalar, or (scalar, aux) with has_aux: the loss of a
            micro-batch, from the output of the last stage. The target is any tree.
        n_microbatches: The number of micro-batches of a schedule step; a window takes as many steps
            as it needs. By default a window is one step.
        has_aux: Whether loss_fn returns (scalar, aux).

    Returns:
        A gradient function. `f.module` is a ModuleDict of the stages of this process, by index. The
        gradients are those of the parameters in `dict(f.module.named_parameters())` that require
        grad, such as "1.weight" of stage 1: for an optimizer of `f.module.parameters()`, and
        `torch_backend.assign_grads(f.module, grads)`.

    Raises:
        FuncgaError: If the schedule scales gradients, if stages are wrapped by anything but
            DistributedDataParallel and fully_shard, if the fold is not a sum, or if processes of a
            pipeline are given different batches.

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
    pipeline = Pipeline(schedule_factory, stages)
    if n_microbatches is not None:
        n_microbatches = check_count(n_microbatches, "n_microbatches")
    module = nn.ModuleDict({str(stage.stage_index): stage.submod for stage in pipeline.stages})
    wrapper = wrapper_of(module, "every")
    if wrapper.wrapped:
        _check_wrapper(wrapper, module)
    return PipelineGradient(
        loss_fn,
        0,
        has_aux,
        True,
        module=module,
        wrapper=wrapper,
        pipeline=pipeline,
        n_microbatches=n_microbatches,
    )


def _check_wrapper(wrapper: Wrapper, module: nn.ModuleDict) -> None:
    """Raises FuncgaError unless schedules support the wrapper of the stages."""
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
