"""What the README writes for those who keep their optimizer."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, value_and_grad
from torch_backend import assign_grads, pure_loss

NAME, SOURCE, AGAINST = "funcga, `assign_grads`, `optimizer.step()`", None, None


def make(problem: Problem) -> Step:
    """`accumulate`, and the fused AdamW steps where the parameters are."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    accumulated = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight)
    params = dict(problem.module.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), fused=True, **OPTIONS)

    def step(batch: torch.Tensor) -> Any:
        loss, grads = accumulated(params, batch)
        assign_grads(problem.module, grads)
        optimizer.step()
        optimizer.zero_grad()
        return loss, params

    return step
