"""multi_steps, which is given the gradients of `.backward()` one by one."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import multi_steps
from torch_backend import from_optimizer

NAME, SOURCE, AGAINST = "funcga, `.backward()`, `multi_steps(donate=True)`: `update`", None, None


def make(problem: Problem) -> Step:
    """`update` for every micro-batch, of which the last makes the update."""
    tx = multi_steps(from_optimizer(torch.optim.AdamW, fused=True, **OPTIONS), problem.n, donate=True)
    params: Any = dict(problem.module.named_parameters())
    state = tx.init(params)

    def step(batch: torch.Tensor) -> Any:
        nonlocal state
        total: Any = 0
        updates: Any = None
        for rows in problem.microbatches(batch):
            loss = problem.loss(problem.module, rows)
            loss.backward()
            updates, state = tx.update(problem.taken(), state, params)
            total = total + loss.detach()
        with torch.no_grad():
            torch._foreach_add_(list(params.values()), [updates[name] for name in params])
        return total / problem.n, params

    return step
