"""The README's `multi_steps`, jitted alone."""

from benchmarks.jax_problem import Optimization
from benchmarks.jax_windows import Run, returned
from funcga import multi_steps

NAME, SOURCE, AGAINST = "`multi_steps`, updates returned", None, None


def make(problem: Optimization) -> Run:
    """A window of `multi_steps`."""
    return returned(multi_steps(problem.tx, problem.n), problem)
