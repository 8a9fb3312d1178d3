"""BatchNorm's running statistics under accumulation, in three ways: threaded, frozen, or merged once for each window.

    python examples/batchnorm_torch.py

A micro-batch is always normalised by its own statistics; the question is what becomes of the running ones. The loop
that people write leaves it to the layer, which updates them n times: n updates with momentum m are one with
1 - (1 - m)**n, the last micro-batches count most, and the variance lacks what the micro-batches differ by. Layers that
hold their updates back until the last micro-batch learn from that one alone; those that save and restore their
statistics, from none. Merged, what all of them saw is pooled (Chan, Golub and LeVeque 1979), and there is one update:
that of one batch. The pictures get brighter from row to row, as of a data set that is sorted.

One update a window instead of n is also a slower average: to keep the decay that the loop had, set the layers' momentum
to 1 - (1 - m)**n.

The gradient is that of micro-batches that are normalised one by one, in any of these ways, and not that of one batch.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import funcga
import torch_backend

RUNNING = ("1.running_mean", "1.running_var")


def data(rows=22):
    """Pictures [rows, 1, 8, 8] and their classes."""
    brightness = torch.linspace(0, 3, rows)[:, None, None, None]
    return torch.randn(rows, 1, 8, 8) + brightness, torch.arange(rows) % 2


def loss_fn(module, x, y):
    """The mean over the rows."""
    return cross_entropy(module(x), y)


def threaded(module, x, y, n=4):
    """The buffers after a window: each micro-batch updates those of the one before."""
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn, buffers=True), has_aux=True)
    fold = ((funcga.mean(), funcga.carry()), funcga.mean())
    step = funcga.accumulate(gradient, n, in_axes=(None, funcga.CARRY, 0, 0), fold=fold)
    (_loss, buffers), _grads = step(torch_backend.trainable(module), dict(module.named_buffers()), x, y)
    return buffers


def frozen(module, x, y, n=4):
    """The same: what the layers write is dropped."""
    step = funcga.accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), n)
    _loss, _grads = step(torch_backend.trainable(module), x, y)
    return dict(module.named_buffers())


def merged(module, x, y, n=4):
    """The same: one update by what all micro-batches saw."""
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn, statistics=True), has_aux=True)
    step = funcga.accumulate(gradient, n, fold=((funcga.mean(), funcga.pooled()), funcga.mean()))
    (_loss, statistics), _grads = step(torch_backend.trainable(module), x, y)
    return torch_backend.running_buffers(module, statistics)


def main():
    """The buffers after a window of four micro-batches, against those of one batch."""
    torch.manual_seed(0)
    module, (x, y) = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 2)), data()
    whole = copy.deepcopy(module)
    whole(x)
    batch = dict(whole.named_buffers())
    for update in (merged, threaded, frozen):
        found = update(module, x, y)
        apart = max((found[name] - batch[name]).abs().max().item() for name in RUNNING)
        print(f"{update.__name__}: {apart:.0e} from the statistics of one batch; the same to 1e-6: {apart < 1e-6}")
    module.load_state_dict(merged(module, x, y), strict=False)


if __name__ == "__main__":
    main()
