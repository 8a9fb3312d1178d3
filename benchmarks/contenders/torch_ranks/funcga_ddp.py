"""funcga that drives DDP."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_problem import Problem, Step
from funcga import accumulate
from torch_backend import module_value_and_grad

NAME, SOURCE, AGAINST = "funcga, `module_value_and_grad` over DDP", None, None


def make(problem: Problem) -> Step:
    """`accumulate(module_value_and_grad(DistributedDataParallel(module), loss_fn))`."""
    return driving(problem, DistributedDataParallel(problem.module, process_group=problem.group))


def driving(problem: Problem, module: nn.Module) -> Step:
    """The same for a module that is wrapped by anything."""
    gradient = module_value_and_grad(module, problem.loss)
    step = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight, in_axes=0)

    def named(batch: torch.Tensor) -> Any:
        loss, grads = step(batch)
        return loss, {name.removeprefix("module."): g for name, g in grads.items()}  # as the module itself names them

    return named
