"""The same, and half of the bytes."""

import torch

from benchmarks.contenders.torch_ranks import funcga
from benchmarks.torch_problem import Problem, Step

NAME, SOURCE, AGAINST, KINDS = "funcga, `across=`, sent as bfloat16", None, None, ("update",)
TOLERANCE = 1e-2  # bfloat16 has eight bits


def make(problem: Problem) -> Step:
    """`across=Replicas(group, wire_dtype=torch.bfloat16)`."""
    return funcga.make(problem, wire_dtype=torch.bfloat16)
