"""As few micro-batches as fit into memory, found by trying; and as many as make a batch of the size that is wanted.

    python examples/adaptive_torch.py

When memory runs out in the middle of a window, the window is replayed with more micro-batches: none of it is lost, none
counted twice. A loop that catches the error, clears the gradients and takes twice as many batches for an update loses
what it had added up, and the batch that failed; the next one has as many rows, and sums grow with their number. That
memory runs out is played here, by a loss that raises torch's error for more rows than there is room for.

For a batch of 64 rows, 64 // rows micro-batches are too few wherever that does not divide; a TargetWeight waits for 64.
"""

import torch
from torch.nn.functional import mse_loss

import funcga
import torch_backend


class Memory:
    """Room for so many rows at a time, and how many rows each forward pass that fitted had."""

    def __init__(self, rows):
        self.rows, self.passes = rows, []

    def loss(self, module, x, y):
        """The mean over the rows, if they fit."""
        if len(x) > self.rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory. (played: {len(x)} rows, room for {self.rows})")
        self.passes.append(len(x))
        return mse_loss(module(x), y)


def target_batches(module, loader, rows, lr=0.1):
    """The parameters after updates of at least so many rows, and the rows of each update."""
    loss_fn = torch_backend.pure_loss(module, lambda module, x, y: mse_loss(module(x), y))
    step, tx = funcga.stream(funcga.grad(loss_fn)), torch_backend.from_optimizer(torch.optim.SGD, lr=lr)
    params = torch_backend.trainable(module)
    state, sizes = tx.init(params), []
    for window in funcga.windows(loader, funcga.transforms.TargetWeight(rows), weight=lambda x, y: len(x)):
        updates, state = tx.update(step(params, window), state, params)
        params = torch_backend.apply_updates(params, updates)
        sizes.append(sum(len(x) for x, _ in window))
    return params, sizes


def made(rows):
    """A module, and data."""
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2), torch.randn(rows, 3), torch.randn(rows, 2)


def main():
    """A batch of 64 rows, with room for 20 of them and then for 5; and updates of 64 rows from batches of 24."""
    module, x, y = made(64)
    params, memory = torch_backend.trainable(module), Memory(64)
    step = funcga.accumulate(funcga.grad(torch_backend.pure_loss(module, memory.loss)), n="auto")
    whole = step(params, x, y)
    for room in (20, 5):
        memory.rows, memory.passes = room, []
        funcga.compare(step(params, x, y), whole).assert_close()  # this call looks for n
        memory.passes = []
        step(params, x, y)  # and this one knows it
        print(f"room for {room} rows: {len(memory.passes)} micro-batches of up to {max(memory.passes)}, same gradients")

    module, x, y = made(160)
    _, sizes = target_batches(module, zip(x.split(24), y.split(24), strict=True), rows=64)
    print(f"updates of {sizes} rows")


if __name__ == "__main__":
    main()
