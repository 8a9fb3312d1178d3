"""Accumulation against one large batch: how far the two are apart, whether rounding explains it, and if not, why.

    python examples/comparison_torch.py

A check by hand takes the largest absolute difference and finds it small or not; with a loss over len(small_batches) it
has the mistake that it is to find, and with batches of one size does not see it. `compare` knows what rounding may do
to each leaf, and `verify` cuts the batch unevenly, and names the cause and the line to write instead.
"""

import torch
from torch.nn.functional import cross_entropy

import funcga
import torch_backend


def loss_fn(module, inputs, targets):
    """The mean over the rows."""
    return cross_entropy(module(inputs), targets)


def made(*layers):
    """A module, inputs, and which of four classes they have."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), *layers, torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return module, torch.randn(16, 3), torch.randint(4, (16,))


def difference(module, inputs, targets, sizes):
    """A report: the gradients of batches of these sizes against those of all their rows at once."""
    gradient = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    params = torch_backend.trainable(module)
    small = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    accumulated = funcga.stream(gradient)(params, small)
    return funcga.compare(accumulated, gradient(params, inputs, targets), names=("accumulated", "large"))


def verdict(module, inputs, targets, **how):
    """Whether accumulation is exact, and why not."""
    gradient = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    return funcga.verify(gradient, torch_backend.trainable(module), inputs, targets, n=3, **how)


def main():
    """A module, the same averaged over micro-batches, and one with BatchNorm."""
    report = difference(*made(), [7, 5, 4])
    report.assert_close()
    print(f"the worst leaf is within {report.worst.relative / report.worst.limit:.0%} of what rounding may do")

    verdict(*made()).assert_exact()
    over_batches = funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)  # / len(small_batches)
    for what, found in (
        ("averaged over batches", verdict(*made(), fold=over_batches)),
        ("BatchNorm", verdict(*made(torch.nn.BatchNorm1d(8)))),
    ):
        print(f"{what}: {found.causes[0].name}; {found.causes[0].fix}")


if __name__ == "__main__":
    main()
