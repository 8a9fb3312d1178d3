"""L-BFGS with a closure that accumulates over a loader: torch.optim.LBFGS, here for a physics-informed network (PINN).

    python examples/lbfgs_torch.py

L-BFGS evaluates the loss several times for each update, and its line search compares the values. So the closure has to
return the loss of all points, together with the gradient of that loss. `funcga.stream` goes through the loader in each
evaluation and returns both. The loss is a mean over the collocation points of a micro-batch, plus the boundary
conditions. The weighted mean over micro-batches, the default, counts a term once that all of them share.

The usual closure makes two mistakes that a first-order optimizer survives. `(loss / len(loader)).backward()` gives the
points of a shorter last micro-batch too large a weight; if all micro-batches are equally large, it is right. And
`return loss` returns the loss of the last micro-batch: another function than the one whose gradient is in the .grads.
Points that are drawn anew in each evaluation, or dropout, break the line search as well, here as with whole batches.

The equation is u'' = -pi^2 sin(pi x) on [0, 1] with u(0) = u(1) = 0, whose solution is sin(pi x).
"""

import math

import torch
from torch import nn

import funcga
import torch_backend

POINTS, MICROBATCH, UPDATES = 100, 32, 4


def derivative(u, x):
    """du/dx, where each row of u depends on its own row of x."""
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def loss_fn(model, x):
    """The mean squared residual of the equation at the points x, plus that of the boundary conditions."""
    x = x.clone().requires_grad_()
    residual = derivative(derivative(model(x), x), x) + math.pi**2 * torch.sin(math.pi * x)
    return residual.square().mean() + model(torch.tensor([[0.0], [1.0]])).square().mean()


def accumulated(model, loader):
    """An evaluation for L-BFGS: the loss of all points, with its gradient in the .grads."""
    step = funcga.stream(torch_backend.module_value_and_grad(model, loss_fn))

    def closure():
        loss, grads = step(loader)
        torch_backend.assign_grads(model, grads)
        return loss

    return closure


def usual(model, loader):
    """The same as it is often written."""

    def closure():
        model.zero_grad()
        for x in loader:
            loss = loss_fn(model, x)
            (loss / len(loader)).backward()
        return loss

    return closure


def whole(model, loader):
    """All points at once, by plain autograd."""

    def closure():
        model.zero_grad()
        loss = loss_fn(model, torch.cat(loader))
        loss.backward()
        return loss

    return closure


def trained(make, loader):
    """(the gradient at the start, the trained model, the number of evaluations)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")
    closure = make(model, loader)
    closure()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    for _ in range(UPDATES):
        optimizer.step(closure)
    return gradient, model, optimizer.state[model[0].weight]["func_evals"]


def main():
    """The gradients of the three closures, and what L-BFGS makes of them."""
    torch.set_default_dtype(torch.float64)
    x = torch.linspace(0, 1, POINTS)[:, None]
    runs = {make: trained(make, x.split(MICROBATCH)) for make in (whole, accumulated, usual)}
    expected = runs[whole][0]
    off = {make: (abs(run[0] - expected).max() / abs(expected).max()).item() for make, run in runs.items()}
    print(f"PINN, 4 micro-batches of 100 points: off by {off[accumulated]:.0e}; the usual loop: {off[usual]:.0%}")
    for make, (_, model, evaluations) in runs.items():
        error = abs(model(x) - torch.sin(math.pi * x)).max()
        print(f"{make.__name__}: {evaluations} evaluations, loss {loss_fn(model, x):.0e}, u is off by {error:.0e}")


if __name__ == "__main__":
    main()
