"""funcga with exact sums, which have the same bits in any order of the micro-batches."""

from benchmarks.torch_problem import Problem, Step
from funcga import accumulate, mean, reproducible, value_and_grad
from torch_backend import pure_loss

NAME, SOURCE, AGAINST = "funcga, exact sums", None, None
KINDS, WORKLOADS = ("update",), ("transformer",)


def make(problem: Problem) -> Step:
    """`accumulate` with a fold whose sums are exact."""
    gradient = value_and_grad(pure_loss(problem.module, problem.loss))
    fold = reproducible(mean())
    step = accumulate(gradient, microbatch_size=problem.size, weight=problem.weight, fold=fold)
    params = dict(problem.module.named_parameters())
    return lambda batch: step(params, batch)
