"""optax's MultiSteps, jitted alone."""

import optax

from benchmarks.jax_problem import Optimization
from benchmarks.jax_windows import Run, returned

NAME, AGAINST = "`optax.MultiSteps`, updates returned", "funcga_update_returned"
SOURCE = "https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html"


def make(problem: Optimization) -> Run:
    """A window of MultiSteps."""
    return returned(optax.MultiSteps(problem.tx, every_k_schedule=problem.n), problem)
