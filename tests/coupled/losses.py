"""Losses that couple the rows of a batch, with operators alone, so that both frameworks run them.

Each has a summary of a micro-batch and a loss of what the summaries come to; and the loss of the whole batch, written
as in a paper, which shares no code with them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import funcga
from tests import objectives

FEATURES, WIDTH, EXPERTS = 5, 4, 3


class Loss(NamedTuple):
    """`summary(xp, params, batch)`, with totals if there are `totals(batch)`, and `loss(xp, params, s)`."""

    summary: Any
    loss: Any
    whole: Any  # whole(xp, params, batch)
    fold: Any = funcga.concat()
    totals: Any = None


def views(rows=11, seed=0):
    """params and a batch with two views of each row."""
    r = np.random.default_rng(seed)
    x = r.normal(size=(rows, FEATURES))
    v, w = r.normal(size=(2, FEATURES, WIDTH)) / 2
    params = {"bias": np.array(-0.3), "scale": np.array(0.7), "v": v, "w": w}  # in the order of JAX
    return params, {"x": x, "y": x + r.normal(size=x.shape), "target": r.normal(size=rows)}


def embedded(xp, params, batch):
    """Both views, not normalised."""
    return xp.tanh(batch["x"] @ params["v"]), xp.tanh(batch["y"] @ params["w"])


def unit(xp, z):
    return z / xp.sqrt((z * z).sum(-1))[:, None]


def _units(xp, params, batch):
    a, b = embedded(xp, params, batch)
    return {"a": unit(xp, a), "b": unit(xp, b)}


def similarities(xp, params, batch):
    """The cosine of each pair, pair by pair."""
    a, b = embedded(xp, params, batch)
    norms = xp.sqrt((a * a).sum(-1))[:, None] * xp.sqrt((b * b).sum(-1))[None]
    return (a[:, None] * b[None]).sum(-1) / norms


# --- InfoNCE, symmetric, with a learned temperature


def _infonce(xp, params, s):
    logits = s["a"] @ s["b"].T * xp.exp(params["scale"])
    largest = logits.max()
    rows, columns = (xp.log(xp.exp(logits - largest).sum(axis)) + largest for axis in (1, 0))
    return (rows + columns).mean() / 2 - xp.diagonal(logits).mean()


def _infonce_whole(xp, params, batch):
    likelihoods = xp.exp(similarities(xp, params, batch) * xp.exp(params["scale"]))
    own = xp.diagonal(likelihoods)
    return -(xp.log(own / likelihoods.sum(1)) + xp.log(own / likelihoods.sum(0))).mean() / 2


# --- VICReg: variance, invariance and covariance


def _moments(xp, params, batch):
    a, b = embedded(xp, params, batch)
    of_view = lambda z: {"mean": z.mean(0), "product": z.T @ z / len(z)}
    return {"a": of_view(a), "b": of_view(b), "apart": ((a - b) ** 2).mean()}


def _spread(xp, covariance):
    deviations = xp.sqrt(xp.diagonal(covariance) + 1e-4)
    excess = (1 - deviations) * (deviations < 1)
    return excess.mean() + ((covariance**2).sum() - (xp.diagonal(covariance) ** 2).sum()) / WIDTH


def _vicreg(xp, params, s):
    covariance = lambda view: view["product"] - view["mean"][:, None] * view["mean"][None]
    return 25 * s["apart"] + sum(_spread(xp, covariance(s[view])) for view in "ab")


def _vicreg_whole(xp, params, batch):
    a, b = embedded(xp, params, batch)
    centred = (z - z.sum(0) / len(z) for z in (a, b))
    return 25 * ((a - b) ** 2).mean() + sum(_spread(xp, (z[:, :, None] * z[:, None]).mean(0)) for z in centred)


# --- a mixture of experts, whose load is balanced


def _routed(xp, params, batch):
    logits = batch["x"] @ params["v"][:, :EXPERTS]
    probabilities = xp.exp(logits) / xp.exp(logits).sum(-1)[:, None]
    best = (logits >= xp.amax(logits, -1)[:, None]) * xp.ones_like(logits)
    outputs = xp.tanh(batch["x"] @ params["w"][:, :EXPERTS])
    return probabilities, best, ((probabilities * best * outputs).sum(-1) - batch["target"]) ** 2


def _experts(xp, params, batch):
    probabilities, best, errors = _routed(xp, params, batch)
    return {"probability": probabilities.mean(0), "fraction": best.mean(0), "error": errors.mean()}


def _balanced(xp, params, s):
    return s["error"] + 0.3 * EXPERTS * (s["fraction"] * s["probability"]).sum()


def _balanced_whole(xp, params, batch):
    probabilities, best, errors = _routed(xp, params, batch)
    count = len(errors)
    return errors.sum() / count + 0.3 * EXPERTS * (best.sum(0) * probabilities.sum(0)).sum() / count**2


def _of_objective(name):
    of = objectives.OBJECTIVES[name]
    return Loss(of.part, lambda xp, params, s: s, of.whole, funcga.sum(), of.totals)


LOSSES = {
    "InfoNCE": Loss(_units, _infonce, _infonce_whole),
    "VICReg": Loss(_moments, _vicreg, _vicreg_whole, funcga.mean()),
    "MoE balance": Loss(_experts, _balanced, _balanced_whole, funcga.mean()),
    "GRPO": _of_objective("GRPO"),
    "CE + auxiliary": _of_objective("CE + auxiliary"),
}


def problem(kit, name, rows=11, seed=0):
    """params and a batch."""
    return kit.arrays(views(rows, seed) if LOSSES[name].totals is None else objectives.rollouts(rows, seed))


def functions(kit, name):
    """(summary_fn, loss_fn, options)."""
    loss = LOSSES[name]
    if loss.totals is None:
        summary_fn = lambda params, batch: loss.summary(kit.xp, params, batch)
    else:
        summary_fn = lambda params, batch, *, totals: loss.summary(kit.xp, params, batch, totals)
    return summary_fn, lambda params, s: loss.loss(kit.xp, params, s), {"fold": loss.fold, "totals": loss.totals}


def step(kit, name, n=None, **options):
    """The coupled step."""
    summary_fn, loss_fn, own = functions(kit, name)
    return funcga.coupled(summary_fn, loss_fn, n, **own, **options)


def expected(kit, name, params, batch):
    """The value and the gradient of the whole batch, by the framework alone."""
    if kit.name == "jax":
        return _expected_in_jax(name, params, batch)
    return differentiated(kit, lambda params: LOSSES[name].whole(kit.xp, params, batch), params)


@partial(jax.jit, static_argnums=0)  # compiled once for all tests
def _expected_in_jax(name, params, batch):
    return jax.value_and_grad(partial(LOSSES[name].whole, jax.numpy))(params, batch)


def differentiated(kit, loss, params):
    """(value, gradients) of loss(params), by the framework alone; zeros where a parameter is not used."""
    if kit.name == "jax":
        return jax.jit(jax.value_and_grad(loss))(params)
    leaves, structure = kit.backend.trees.flatten(params)
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = loss(kit.backend.trees.unflatten(structure, leaves))
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    return value.detach(), kit.backend.trees.unflatten(structure, grads)


def bounds(rows, n=None, size=None):
    """The first row of each micro-batch, and the number of rows."""
    if n is None:
        return [*range(0, rows, size), rows]
    return [0, *np.cumsum([len(piece) for piece in np.array_split(np.arange(rows), n)]).tolist()]
