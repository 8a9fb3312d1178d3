"""Lightning Fabric as its guide to efficient accumulation writes it."""

from typing import Any

import torch
from lightning_fabric import Fabric

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "Lightning Fabric, `no_backward_sync`", "funcga"
SOURCE = "https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html"


def make(problem: Problem) -> Step:
    """Each loss is divided by the planned n, and the last of the window is synchronised."""
    fabric = Fabric(accelerator="cpu" if problem.device.type == "cpu" else "cuda", devices=1)
    prepared = fabric.setup(problem.module)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        microbatches = problem.microbatches(batch)
        for i, rows in enumerate(microbatches):
            with fabric.no_backward_sync(prepared, enabled=i + 1 < len(microbatches)):
                loss = problem.loss(prepared, rows) / problem.n
                fabric.backward(loss)
            total = total + loss.detach()
        return total, problem.taken()

    return step
