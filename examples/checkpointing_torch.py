"""Gradient checkpointing inside of accumulation: less memory for each micro-batch, and the same gradients.

    python examples/checkpointing_torch.py

Accumulation holds the activations of one micro-batch at a time, and a checkpoint those between layers alone; the rest
is computed again in the backward pass. Both kinds of torch.utils.checkpoint work. The loss goes to `funcga.grad` as a
`pure_loss`, so that the parameters are still in the module when a checkpoint runs it again.

What the usual loop gets wrong: if `checkpoint(layer, x)` of the batch itself is reentrant, as it is where nothing is
said, the layer gets no gradient, as x needs none, with no more than a warning; in funcga it is zeros. Write
use_reentrant=False, or leave out the first layer, as here.
"""

import weakref

import torch
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend

KINDS = ("no", "reentrant", "non-reentrant")


class Net(torch.nn.Module):
    """A layer, and six blocks, which are run again in the backward pass unless kind is "no"."""

    def __init__(self, width, kind):
        super().__init__()
        linear = torch.nn.Linear
        block = lambda: torch.nn.Sequential(linear(width, 4 * width), torch.nn.GELU(), linear(4 * width, width))
        self.first, self.blocks, self.kind = linear(width, width), torch.nn.ModuleList(block() for _ in range(6)), kind

    def forward(self, x):
        """What the last block makes of x."""
        x = self.first(x)
        for block in self.blocks:
            x = x + (block(x) if self.kind == "no" else checkpoint(block, x, use_reentrant=self.kind == "reentrant"))
        return x


class Peak(TorchDispatchMode):
    """`with Peak(there) as peak`: `peak.bytes` is the most that tensors have held at any time, besides those there."""

    def __init__(self, there):
        super().__init__()
        self.bytes, self.live = 0, 0
        self.known = {tensor.untyped_storage().data_ptr() for tensor in there}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        """What the operation returns, whose memory is counted until nobody holds it any more."""
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage):
        """Counts memory that is new."""
        where, size = storage.data_ptr(), storage.nbytes()
        if size and where not in self.known:
            self.known.add(where)
            self.live += size
            self.bytes = max(self.bytes, self.live)
            weakref.finalize(storage, self.freed, where, size)

    def freed(self, where, size):
        """The opposite."""
        self.known.remove(where)
        self.live -= size


def gradients(kind, n):
    """The gradients, and the bytes that it took to get them."""
    torch.manual_seed(0)
    module, x, y = Net(16, kind), torch.randn(1024, 16), torch.randn(1024, 16)
    step = funcga.accumulate(funcga.grad(torch_backend.pure_loss(module, lambda m, x, y: mse_loss(m(x), y))), n)
    with Peak([*module.parameters(), x, y]) as peak:
        return step(torch_backend.trainable(module), x, y), peak.bytes


def main():
    """Without both, with accumulation, and with checkpoints too."""
    whole, most = gradients("no", 1)
    print(f"one batch: {most:,} bytes")
    for kind in KINDS:
        grads, peak = gradients(kind, 8)
        funcga.compare(grads, whole).assert_close()
        print(f"eight micro-batches, {kind} checkpoints: {peak:,} bytes, the same gradients")


if __name__ == "__main__":
    main()
