"""funcga and an optimizer that is a pure function, whose updates are added to the parameters."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, value_and_grad
from torch_backend import apply_updates, from_optimizer, pure_loss

NAME, SOURCE, AGAINST = "funcga, `from_optimizer`, `apply_updates`: all pure", None, None


def make(problem: Problem) -> Step:
    """`accumulate`, then `(init, update)` of the fused AdamW: every state and parameter stays as it was."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    accumulated = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight)
    tx = from_optimizer(torch.optim.AdamW, fused=True, **OPTIONS)
    params: Any = {name: p.detach() for name, p in problem.module.named_parameters()}
    state = tx.init(params)

    def step(batch: torch.Tensor) -> Any:
        nonlocal params, state
        loss, grads = accumulated(params, batch)
        updates, state = tx.update(grads, state, params)
        params = apply_updates(params, updates)
        return loss, params

    return step
