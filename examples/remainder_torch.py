"""The micro-batches that are left at the end of the loader make one more update, exact however few they are.

    python examples/remainder_torch.py

Nineteen rows in micro-batches of two, four to an update, leave two micro-batches at the end, of three rows in all. By
hand their losses are still divided by four, so that the gradient is half of what it should be, and a row counts as much
in a micro-batch of one as two rows elsewhere; and to know the end one has to know len(loader), which a stream has not.
A count of micro-batches that goes on after such an update shifts the windows of all later epochs: the next one begins
with an update of what is missing to four. `windows` ends where the loader ends, and a fold divides by what was folded.

Accelerate's sync_with_dataloader=False, a window that goes on in the next epoch, is `multi_steps` without `flush`.
"""

import torch
from torch.nn.functional import mse_loss

import funcga
import torch_backend


def loss_fn(module, x, y):
    """The mean over the rows of a micro-batch."""
    return mse_loss(module(x), y)


def gradients(module, loader, n):
    """The gradients of each window of an epoch, the parameters as they are."""
    step = funcga.stream(funcga.grad(torch_backend.pure_loss(module, loss_fn)))
    for window in funcga.windows(loader, n):
        yield step(torch_backend.trainable(module), window)


def over_epochs(module, loader, n, epochs, lr=0.1):
    """The parameters after some epochs, and the number of updates, where no epoch ends a window."""
    gradient = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=lr), n)
    params = torch_backend.trainable(module)
    state = tx.init(params)
    for _ in range(epochs):
        for x, y in loader:
            updates, state = tx.update(gradient(params, x, y), state, params, weight=len(x))
            if tx.has_updated(state):
                params = torch_backend.apply_updates(params, updates)
    return params, int(state.updates)


def made(rows=19, size=2):
    """A module, the data, and a loader without a length."""
    torch.manual_seed(0)
    module, x, y = torch.nn.Linear(3, 2), torch.randn(rows, 3), torch.randn(rows, 2)
    return module, x, y, zip(x.split(size), y.split(size), strict=True)


def main():
    """The gradient of the last three rows, and two epochs without an update at the end of the first."""
    module, x, y, loader = made()
    *_, last = gradients(module, loader, 4)
    whole = funcga.grad(torch_backend.pure_loss(module, loss_fn))(torch_backend.trainable(module), x[16:], y[16:])
    funcga.compare(last, whole, names=("the last window", "its rows at once")).assert_close()
    print("the last window has the gradient of its three rows")

    _, updates = over_epochs(module, list(zip(x.split(2), y.split(2), strict=True)), 4, epochs=2)
    print(f"two epochs of ten micro-batches, none ended early: {updates} updates")


if __name__ == "__main__":
    main()
