"""What a contender in torch is made of."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

Step = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Problem(NamedTuple):
    """A module that is this contender's own, and how it is to be accumulated.

    `loss(module, rows)` is the mean over what `weight(rows)` counts, or over the rows if that is None. A window has
    `size` rows a micro-batch, and `n` micro-batches are planned. `group` is that of the ranks, if there are several.
    """

    module: nn.Module
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    n: int
    size: int
    weight: Callable[[torch.Tensor], torch.Tensor] | None = None
    group: dist.ProcessGroup | None = None

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self.module.parameters()).device

    def microbatches(self, batch: torch.Tensor) -> Sequence[torch.Tensor]:
        """The micro-batches of a window."""
        return batch.split(self.size)

    def count(self, rows: torch.Tensor) -> torch.Tensor:
        """How much the loss of these rows is a mean over."""
        return torch.tensor(len(rows), device=rows.device) if self.weight is None else self.weight(rows)

    def taken(self) -> dict[str, Any]:
        """The gradients, which leave the module, as after an optimizer's step."""
        grads = {name: p.grad for name, p in self.module.named_parameters()}
        self.module.zero_grad()
        return grads


class _Whole(nn.Module):
    """The module and its loss as one, so that functional_call swaps parameters once for both."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.module, self.loss = problem.module, problem.loss

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.loss(self.module, rows)


def functional_loss(problem: Problem) -> Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]:
    """`loss(params, rows)` by torch.func.functional_call."""
    whole = _Whole(problem)
    named = lambda params: {f"module.{name}": p for name, p in params.items()}
    return lambda params, rows: torch.func.functional_call(whole, named(params), (rows,))
