"""What the documentation writes."""

from benchmarks.torch_pairs import contrastive
from benchmarks.torch_problem import Problem, Step
from funcga import coupled
from torch_backend import pure_loss

NAME, SOURCE, AGAINST = "funcga", None, None


def make(problem: Problem) -> Step:
    """`coupled` over the embeddings of a micro-batch, and the loss of all of them."""
    module = problem.module
    step = coupled(
        pure_loss(module, lambda module, rows: module(rows).unbind(1)),
        lambda params, sides: contrastive(*sides, params["logit_scale"], module.tile),
        microbatch_size=problem.size,
    )
    params = dict(module.named_parameters())
    return lambda batch: step(params, batch)
