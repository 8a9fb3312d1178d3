"""The scan that everybody writes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST = "a `lax.scan` by hand", "funcga"
SOURCE = "https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html"


def make(problem: Problem) -> Step:
    """The batch is cut into the planned n, gradients add up in the carry, and the sum is divided by n."""
    gradient = jax.value_and_grad(problem.loss)

    def step(params: Any, batch: jax.Array) -> Any:
        micro = batch.reshape(problem.n, -1, *batch.shape[1:])
        zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
        add = lambda total, rows: (jax.tree.map(jnp.add, total, gradient(params, rows)), None)
        return jax.tree.map(lambda total: total / problem.n, lax.scan(add, zeros, micro)[0])

    return step
