"""What the README writes."""

from benchmarks.jax_problem import Problem, Step
from funcga import accumulate, value_and_grad

NAME, SOURCE, AGAINST = "funcga", None, None


def make(problem: Problem) -> Step:
    """`accumulate` over funcga's own gradient."""
    return accumulate(value_and_grad(problem.loss), microbatch_size=problem.size, weight=problem.weight)
