"""The noise scale of a training run, with error bars, beside that of the formula, on a problem whose noise is known.

    python examples/noise_scale_torch.py

Of the loss |h (w - z)|^2 / 2, with z drawn around 0 with deviations s, a row's gradient has the mean h^2 w and the
variances (h^2 s)^2. So tr(Sigma) is the same all the time, and the noise scale grows as w comes to 0: the better the
model, the larger the batch that is worth its cost.
"""

import torch

import funcga
import torch_backend

DIMENSIONS, ROWS, N, WINDOWS = 200, 64, 16, 80
torch.manual_seed(0)
curvatures = torch.linspace(0.5, 1.5, DIMENSIONS)
deviations = torch.linspace(2.0, 0.1, DIMENSIONS)


def loss_fn(w, z):
    """The mean over the rows of a quadratic function."""
    return 0.5 * ((curvatures * (w - z)) ** 2).sum(1).mean()


def by_formula(w):
    """The noise scale at these parameters."""
    return ((curvatures**2 * deviations) ** 2).sum() / ((curvatures**2 * w) ** 2).sum()


def drawn(noise, truth, width=40):
    """A line for the scale, logarithmic from 1 to 1,000: the error bar, the formula `|` and the estimate `o`."""
    place = lambda number: round(float(number.clamp(1, 1000).log10()) / 3 * (width - 1))
    low, high = (place(noise.scale + sign * noise.scale_error) for sign in (-1, 1))
    marks = ["-" if low <= column <= high else " " for column in range(width)]
    marks[place(truth)] = "|"
    marks[place(noise.scale)] = "o"
    return "".join(marks)


def main():
    """Trains, and draws each tenth noise scale with its error beside that of the formula."""
    step = funcga.accumulate(funcga.grad(loss_fn), N, observe=funcga.gradient_noise())
    tx = torch_backend.from_optimizer(torch.optim.SGD, lr=0.03)
    w = torch.ones(DIMENSIONS)
    state, held = tx.init(w), 0
    print("update   estimate        formula")
    for update in range(1, WINDOWS + 1):
        truth = by_formula(w)
        grads, noise = step(w, deviations * torch.randn(ROWS, DIMENSIONS))
        held += abs(noise.scale - truth) < 3 * noise.scale_error
        if update % 10 == 0:
            print(f"{update:6d} {noise.scale:6.1f} +-{noise.scale_error:5.1f} {truth:6.1f}  {drawn(noise, truth)}")
        updates, state = tx.update(grads, state, w)
        w = torch_backend.apply_updates(w, updates)
    print(f"windows whose formula is within three standard errors: {int(held)} of {WINDOWS}")


if __name__ == "__main__":
    main()
