"""FSDP2 that reduces in the last micro-batch, as the documentation of its module writes it."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "FSDP2, `set_requires_gradient_sync`", "funcga_fsdp2"
SOURCE = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
HANGS = ("uneven ranks",)  # every forward pass gathers parameters from all ranks


def make(problem: Problem) -> Step:
    """Gradients stay whole until the last micro-batch, which reduces and shards them."""
    module = sharded(problem)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        microbatches = problem.microbatches(batch)
        for i, rows in enumerate(microbatches):
            last = i + 1 == len(microbatches)
            module.set_requires_gradient_sync(last)
            module.set_is_last_backward(last)
            loss = problem.loss(module, rows) / problem.n
            loss.backward()
            total = total + loss.detach()
        return total, problem.taken()

    return step


def sharded(problem: Problem) -> Any:
    """The module, of which each layer of a transformer is a group, and what remains is one."""
    assert problem.group is not None
    mesh = DeviceMesh.from_group(problem.group, problem.device.type)
    for layer in problem.module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer, mesh=mesh)
    return fully_shard(problem.module, mesh=mesh)
