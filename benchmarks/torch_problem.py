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

    def microbatches(self, batch: torch.Tensor) -> Sequence[torch.Tensor]:
        """The micro-batches of a window."""
        return batch.split(self.size)

    def taken(self) -> dict[str, Any]:
        """The gradients, which leave the module, as after an optimizer's step."""
        grads = {name: p.grad for name, p in self.module.named_parameters()}
        self.module.zero_grad()
        return grads
