"""The `.backward()` loop with its loss compiled, forward and backward."""

from typing import Any

import torch

from benchmarks.contenders.torch import loop
from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "a `.backward()` loop with a compiled loss", "funcga_loss"
SOURCE = "https://docs.pytorch.org/tutorials/intermediate/torch_compile_tutorial.html"


def make(problem: Problem, backend: Any = "inductor") -> Step:
    """The loop, as compiled autograd functions make it; gradients are added by eager autograd."""
    return loop.make(problem._replace(loss=torch.compile(problem.loss, fullgraph=True, backend=backend)))
