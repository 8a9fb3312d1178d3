"""multi_steps with a gradient of funcga for each micro-batch, which is handed over as a tree."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import multi_steps, value_and_grad
from torch_backend import apply_updates, from_optimizer, pure_loss

NAME, SOURCE, AGAINST = "funcga, `value_and_grad`, `multi_steps(donate=True)`: `update`", None, None


def make(problem: Problem) -> Step:
    """`update` for every micro-batch, of which the last makes the update."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    tx = multi_steps(from_optimizer(torch.optim.AdamW, fused=True, **OPTIONS), problem.n, donate=True)
    params: Any = {name: p.detach() for name, p in problem.module.named_parameters()}
    state = tx.init(params)

    def step(batch: torch.Tensor) -> Any:
        nonlocal params, state
        total: Any = 0
        for rows in problem.microbatches(batch):
            loss, grads = gradient(params, rows)
            updates, state = tx.update(grads, state, params)
            if tx.has_updated(state):
                params = apply_updates(params, updates)
            total = total + loss
        return total / problem.n, params

    return step
