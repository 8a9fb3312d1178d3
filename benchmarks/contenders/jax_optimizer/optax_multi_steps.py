"""optax's MultiSteps, in one jitted step with the parameters, as its example has it."""

import optax

from benchmarks.jax_problem import Optimization
from benchmarks.jax_windows import Run, applied

NAME, AGAINST = "`optax.MultiSteps`", ("funcga_update", "funcga_split")
SOURCE = "https://optax.readthedocs.io/en/latest/_collections/examples/gradient_accumulation.html"


def make(problem: Optimization) -> Run:
    """A window of MultiSteps."""
    return applied(optax.MultiSteps(problem.tx, every_k_schedule=problem.n), problem)
