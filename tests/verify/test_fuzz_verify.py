"""`verify` against a loop by hand, on losses made by chance: it accuses no right one and passes no wrong one.

FUNCGA_FUZZ=N looks at N losses in torch, and at N / 120 in JAX, which compiles them.
"""

import os

import numpy as np
import pytest
import torch

import funcga
from tests.kits import JAX, TORCH

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = int(os.environ.get("FUNCGA_FUZZ", "240"))
CUT = 5  # how many of the rows the first micro-batch of the loop by hand has


class Words:
    """What losses are made of, in both frameworks."""

    def __init__(self, kit):
        self.xp = kit.xp

    def terms(self, params, batch, shape):
        """A number >= 0 for each row."""
        h = batch["x"] @ params["w"]
        h = {"tanh": self.xp.tanh(h), "square": h**2 / 4, "linear": h}[shape]
        return (h @ params["v"] - batch["y"]) ** 2 + 0.01

    def loss(self, kind, shape):
        """The loss of this kind of `terms`, weighted by w >= 0 where it says so."""
        xp, of = self.xp, lambda p, b: self.terms(p, b, shape)
        mean = lambda p, b: of(p, b).mean()
        weighted = lambda p, b: (of(p, b) * b["w"]).sum() / b["w"].sum()
        side = lambda p, b: ((b["x"] @ p["w"]) ** 2).mean()
        return {
            "mean": mean,
            "weighted": weighted,
            "sum": lambda p, b: of(p, b).sum(),
            "penalised": lambda p, b: mean(p, b) + 0.1 * (p["w"] ** 2).sum(),
            "penalised sum": lambda p, b: of(p, b).sum() + (p["w"] ** 2).sum(),
            "two means": lambda p, b: weighted(p, b) + side(p, b),
            "sum and mean": lambda p, b: of(p, b).sum() + side(p, b),
            "norm": lambda p, b: of(p, b).sum() ** 0.5,
            "root of the mean": lambda p, b: mean(p, b) ** 0.5,
            "sum over a power": lambda p, b: of(p, b).sum() / len(b["x"]) ** 0.75,
            "weighted sum over a root": lambda p, b: (of(p, b) * b["w"]).sum() / b["w"].sum() ** 0.5,
            "log of the mean": lambda p, b: xp.log(mean(p, b)),
            "log of the sum": lambda p, b: xp.log(of(p, b).sum()),
            "log-sum-exp": lambda p, b: xp.log(xp.exp(xp.tanh(of(p, b))).sum()),
            "variance": lambda p, b: ((of(p, b) - mean(p, b)) ** 2).mean(),
            "square of the mean": lambda p, b: mean(p, b) ** 2,
            "square of the sum": lambda p, b: of(p, b).sum() ** 2,
            "attention over rows": lambda p, b: (xp.exp(-of(p, b)) * of(p, b)).sum() / xp.exp(-of(p, b)).sum(),
            "contrastive": lambda p, b: xp.log(xp.exp(xp.tanh(b["x"] @ p["w"] @ p["w"].T @ b["x"].T)).sum(1)).mean(),
            "rows times a mean": lambda p, b: of(p, b).sum() * side(p, b),
        }[kind]


KINDS = [
    "mean", "weighted", "sum", "penalised", "penalised sum", "two means", "sum and mean", "norm", "root of the mean",
    "sum over a power", "weighted sum over a root", "log of the mean", "log of the sum", "log-sum-exp", "variance",
    "square of the mean", "square of the sum", "attention over rows", "contrastive", "rows times a mean",
]  # fmt: skip
LENGTHS = {"rows": None, "w": lambda batch: batch["w"].sum(), "rows, written": lambda batch: batch["x"].shape[0]}
RIGHT = {"mean": ("rows", "mean"), "weighted": ("w", "mean"), "sum": ("rows", "sum"), "penalised": ("rows", "mean")}
FOLDS = {"mean": funcga.mean(), "per_weight": funcga.per_weight(), "sum": funcga.sum()}

