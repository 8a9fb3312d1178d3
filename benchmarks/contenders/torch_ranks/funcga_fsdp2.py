"""funcga that drives FSDP2."""

from benchmarks.contenders.torch_ranks import fsdp2, funcga_ddp
from benchmarks.torch_problem import Problem, Step

NAME, SOURCE, AGAINST = "funcga, `module_value_and_grad` over FSDP2", None, None


def make(problem: Problem) -> Step:
    """`accumulate(module_value_and_grad(fully_shard(module), loss_fn))`."""
    return funcga_ddp.driving(problem, fsdp2.sharded(problem))
