"""What a wrapped module drops: micro-batches of all replicas together, as its gradients are theirs.

Only torch has this file: in JAX a loop selects what it carries.

A wrapper adds the gradients of all replicas before anybody can look at them. So where micro-batches may be dropped,
every backward pass reduces, the replicas vote on what it has left, and all of them add it to their sums, or none.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from funcga._backend import Backend
from funcga._call.dropping import DroppingStep
from funcga._types import Scalar
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import local_tensors
from torch_backend.engine.backward import is_alone
from torch_backend.engine.dropping import DroppingBuffers
from torch_backend.engine.layout import Layout


class KeptSums:
    """The sums of the gradients that backward passes leave in the parameters, of the passes that are kept.

    `groups`: what the replicas are, the inner one first.
    """

    def __init__(self, params: Collection[torch.Tensor], groups: Sequence[dist.ProcessGroup], backend: Backend):
        self.params, self.groups, self.backend = params, groups, backend
        self.sums: list[torch.Tensor | None] = [None for _ in params]
        self.last: bool | torch.Tensor = True  # the last vote

    def clear(self) -> None:
        """Leaves no gradient in the parameters: the next pass begins with none."""
        for p in self.params:
            p.grad = None

    def vote(self, is_kept_here: bool | torch.Tensor) -> bool | torch.Tensor:
        """Adds the gradients that the last pass has left, if every replica keeps its micro-batch; whether they do."""
        pairs = [(index, p.grad) for index, p in enumerate(self.params) if p.grad is not None]
        finite = self.backend.transforms.finite(local_tensors([gradient for _, gradient in pairs]))
        device = next((p.device for p in self.params), finite.device)
        votes = (torch.as_tensor(is_kept_here, device=device) & finite.to(device)).to(torch.int32)
        for group in self.groups:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
        keep: bool | torch.Tensor = arrays.scalar(votes.bool())
        self.last = keep
        if keep is not False:
            for index, gradient in pairs:
                self._add(index, gradient, keep)
        self.clear()
        return keep

    def _add(self, index: int, gradient: torch.Tensor, keep: bool | torch.Tensor) -> None:
        sum_so_far = self.sums[index]
        if isinstance(keep, torch.Tensor):
            (shard,) = local_tensors([gradient])
            shard.masked_fill_(~keep, 0)
        if sum_so_far is not None:
            total, more = local_tensors([sum_so_far, gradient])
            total.add_(more)
        else:
            # A wrapper may write to the memory of its buckets in the next pass.
            self.sums[index] = gradient if is_alone(gradient) else gradient.clone()

    def put(self) -> None:
        """Leaves the sums in the parameters, where a pass that is not dropped would have."""
        for p, total in zip(self.params, self.sums, strict=True):
            p.grad = total
        self.sums = []


class AgreedBuffers(DroppingBuffers):
    """Buffers that a micro-batch is added to if every replica keeps its own."""

    def __init__(self, dropping: DroppingStep, kept: KeptSums, layout: Layout):
        super().__init__(dropping, layout)
        self.kept_sums = kept

    def keeps(self, leaves: Sequence[Any], weight: Scalar) -> bool | torch.Tensor:
        """Whether a micro-batch is folded: the gradients are not among the leaves, but in the parameters."""
        tested = [leaf_index for leaf_index in self.tested.leaf_indices if leaves[leaf_index] is not None]
        here = self.tested._replace(leaf_indices=tested)
        return self.kept_sums.vote(self.dropping.keeps(self.outputs, here, leaves, weight))


def check_droppable(dropping: DroppingStep, name: str) -> None:
    """Raises FuncgaError for a test of the user's: its gradients are those of all replicas, times their weights."""
    if dropping.test is not None:
        raise FuncgaError(
            f"drop_if= was given, and the module is wrapped by {name}: what can be looked at are the gradients of all "
            f"replicas together, times their weights. Leave drop_if out, to drop what is not finite; or let funcga "
            f"reduce: accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), n, across=group), "
            f"with the module that was wrapped."
        )
