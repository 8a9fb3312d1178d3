"""Losses whose terms are divided by counts of the whole batch, with operators alone, so that both frameworks run them.

Each has what the whole batch gives, written as in a paper; the same as a sum over micro-batches, with totals=; and what
people write in a loop, whose micro-batches are then averaged.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

import funcga

VOCABULARY, LENGTH, WIDTH = 5, 6, 4


def rollouts(rows=11, seed=0):
    """params and a batch of completions: very uneven lengths, advantages, and two older policies."""
    r = np.random.default_rng(seed)
    lengths = r.integers(1, LENGTH + 1, size=rows)
    lengths[0], lengths[-1] = LENGTH, 1
    batch = {
        "x": r.normal(size=(rows, LENGTH, WIDTH)),
        "chosen": np.eye(VOCABULARY)[r.integers(0, VOCABULARY, size=(rows, LENGTH))],
        "mask": (np.arange(LENGTH) < lengths[:, None]).astype("float64"),
        "advantage": r.normal(size=(rows, 1)),
        "old": -r.random(size=(rows, LENGTH)) * 3,
        "reference": -r.random(size=(rows, LENGTH)) * 3,
    }
    return {"w": r.normal(size=(WIDTH, VOCABULARY))}, batch


def likelihoods(xp, params, batch):
    """The logarithm of the probability of each token."""
    logits = batch["x"] @ params["w"]
    return (logits * batch["chosen"]).sum(-1) - xp.log(xp.exp(logits).sum(-1))


def surrogate(xp, params, batch):
    """The clipped objective of each token, and its divergence from the reference."""
    new = likelihoods(xp, params, batch)
    ratio = xp.exp(new - batch["old"])
    clipped = -xp.minimum(ratio * batch["advantage"], xp.clip(ratio, 0.8, 1.28) * batch["advantage"])
    distance = batch["reference"] - new
    return clipped * batch["mask"], (xp.exp(distance) - distance - 1) * batch["mask"]


def cross_entropy(xp, params, batch):
    return -likelihoods(xp, params, batch) * batch["mask"]


def auxiliary(xp, params, batch):
    """A loss of each row, as of a router: the square of its log-sum-exp at the first token."""
    return xp.log(xp.exp(batch["x"][:, 0] @ params["w"]).sum(-1)) ** 2


class Objective(NamedTuple):
    """`whole(xp, params, batch)`; `part(xp, params, batch, totals)`, of which `totals(batch)` is the tree."""

    whole: Any
    part: Any
    totals: Any


def per_row(batch):
    return batch["mask"].sum(1)


def _grpo(xp, params, batch):
    clipped, distance = surrogate(xp, params, batch)
    return ((clipped + 0.04 * distance).sum(1) / per_row(batch)).mean()


def _grpo_part(xp, params, batch, totals):
    clipped, distance = surrogate(xp, params, batch)
    return ((clipped + 0.04 * distance).sum(1) / per_row(batch)).sum() / totals["rows"]


def _dapo(xp, params, batch):
    return surrogate(xp, params, batch)[0].sum() / batch["mask"].sum()


def _dapo_part(xp, params, batch, totals):
    return surrogate(xp, params, batch)[0].sum() / totals["tokens"]


def _with_aux(xp, params, batch):
    tokens = cross_entropy(xp, params, batch).sum() / batch["mask"].sum()
    return tokens + 0.5 * auxiliary(xp, params, batch).mean()


def _with_aux_part(xp, params, batch, totals):
    tokens = cross_entropy(xp, params, batch).sum() / totals["tokens"]
    return tokens + 0.5 * auxiliary(xp, params, batch).sum() / totals["rows"]


def rows(batch):
    return {"rows": len(batch["mask"])}


def tokens(batch):
    return {"tokens": batch["mask"].sum()}


def rows_and_tokens(batch):
    return {"tokens": batch["mask"].sum(), "rows": len(batch["mask"])}


OBJECTIVES = {
    "GRPO": Objective(_grpo, _grpo_part, rows),
    "DAPO": Objective(_dapo, _dapo_part, tokens),
    "CE + auxiliary": Objective(_with_aux, _with_aux_part, rows_and_tokens),
}


def expected(kit, name, params, batch):
    """The value and the gradient of the whole batch, by the framework alone."""
    return _differentiated(kit, OBJECTIVES[name].whole, params, batch)


@partial(jax.jit, static_argnums=0)  # compiled once for all tests
def _differentiated_in_jax(loss, params, batch):
    return jax.value_and_grad(partial(loss, jax.numpy))(params, batch)


def _differentiated(kit, loss, params, batch):
    if kit.name == "jax":
        return _differentiated_in_jax(loss, params, batch)
    w = params["w"].clone().requires_grad_()
    value = loss(kit.xp, {"w": w}, batch)
    return value.detach(), {"w": torch.autograd.grad(value, w)[0]}


def gradient(kit, name):
    """The gradient function of the loss that takes totals."""
    loss = OBJECTIVES[name].part
    return funcga.value_and_grad(lambda params, batch, *, totals: loss(kit.xp, params, batch, totals))


def step(kit, name, n, **options):
    """The step with totals=."""
    return funcga.accumulate(gradient(kit, name), n, fold=funcga.sum(), totals=OBJECTIVES[name].totals, **options)


def streaming(kit, name, **options):
    """The step over an iterable of micro-batches."""
    return funcga.stream(gradient(kit, name), fold=funcga.sum(), totals=OBJECTIVES[name].totals, **options)


def cut(batch, *bounds):
    """The rows of a batch between these bounds."""
    return [{name: leaf[start:end] for name, leaf in batch.items()} for start, end in pairwise(bounds)]
