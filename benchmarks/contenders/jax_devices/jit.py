"""The scan that everybody writes, where the compiler places the reductions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST = "jit over sharded data", "funcga"
SOURCE = "https://docs.jax.dev/en/latest/201/sharding.html"


def make(problem: Problem) -> Step:
    """A `lax.scan` by hand: micro-batch i has the i-th rows of every device, so that no row moves."""
    gradient = jax.value_and_grad(problem.loss)
    devices = problem.mesh.devices.size

    def step(params: Any, batch: jax.Array) -> Any:
        micro = batch.reshape(devices, problem.n, -1, *batch.shape[1:]).swapaxes(0, 1)
        micro = micro.reshape(problem.n, -1, *batch.shape[1:])
        zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
        add = lambda total, rows: (jax.tree.map(jnp.add, total, gradient(params, rows)), None)
        return jax.tree.map(lambda total: total / problem.n, lax.scan(add, zeros, micro)[0])

    return step
