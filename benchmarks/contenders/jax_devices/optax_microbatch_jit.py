"""optax's microbatch over sharded data: it cuts the batch so that no row moves, and the compiler reduces."""

import jax
import optax

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST = "`optax.microbatch`, MEAN, jit over sharded data", "funcga"
SOURCE = "https://optax.readthedocs.io/en/latest/api/microbatching.html"


def make(problem: Problem) -> Step:
    """The mean over micro-batches, each of which has rows of every device."""
    mean = optax.microbatching.AccumulationType.MEAN
    size = problem.size * problem.mesh.devices.size
    return optax.microbatch(jax.value_and_grad(problem.loss), 1, size, mean)
