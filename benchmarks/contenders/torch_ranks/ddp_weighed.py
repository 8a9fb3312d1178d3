"""DDP with `no_sync`, weighed by hand, of those who know that DDP averages over ranks."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST, KINDS = "DDP, `no_sync`, weighed by hand", ("funcga", "funcga_ddp"), ("exactness",)
SOURCE = "https://huggingface.co/blog/gradient_accumulation"


def make(problem: Problem) -> Step:
    """The window is counted over all ranks first; what DDP divides by is multiplied back."""
    wrapped = DistributedDataParallel(problem.module, process_group=problem.group)
    ranks = dist.get_world_size(problem.group)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        microbatches = problem.microbatches(batch)
        counted = problem.count(batch)
        dist.all_reduce(counted, group=problem.group)
        for i, rows in enumerate(microbatches):
            with contextlib.nullcontext() if i + 1 == len(microbatches) else wrapped.no_sync():
                loss = problem.loss(wrapped, rows) * (problem.count(rows) * ranks / counted)
                loss.backward()
            total = total + loss.detach()
        return total, problem.taken()

    return step
