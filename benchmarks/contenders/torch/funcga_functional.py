"""funcga over a gradient of torch.func, which it calls as it is."""

import torch

from benchmarks.torch_problem import Problem, Step, functional_loss
from funcga import accumulate

NAME, SOURCE, AGAINST = "funcga over `torch.func.grad_and_value`", None, None


def make(problem: Problem) -> Step:
    """`accumulate` over what torch.func makes of the same loss."""
    gradient = torch.func.grad_and_value(functional_loss(problem))
    step = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight)
    params = {name: p.detach() for name, p in problem.module.named_parameters()}
    return lambda batch: step(params, batch)[::-1]
