"""The best torch.func loop: one accumulator, added to in place, and one gradient at a time."""

from typing import Any

import torch

from benchmarks.torch_problem import Problem, Step, functional_loss

NAME, AGAINST = "the best torch.func loop (`_foreach_add_`)", ("funcga", "funcga_functional")
SOURCE = "https://docs.pytorch.org/docs/stable/func.api.html"


def make(problem: Problem) -> Step:
    """Sums in float32, of micro-batches that weigh alike, divided once and in place by how many there were."""
    gradient = torch.func.grad_and_value(functional_loss(problem))
    params = {name: p.detach() for name, p in problem.module.named_parameters()}

    @torch.no_grad()
    def step(batch: torch.Tensor) -> Any:
        sums: list[Any] = []
        microbatches = problem.microbatches(batch)
        for rows in microbatches:
            grads, loss = gradient(params, rows)
            leaves = [loss, *grads.values()]
            del grads, loss
            if sums:
                torch._foreach_add_(sums, leaves)
            else:
                sums = [leaf.to(torch.float32, copy=True) for leaf in leaves]  # a gradient may be another's view
            del leaves
        torch._foreach_div_(sums, len(microbatches))
        return sums[0], {name: g.to(p.dtype) for (name, p), g in zip(params.items(), sums[1:], strict=True)}

    return step
