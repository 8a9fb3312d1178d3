"""The gradient cache of Gao et al. (2021), written by hand as well as it can be."""

from typing import Any

import torch

from benchmarks.torch_pairs import contrastive
from benchmarks.torch_problem import Problem, Step

NAME, AGAINST = "two passes by hand (Gao et al. 2021)", "funcga"
SOURCE = "https://arxiv.org/abs/2101.06983"


def make(problem: Problem) -> Step:
    """The graph of the last micro-batch is kept from the first pass; the others are drawn and computed again."""
    module = problem.module

    def step(batch: torch.Tensor) -> Any:
        *others, last = problem.microbatches(batch)
        states, summaries = [], []
        with torch.no_grad():
            for rows in others:
                states.append(torch.get_rng_state())
                summaries.append(module(rows))
        with_graph = module(last)
        whole = torch.cat([*summaries, with_graph.detach()]).requires_grad_()
        del summaries
        loss = contrastive(*whole.unbind(1), module.logit_scale, module.tile)
        loss.backward()
        value, (*cotangents, last_cotangent) = loss.detach(), whole.grad.split(problem.size)
        del loss, whole
        with_graph.backward(last_cotangent)
        del with_graph
        after = torch.get_rng_state()
        for rows, state, cotangent in zip(others, states, cotangents, strict=True):
            torch.set_rng_state(state)
            module(rows).backward(cotangent)
        torch.set_rng_state(after)
        return value, problem.taken()

    return step
