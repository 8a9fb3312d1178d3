"""`verify` of steps of `coupled` made by chance, against a fold by hand: none is accused wrongly, and none passes.

FUNCGA_FUZZ=N looks at N of them.
"""

import itertools
import os

import numpy as np
import pytest
import torch

import funcga

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = int(os.environ.get("FUNCGA_FUZZ", "80"))
CUT = 5  # how many of the rows the first micro-batch of the fold by hand has


def hidden(params, batch):
    return torch.tanh(batch["x"] @ params["w"])


def weighted(params, batch):
    return hidden(params, batch) * batch["w"][:, None]


SUMMARIES = {
    "mean": lambda p, b: hidden(p, b).mean(0),
    "sum": lambda p, b: hidden(p, b).sum(0),
    "weighted mean": lambda p, b: weighted(p, b).sum(0) / b["w"].sum(),
    "weighted sum": lambda p, b: weighted(p, b).sum(0),
    "rows": hidden,
    "largest": lambda p, b: hidden(p, b).amax(0),
    "variance": lambda p, b: hidden(p, b).var(0, correction=0),
    "centred rows": lambda p, b: hidden(p, b) - hidden(p, b).mean(0),
    "log of a sum": lambda p, b: hidden(p, b).exp().sum(0).log(),
    "a constant": lambda p, b: p["w"].sum(0),
}
FOLDS = {
    "mean": (funcga.mean(), lambda parts, w: sum(v * c for v, c in zip(parts, w, strict=True)) / sum(w)),
    "sum": (funcga.sum(), lambda parts, w: sum(parts)),
    "per_weight": (funcga.per_weight(), lambda parts, w: sum(parts) / sum(w)),
    "max": (funcga.max(), lambda parts, w: torch.stack(parts).amax(0)),
    "logsumexp": (funcga.logsumexp(), lambda parts, w: torch.stack(parts).logsumexp(0)),
    "concat": (funcga.concat(), lambda parts, w: torch.cat(parts)),
}
WEIGHED = ("mean", "per_weight")
WEIGHTS = {"rows": None, "w": lambda batch: batch["w"].sum()}


def loss_fn(params, s):
    """It couples all that is in s, and uses the parameters itself."""
    together = s if s.ndim == 1 else s.T @ s / len(s)
    return (together**2).sum() * params["scale"] + together.sum().sin()


def made(seed):
    """(summary, fold, weight, params, batch) by chance."""
    r = np.random.default_rng(seed)
    rows = int(r.integers(11, 19))
    params = {"w": r.normal(size=(3, 4)), "scale": np.array(0.7)}
    batch = {"x": r.normal(size=(rows, 3)), "w": r.integers(1, 6, rows).astype("float64")}
    combinations = [*itertools.product(SUMMARIES, FOLDS, ["rows"]), *itertools.product(SUMMARIES, WEIGHED, ["w"])]
    return *combinations[seed % len(combinations)], funcga.to_torch(params), funcga.to_torch(batch)


def is_exact(summary, fold, weight, params, batch):
    """Whether two uneven parts, folded by hand, have the gradient of the whole batch."""

    def gradient(parts):
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        weights = [float(len(part["x"]) if weight is None else weight(part)) for part in parts]
        s = FOLDS[fold][1]([SUMMARIES[summary](leaves, part) for part in parts], weights)
        return torch.autograd.grad(loss_fn(leaves, s), [*leaves.values()])

    parts = [{name: array[rows] for name, array in batch.items()} for rows in (slice(CUT), slice(CUT, None))]
    scale = max(float(g.abs().max()) for g in gradient([batch]))
    pairs = zip(gradient(parts), gradient([batch]), strict=True)
    return all(float((x - y).abs().max()) <= 1e-9 * scale for x, y in pairs)


def test_steps_by_chance():
    seen = set()
    for seed in range(COUNT):
        summary, fold, weight, params, batch = made(seed)
        step = funcga.coupled(SUMMARIES[summary], loss_fn, 3, fold=FOLDS[fold][0], weight=WEIGHTS[weight])
        verdict = funcga.verify(step, params, batch)
        try:
            exact = is_exact(summary, fold, WEIGHTS[weight], params, batch)
        except RuntimeError:  # rows of parts that differ in number cannot be added up
            exact = False
        assert verdict.ok == exact, (seed, summary, fold, weight, str(verdict))
        assert verdict.ok or len(verdict.causes) == 1, str(verdict)
        # Of all but statistics of the rows there is a fold, and it is named.
        names = {cause.name for cause in verdict.causes}
        assert "not decomposable" not in names or summary == "variance", str(verdict)
        assert "batch statistics" not in names or summary in ("variance", "centred rows"), str(verdict)
        seen.add((summary, fold, exact))
    if COUNT >= 80:
        right = {(summary, fold) for summary, fold, exact in seen if exact}
        assert right == {
            ("mean", "mean"), ("weighted mean", "mean"), ("sum", "sum"), ("weighted sum", "sum"), ("sum", "per_weight"),
            ("weighted sum", "per_weight"), ("rows", "concat"), ("largest", "max"), ("log of a sum", "logsumexp"),
            ("a constant", "mean"), ("a constant", "max"),
        }  # fmt: skip
