"""DDP with `no_sync`, whose gradients are views of smaller buckets: no copy, and reductions that begin earlier."""

from benchmarks.contenders.torch_ranks import ddp
from benchmarks.torch_problem import Problem, Step

NAME, SOURCE, AGAINST = "DDP, `no_sync`, views of 4 MB buckets", ddp.SOURCE, ddp.AGAINST
KINDS = ("update",)


def make(problem: Problem) -> Step:
    """`gradient_as_bucket_view=True, bucket_cap_mb=4`."""
    return ddp.make(problem, gradient_as_bucket_view=True, bucket_cap_mb=4)
