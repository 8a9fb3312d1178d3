"""multi_steps as its page writes it for torch: the gradient of each micro-batch is added where it is computed."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import multi_steps, value_and_grad
from torch_backend import from_optimizer, pure_loss

NAME, SOURCE, AGAINST = "funcga, `accumulate_from`, `flush_into`, `multi_steps(donate=True)`", None, None


def make(problem: Problem) -> Step:
    """`accumulate_from` for every micro-batch, and `flush_into` once."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    tx = multi_steps(from_optimizer(torch.optim.AdamW, fused=True, **OPTIONS), problem.n, donate=True)
    params: Any = {name: p.detach() for name, p in problem.module.named_parameters()}
    state = tx.init(params)

    def step(batch: torch.Tensor) -> Any:
        nonlocal params, state
        total: Any = 0
        for rows in problem.microbatches(batch):
            loss, state = tx.accumulate_from(gradient, state, params, rows)
            total = total + loss
        params, state = tx.flush_into(state, params, donate=True)
        return total / problem.n, params

    return step
