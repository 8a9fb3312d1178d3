"""The whole step, compiled."""

from typing import Any

import torch

from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, value_and_grad
from torch_backend import pure_loss

NAME, SOURCE, AGAINST = "funcga, compiled as a whole", None, None


def make(problem: Problem, backend: Any = "inductor") -> Step:
    """`torch.compile(accumulate(...), fullgraph=True)`."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    step = torch.compile(
        accumulate(gradient, microbatch_size=problem.size, weight=problem.weight), fullgraph=True, backend=backend
    )
    params = {name: p.detach() for name, p in problem.module.named_parameters()}
    return lambda batch: step(params, batch)
