"""A VAE with a beta schedule and free bits; Bayes by backprop; L2 of the weights: which terms of a loss have rows.

    python examples/vae_torch.py

- **Reconstruction and KL of a VAE** have rows. A mean over rows needs nothing special: the default fold. The usual loop
  is right as well where all micro-batches have equally many rows. A loss that is summed over the batch, as in PyTorch's
  example, is divided once by `per_weight()`, and stays a sum with `sum()`.
- **Free bits** clamp the mean KL of the batch, in each dimension. The mean of a micro-batch is another
  one, and may be clamped where that of the batch is not. `coupled` folds the means, and clamps once.
- **The KL of weights** (Bayes by backprop) and **L2 of weights** have no rows. Such a term has the same value in every
  micro-batch, and the mean of equal values is that value: under the default fold it counts once. A loop that adds up
  the parts of a sum adds it n times. Under `per_weight()` multiply it by the rows of the micro-batch.

Noise is drawn before the split: that of rows is an argument, that of weights a keyword, which is passed whole. A loss
that draws its own is right as well; its noise then depends on n. beta is a keyword, and follows the count of updates.

Sources: Kingma and others (2016), "Improving Variational Inference with Inverse Autoregressive Flow" (free bits);
Blundell and others (2015), "Weight Uncertainty in Neural Networks".
"""

from functools import partial

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss, softplus

import funcga
import torch_backend

ROWS, DATA, N, PIXELS, LATENT = 24, 72, 4, 24, 4
PRIOR = Normal(0.0, 1.0)


class VAE(nn.Module):
    """The logits of the pixels, and the posterior of each row."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 32), nn.Tanh(), nn.Linear(32, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.Tanh(), nn.Linear(32, PIXELS))

    def forward(self, x, noise):
        """The noise is that of the rows."""
        mean, log_scale = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + log_scale.exp() * noise), Normal(mean, log_scale.exp())


def terms(model, x, noise):
    """The reconstruction loss of each row, and its KL in each dimension."""
    logits, posterior = model(x, noise)
    return binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1), kl_divergence(posterior, PRIOR)


def elbo(model, x, noise, beta=1.0):
    """The negative ELBO, the mean over rows, with a weight of the KL."""
    reconstruction, kl = terms(model, x, noise)
    return reconstruction.mean() + beta * kl.sum(1).mean()


def l2(model):
    """A term of the weights alone, beside a mean over rows."""
    return 0.01 * sum(p.square().sum() for p in model.decoder.parameters())


def summed(model, x, noise):
    """The sum over rows, with the L2 for each of them."""
    return sum(term.sum() for term in terms(model, x, noise)) + len(x) * l2(model)


def summed_in_parts(model, x, noise):
    """As a loop adds it up: a part of the mean over rows, and all of the L2."""
    return sum(term.sum() for term in terms(model, x, noise)) / ROWS + l2(model)


def means(model, x, noise):
    """The summary of a micro-batch: its mean reconstruction loss, and its mean KL in each dimension."""
    return [term.mean(0) for term in terms(model, x, noise)]


def free_bits(model, summary):
    """At least half a nat counts in each dimension, on average over the batch."""
    reconstruction, kl = summary
    return reconstruction + kl.clamp(min=0.5).sum()


class BayesianLinear(nn.Module):
    """A linear layer with a posterior of its weights."""

    def __init__(self):
        super().__init__()
        self.weight, self.rho = nn.Parameter(torch.randn(PIXELS) / 5), nn.Parameter(torch.zeros(PIXELS) - 3)

    def forward(self, x, noise):
        """The noise is that of the weights."""
        return x @ (self.weight + softplus(self.rho) * noise)


def bayes(model, x, y, noise, rows=None):
    """The mean over rows, or in a loop its part, and the share of one row in the KL of the weights."""
    kl = kl_divergence(Normal(model.weight, softplus(model.rho)), PRIOR).sum()
    return mse_loss(model(x, noise), y, reduction="sum") / (rows or len(x)) + kl / DATA


def report(name, step, model, loss_fn, batch, n=N, **whole):
    """Prints how far a step is from the gradient of the whole batch, and a loop of `(loss / n).backward()`."""
    gradients = [torch.cat([grad.flatten() for grad in step(*batch, **whole)[1].values()])]
    for microbatches, count in (([batch], 1), (zip(*(leaf.tensor_split(N) for leaf in batch), strict=True), n)):
        model.zero_grad()
        for microbatch in microbatches:
            (loss_fn(model, *microbatch, **whole) / count).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    ours, expected, loop = gradients
    off, usual = [((each - expected).abs().max() / expected.abs().max()).item() for each in (ours, loop)]
    shown = f"{usual:.0e}" if usual < 1e-9 else f"{usual:.0%}"
    print(f"{name}, {N} micro-batches: off by {off:.0e}; the usual loop: {shown}")


def main(updates=60):
    """Prints how far each gradient is from that of the whole batch, and trains the VAE."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    vae, bayesian, gradient = VAE(), BayesianLinear(), torch_backend.module_value_and_grad
    x = (torch.rand(3, PIXELS)[torch.arange(ROWS) // 8] + 0.2 * torch.randn(ROWS, PIXELS) > 0.5).double()
    images, labeled, noise = (x, torch.randn(ROWS, LATENT)), (x, x.mean(1)), torch.randn(PIXELS)

    step = funcga.accumulate(gradient(vae, elbo), N)
    optimizer = torch.optim.Adam(vae.parameters(), lr=1e-2)
    for update in range(updates):
        beta = min(1.0, update / 40)
        loss, grads = step(x, torch.randn(ROWS, LATENT), beta=beta)
        torch_backend.assign_grads(vae, grads)
        optimizer.step()
        if update % 20 == 19:
            print(f"update {update + 1}: beta {beta:.2f}, loss {loss:.2f}")

    report("VAE, mean over rows", step, vae, elbo, images, beta=0.3)

    of_sums = funcga.accumulate(gradient(vae, summed), N, fold=funcga.per_weight())
    report("VAE, summed, with L2", of_sums, vae, summed_in_parts, images, 1)

    two_passes = funcga.coupled(gradient(vae, means), free_bits, N, fold=funcga.mean())
    report("VAE, free bits", two_passes, vae, lambda vae, *batch: free_bits(vae, means(vae, *batch)), images)

    by_rows = funcga.accumulate(gradient(bayesian, bayes), N)
    report("Bayes by backprop", by_rows, bayesian, partial(bayes, rows=ROWS), labeled, 1, noise=noise)


if __name__ == "__main__":
    main()
