"""What the README writes."""

from benchmarks.jax_problem import Problem, Step
from funcga import accumulate, value_and_grad
from jax_backend import replicated

NAME, SOURCE, AGAINST = "funcga, `across`", None, None


def make(problem: Problem) -> Step:
    """`accumulate` on every device, merged once."""
    gradient = value_and_grad(problem.loss)
    step = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight, across="data")
    return replicated(step, problem.mesh)