# What may be said of each kind; a cause of another kind is a wrong diagnosis.
COUNTS = {"uneven tokens", "wrong weight", "mean under sum", "mean under per_weight", "sum under mean", "regulariser"}
OTHER, COUPLED, STATISTICS = {"other normaliser"}, {"coupled rows"}, {"batch statistics"}
SAID = {
    "mean": COUNTS, "weighted": COUNTS, "sum": COUNTS, "penalised": COUNTS, "penalised sum": COUNTS,
    "two means": OTHER, "sum and mean": OTHER, "sum over a power": OTHER, "weighted sum over a root": OTHER,
    "norm": COUPLED, "square of the sum": COUPLED, "contrastive": {"in-batch negatives"},
}  # fmt: skip


def made(seed, kit):
    """(kind, shape, params, batch, weight, fold) by chance."""
    r = np.random.default_rng(seed)
    rows = int(r.integers(12, 20))
    params = {"w": r.normal(size=(3, 2)), "v": r.normal(size=2)}
    batch = {"x": r.normal(size=(rows, 3)), "y": r.normal(size=rows), "w": r.integers(1, 6, rows).astype("float64")}
    kind, shape, weight, fold = (str(r.choice([*of])) for of in (KINDS, ("tanh", "square", "linear"), LENGTHS, FOLDS))
    if kind in RIGHT and r.random() < 0.5:
        weight, fold = RIGHT[kind]
    return kind, shape, kit.arrays(params), kit.arrays(batch), LENGTHS[weight], fold


def is_exact(loss, params, batch, weight, fold):
    """Whether two uneven micro-batches give the gradient of the whole batch, by a loop in torch in float64."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    gradient = lambda rows: torch.autograd.grad(loss(leaves, rows), [*leaves.values()], materialize_grads=True)
    parts = [{k: v[part] for k, v in batch.items()} for part in (slice(CUT), slice(CUT, None))]
    count = lambda rows: float(len(rows["x"]) if weight is None else weight(rows))
    factor = count if fold == "mean" else lambda rows: 1
    total = sum(map(count, parts)) if fold != "sum" else 1
    summed = [sum(parts) for parts in zip(*[[factor(rows) * g for g in gradient(rows)] for rows in parts], strict=True)]
    divisor = count(batch) if fold == "per_weight" else 1  # of one micro-batch, the whole batch
    whole = [g / divisor for g in gradient(batch)]
    scale = max(float(g.abs().max()) for g in whole)
    return all(float((s / total - g).abs().max()) <= 1e-9 * scale for s, g in zip(summed, whole, strict=True))


def check(seed, kit, **options):
    kind, shape, params, batch, weight, fold = made(seed, kit)
    verdict = funcga.verify(
        funcga.value_and_grad(Words(kit).loss(kind, shape)), params, batch, weight=weight, fold=FOLDS[fold], **options
    )
    _, _, *tensors, _, _ = made(seed, TORCH)
    exact = is_exact(Words(TORCH).loss(kind, shape), *tensors, weight, fold)
    assert verdict.ok == exact, (seed, kind, shape, fold, str(verdict))
    wrong = {cause.name for cause in verdict.causes} - SAID.get(kind, STATISTICS)
    assert not wrong, (seed, kind, shape, fold, str(verdict))
    return kind, exact


def test_losses_by_chance_in_torch():
    seen = {check(seed, TORCH) for seed in range(COUNT)}
    if COUNT >= 240:
        assert {kind for kind, _ in seen} == {*KINDS}
        assert {(kind, exact) for kind in RIGHT for exact in (True, False)} <= seen


@pytest.mark.usefixtures("x64")
def test_losses_by_chance_in_jax():
    for seed in range(COUNT // 120):
        check(seed, JAX, n=2)


def test_the_fuzzer_has_teeth(monkeypatch):
    """A verify that always says the same is found out."""
    verify = funcga.verify
    for ok in (True, False):
        same = lambda *args, ok=ok, **options: verify(*args, **options).__class__(ok, (), (), "float64")
        monkeypatch.setattr(funcga, "verify", same)
        with pytest.raises(AssertionError):
            test_losses_by_chance_in_torch()
