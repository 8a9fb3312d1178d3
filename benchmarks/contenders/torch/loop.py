"""The loop that everybody writes."""

from typing import Any

import torch

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "a `.backward()` loop", "funcga"
SOURCE = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"


def make(problem: Problem) -> Step:
    """Each loss is divided by the planned n, and gradients add up in `.grad`."""

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        for rows in problem.microbatches(batch):
            loss = problem.loss(problem.module, rows) / problem.n
            loss.backward()
            total = total + loss.detach()
        return total, problem.taken()

    return step
