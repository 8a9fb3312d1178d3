"""optax's MultiSteps around no optimizer: what an optimizer would be given."""

from typing import Any

import jax
import optax
from jax import lax

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST, KINDS = "`optax.MultiSteps`", "funcga", ("exactness",)
SOURCE = "https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html"


def make(problem: Problem) -> Step:
    """The updates after the last micro-batch, of a window that begins with the batch."""
    tx = optax.MultiSteps(optax.identity(), every_k_schedule=problem.n)
    gradient = jax.value_and_grad(problem.loss)

    def step(params: Any, batch: jax.Array) -> Any:
        def micro_step(state: Any, rows: jax.Array) -> Any:
            loss, grads = gradient(params, rows)
            updates, state = tx.update(grads, state, params)
            return state, (loss, updates)

        micro = batch.reshape(-1, problem.size, *batch.shape[1:])
        _, (losses, updates) = lax.scan(micro_step, tx.init(params), micro)
        return losses.mean(), jax.tree.map(lambda update: update[-1], updates)

    return step
