"""The gradient of a window is clipped, not those of its micro-batches: with optimizer.step(), and as transforms.

    python examples/clipping_torch.py

What a transform does it does to what it is given, so the order is seen: clipping is inside of `multi_steps`, or after
the fold. By hand it is easily done after each backward pass, where it clips what has been added up so far, again and
again: the last micro-batches then count more than the first ones.
"""

import torch
from torch.nn.functional import mse_loss

import funcga
import torch_backend

MAX_NORM, LR = 1.0, 0.1


def loss_fn(module, x, y):
    """The mean over the rows."""
    return mse_loss(module(x), y)


def stepped(module, loader, n):
    """The norms before clipping; the module has had an update for every n micro-batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    step = funcga.stream(funcga.grad(torch_backend.pure_loss(module, loss_fn)))
    norms = []
    for window in funcga.windows(loader, n):
        torch_backend.assign_grads(module, step(torch_backend.trainable(module), window))
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms


def transformed(module, loader, n):
    """The parameters after the same updates, without an object that changes."""
    sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=LR)
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(MAX_NORM), sgd), n)
    gradient = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    params = torch_backend.trainable(module)
    state = tx.init(params)
    for window in funcga.windows(loader, n):
        for x, y in window:
            state = tx.accumulate(gradient(params, x, y), state, weight=len(x))
        updates, state = tx.flush(state, params)
        params = torch_backend.apply_updates(params, updates)
    return params


def made():
    """A module, and data; later rows have larger gradients."""
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2), torch.randn(16, 3) * torch.linspace(1, 4, 16)[:, None], torch.randn(16, 2)


def main():
    """Both, against two batches of eight rows."""
    (module, x, y), (whole, *_) = made(), made()
    loader = list(zip(x.split(2), y.split(2), strict=True))
    params = transformed(module, loader, 4)
    norms = stepped(module, loader, 4)
    print("norms of the windows:", ", ".join(f"{norm:.3f}" for norm in norms))

    stepped(whole, zip(x.split(8), y.split(8), strict=True), 1)
    funcga.compare(module.state_dict(), whole.state_dict()).assert_close()
    funcga.compare(params, whole.state_dict()).assert_close()
    print(f"clipped at {MAX_NORM}, the weights are those of two batches: with optimizer.step(), and as transforms")


if __name__ == "__main__":
    main()
