"""The loop of those who have read about it: each loss counts by what it is a mean over."""

from typing import Any

import torch

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST, KINDS = "a `.backward()` loop, weighed by hand", "funcga", ("exactness",)
SOURCE = "https://huggingface.co/blog/gradient_accumulation"


def make(problem: Problem) -> Step:
    """The window is counted first, and each loss is multiplied by its micro-batch's part of the count."""

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        counted = problem.count(batch)
        for rows in problem.microbatches(batch):
            loss = problem.loss(problem.module, rows) * (problem.count(rows) / counted)
            loss.backward()
            total = total + loss.detach()
        return total, problem.taken()

    return step
