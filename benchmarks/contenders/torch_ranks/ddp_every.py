"""DDP without `no_sync`: every micro-batch is synchronised."""

from benchmarks.contenders.torch_ranks import ddp
from benchmarks.torch_problem import Problem, Step

NAME, SOURCE, AGAINST = "DDP, every micro-batch", ddp.SOURCE, ddp.AGAINST
HANGS = ("uneven ranks",)


def make(problem: Problem) -> Step:
    """The loop that one process would write."""
    return ddp.make(problem, every=True)
