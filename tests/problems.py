"""Losses written with operators alone, so that both frameworks run them, on seeded data as NumPy trees."""

import numpy as np

import funcga


def rng(seed=0):
    return np.random.default_rng(seed)


def regression(dtype="float32", rows=12, seed=0):
    """params, (x, y) and a loss that is a mean over rows."""
    r = rng(seed)
    params = {"w": r.normal(size=(3, 2)), "b": r.normal(size=2)}
    batch = (r.normal(size=(rows, 3)), r.normal(size=(rows, 2)))
    cast = lambda tree: [a.astype(dtype) for a in tree]
    return {k: v.astype(dtype) for k, v in params.items()}, tuple(cast(batch)), mean_loss


def mean_loss(params, x, y):
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def tokens(dtype="float32", rows=10, length=7, seed=1):
    """params, (batch,) and a loss that is a sum over the unmasked tokens of very uneven rows."""
    r = rng(seed)
    lengths = r.integers(0, length + 1, size=rows)
    lengths[0], lengths[-1] = length, 0
    batch = {
        "x": r.normal(size=(rows, length, 4)).astype(dtype),
        "y": r.normal(size=(rows, length)).astype(dtype),
        "mask": (np.arange(length) < lengths[:, None]).astype(dtype),
    }
    params = [r.normal(size=(4, 5)).astype(dtype), (r.normal(size=(5,)).astype(dtype),)]
    return params, (batch,), token_sum


def token_sum(params, batch):
    hidden = batch["x"] @ params[0]
    hidden = hidden / (1 + hidden**2)
    return (batch["mask"] * (hidden @ params[1][0] - batch["y"]) ** 2).sum()


def token_count(batch):
    return batch["mask"].sum()


def token_mean(params, batch):
    """A mean over the micro-batch's tokens: NaN where there are none."""
    return token_sum(params, batch) / token_count(batch)


PROBLEMS = {
    "regression": lambda dtype: (*regression(dtype), funcga.mean(), None),
    "tokens": lambda dtype: (*tokens(dtype), funcga.per_weight(), token_count),
}


def full_gradient(kit, params, batch, loss, weight):
    """The value and gradient of the whole batch at once, without a fold."""
    value, grads = funcga.value_and_grad(loss)(params, *batch)
    if weight is None:
        return value, grads
    total = weight(*batch)
    leaves, structure = kit.backend.trees.flatten((value, grads))
    return kit.backend.trees.unflatten(structure, [leaf / total for leaf in leaves])


FOLDS = {
    "mean": funcga.mean(),
    "per_weight": funcga.per_weight(),
    "sum": funcga.sum(),
    "max": funcga.max(),
    "min": funcga.min(),
    "logsumexp": funcga.logsumexp(),
    "moments": funcga.moments(),
    "concat": funcga.concat(),
    "carry": funcga.carry(),
}
