"""Generated cases of `across=`, held against a loop by hand in float64 on one process.

Structures, dtypes, folds, metrics, weights of any size and of 0, uneven ranks and ranks without anything, buckets of
any size. A few processes run many cases each; `FUNCGA_FUZZ=N` runs N of them.
"""

import os
import random

import pytest
import torch
import torch.distributed as dist

import funcga
from tests.processes import Failed, processes
from torch_backend import Replicas

CASES = int(os.environ.get("FUNCGA_FUZZ", "30"))
SHAPES = [(0,), (), (1,), (3,), (1, 1), (5, 4), (2, 3, 4), (300, 7), (40, 50)]
FOLDS = {
    "mean": funcga.mean(),
    "sum": funcga.sum(),
    "per_weight": funcga.per_weight(),
    "max": funcga.max(),
    "min": funcga.min(),
    "logsumexp": funcga.logsumexp(),
    "moments": funcga.moments(),
}


def leaf(shape, dtype, seed, strided):
    """Numbers of about 1; in a memory of which they are every second one, or the other way round."""
    generator = torch.Generator().manual_seed(seed)
    if strided and len(shape) >= 2:
        return torch.randn(shape[::-1], generator=generator, dtype=torch.float64).to(dtype).permute(
            *reversed(range(len(shape)))
        )  # fmt: skip
    if strided and shape:
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, dtype=torch.float64).to(dtype)[..., ::2]
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Case:
    """A step, and what each rank has in each of three windows: (rows, weight) of its micro-batches."""

    def __init__(self, seed, ranks):
        choose = random.Random(seed)
        self.seed, self.dtype = seed, choose.choice([torch.float32, torch.float64])
        names = [f"p{k}" for k in range(choose.randint(1, 4))]
        dtypes = [self.dtype] * 3 + [torch.bfloat16]
        self.params = {
            name: leaf(choose.choice(SHAPES[k == 0 :]), choose.choice(dtypes), seed + k, choose.random() < 0.3)
            for k, name in enumerate(names)
        }
        self.engine, self.streams = choose.random() < 0.6, choose.random() < 0.7
        # autograd adds sums of gradients in place; every other fold is combined leaf by leaf
        self.gradients = choose.choice(
            ["mean", "mean", "mean", "per_weight", "sum", "max", "min", "logsumexp", "moments"]
        )
        metrics = ["norm", "count", "double", "single", "vector", "rows", "table", "column"]
        self.metrics = {name: self.fold_of(name, choose) for name in choose.sample(metrics, choose.randint(0, 4))}
        if any(name == "rows" for name in self.metrics) and choose.random() < 0.5:
            del self.metrics["rows"]
        self.replicas = {"bucket_bytes": choose.choice([64, 1024, 2**22])}
        if choose.random() < 0.2:
            self.replicas["wire_dtype"] = torch.float64
        scale = choose.choice([1, 1, 1, 0.1, 1e-30, 1e-3, 1e30])
        self.windows = [self.window(choose, ranks, scale) for _ in range(3)]

    @staticmethod
    def fold_of(name, choose):
        if name == "rows":
            return "concat"
        return "sum" if name == "count" else choose.choice(["mean", "sum", "max", "min", "logsumexp", "moments"])

    def window(self, choose, ranks, scale):
        """At least one rank has something. Where `accumulate` cuts a batch, each micro-batch is one row."""
        weights, rows = [0, 1, 1, 2, 3, 7, 16], range(1, 6)
        microbatch = lambda: (choose.choice(rows), scale * choose.choice(weights)) if self.streams else (1, 1)
        while True:
            window = [[microbatch() for _ in range(choose.choice([0, 1, 1, 2, 4]))] for _ in range(ranks)]
            if any(window):
                return window

    def batch(self, window, rank, k, rows):
        generator = torch.Generator().manual_seed(10_000 * self.seed + 100 * window + 10 * rank + k)
        return torch.randn(rows, 2, generator=generator, dtype=torch.float64)

    def loss(self, params, x, dtype):
        """A mean over rows, and what is measured beside it."""
        product = sum(
            (p.to(dtype) * (1 + k) / 10).sum() / p.numel() ** 0.5 for k, p in enumerate(params.values()) if p.numel()
        )
        error = torch.tanh(product + torch.zeros((), dtype=dtype)) * x[:, 0] - x[:, 1]
        found = error.detach()
        metrics = {
            "norm": found.square().mean(),
            "count": (found > 0).sum(),
            "double": found.double().mean(),
            "single": found.float().sum(),
            "vector": torch.stack([found.min(), found.max(), found.mean()]),
            "rows": found[:, None] * torch.ones(2, dtype=dtype),
            "table": found.mean() * torch.arange(40, dtype=torch.float64),
            "column": (found.mean() * torch.ones(2, 3, dtype=dtype))[:, 1:2],
        }
        return error.square().mean(), {name: metrics[name] for name in self.metrics}

    def folds(self):
        metrics = {name: funcga.concat() if fold == "concat" else FOLDS[fold] for name, fold in self.metrics.items()}
        return (funcga.mean(), metrics), FOLDS[self.gradients]


