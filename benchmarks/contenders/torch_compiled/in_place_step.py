"""A hand-written loop as good as it gets: one compiled micro-step that adds to accumulators in place."""

from typing import Any

import torch

from benchmarks.torch_problem import Problem, Step, functional_loss

NAME, AGAINST = "a compiled micro-step that adds in place", "funcga_loss"
SOURCE = "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_faq.html"


def make(problem: Problem, backend: Any = "inductor") -> Step:
    """One graph computes the loss and its gradients, and adds them to sums that it is given; those are divided once."""
    gradient = torch.func.grad_and_value(functional_loss(problem))

    @torch.compile(fullgraph=True, backend=backend)
    def micro_step(sums: list[torch.Tensor], params: dict[str, torch.Tensor], rows: torch.Tensor) -> None:
        grads, loss = gradient(params, rows)
        for total, value in zip(sums, (loss, *grads.values()), strict=True):
            total.add_(value)

    params = {name: p.detach() for name, p in problem.module.named_parameters()}

    @torch.no_grad()
    def step(batch: torch.Tensor) -> Any:
        sums = [torch.zeros((), device=batch.device), *map(torch.zeros_like, params.values())]
        microbatches = problem.microbatches(batch)
        for rows in microbatches:
            micro_step(sums, params, rows)
        torch._foreach_div_(sums, len(microbatches))
        return sums[0], dict(zip(params, sums[1:], strict=True))

    return step
