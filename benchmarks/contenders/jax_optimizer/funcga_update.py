"""The README's `multi_steps`, in one jitted step with the parameters."""

from benchmarks.jax_problem import Optimization
from benchmarks.jax_windows import Run, applied
from funcga import multi_steps

NAME, SOURCE, AGAINST = "`multi_steps`, update", None, None


def make(problem: Optimization) -> Run:
    """A window of `multi_steps`."""
    return applied(multi_steps(problem.tx, problem.n), problem)
