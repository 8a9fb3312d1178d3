"""Hugging Face Accelerate as its guide writes it."""

from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "Accelerate, `accumulate`", "funcga"
SOURCE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"


def make(problem: Problem) -> Step:
    """`accumulate` decides what is synchronised, and `backward` divides the loss by the planned n."""
    accelerator = Accelerator(gradient_accumulation_steps=problem.n, cpu=problem.device.type == "cpu")
    prepared = accelerator.prepare(problem.module)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        for rows in problem.microbatches(batch):
            with accelerator.accumulate(prepared):
                loss = problem.loss(prepared, rows)
                accelerator.backward(loss)
                total = total + loss.detach()
        return total / problem.n, problem.taken()

    return step
