"""DDP that synchronises the last micro-batch, as its documentation writes it."""

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "DDP, `no_sync`", ("funcga", "funcga_ddp")
SOURCE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync"


def make(problem: Problem, every: bool = False, **options: Any) -> Step:
    """`no_sync()` around forward and backward of all but the last; the loss is that of this rank."""
    wrapped = DistributedDataParallel(problem.module, process_group=problem.group, **options)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        microbatches = problem.microbatches(batch)
        for i, rows in enumerate(microbatches):
            with contextlib.nullcontext() if every or i + 1 == len(microbatches) else wrapped.no_sync():
                loss = problem.loss(wrapped, rows) / problem.n
                loss.backward()
            total = total + loss.detach()
        return total, problem.taken()

    return step
