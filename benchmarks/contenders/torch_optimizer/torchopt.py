"""TorchOpt's functional AdamW, after the best torch.func loop: it has nothing that accumulates."""

from typing import Any

import torch
import torchopt

from benchmarks.contenders.torch import functional_loop
from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = (
    "TorchOpt's `adamw`, the best torch.func loop",
    ("funcga", "transform", "funcga_updates", "update"),
)
SOURCE = "https://torchopt.readthedocs.io/en/latest/optimizer/optim.html"


def make(problem: Problem) -> Step:
    """`update` once a window; `apply_updates` writes to the parameters, as is its default."""
    accumulated = functional_loop.make(problem)
    optimizer = torchopt.adamw(**OPTIONS)
    params: Any = {name: p.detach() for name, p in problem.module.named_parameters()}
    state = optimizer.init(params)

    def step(batch: torch.Tensor) -> Any:
        nonlocal params, state
        loss, grads = accumulated(batch)
        updates, state = optimizer.update(grads, state, params=params)
        params = torchopt.apply_updates(params, updates)
        return loss, params

    return step
