"""What a wrapped module drops: whole windows, by the gradient that all replicas have.

Only torch has this file: in JAX a loop selects what it carries.
"""

from collections.abc import Sequence
from typing import Any

import torch

from funcga._types import Scalar
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
        finite = self.outputs.backend.arrays.finite(sums)
        self.rejected = self.rejected + arrays.scalar((~finite).to(torch.int64))
