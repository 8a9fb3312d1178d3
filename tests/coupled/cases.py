"""Generated steps of `coupled`, and what they give by one graph over all micro-batches."""

import math
import random
from typing import Any, NamedTuple

import numpy as np
import torch

import funcga
from tests.coupled.losses import bounds, differentiated

PRODUCT = funcga.Fold(
    funcga.Reducer(
        lambda xp, value, weight: value,
        funcga.Monoid(lambda xp, like: xp.ones_like(like), lambda xp, a, b: a * b),
        kinds=("float",),
    ),
    funcga.normalizers.identity,
)
# A sum, whose terms are no linear function of the values.
SQUARES = funcga.Fold(
    funcga.Reducer(lambda xp, value, weight: value * value, funcga.monoids.sum, kinds=("float",)),
    funcga.normalizers.by_steps,
)


class Leaf(NamedTuple):
    """A leaf of a summary: `of(xp, h, labels)`, of hidden features [rows, features], and how it is folded."""

    fold: Any
    folded: str
    of: Any


LEAVES = {
    "rows": Leaf(funcga.concat(), "concat", lambda xp, h, labels: h),
    "columns": Leaf(funcga.concat(axis=1), "columns", lambda xp, h, labels: h.T),
    "two a row": Leaf(funcga.concat(), "concat", lambda xp, h, labels: xp.concatenate([h, h * h])),
    "one": Leaf(funcga.concat(), "concat", lambda xp, h, labels: h.sum(0)[None]),
    "mean": Leaf(funcga.mean(), "mean", lambda xp, h, labels: h.mean(0)),
    "product": Leaf(funcga.mean(), "mean", lambda xp, h, labels: h.T @ h / len(h)),
    "sum": Leaf(funcga.sum(), "sum", lambda xp, h, labels: h.sum()),
    "per_weight": Leaf(funcga.per_weight(), "per_weight", lambda xp, h, labels: h.sum(0)),
    "max": Leaf(funcga.max(), "max", lambda xp, h, labels: xp.amax(h, 0)),
    "min": Leaf(funcga.min(), "min", lambda xp, h, labels: xp.amin(h, 0)),
    "logsumexp": Leaf(funcga.logsumexp(), "logsumexp", lambda xp, h, labels: xp.log(xp.exp(h).sum(0))),
    "moments": Leaf(funcga.moments(), "moments", lambda xp, h, labels: h.mean(0)),
    "pooled": Leaf(funcga.pooled(), "pooled", lambda xp, h, labels: xp.stack(
        [h.mean(0) * 0 + len(h), h.mean(0), ((h - h.mean(0)) ** 2).mean(0)])),
    "ratio": Leaf(funcga.ratio(), "ratio", lambda xp, h, labels: xp.stack([h.sum(0), 1 + (h * h).sum(0)])),
    "own monoid": Leaf(PRODUCT, "product", lambda xp, h, labels: 1 + h.mean(0)),
    "own lift": Leaf(SQUARES, "squares", lambda xp, h, labels: h.mean(0)),
    "labels": Leaf(funcga.concat(), "concat", lambda xp, h, labels: labels),
    "mask": Leaf(funcga.concat(), "concat", lambda xp, h, labels: labels > 1),
    "largest label": Leaf(funcga.max(), "max", lambda xp, h, labels: xp.amax(labels)),
    "how many": Leaf(funcga.sum(), "sum", lambda xp, h, labels: labels.sum()),
    "nothing": Leaf(funcga.mean(), "nothing", lambda xp, h, labels: None),
}  # fmt: skip
WITHOUT_GRADIENT = ("labels", "mask", "largest label", "how many", "nothing")


def folded(xp, name, values, weights):
    """What a fold is, in words."""
    total = sum(weights)
    if name == "nothing":
        return None
    if name in ("concat", "columns"):
        return xp.concatenate(values, 1 if name == "columns" else 0)
    if name in ("max", "min"):
        return (xp.amax if name == "max" else xp.amin)(xp.stack(values), 0)
    if name == "logsumexp":
        return xp.log(sum(map(xp.exp, values)))
    if name == "product":
        return math.prod(values)
    if name == "sum":
        return sum(values)
    if name == "per_weight":
        return sum(values) / total
    if name == "squares":
        return sum(value * value for value in values) / len(values)
    if name == "ratio":
        return sum(value[0] for value in values) / sum(value[1] for value in values)
    if name == "pooled":
        weights, total = [value[0] for value in values], sum(value[0] for value in values)
        mean = sum(value[0] * value[1] for value in values) / total
        apart = sum(value[0] * (value[2] + (value[1] - mean) ** 2) for value in values)
        return funcga.normalizers.Pooled(total, mean, apart / total)
    mean = sum(w * value for w, value in zip(weights, values, strict=True)) / total
    if name == "mean":
        return mean
    variance = sum(w * (value - mean) ** 2 for w, value in zip(weights, values, strict=True)) / total
    return funcga.normalizers.Moments(mean, variance)


class Triple(NamedTuple):
    """A summary that is no dict."""

    first: Any
    second: Any
    third: Any


WEIGHTS = {"rows": None, "constant": lambda *batch: 0.1, "labels": lambda *batch: labels_of(batch).sum()}


def labels_of(batch):
    return batch[0]["labels"] if isinstance(batch[0], dict) else batch[1]


