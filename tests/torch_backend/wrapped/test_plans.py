"""What cannot be planned: the step of a wrapped module, and that of a pipeline."""

import pytest
import torch

import funcga
from funcga._call import OwningGradient
from tests.processes import processes
from tests.torch_backend.reduce.test_replicas import refused
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, made, mean_square, rows_of
from torch_backend import module_value_and_grad


def plans(group, kind):
    """A plan that one rank asks for alone."""
    module, batch = WRAPPERS[kind](group, made()), rows_of(group.rank(), torch.float32)
    gradient = module_value_and_grad(module, mean_square)
    if group.rank() == 0:
        funcga.plan(gradient, *batch, memory=10**9)
    raise funcga.FuncgaError("the other rank is not asked")


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_wrapped_module_is_refused(kind):
    name = {"ddp": "DistributedDataParallel", "fsdp1": "FullyShardedDataParallel", "fsdp2": "fully_shard"}[kind]
    text, _ = refused(plans, kind, size=2)
    assert text == (
        f"the module is wrapped by {name}, and a plan does not know what that holds, sends and frees. Plan the step of "
        "the module that was wrapped, with across=group: it has all parameters and gradients whole. Leave room for the "
        "buckets of DDP, as large as all gradients; with FSDP that plan is an upper bound."
    )


def of_what_was_wrapped(group):
    module, batch = made(), rows_of(group.rank(), torch.float32)
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 2, across=group)
    return funcga.plan(step, *batch, memory=10**9).n if group.rank() == 0 else None


def test_the_module_that_was_wrapped_is_planned_by_one_rank_alone():
    assert processes().run(of_what_was_wrapped, size=2) == [1, None]


def test_a_pipeline_is_refused():
    class OfPipeline(OwningGradient):
        def __call__(self, x):
            return x

    with pytest.raises(funcga.FuncgaError, match="the plan of a step of a pipeline was asked for"):
        funcga.plan(OfPipeline(), torch.ones(4, 2))
