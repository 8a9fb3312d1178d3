"""multi_steps in its two halves, for those who know when a window ends."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import multi_steps
from torch_backend import from_optimizer

NAME, SOURCE, AGAINST = "funcga, `.backward()`, `multi_steps(donate=True)`: `accumulate`, `flush_into`", None, None


def make(problem: Problem) -> Step:
    """`accumulate` for every micro-batch, and `flush_into` once, which steps in place."""
    tx = multi_steps(from_optimizer(torch.optim.AdamW, fused=True, **OPTIONS), problem.n, donate=True)
    parameters = dict(problem.module.named_parameters())  # looked up once, as an optimizer does
    params: Any = parameters
    state = tx.init(params)

    def taken() -> Any:
        grads = {name: p.grad for name, p in parameters.items()}
        for p in parameters.values():
            p.grad = None
        return grads

    def step(batch: torch.Tensor) -> Any:
        nonlocal params, state
        total: Any = 0
        for rows in problem.microbatches(batch):
            loss = problem.loss(problem.module, rows)
            loss.backward()
            state = tx.accumulate(taken(), state)
            total = total + loss.detach()
        params, state = tx.flush_into(state, params, donate=True)
        return total / problem.n, params

    return step
