"""GradCache, the library of the paper's authors."""

import sys
from typing import Any

import torch
from torch import nn

from benchmarks.torch_pairs import contrastive
from benchmarks.torch_problem import Problem, Step

try:
    from grad_cache import GradCache  # installed from its repository
except ModuleNotFoundError:
    import gradcache

    sys.modules["grad_cache"] = gradcache  # on PyPI the folder is called gradcache, and imports itself as grad_cache
    from gradcache.grad_cache import GradCache

NAME, AGAINST = "GradCache", "funcga"
SOURCE = "https://github.com/luyug/GradCache#usage"


class _Encoder(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module.embed(tokens)


def make(problem: Problem) -> Step:
    """It takes one side at a time: in chunks of twice the rows, so that there are as many sequences at once."""
    module = problem.module
    encoder = _Encoder(module)
    cache = GradCache(
        models=[encoder, encoder],
        chunk_sizes=2 * problem.size,
        loss_fn=lambda left, right: contrastive(left, right, module.logit_scale, module.tile),
    )

    def step(batch: torch.Tensor) -> Any:
        return cache(batch[:, 0], batch[:, 1]), problem.taken()

    return step
