"""multi_steps in its two halves, for those who know when a window ends."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import multi_steps, value_and_grad
from torch_backend import apply_updates, from_optimizer, pure_loss

NAME, SOURCE, AGAINST = "funcga, `multi_steps(donate=True)`: `accumulate` and `flush`", None, None


def make(problem: Problem) -> Step:
    """`accumulate` for every micro-batch, and `flush` once."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    tx = multi_steps(from_optimizer(torch.optim.AdamW, fused=True, **OPTIONS), problem.n, donate=True)
    params: Any = {name: p.detach() for name, p in problem.module.named_parameters()}
    state = tx.init(params)

    def step(batch: torch.Tensor) -> Any:
        nonlocal params, state
        total: Any = 0
        for rows in problem.microbatches(batch):
            loss, grads = gradient(params, rows)
            state = tx.accumulate(grads, state)
            total = total + loss
        updates, state = tx.flush(state, params)
        params = apply_updates(params, updates)
        return total / problem.n, params

    return step
