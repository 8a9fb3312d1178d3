"""`verify` against a loop by hand, on losses made by chance: it accuses no right one and passes no wrong one.

FUNCGA_FUZZ=N looks at N losses.
"""

import os

import numpy as np
import pytest
import torch

import funcga

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = int(os.environ.get("FUNCGA_FUZZ", "100"))


def terms(p, b, shape):
    """A number >= 0 for each row."""
    h = b["x"] @ p["w"]
    h = {"tanh": torch.tanh(h), "square": h**2 / 4, "linear": h}[shape]
    return (h @ p["v"] - b["y"]) ** 2 + 0.01


def side(p, b):
    return ((b["x"] @ p["w"]) ** 2).mean()


def contrast(p, b):
    return torch.tanh(b["x"] @ p["w"] @ p["w"].T @ b["x"].T).logsumexp(1).mean()


def attention(e):
    return (torch.exp(-e) * e).sum() / torch.exp(-e).sum()


# The loss of parameters p, a batch b and its terms e, weighted by w >= 0 where the name says so.
KINDS = {
    "mean": lambda p, b, e: e.mean(),
    "weighted": lambda p, b, e: (e * b["w"]).sum() / b["w"].sum(),
    "sum": lambda p, b, e: e.sum(),
    "penalised": lambda p, b, e: e.mean() + 0.1 * (p["w"] ** 2).sum(),
    "penalised sum": lambda p, b, e: e.sum() + (p["w"] ** 2).sum(),
    "two means": lambda p, b, e: (e * b["w"]).sum() / b["w"].sum() + side(p, b),
    "sum and mean": lambda p, b, e: e.sum() + side(p, b),
    "norm": lambda p, b, e: e.sum() ** 0.5,
    "root of the mean": lambda p, b, e: e.mean() ** 0.5,
    "sum over a power": lambda p, b, e: e.sum() / len(e) ** 0.75,
    "weighted sum over a root": lambda p, b, e: (e * b["w"]).sum() / b["w"].sum() ** 0.5,
    "log of the mean": lambda p, b, e: e.mean().log(),
    "log of the sum": lambda p, b, e: e.sum().log(),
    "log-sum-exp": lambda p, b, e: e.tanh().logsumexp(0),
    "variance": lambda p, b, e: e.var(correction=0),
    "square of the mean": lambda p, b, e: e.mean() ** 2,
    "square of the sum": lambda p, b, e: e.sum() ** 2,
    "attention over rows": lambda p, b, e: attention(e),
    "contrastive": lambda p, b, e: contrast(p, b),
    "rows times a mean": lambda p, b, e: e.sum() * side(p, b),
}
LENGTHS = {"rows": None, "w": lambda batch: batch["w"].sum(), "rows, written": lambda batch: batch["x"].shape[0]}
RIGHT = {"mean": ("rows", "mean"), "weighted": ("w", "mean"), "sum": ("rows", "sum"), "penalised": ("rows", "mean")}
FOLDS = {"mean": funcga.mean(), "per_weight": funcga.per_weight(), "sum": funcga.sum()}

# What may be said of each kind; a cause of another kind is a wrong diagnosis.
COUNTS = {"uneven tokens", "wrong weight", "mean under sum", "mean under per_weight", "sum under mean", "regulariser"}
OTHER, COUPLED, STATISTICS = {"other normaliser"}, {"coupled rows"}, {"batch statistics"}
SAID = {
    "mean": COUNTS, "weighted": COUNTS, "sum": COUNTS, "penalised": COUNTS, "penalised sum": COUNTS,
    "two means": OTHER, "sum and mean": OTHER, "sum over a power": COUPLED, "weighted sum over a root": COUPLED,
    "norm": COUPLED, "square of the sum": COUPLED, "contrastive": {"in-batch negatives"},
}  # fmt: skip


def made(seed):
    """(kind, loss, params, batch, options) by chance."""
    r = np.random.default_rng(seed)
    rows, dtype = int(r.integers(12, 20)), str(r.choice(["float32", "float64"]))
    params = {"w": r.normal(size=(3, 2)), "v": r.normal(size=2), "unused": r.normal(size=2)}
    batch = {"x": r.normal(size=(rows, 3)), "y": r.normal(size=rows), "w": r.integers(1, 6, rows)}
    kind, shape, weight, fold = (str(r.choice([*of])) for of in (KINDS, ("tanh", "square", "linear"), LENGTHS, FOLDS))
    if kind in RIGHT and r.random() < 0.7:
        weight, fold = RIGHT[kind]
        # A right loss may have few rows, some of which do not count.
        few = int(r.integers(2, rows + 1))
        batch = {name: array[:few] for name, array in batch.items()}
        batch["w"] = batch["w"] % 5 + (np.arange(len(batch["w"])) == 0)
    scale = float(r.choice([1, 1 / 3, 1e-9]))
    loss = lambda p, b: scale * KINDS[kind](p, b, terms(p, b, shape))
    tensors = funcga.to_torch([{name: array.astype(dtype) for name, array in tree.items()} for tree in (params, batch)])
    n = [None, 2, (2, len(batch["x"]))][r.integers(3)]
    return kind, loss, *tensors, {"weight": LENGTHS[weight], "fold": fold, "n": n, "seed": int(r.integers(99))}


def is_exact(loss, params, batch, weight, fold):
    """Whether two uneven micro-batches give the gradient of the whole batch, by a loop in torch in float64."""
    leaves = {name: p.double().requires_grad_() for name, p in params.items()}
    batch = {name: leaf.double() for name, leaf in batch.items()}
    gradient = lambda rows: torch.autograd.grad(loss(leaves, rows), [*leaves.values()], materialize_grads=True)
    cut = min(5, len(batch["x"]) - 1)
    parts = [{k: v[part] for k, v in batch.items()} for part in (slice(cut), slice(cut, None))]
    count = lambda rows: float(len(rows["x"]) if weight is None else weight(rows))
    factor = count if fold == "mean" else lambda rows: 1
    total = sum(map(count, parts)) if fold != "sum" else 1
    summed = [sum(parts) for parts in zip(*[[factor(rows) * g for g in gradient(rows)] for rows in parts], strict=True)]
    divisor = count(batch) if fold == "per_weight" else 1  # of one micro-batch, the whole batch
    whole = [g / divisor for g in gradient(batch)]
    scale = max(float(g.abs().max()) for g in whole)
    return all(float((s / total - g).abs().max()) <= 1e-9 * scale for s, g in zip(summed, whole, strict=True))


def check(seed):
    kind, loss, params, batch, options = made(seed)
    fold = options.pop("fold")
    verdict = funcga.verify(funcga.value_and_grad(loss), params, batch, fold=FOLDS[fold], **options)
    exact = is_exact(loss, params, batch, options["weight"], fold)
    assert verdict.ok == exact, (seed, kind, fold, str(verdict))
    wrong = {cause.name for cause in verdict.causes} - SAID.get(kind, STATISTICS)
    assert not wrong, (seed, kind, fold, str(verdict))
    return kind, exact


def test_losses_by_chance():
    seen = {check(seed) for seed in range(COUNT)}
    if COUNT >= 100:
        assert {kind for kind, _ in seen} == {*KINDS}
        assert {("penalised", True), ("penalised", False), ("sum", True), ("sum", False)} <= seen
