"""What the README writes."""

from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, value_and_grad
from torch_backend import pure_loss

NAME, SOURCE, AGAINST = "funcga", None, None


def make(problem: Problem) -> Step:
    """`accumulate` over funcga's own gradient."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    step = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight)
    params = dict(problem.module.named_parameters())
    return lambda batch: step(params, batch)
