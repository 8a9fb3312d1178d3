"""The learning rate for an effective batch: linear or square-root scaling, with a warm-up that counts updates.

    python examples/learning_rate_torch.py

A learning rate is tuned for a batch size. With accumulation the batch of an update is what all its micro-batches
have, on all replicas, so the rate is scaled to that: linearly for SGD, by the square root for Adam. Training begins
at the rate as it was, and warms up to the scaled one over some updates.

What the usual loop gets wrong: it takes `batch_size * n * world_size` for the effective batch, once for all, although
the last window of an epoch is smaller: 16 rows here get the rate of 32, twice what the rule says. Below, an update is
scaled to the rows that were really folded.
"""

import torch

import funcga
import torch_backend

LR, BASE, TARGET = 0.1, 8, 32  # a learning rate that was tuned for 8 rows, and the rows of an update


def loss_fn(module, x, y):
    """The mean square, and the rows that it is of."""
    return torch.nn.functional.mse_loss(module(x), y), {"rows": len(x)}


def epoch():
    """Ten micro-batches of 8 rows."""
    random = torch.Generator().manual_seed(0)
    for _ in range(10):
        x = torch.randn(8, 3, generator=random)
        yield x, x.sum(1, keepdim=True)


def warmed_up(scaled, update, warmup=4):
    """The learning rate of an update: LR at first, and what was scaled after `warmup` of them."""
    return LR + (scaled - LR) * min(update / warmup, 1)


def train(epochs=2):
    """Trains in windows of 32 rows. Yields the rows, the loss and the learning rate of every update."""
    torch.manual_seed(0)
    module, update = torch.nn.Linear(3, 1), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn), has_aux=True)
    step = funcga.stream(gradient, fold=((funcga.mean(), {"rows": funcga.sum()}), funcga.mean()))
    for _ in range(epochs):
        for window in funcga.windows(epoch(), funcga.transforms.TargetWeight(TARGET), weight=lambda x, y: len(x)):
            (loss, metrics), grads = step(torch_backend.trainable(module), window)
            torch_backend.assign_grads(module, grads)
            lr = warmed_up(funcga.transforms.linear_scaling(LR, BASE, int(metrics["rows"])), update)
            optimizer.param_groups[0]["lr"], update = lr, update + 1
            optimizer.step()
            yield int(metrics["rows"]), loss.item(), lr, module.weight.detach().clone()


def main():
    """Prints both rules, and the effective batch, the loss and the learning rate of every update."""
    linear, root = (
        rule(LR, BASE, TARGET) for rule in (funcga.transforms.linear_scaling, funcga.transforms.sqrt_scaling)
    )
    print(f"{LR} for {BASE} rows is {linear:.2f} for {TARGET} rows, or {root:.2f} by the square root")
    for rows, loss, lr, _weight in train():
        print(f"rows {rows}: loss {loss:.3f}, lr {lr:.3f}")


if __name__ == "__main__":
    main()
