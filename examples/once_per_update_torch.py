"""Once per update, not per micro-batch: Muon and AdamW, EMA and SWA of the weights, and ReduceLROnPlateau.

    python examples/once_per_update_torch.py

The loss is a mean over rows, so a plain step is right. What else a training loop does comes after it, once for each
window: torch.optim.Muon for the matrices and AdamW for the rest; AveragedModel for an exponential moving average (EMA)
of the weights, and for stochastic weight averaging (SWA); and ReduceLROnPlateau. The scheduler is given the loss that
the step returns, which is the mean over all rows of the window. Then the run is that of whole batches.

In a loop over micro-batches these lines are easily indented one level too deep. An EMA that is updated after each of n
micro-batches forgets n times as fast. A scheduler that is given the loss of the last micro-batch compares the losses of
fewer rows, and takes their noise for a plateau.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler, swa_utils

import funcga
import torch_backend

UPDATES, N, ROWS, SWA_START = 40, 4, 8, 20


class Run:
    """A model, two optimizers with a scheduler each, and two averages of the weights."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 5))
        hidden = [self.model[0].weight, self.model[2].weight]
        others = [self.model[0].bias, self.model[2].bias, *self.model[4].parameters()]
        self.optimizers = torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=0.01)
        self.schedulers = [lr_scheduler.ReduceLROnPlateau(each, factor=0.5, patience=3) for each in self.optimizers]
        self.ema = swa_utils.AveragedModel(self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        self.swa = swa_utils.AveragedModel(self.model)

    def update(self, grads):
        """A step of both optimizers."""
        torch_backend.assign_grads(self.model, grads)
        for optimizer in self.optimizers:
            optimizer.step()

    def average(self, update):
        """EMA, and SWA from SWA_START on."""
        self.ema.update_parameters(self.model)
        if update >= SWA_START:
            self.swa.update_parameters(self.model)

    def schedule(self, loss):
        """A step of both schedulers."""
        for scheduler in self.schedulers:
            scheduler.step(loss)

    def result(self):
        """All weights, and the learning rates."""
        models = {"weights": self.model, "EMA": self.ema.module, "SWA": self.swa.module}
        flat = {name: nn.utils.parameters_to_vector(model.parameters()).detach() for name, model in models.items()}
        return {**flat, "learning rates": torch.tensor([each.get_last_lr()[0] for each in self.schedulers])}


def loss_fn(model, x, y):
    """The mean over the rows."""
    return cross_entropy(model(x), y)


def accumulated(loader, averages=1, of_last=False):
    """A run with N micro-batches for each update, or with a mistake in it."""
    run = Run()
    step = funcga.stream(torch_backend.module_value_and_grad(run.model, loss_fn))
    for update, window in enumerate(funcga.windows(loader, N)):
        last_loss = loss_fn(run.model, *window[-1]).detach()
        loss, grads = step(window)
        for _ in range(averages - 1):
            run.average(update)
        run.update(grads)
        run.average(update)
        run.schedule(last_loss if of_last else loss)
    return run.result()


def whole(loader):
    """The run with whole batches, by plain autograd."""
    run = Run()
    names = [name for name, _ in run.model.named_parameters()]
    for update in range(UPDATES):
        x, y = map(torch.cat, zip(*loader[N * update : N * (update + 1)], strict=True))
        loss = loss_fn(run.model, x, y)
        run.update(dict(zip(names, torch.autograd.grad(loss, [*run.model.parameters()]), strict=True)))
        run.average(update)
        run.schedule(loss.detach())
    return run.result()


def main():
    """The run with micro-batches, and two that make a mistake, beside the run with whole batches."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x = torch.randn(N * UPDATES, ROWS, 10)
    y = (x[..., :5] + torch.randn(N * UPDATES, ROWS, 5)).argmax(-1)
    loader = [*zip(x, y, strict=True)]

    expected = whole(loader)
    off = lambda got, name: (abs(got[name] - expected[name]).max() / abs(expected[name]).max()).item()
    got = accumulated(loader)
    print(f"{UPDATES} updates: " + ", ".join(f"{name} off by {off(got, name):.0e}" for name in got))
    got = accumulated(loader, averages=N)
    print(f"averaged after each micro-batch: EMA off by {off(got, 'EMA'):.0%}, SWA by {off(got, 'SWA'):.0%}")
    rates = [result["learning rates"][0] for result in (expected, accumulated(loader, of_last=True))]
    print(f"with the loss of the last micro-batch: the rate of Muon ends at {rates[1]:.4f}, not {rates[0]:.4f}")


if __name__ == "__main__":
    main()
