"""A learning rate schedule counts updates, not micro-batches: with optimizer.step(), and as transforms.

    python examples/schedules_torch.py

By hand `scheduler.step()` easily comes after each micro-batch: a cosine is then through after a quarter of the
training, and OneCycleLR raises when it is asked for more. The other mistake is to plan len(loader) // n updates an
epoch, where the last, shorter window is one too. `scheduler=` of from_optimizer takes any scheduler that follows the
count of updates; one that goes by epochs is told how many updates these have, or, if it has no such number, is written
as a LambdaLR of `update // UPDATES`.
"""

import functools
import math

import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

import funcga
import torch_backend

EPOCHS, MICROBATCHES, N = 4, 10, 4
UPDATES = math.ceil(MICROBATCHES / N)  # of an epoch; the last one has two micro-batches

BY_UPDATE = {
    "OneCycleLR": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=EPOCHS * UPDATES),
    "CosineAnnealingLR": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=EPOCHS * UPDATES),
}


def cosine_of_epochs(update):
    """CosineAnnealingLR(T_max=EPOCHS), stepped once an epoch, as a factor of the learning rate."""
    return (1 + math.cos(math.pi * (update // UPDATES) / EPOCHS)) / 2


BY_EPOCH = {  # stepped once an epoch, and the same stepped once an update
    "StepLR": [functools.partial(lr_scheduler.StepLR, step_size=size, gamma=0.5) for size in (1, UPDATES)],
    "CosineAnnealingLR": (
        functools.partial(lr_scheduler.CosineAnnealingLR, T_max=EPOCHS),
        functools.partial(lr_scheduler.LambdaLR, lr_lambda=cosine_of_epochs),
    ),
}


def loss_fn(module, x, y):
    """The mean over the rows."""
    return mse_loss(module(x), y)


def stepped(module, loader, by_update=None, by_epoch=None):
    """The learning rate of each update, where the schedulers stand where they always do."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedulers = [make(optimizer) if make else None for make in (by_update, by_epoch)]
    step, rates = funcga.stream(funcga.grad(torch_backend.pure_loss(module, loss_fn))), []
    for _ in range(EPOCHS):
        for window in funcga.windows(loader, N):
            torch_backend.assign_grads(module, step(torch_backend.trainable(module), window))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if by_update:
                schedulers[0].step()
        if by_epoch:
            schedulers[1].step()
    return rates


def transformed(module, loader, scheduler):
    """The parameters after the same training, without an object that changes."""
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=0.1, scheduler=scheduler), N)
    gradient = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    params = torch_backend.trainable(module)
    state = tx.init(params)
    for _ in range(EPOCHS):
        for window in funcga.windows(loader, N):
            for x, y in window:
                state = tx.accumulate(gradient(params, x, y), state, weight=len(x))
            updates, state = tx.flush(state, params)
            params = torch_backend.apply_updates(params, updates)
    return params


def made():
    """A module, and a loader."""
    torch.manual_seed(0)
    module, x, y = torch.nn.Linear(3, 2), torch.randn(2 * MICROBATCHES, 3), torch.randn(2 * MICROBATCHES, 2)
    return module, list(zip(x.split(2), y.split(2), strict=True))


def main():
    """Each scheduler, in both ways."""
    for name, make in BY_UPDATE.items():
        module, loader = made()
        params = transformed(module, loader, make)
        rates = stepped(module, loader, by_update=make)
        funcga.compare(params, module.state_dict()).assert_close()
        print(f"{name}: {len(rates)} updates, rates {rates[0]:.3f} to {rates[-1]:.3f}, the same as a transform")
    for name, (by_epoch, by_update) in BY_EPOCH.items():
        module, loader = made()
        params = transformed(module, loader, by_update)
        rates = stepped(module, loader, by_epoch=by_epoch)
        funcga.compare(params, module.state_dict()).assert_close()
        shown = ", ".join(f"{rate:.3f}" for rate in rates[::UPDATES])
        print(f"{name}: {len(rates)} updates, a rate an epoch {shown}, the same as a transform")


if __name__ == "__main__":
    main()
