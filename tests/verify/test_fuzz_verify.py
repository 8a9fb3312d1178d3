"""`verify` against a loop by hand, on losses made by chance: it accuses no right one and passes no wrong one.

FUNCGA_FUZZ=N looks at N losses of any kind, and at N / 2 right ones.
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import funcga

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = int(os.environ.get("FUNCGA_FUZZ", "80"))
CUT = 5  # how many of the rows the first micro-batch of the loop by hand has


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
    "two means": OTHER, "sum and mean": OTHER, "sum over a power": OTHER, "weighted sum over a root": OTHER,
    "norm": COUPLED, "square of the sum": COUPLED, "contrastive": {"in-batch negatives"},
}  # fmt: skip


def made(seed):
    """(kind, loss, params, batch, weight, fold) by chance."""
    r = np.random.default_rng(seed)
    rows = int(r.integers(12, 20))
    params = {"w": r.normal(size=(3, 2)), "v": r.normal(size=2)}
    batch = {"x": r.normal(size=(rows, 3)), "y": r.normal(size=rows), "w": r.integers(1, 6, rows).astype("float64")}
    kind, shape, weight, fold = (str(r.choice([*of])) for of in (KINDS, ("tanh", "square", "linear"), LENGTHS, FOLDS))
    if kind in RIGHT and r.random() < 0.5:
        weight, fold = RIGHT[kind]
    loss = lambda p, b: KINDS[kind](p, b, terms(p, b, shape))
    return kind, loss, funcga.to_torch(params), funcga.to_torch(batch), LENGTHS[weight], fold


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


def check(seed):
    kind, loss, params, batch, weight, fold = made(seed)
    verdict = funcga.verify(funcga.value_and_grad(loss), params, batch, weight=weight, fold=FOLDS[fold])
    exact = is_exact(loss, params, batch, weight, fold)
    assert verdict.ok == exact, (seed, kind, fold, str(verdict))
    wrong = {cause.name for cause in verdict.causes} - SAID.get(kind, STATISTICS)
    assert not wrong, (seed, kind, fold, str(verdict))
    return kind, exact


def test_losses_by_chance():
    seen = {check(seed) for seed in range(COUNT)}
    if COUNT >= 80:
        assert {kind for kind, _ in seen} == {*KINDS}
        assert {("penalised", True), ("penalised", False), ("sum", True), ("sum", False)} <= seen


# --- right losses, of more kinds


def activated(h, kind):
    return {"linear": h, "rational": h / (1 + h**2), "square": h**2}[kind]


@st.composite
def right_losses(draw):
    """(loss, params, batch, options) of NumPy arrays: a loss of some terms under the fold that is right for it."""
    rows, length, width = draw(st.integers(2, 17)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    depth = draw(st.integers(1, 3))
    r = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    floats = lambda *shape: r.normal(size=shape).astype(dtype)
    params = {f"w{i}": floats(width, width) for i in range(depth)} | {"bias": floats(width), "unused": floats(2)}
    lengths = r.integers(0, length + 1, rows)
    lengths[r.integers(rows)] = length
    batch = {
        "x": floats(rows, length, width) * draw(st.sampled_from([1e-3, 1, 1e2])),
        "y": floats(rows, length),
        "mask": (np.arange(length) < lengths[:, None]).astype(dtype),
        "side": floats(rows, width),
    }
    kinds = [draw(st.sampled_from(["linear", "rational", "square"])) for _ in range(depth)]
    kind = draw(st.sampled_from(["row mean", "token mean", "token sum", "row sum", "sum"]))
    scale = draw(st.sampled_from([1, 0.5, 0.25, 3, 1 / 3, 1e-9]))
    temperature = draw(st.sampled_from([1, 2, 4, 0.1]))
    penalty, side = draw(st.sampled_from([0, 1e-2, 10])), draw(st.booleans())

    def loss(params, batch):
        h = batch["x"]
        for i, kind_of in enumerate(kinds):
            h = activated(h @ params[f"w{i}"] + params["bias"], kind_of)
        each = ((h.sum(2) / temperature - batch["y"]) ** 2 * batch["mask"]).sum(1)
        if side and "token" not in kind:
            each = each + ((batch["side"] @ params["w0"]) ** 2).sum(1)
        if "sum" in kind:
            return scale * each.sum()
        total = each.sum() / (batch["mask"].sum() if kind == "token mean" else len(each))
        return scale * total + penalty * (params["w0"] ** 2).sum()

    count = lambda batch: batch["mask"].sum()
    options = {
        "row mean": {},
        "token mean": {"weight": count},
        "token sum": {"fold": funcga.per_weight(), "weight": count},
        "row sum": {"fold": funcga.per_weight()},
        "sum": {"fold": funcga.sum()},
    }[kind]
    n = draw(st.sampled_from([None, 2, 3, 4, rows, (2, rows)]))
    within = n if n is None or isinstance(n, tuple) else min(n, rows)
    return loss, params, batch, {**options, "n": within, "seed": draw(st.integers(0, 99))}


@given(right_losses(), st.sampled_from([funcga.grad, funcga.value_and_grad]))
@settings(
    max_examples=COUNT // 2, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
def test_no_right_loss_is_accused(right, gradient):
    loss, params, batch, options = right
    verdict = funcga.verify(gradient(loss), funcga.to_torch(params), funcga.to_torch(batch), **options)
    assert verdict.ok, str(verdict)
    assert not verdict.causes
