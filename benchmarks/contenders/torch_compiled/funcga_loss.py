"""funcga over a loss that is compiled, as in the loop."""

from typing import Any

import torch

from benchmarks.contenders.torch import funcga
from benchmarks.torch_problem import Problem, Step

NAME, SOURCE, AGAINST = "funcga, its loss compiled", None, None


def make(problem: Problem, backend: Any = "inductor") -> Step:
    """`accumulate(value_and_grad(pure_loss(module, torch.compile(loss, fullgraph=True))))`."""
    return funcga.make(problem._replace(loss=torch.compile(problem.loss, fullgraph=True, backend=backend)))
