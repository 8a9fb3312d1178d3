"""bfloat16 without a loss scale: under autocast, and with parameters that are bfloat16 themselves.

    python examples/bfloat16_torch.py

bfloat16 has the range of float32, so nothing has to be scaled; it has 8 bits, so sums of many terms stand still. By
hand `.grad` is as narrow as its parameter, and 1,024 micro-batches with a gradient of 1 add up to 256: one more is
less than half of the last bit. A fold adds in float32, and rounds once, at the end.
"""

import torch
from torch.nn.functional import mse_loss

import funcga
import torch_backend


def sum_of_ones(n):
    """The sum of n gradients of 1, in bfloat16."""
    w, x = torch.zeros(1, dtype=torch.bfloat16), torch.ones(n, 1, dtype=torch.bfloat16)
    return funcga.accumulate(funcga.grad(lambda w, x: (w * x).sum()), n, fold=funcga.sum())(w, x).item()


def autocast_loss(module, x, y):
    """The mean over the rows, with matrix products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return mse_loss(module(x).float(), y)


def gradients(module, x, y, n):
    """The gradients of float32 parameters under autocast."""
    gradient = funcga.grad(torch_backend.pure_loss(module, autocast_loss))
    return funcga.accumulate(gradient, n)(torch_backend.trainable(module), x, y)


def main():
    """The sum, and a module under autocast in eight micro-batches and at once."""
    print(f"1,024 gradients of 1 in bfloat16 add up to {sum_of_ones(1024):,.0f}")

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    x, y = torch.randn(64, 16), torch.randn(64, 4)
    grads, whole = gradients(module, x, y, 8), gradients(module, x, y, 1)
    apart = max((grads[name] - whole[name]).abs().max().item() / whole[name].abs().max().item() for name in grads)
    print(f"autocast: {grads['0.weight'].dtype} gradients, those of the whole batch to 1%: {apart < 0.01}")


if __name__ == "__main__":
    main()
