"""optax's microbatch, which adds the gradients of summed losses, by default, for code that counts the items by hand."""

from typing import Any

import jax
import optax

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST = "`optax.microbatch`, SUM", "funcga"
SOURCE = "https://optax.readthedocs.io/en/latest/api/microbatching.html"


def make(problem: Problem) -> Step:
    """The sum over items, divided by how many the batch has."""
    summed = lambda params, rows: problem.loss(params, rows) * problem.count(rows)
    sums = optax.microbatch(jax.value_and_grad(summed), argnums=1, microbatch_size=problem.size)

    def step(params: Any, batch: jax.Array) -> Any:
        count = problem.count(batch)
        return jax.tree.map(lambda total: (total / count).astype(total.dtype), sums(params, batch))

    return step
