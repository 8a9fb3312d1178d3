"""The README's `multi_steps`, whose two halves are jitted apart."""

from benchmarks.jax_problem import Optimization
from benchmarks.jax_windows import Run, split
from funcga import multi_steps

NAME, SOURCE, AGAINST = "`multi_steps`, accumulate and flush", None, None


def make(problem: Optimization) -> Run:
    """A window of `multi_steps`."""
    return split(multi_steps(problem.tx, problem.n), problem)
