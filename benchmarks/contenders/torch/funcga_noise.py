"""funcga with an estimate of the gradient noise of each update."""

from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, gradient_noise, value_and_grad
from torch_backend import pure_loss

NAME, SOURCE, AGAINST = "funcga, gradient noise", None, None
KINDS, WORKLOADS = ("update",), ("transformer",)


def make(problem: Problem) -> Step:
    """`accumulate` with an observer."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    step = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight, observe=gradient_noise())
    params = dict(problem.module.named_parameters())
    return lambda batch: step(params, batch)[0]
