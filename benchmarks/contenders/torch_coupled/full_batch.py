"""The whole batch at once, with all its activations: the right gradient."""

from typing import Any

import torch

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "the whole batch at once", "funcga"
SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html"


def make(problem: Problem) -> Step:
    """One forward and one backward pass."""

    def step(batch: torch.Tensor) -> Any:
        loss = problem.loss(problem.module, batch)
        loss.backward()
        return loss.detach(), problem.taken()

    return step