class Case:
    """A step, and its call."""

    def __init__(self, seed, kit):
        choose, self.kit = random.Random(seed), kit
        self.rows = choose.randint(1, 9)
        n = choose.randint(1, self.rows)
        self.cut = choose.choice([{"n": n}, {"microbatch_size": n}])
        self.bounds = bounds(self.rows, self.cut.get("n"), self.cut.get("microbatch_size"))
        self.names = choose.sample([*LEAVES], 3)
        if all(name in WITHOUT_GRADIENT for name in self.names):
            self.names[1] = "rows"
        self.container = choose.choice(["dict", "tuple", "Triple"])
        self.weight = choose.choice([*WEIGHTS])
        self.batch = choose.choice(["two", "dict", "columns", "dict of columns"])
        self.argnums = choose.choice([0, 0, (0,), (0, 1), (1, 0), 1])
        self.has_aux = choose.random() < 0.3
        r = np.random.default_rng(seed)
        params = {"t": r.normal(size=()), "w": r.normal(size=(3, 2))}
        self.params, self.shift = kit.arrays((params, r.normal(size=2)))
        # Labels of at least 1 in the first row: the total weight is not 0. Others may be 0, and so may be weights.
        labels = r.integers(0, 3, size=self.rows) * (r.random(self.rows) < 0.5) + (np.arange(self.rows) == 0)
        self.counts = labels
        self.x, self.labels = kit.arrays((r.normal(size=(self.rows, 3)), labels.astype("int32")))

    def __repr__(self):
        parts = (self.rows, self.cut, self.names, self.container, self.weight, self.batch, self.argnums, self.has_aux)
        return ", ".join(map(str, parts))

    # --- the step

    def summary_fn(self, params, shift, *batch):
        x, labels = (batch[0]["x"], batch[0]["labels"]) if "dict" in self.batch else batch
        return self.summary(params, shift, x.T if "columns" in self.batch else x, labels)

    def summary(self, params, shift, x, labels):
        h = self.kit.xp.tanh(x @ params["w"] + shift)
        return self.contained([LEAVES[name].of(self.kit.xp, h, labels) for name in self.names])

    def contained(self, leaves):
        if self.container == "dict":
            return dict(zip(self.names, leaves, strict=True))
        return tuple(leaves) if self.container == "tuple" else Triple(*leaves)

    def loss_fn(self, *args):
        *of_params, s = args
        t = next((arg["t"] for arg in of_params if isinstance(arg, dict)), 0.5)
        xp, leaves = self.kit.xp, [leaf for leaf in self.kit.backend.trees.flatten(s)[0] if leaf is not None]
        floats = [leaf for leaf in leaves if self.kit.backend.arrays.kind(leaf.dtype) == "float"]
        others = [leaf for leaf in leaves if self.kit.backend.arrays.kind(leaf.dtype) != "float"]
        total = sum((k + 1) * xp.tanh(leaf).sum() for k, leaf in enumerate(floats))
        loss = (1 + t * t) * total * total + sum(xp.sin(leaf).sum() for leaf in floats)
        loss = loss + sum(t * leaf.sum() for leaf in others)
        return (loss, {"total": total, "s": s}) if self.has_aux else loss

    def step(self, **options):
        split = {"two": (0, 0), "dict": (0,), "columns": (1, 0), "dict of columns": ({"x": 1, "labels": 0},)}
        return funcga.coupled(
            self.summary_fn,
            self.loss_fn,
            **self.cut,
            fold=self.contained([LEAVES[name].fold for name in self.names]),
            weight=WEIGHTS[self.weight],
            in_axes=(None, None, *split[self.batch]),
            argnums=self.argnums,
            has_aux=self.has_aux,
            **options,
        )

    def args(self, start=0, end=None):
        x, labels = self.x[start:end], self.labels[start:end]
        x = x.T if "columns" in self.batch else x
        batch = ({"x": x, "labels": labels},) if "dict" in self.batch else (x, labels)
        return self.params, self.shift, *batch

    # --- the same in one graph

    def expected(self):
        """((loss, gradients), the folded summaries)."""
        argnums = self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)

        def whole(differentiated):
            params, shift = (differentiated.get(k, given) for k, given in enumerate((self.params, self.shift)))
            loss = self.loss_fn(*[differentiated[k] for k in argnums], self.folded(params, shift))
            return loss[0] if self.has_aux else loss

        value, grads = differentiated(self.kit, whole, {k: (self.params, self.shift)[k] for k in argnums})
        grads = tuple(grads[k] for k in argnums)
        return value, grads if isinstance(self.argnums, tuple) else grads[0]

    def folded(self, params, shift):
        """The summaries of all micro-batches, folded."""
        pieces = [slice(*pair) for pair in zip(self.bounds[:-1], self.bounds[1:], strict=True)]
        summaries = [self.summary(params, shift, self.x[piece], self.labels[piece]) for piece in pieces]
        weights = [self.weight_of(piece) for piece in pieces]
        leaves = [
            [summary[name] if self.container == "dict" else summary[k] for summary in summaries]
            for k, name in enumerate(self.names)
        ]
        pairs = zip(self.names, leaves, strict=True)
        return self.contained([folded(self.kit.xp, LEAVES[name].folded, values, weights) for name, values in pairs])

    def weight_of(self, piece):
        if self.weight == "rows":
            return piece.stop - piece.start
        return 0.1 if self.weight == "constant" else float(self.counts[piece].sum())

    def leaves(self, tree):
        """The numbers of a tree."""
        leaves = [leaf for leaf in self.kit.backend.trees.flatten(tree)[0] if leaf is not None]
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
