"""What a wrapped module drops: whole windows, by the gradient that all replicas have.

Only torch has this file: in JAX a loop selects what it carries.
"""

from collections.abc import Sequence
from typing import Any

import torch

from funcga._call.dropping import DroppingStep
from funcga._types import Scalar
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.engine.dropping import DroppingBuffers


class WindowBuffers(DroppingBuffers):
    """Buffers of what stands beside the gradients, which a wrapper sums. Any of it may cost the window its result."""

    def keeps(self, leaves: Sequence[Any], weight: Scalar) -> bool | torch.Tensor:
        """Whether what stands beside the gradients of a micro-batch is finite."""
        tested = [leaf_index for leaf_index in self.tested.leaf_indices if leaves[leaf_index] is not None]
        return self.dropping.keeps(self.outputs, self.tested._replace(leaf_indices=tested), leaves, weight)

    def look_at(self, sums: Sequence[torch.Tensor]) -> None:
        """Drops the window if its gradients are not finite."""
        finite = self.outputs.backend.transforms.finite(sums)
        self.rejected = self.rejected + arrays.scalar((~finite).to(torch.int64))


def check_droppable(dropping: DroppingStep, name: str) -> None:
    """Raises FuncgaError for what needs the gradients of single micro-batches, or replicas."""
    if dropping.scope == "window" and dropping.test is None:
        return
    what = 'drop="microbatch"' if dropping.test is None else "drop_if="
    raise FuncgaError(
        f"{what} was given, and the module is wrapped by {name}: what can be looked at is the gradient of all replicas "
        f'together, once a window. Write drop="window", to drop what is not finite; or let funcga reduce: '
        f"accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), n, across=group), with the "
        f"module that was wrapped."
    )
