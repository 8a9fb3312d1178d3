"""funcga and an optimizer that is a function, which is given its parameters, gradients and state away."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, value_and_grad
from funcga.transforms import apply
from torch_backend import from_optimizer, pure_loss

NAME, SOURCE, AGAINST = "funcga, `from_optimizer`, `apply(donate=True)`", None, None


def make(problem: Problem) -> Step:
    """`accumulate`, then `apply` of the fused AdamW, which steps in place."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    accumulated = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight)
    tx = from_optimizer(torch.optim.AdamW, fused=True, **OPTIONS)
    params: Any = {name: p.detach() for name, p in problem.module.named_parameters()}
    state = tx.init(params)

    def step(batch: torch.Tensor) -> Any:
        nonlocal params, state
        loss, grads = accumulated(params, batch)
        params, state = apply(tx, grads, state, params, donate=True)
        return loss, params

    return step
