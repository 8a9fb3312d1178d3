"""The torch.func loop as one writes it first: a tree of gradients added to a tree of sums."""

from typing import Any

import torch
from torch.utils import _pytree

from benchmarks.torch_problem import Problem, Step, functional_loss

NAME, AGAINST = "the naive torch.func loop (`tree_map`)", "funcga"
SOURCE = "https://docs.pytorch.org/docs/stable/func.api.html"


def make(problem: Problem) -> Step:
    """Sums in the gradients' dtype, of micro-batches that weigh alike, divided by how many there were."""
    gradient = torch.func.grad_and_value(functional_loss(problem))
    params = {name: p.detach() for name, p in problem.module.named_parameters()}

    def step(batch: torch.Tensor) -> Any:
        total = None
        microbatches = problem.microbatches(batch)
        for rows in microbatches:
            value = gradient(params, rows)
            total = value if total is None else _pytree.tree_map(torch.add, total, value)
        grads, loss = _pytree.tree_map(lambda t: t / len(microbatches), total)
        return loss, grads

    return step
