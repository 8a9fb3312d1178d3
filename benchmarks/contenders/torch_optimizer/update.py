"""multi_steps, which is given the gradients of `.backward()` one by one."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import multi_steps
from funcga.transforms import apply
from torch_backend import from_optimizer

NAME, SOURCE, AGAINST = "funcga, `.backward()`, `multi_steps`: `apply(donate=True)`", None, None


def make(problem: Problem) -> Step:
    """`apply` for every micro-batch, of which the last makes the update, in place."""
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
            params, state = apply(tx, taken(), state, params, donate=True)
            total = total + loss.detach()
        return total / problem.n, params

    return step
