"""Gradient checkpointing inside of accumulation: less memory for each micro-batch, and the same gradients.

    python examples/checkpointing_torch.py

Accumulation holds the activations of one micro-batch at a time, and a checkpoint those between layers alone; the rest
is computed again in the backward pass. Both kinds of torch.utils.checkpoint work. The loss goes to `funcga.grad` as a
`pure_loss`, so that the parameters are still in the module when a checkpoint runs it again.
"""

import weakref

import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend


class Net(torch.nn.Module):
    """A layer, and six blocks, which are run again in the backward pass if kind is "reentrant" or "other"."""

    def __init__(self, width, kind):
        super().__init__()
        linear = torch.nn.Linear
        block = lambda: torch.nn.Sequential(linear(width, 4 * width), torch.nn.GELU(), linear(4 * width, width))
        self.first, self.blocks, self.kind = linear(width, width), torch.nn.ModuleList(block() for _ in range(6)), kind

    def forward(self, x):
        """What the last block makes of x."""
        x = self.first(
            x
        )  # so that the first checkpoint, too, has an input with a gradient: the reentrant kind needs one
        for block in self.blocks:
            x = x + (block(x) if self.kind == "no" else checkpoint(block, x, use_reentrant=self.kind == "reentrant"))
        return x


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """`with Kept(module) as kept`: `kept.bytes` is the most that autograd has kept for a backward pass at any time.

    Parameters, which are there in any case, do not count. Nor does what the other kind keeps of the one block that it
    runs again, which autograd does not say.
    """

    def __init__(self, module):
        super().__init__(self.pack, lambda holder: holder[0])
        self.own = {parameter.data_ptr() for parameter in module.parameters()}
        self.bytes, self.live = 0, 0

    def __enter__(self):
        super().__enter__()
        return self

    def pack(self, tensor):
        """The tensor in a list, whose end is noticed."""
        holder = Holder([tensor])
        if tensor.data_ptr() not in self.own:
            self.count(tensor.nbytes)
            weakref.finalize(holder, self.count, -tensor.nbytes)
        return holder

    def count(self, change):
        """Counts what is kept, or let go."""
        self.live += change
        self.bytes = max(self.bytes, self.live)


class Holder(list):
    """A list that can be referred to weakly."""


def gradients(kind, n):
    """The gradients, and the bytes that were kept."""
    torch.manual_seed(0)
    module, x, y = Net(32, kind), torch.randn(64, 32), torch.randn(64, 32)
    loss_fn = torch_backend.pure_loss(module, lambda module, x, y: mse_loss(module(x), y))
    with Kept(module) as kept:
        grads = funcga.accumulate(funcga.grad(loss_fn), n)(dict(module.named_parameters()), x, y)
    return grads, kept.bytes


def main():
    """Without both, with accumulation, and with checkpoints too."""
    whole, most = gradients("no", 1)
    print(f"one batch: {most:,} bytes are kept for the backward pass")
    for kind in ("no", "reentrant", "other"):
        grads, kept = gradients(kind, 8)
        funcga.compare(grads, whole).assert_close()
        print(f"eight micro-batches, {kind} checkpoints: {kept:,} bytes, the same gradients")


if __name__ == "__main__":
    main()
