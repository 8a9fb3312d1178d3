"""optax's microbatch, which averages the gradients of mean losses."""

import jax
import optax

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST = "`optax.microbatch`, MEAN", "funcga"
SOURCE = "https://optax.readthedocs.io/en/latest/api/microbatching.html"


def make(problem: Problem) -> Step:
    """The mean over micro-batches, each of which counts as much."""
    mean = optax.microbatching.AccumulationType.MEAN
    return optax.microbatch(jax.value_and_grad(problem.loss), 1, problem.size, mean)