def folded(values, weights, fold):
    """What a fold is, in words of float64."""
    values = [v.double() for v in values]
    total = sum(weights)
    if fold == "concat":
        return torch.cat(values)
    if fold in ("max", "min"):
        return getattr(torch.stack(values), "amax" if fold == "max" else "amin")(0)
    if fold == "sum":
        return sum(values)
    if fold == "logsumexp":
        return torch.stack(values).logsumexp(0)
    if not total:
        mean = torch.zeros_like(values[0])
        return torch.stack([mean, mean]) if fold == "moments" else mean
    if fold == "per_weight":
        return sum(values) / total
    shares = [w / total for w in weights]
    mean = sum(s * v for s, v in zip(shares, values, strict=True))
    if fold == "mean":
        return mean
    return torch.stack([mean, sum(s * (v - mean) ** 2 for s, v in zip(shares, values, strict=True))])


def expected(case, window):
    """All micro-batches of all ranks, one after the other."""
    said, weights = [], []
    params = {name: p.double().requires_grad_() for name, p in case.params.items()}
    for rank, own in enumerate(case.windows[window]):
        for k, (rows, weight) in enumerate(own):
            loss, metrics = case.loss(params, case.batch(window, rank, k, rows), torch.float64)
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params.values(), strict=True)]
            said.append([loss.detach(), *metrics.values(), *grads])
            weights.append(weight)
    folds = ["mean", *case.metrics.values(), *[case.gradients] * len(params)]
    return [folded(values, weights, fold) for values, fold in zip(zip(*said, strict=True), folds, strict=True)]


def step_of(case, group):
    """f(window, rank): the step of a case, for what a rank has in a window."""
    loss = lambda params, x: case.loss(params, x.to(case.dtype), case.dtype)
    gradient = funcga.value_and_grad(loss, has_aux=True)
    if not case.engine:
        inner = torch.func.grad_and_value(loss, has_aux=True)
        gradient = lambda params, x: (lambda grads, value: (value, grads))(*inner(params, x))
    weights = []
    options = {"fold": case.folds(), "across": Replicas(group, **case.replicas)}
    streamed = funcga.stream(gradient, weight=lambda x: weights.pop(0), **options)
    whole = funcga.accumulate(gradient, microbatch_size=1, **options)

    def run(window, rank):
        own = case.windows[window][rank]
        microbatches = [case.batch(window, rank, k, rows) for k, (rows, _) in enumerate(own)]
        weights[:] = [weight for _, weight in own]
        if case.streams:
            return streamed(case.params, microbatches)
        return whole(case.params, torch.cat([torch.zeros(0, 2, dtype=torch.float64), *microbatches]))

    return run


def compared(case, window, found):
    """Where a leaf is wrong, if one is: its place, what it is and what it should be."""
    (loss, metrics), grads = found
    leaves = [loss, *(metrics[name] for name in case.metrics), *(grads[name] for name in case.params)]
    for place, (own, right) in enumerate(zip(leaves, expected(case, window), strict=True)):
        parts = torch.stack([part.double() for part in own]) if isinstance(own, tuple) else own.double()
        dtypes = {case.dtype, *(part.dtype for part in (own if isinstance(own, tuple) else [own]))}
        limit = 2e-2 if torch.bfloat16 in dtypes else 2e-5 if torch.float32 in dtypes else 1e-11
        scale = 1 + right.abs().max().item() ** 2 if right.numel() else 1
        if parts.shape != right.shape or not bool(((parts - right).abs() <= limit * scale).all()):
            return f"case {case.seed}, window {window}, leaf {place}: {own} is not {right}"
    return None


def run_cases(group, seeds):
    """What is wrong in the cases of these seeds."""
    wrong = []
    for seed in seeds:
        case = Case(seed, dist.get_world_size(group))
        step = step_of(case, group)
        wrong += [compared(case, k, step(k, dist.get_rank(group))) for k in range(len(case.windows))]
    return [text for text in wrong if text is not None]


@pytest.mark.parametrize("size", [2, 3])
def test_generated_cases(size):
    seeds = range(size, CASES, 2)
    for start in range(0, len(seeds), 20):
        chunk = seeds[start : start + 20]
        try:
            found = processes().run(run_cases, chunk, size=size)
        except Failed as failure:
            raise AssertionError(f"one of the cases {[*chunk]} failed: {failure}") from None
        assert [text for wrong in found for text in wrong] == []
