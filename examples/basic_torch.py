"""One update from four micro-batches ends where one update from the whole batch ends.

    python examples/basic_torch.py

The example of Accelerate's guide: y = 2x is learned from 0, and one step of SGD on eight rows gives 2.04. A loop by
hand divides each loss by the number of micro-batches that is planned, which is right if all of them come, with equally
many rows; here nothing is divided, and the result is that of the rows that came.
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import funcga
import torch_backend

x = torch.arange(1.0, 9.0)[:, None]
data = TensorDataset(x, 2 * x)


def started():
    """The module before it has learned anything."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    return module


def train(module, loader, n):
    """One update for every n micro-batches of the loader."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    loss_fn = torch_backend.pure_loss(module, lambda module, x, y: mse_loss(module(x), y))
    step = funcga.stream(funcga.value_and_grad(loss_fn))
    for window in funcga.windows(loader, n):
        _loss, grads = step(torch_backend.trainable(module), window)
        torch_backend.assign_grads(module, grads)
        optimizer.step()
    return module


def main():
    """Trains with accumulation, and without; and with micro-batches of 3, 3 and 2 rows."""
    for text, rows, n in (("four micro-batches", 2, 4), ("one batch", 8, 1), ("micro-batches of 3, 3 and 2", 3, 3)):
        module = train(started(), DataLoader(data, batch_size=rows), n)
        print(f"{text}: the weight is {module.weight.item():.5f}")


if __name__ == "__main__":
    main()
