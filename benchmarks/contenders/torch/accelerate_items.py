"""Accelerate as its guide writes it for samples of variable size, where the loss is a sum over items."""

from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST, KINDS = "Accelerate, for samples of variable size", "funcga", ("exactness",)
SOURCE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation#gradient-accumulation-on-training-samples-of-variable-size"


def make(problem: Problem) -> Step:
    """The items of the window are counted first; `backward` divides by n, so each loss is multiplied by it."""
    accelerator = Accelerator(gradient_accumulation_steps=problem.n, cpu=problem.device.type == "cpu")
    prepared = accelerator.prepare(problem.module)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        microbatches = problem.microbatches(batch)
        items = sum(problem.count(rows) for rows in microbatches)
        items = accelerator.gather_for_metrics(items).sum().item()
        for i, rows in enumerate(microbatches):
            with accelerator.accumulate(prepared):
                accelerator.gradient_state._set_sync_gradients(i + 1 == len(microbatches))
                loss = problem.loss(prepared, rows) * problem.count(rows)  # their sum, of which this loss is the mean
                loss = loss * problem.n * accelerator.num_processes / items
                accelerator.backward(loss)
                total = total + loss.detach() / problem.n
        return total, problem.taken()

    return step
