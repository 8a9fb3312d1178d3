"""A diffusion model: DDPM noise prediction with min-SNR weights, and an EMA of the weights, in micro-batches.

    python examples/diffusion_torch.py

The loss is the mean over rows of each row's mean square error, times a weight of its timestep, as in diffusers'
training scripts. It is divided by rows, not by the sum of these weights, so the default fold is right. The usual loop,
`(loss / n).backward()`, is right as well where all micro-batches have equally many rows; a shorter last one counts for
too much.

Noise and timesteps are drawn before the split, as arguments, so that they do not depend on the number of micro-batches.

The EMA moves once per update, after `optimizer.step()`. In a loop that calls `update_parameters` after each of n
micro-batches its decay is decay ** n.

Source of the weights: Hang and others (2023), "Efficient Diffusion Training via Min-SNR Weighting Strategy".
"""

import copy

import torch
from by_hand import gradient_by_hand
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import funcga
import torch_backend

ROWS, TIMESTEPS, WIDTH, GAMMA, DECAY = 21, 50, 8, 5.0, 0.9
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, TIMESTEPS, dtype=torch.float64), 0)  # alphas_cumprod


class UNet(nn.Module):
    """The noise in images of 8 x 8 pixels, at a timestep: one level down and up, with a skip connection."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(TIMESTEPS, WIDTH)
        self.first = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(2, WIDTH), nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1))
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.last = nn.Conv2d(2 * WIDTH, 1, 3, padding=1)

    def forward(self, x, t):
        """A timestep for each image."""
        x = torch.relu(self.first(x) + self.time(t)[..., None, None])
        return self.last(torch.cat([x, torch.relu(self.up(self.middle(self.down(x))))], 1))


def loss_fn(model, images, noise, t):
    """The mean over rows of min(SNR, GAMMA) / SNR * the mean square error of the predicted noise."""
    kept = KEPT[t][:, None, None, None]
    predicted = model(kept.sqrt() * images + (1 - kept).sqrt() * noise, t)
    snr = KEPT[t] / (1 - KEPT[t])
    losses = mse_loss(predicted, noise, reduction="none").mean((1, 2, 3))
    return (losses * snr.clamp(max=GAMMA) / snr).mean()


def batches(updates):
    """A batch for each update: images with a bright square, noise and timesteps."""
    for _ in range(updates):
        images = torch.zeros(ROWS, 1, 8, 8) - 1
        for image, corner in zip(images, torch.randint(5, (ROWS, 2)).tolist(), strict=True):
            image[0, corner[0] : corner[0] + 3, corner[1] : corner[1] + 3] = 1
        yield images, torch.randn(ROWS, 1, 8, 8), torch.randint(TIMESTEPS, (ROWS,))


def trained(model, data, backward, microbatches=1):
    """How far the weights, and their EMA, have gone after an update for each batch; it moves with each micro-batch."""
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in data:
        backward(*batch)
        for _ in range(microbatches - 1):
            ema.update_parameters(model)
        optimizer.step()
        ema.update_parameters(model)
    return [{k: after[k] - start[k] for k in start} for after in (model.state_dict(), ema.module.state_dict())]


def apart(left, right):
    """The largest difference of two trees of tensors, relative to the largest element of the second."""
    left, right = (torch.cat([each.detach().flatten() for each in tree.values()]) for tree in (left, right))
    error = ((left - right).abs().max() / right.abs().max()).item()
    return f"{error:.0e}" if error < 1e-9 else f"{error:.0%}"


def main(updates=12):
    """Prints how far gradients and an EMA are from those of whole batches."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, data = UNet(), [*batches(updates)]
    at_once, in_loop = copy.deepcopy(model), copy.deepcopy(model)
    whole = gradient_by_hand(model, loss_fn, [data[0]])
    for size in (7, 8):
        step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), microbatch_size=size)
        loop = gradient_by_hand(model, loss_fn, [*zip(*(leaf.split(size) for leaf in data[0]), strict=True)])
        off, usual = apart(step(*data[0])[1], whole), apart(loop, whole)
        print(f"min-SNR loss, {ROWS} rows in micro-batches of {size}: off by {off}; the usual loop: {usual}")

    weights, ema = trained(at_once, data, lambda *batch: gradient_by_hand(at_once, loss_fn, [batch]))
    ours = trained(model, data, lambda *batch: torch_backend.assign_grads(model, step(*batch)[1]))
    _, too_fast = trained(in_loop, data, lambda *batch: gradient_by_hand(in_loop, loss_fn, [batch]), microbatches=3)
    print(f"after {updates} updates: weights off by {apart(ours[0], weights)}, EMA off by {apart(ours[1], ema)}")
    print(f"an EMA that moves with each of 3 micro-batches: off by {apart(too_fast, ema)}")


if __name__ == "__main__":
    main()
