"""What the README writes for replicas."""

from typing import Any

from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, value_and_grad
from torch_backend import Replicas, pure_loss

NAME, SOURCE, AGAINST = "funcga, `across=`", None, None


def make(problem: Problem, **options: Any) -> Step:
    """`accumulate(..., across=group)`, which also merges the loss."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    across = Replicas(problem.group, **options) if options else problem.group
    step = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight, across=across)
    params = dict(problem.module.named_parameters())
    return lambda batch: step(params, batch)
