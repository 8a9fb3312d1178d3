"""The best torch.func loop with its gradient compiled, and its addition."""

from typing import Any

import torch

from benchmarks.torch_problem import Problem, Step, functional_loss

NAME, AGAINST = "the best torch.func loop, both parts compiled", "funcga_loss"
SOURCE = "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_faq.html"


def make(problem: Problem, backend: Any = "inductor") -> Step:
    """One graph computes the loss and its gradients, another adds them in place."""
    compiled = lambda function: torch.compile(function, fullgraph=True, backend=backend)
    gradient, add = compiled(torch.func.grad_and_value(functional_loss(problem))), compiled(torch._foreach_add_)
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
                add(sums, leaves)
            else:
                sums = leaves  # a compiled program owns what it returns
            del leaves
        torch._foreach_div_(sums, len(microbatches))
        return sums[0], dict(zip(params, sums[1:], strict=True))

    return step
