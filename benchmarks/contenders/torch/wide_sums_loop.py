"""The loop whose `.grad` is float32 where parameters are narrower, which torch does since `grad_dtype`."""

from typing import Any

import torch

from benchmarks.contenders.torch import loop
from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "a `.backward()` loop with float32 sums", "funcga"
KINDS, WORKLOADS = ("update", "exactness"), ("wide_bfloat16",)
SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad_dtype.html"


def make(problem: Problem) -> Step:
    """Zeros of float32 in each `.grad`, to which autograd then adds."""
    add = loop.make(problem)
    for parameter in problem.module.parameters():
        parameter.grad_dtype = None

    def step(batch: torch.Tensor) -> Any:
        for parameter in problem.module.parameters():
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        return add(batch)

    return step
