"""The loop that everybody writes."""

from typing import Any

import torch

from benchmarks.contenders.torch_optimizer import OPTIONS
from benchmarks.torch_problem import Problem, Step

NAME = "a `.backward()` loop, `optimizer.step()`"
SOURCE = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
AGAINST = ("funcga", "transform", "funcga_updates", "update", "funcga_one_by_one")


def make(problem: Problem) -> Step:
    """Gradients add up in `.grad`; the fused AdamW steps where they are."""
    params = dict(problem.module.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), fused=True, **OPTIONS)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        for rows in problem.microbatches(batch):
            loss = problem.loss(problem.module, rows) / problem.n
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total, params

    return step
