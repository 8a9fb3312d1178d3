"""Dropout: noise that is reproducible, other in each micro-batch and epoch, and, if one likes, the same for every n.

    python examples/dropout_torch.py

Every example has a key, made of a seed, the epoch and its index, which is one more argument that is split. Without the
epoch an example would be dropped out alike in every epoch. `seeded` runs a loss with torch's generators seeded by the
keys of its micro-batch: dropout, as modules have it, is then a pure function of its arguments. What is `sampled`
belongs to the example alone, so that micro-batches of 4, in any order, are dropped out as one of 16.

What the usual loop gets wrong: it seeds once, and the noise then depends on n, on what was drawn before, and on
whether a run was resumed; a seed set in every micro-batch makes all of a window draw the same.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import funcga
import torch_backend

ROWS, RATE = 16, 0.5

random = torch.Generator().manual_seed(1)
x, y = torch.randn(ROWS, 5, generator=random), torch.randn(ROWS, 1, generator=random)
data = TensorDataset(torch.arange(ROWS), x, y)  # examples come with their indices, also when they are shuffled


def module():
    """Two layers with dropout between them."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.ReLU(), torch.nn.Dropout(RATE), torch.nn.Linear(32, 1))


def keys_of(indices, epoch, seed=0):
    """A key for each example, another one in each epoch."""
    return torch_backend.example_keys(torch_backend.example_keys(seed, epoch), indices)


def loss_fn(module, x, y):
    """The mean square, with the module's own dropout."""
    return torch.nn.functional.mse_loss(module(x), y)


def loss_by_example(module, keys, x, y):
    """The same, where what is dropped is drawn with the key of each example."""
    kept = torch_backend.sampled(torch.rand, keys, (32,)) >= RATE
    hidden = module[1](module[0](x))
    return torch.nn.functional.mse_loss(module[3](torch.where(kept, hidden / (1 - RATE), 0)), y)


def gradients(loss, n, epoch=0):
    """The gradient of the first layer, of 16 examples in n micro-batches."""
    net = module()
    step = funcga.accumulate(funcga.grad(torch_backend.pure_loss(net, loss)), n)
    return step(torch_backend.trainable(net), keys_of(torch.arange(ROWS), epoch), x, y)["0.weight"]


def streamed(loss, epoch=0):
    """The same from a loader that shuffles; keys are part of a micro-batch, and so an argument of its weight."""
    net, shuffled = module(), DataLoader(data, batch_size=4, shuffle=True)
    step = funcga.stream(funcga.grad(torch_backend.pure_loss(net, loss)), weight=lambda keys, x, y: len(x))
    microbatches = ((keys_of(indices, epoch), x, y) for indices, x, y in shuffled)
    return step(torch_backend.trainable(net), microbatches)["0.weight"]


def masks(epoch=0, n=4):
    """What `seeded` keeps of 32 hidden units [n, ROWS / n, 32]."""
    dropout = torch_backend.seeded(lambda _, hidden: torch.nn.functional.dropout(hidden, RATE) > 0)
    step = funcga.accumulate(dropout, n, in_axes=(None, 0, 0), fold=funcga.concat())
    return step(None, keys_of(torch.arange(ROWS), epoch), torch.ones(ROWS, 32)).unflatten(0, (n, -1))


def main():
    """Prints what stays the same, and what does not."""
    whole, own = torch_backend.seeded(loss_fn), loss_by_example
    print("seeded: the same in two runs:", torch.equal(gradients(whole, 4), gradients(whole, 4)))
    print(f"seeded: {len(torch.unique(torch.cat([masks(0), masks(1)]), dim=0))} masks in 4 micro-batches of 2 epochs")
    print(f"seeded: 4 micro-batches are {_apart(gradients(whole, 4), gradients(whole, 1)):.2f} from one")
    print(f"by example: 4 micro-batches are {_apart(gradients(own, 4), gradients(own, 1)):.0e} from one")
    print(f"by example: 4 that are shuffled are {_apart(streamed(own), gradients(own, 1)):.0e} from one")
    print(f"by example: another epoch is {_apart(gradients(own, 4, epoch=1), gradients(own, 4)):.2f} away")


def _apart(left, right):
    return ((left - right).norm() / right.norm()).item()


if __name__ == "__main__":
    main()
