"""Problems, what the whole batch gives for them, and every source of a window's loss and gradients.

A problem is a loss that both frameworks run, on a batch as a dict of NumPy arrays. Its truth is one pass of torch's autograd
over the whole batch in float64, without any of funcga's code. A source is a function (kit, problem, cut) that returns a
step: step(params, batch) = {"loss": ..., "grads": ...}. What a step keeps of a call may spoil a later one, so tests call
each step with four problems in turn (`four`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

import funcga
import torch_backend
from tests.kits import TORCH, difference

ROWS = 11
# Two ways to cut rows into ragged micro-batches, the two ends, and one that is even for the 12 rows of the third call.
CUTS = {"n=5": {"n": 5}, "size=4": {"microbatch_size": 4}, "n=1": {"n": 1}, "n=rows": {"n": ROWS}, "n=4": {"n": 4}}


def bounds(cut, rows=ROWS):
    """(first, last + 1) row of each micro-batch: sizes that differ by at most one, or the last one smaller."""
    if "n" in cut:  # no micro-batch is empty
        return [(int(part[0]), int(part[-1]) + 1) for part in np.array_split(np.arange(rows), min(cut["n"], rows))]
    size = cut["microbatch_size"]
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def rows_of(batch):
    return len(next(iter(batch.values())))


def parts(batch, cut):
    return [{name: leaf[first:last] for name, leaf in batch.items()} for first, last in bounds(cut, rows_of(batch))]


def four(make):
    """What one step is called with: at first, with other values, with another structure, and as at first.

    The third has other shapes of parameters, and one row more: another batch, cut into as many micro-batches.
    """
    first = make()
    return first, make(seed=10), make(seed=20, rows=ROWS + 1, width=5), first


# -- problems


@dataclass(frozen=True)
class Problem:
    """`loss(xp, params, batch)` of a micro-batch, how it is folded, and `whole(xp, params, batch)` of the batch.

    `summary` and `of_summary` say the same for `coupled`: sums over a micro-batch, and the loss of the sums of all.
    """

    params: Any
    batch: Any
    loss: Callable
    whole: Callable
    summary: Callable
    fold: Any = funcga.mean()  # noqa: RUF009 - a frozen value
    weight: Callable | None = None

    def arrays(self, kit, dtype="float64"):
        cast = lambda leaf: leaf.astype(dtype) if leaf.dtype.kind == "f" else leaf
        return tuple(
            kit.arrays({name: cast(leaf) for name, leaf in tree.items()}) for tree in (self.params, self.batch)
        )

    def truth(self, dtype):
        """By one pass of autograd over the whole batch in float64, rounded once."""
        params = {name: torch.tensor(leaf, requires_grad=True) for name, leaf in self.params.items()}
        value = self.whole(torch, params, {name: torch.tensor(leaf) for name, leaf in self.batch.items()})
        grads = torch.autograd.grad(value, [*params.values()])
        rounded = lambda leaf: leaf.detach().numpy().astype(dtype)
        return {"loss": rounded(value), "grads": {n: rounded(g) for n, g in zip(params, grads, strict=True)}}

    def options(self):
        return {"fold": self.fold, "weight": self.weight}


def squares(xp, params, batch):
    """Of a network with one hidden layer, one a row."""
    return ((xp.tanh(batch["x"] @ params["hidden"] + params["bias"]) @ params["out"] - batch["y"]) ** 2).sum(1)


def regression(seed=0, rows=ROWS, width=4, **options):
    r = np.random.default_rng(seed).normal
    return Problem(
        params={"bias": r(size=width), "hidden": r(size=(3, width)), "out": r(size=(width, 2))},
        batch={"x": r(size=(rows, 3)), "y": r(size=(rows, 2))},
        loss=lambda xp, params, batch: squares(xp, params, batch).mean(),
        whole=lambda xp, params, batch: squares(xp, params, batch).mean(),
        summary=lambda xp, params, batch: (squares(xp, params, batch).sum(), batch["x"][:, 0] * 0 + 1),
        **options,
    )


def likelihoods(xp, params, batch):
    """The cross entropy of each token of an embedding and a linear layer; 0 where the label is -100."""
    logits = params["table"][batch["ids"]] @ params["out"]
    largest = xp.amax(logits, -1)
    norms = largest + xp.log(xp.exp(logits - largest[..., None]).sum(-1))
    labels = batch["labels"]
    chosen = xp.where(labels[..., None] == batch["classes"][:, None], logits, 0).sum(-1)
    return xp.where(labels != -100, norms - chosen, 0)


def count(batch):
    return (batch["labels"] != -100).sum()


def token_mean(xp, params, batch):
    """NaN where all is masked."""
    losses = likelihoods(xp, params, batch)
    return losses.sum() / (batch["labels"] != -100).sum() + 0 * losses.sum()


def tokens(loss, seed=1, rows=ROWS, width=3, **options):
    """Very uneven numbers of labels, and none in five rows: a micro-batch of every cut but one has none.

    They are rows 3 to 7, or with another seed the rows after these.
    """
    r = np.random.default_rng(seed)
    labels = r.integers(0, 5, (rows, 4)).astype("int32")
    lengths = np.roll([4, 1, 3, 0, 0, 0, 0, 0, 2, 4, 1, 2][:rows], int(seed != 1))
    labels[np.arange(4) >= lengths[:, None]] = -100
    return Problem(
        params={"out": r.normal(size=(width, 5)), "table": r.normal(size=(7, width))},
        batch={
            "classes": np.tile(np.arange(5, dtype="int32"), (rows, 1)),
            "ids": r.integers(0, 7, (rows, 4)).astype("int32"),
            "labels": labels,
        },
        loss=loss,
        whole=lambda xp, params, batch: likelihoods(xp, params, batch).sum() / count(batch),
        summary=lambda xp, params, batch: (likelihoods(xp, params, batch).sum(), batch["labels"] != -100),
        **options,
    )


def token_sum(xp, params, batch):
    return likelihoods(xp, params, batch).sum()


PROBLEMS = {
    "mean of rows": regression,
    "mean, weighed by numbers": partial(regression, weight=lambda batch: 0.3 * len(batch["x"])),
    "sum over tokens": partial(tokens, token_sum, fold=funcga.per_weight(), weight=count),
    "mean over tokens": partial(tokens, token_mean, weight=count),
}


# -- sources


def pair(output):
    return {"loss": output[0], "grads": output[1]}


def loss_of(kit, problem):
    return partial(problem.loss, kit.xp)


def accumulate(kit, problem, cut):
    step = funcga.accumulate(funcga.value_and_grad(loss_of(kit, problem)), **cut, **problem.options())
    return lambda params, batch: pair(step(params, batch))


def gradient_alone(kit, problem, cut):
    step = funcga.accumulate(funcga.grad(loss_of(kit, problem)), **cut, **problem.options())
    return lambda params, batch: {"grads": step(params, batch)}


def of_the_framework(kit, problem, cut):
    """A gradient function of which funcga knows nothing; torch's has the gradients first."""
    loss = loss_of(kit, problem)
    if kit is TORCH:
        step = funcga.accumulate(torch.func.grad_and_value(loss), **cut, **problem.options())
        return lambda params, batch: pair(step(params, batch)[::-1])
    step = funcga.accumulate(jax.value_and_grad(loss), **cut, **problem.options())
    return lambda params, batch: pair(step(params, batch))


def stream(kit, problem, cut):
    step = funcga.stream(funcga.value_and_grad(loss_of(kit, problem)), **problem.options())
    return lambda params, batch: pair(step(params, parts(batch, cut)))


def compiled(kit, problem, cut):
    """In torch a loss that is compiled, in JAX a step that is."""
    if kit is TORCH:
        loss = torch.compile(loss_of(kit, problem), backend="eager", dynamic=True)
        step = funcga.accumulate(funcga.value_and_grad(loss), **cut, **problem.options())
    else:
        step = jax.jit(funcga.accumulate(funcga.value_and_grad(loss_of(kit, problem)), **cut, **problem.options()))
    return lambda params, batch: pair(step(params, batch))


def weighed(kit, problem, batch, cut):
    """Each micro-batch with its weight, by default its rows."""
    for part, (first, last) in zip(parts(batch, cut), bounds(cut, rows_of(batch)), strict=True):
        yield part, last - first if problem.weight is None else problem.weight(part)


def gradient_of(kit, problem):
    gradient = funcga.value_and_grad(loss_of(kit, problem))
    return gradient if kit is TORCH else jax.jit(gradient)


def accumulator(kit, problem, cut):
    """Its first micro-batches in one state and the others in another, merged."""
    folds, gradient = funcga.Accumulator(problem.fold), gradient_of(kit, problem)

    def step(params, batch):
        states = [folds.init((next(iter(params.values())).sum(), params)) for _ in range(2)]
        for index, (part, weight) in enumerate(weighed(kit, problem, batch, cut)):
            which = index >= 2
            states[which] = folds.update(states[which], gradient(params, part), weight=weight)
        return pair(folds.finalize(folds.merge(*states)))

    return step


def negated():
    """A transform whose updates are the negated gradients."""
    tree = lambda grads: {name: -leaf for name, leaf in grads.items()}
    return funcga.transforms.Transform(lambda params: (), lambda grads, state, params=None: (tree(grads), state))


def multi_steps(kit, problem, cut):
    """A window that `update` ends."""
    tx = funcga.multi_steps(negated(), len(bounds(cut)), fold=problem.fold)
    gradient = gradient_of(kit, problem)

    def step(params, batch):
        state = tx.init(params)
        for part, weight in weighed(kit, problem, batch, cut):
            assert not tx.has_updated(state)
            updates, state = tx.update(gradient(params, part)[1], state, params, weight=weight)
        assert tx.has_updated(state)
        return {"grads": negated().update(updates, ())[0]}

    return step


def flushed(kit, problem, cut):
    """A window that `flush` ends, long before it is full, with states that are donated."""
    tx, gradient = funcga.multi_steps(negated(), 100, fold=problem.fold, donate=kit is TORCH), gradient_of(kit, problem)
    accumulate = tx.accumulate if kit is TORCH else jax.jit(tx.accumulate, donate_argnums=1)

    def step(params, batch):
        state = tx.init(params)
        for part, weight in weighed(kit, problem, batch, cut):
            state = accumulate(gradient(params, part)[1], state, weight=weight)
        updates, _ = tx.flush(state, params)
        return {"grads": negated().update(updates, ())[0]}

    return step


def applied(kit, problem, cut):
    """What `apply` takes from the parameters."""
    tx = funcga.multi_steps(negated(), len(bounds(cut)), fold=problem.fold)
    gradient = gradient_of(kit, problem)

    def step(params, batch):
        state, moved = tx.init(params), params
        for part, weight in weighed(kit, problem, batch, cut):
            assert moved is params or difference(kit, moved, params) == 0
            moved, state = funcga.transforms.apply(tx, gradient(params, part)[1], state, params, weight=weight)
        return {"grads": {name: params[name] - moved[name] for name in params}}

    return step


def coupled(kit, problem, cut):
    """Sums over tokens or rows and how many there are, divided when all are there."""

    def summary(params, batch):
        total, counted = problem.summary(kit.xp, params, batch)
        return total, kit.cast(counted, total.dtype).sum()

    step = funcga.coupled(summary, lambda params, sums: sums[0] / sums[1], **cut, fold=funcga.sum())
    return lambda params, batch: pair(step(params, batch))


class Parameters(nn.Module):
    """A module with the parameters of a problem, and a buffer that each forward pass counts in."""

    def __init__(self, problem):
        super().__init__()
        self.take(problem.arrays(TORCH)[0])
        self.register_buffer("passes", torch.tensor(0))

    def take(self, params):
        """Write these values into the parameters, or replace parameters of other shapes and dtypes."""
        for name, leaf in params.items():
            own = getattr(self, name, None)
            if own is None or (own.shape, own.dtype) != (leaf.shape, leaf.dtype):
                self.register_parameter(name, nn.Parameter(leaf.clone()))
            else:
                own.data.copy_(leaf)

    def forward(self, problem, batch):
        self.passes += 1
        return problem.loss(torch, dict(self.named_parameters()), batch)


def pure_loss(kit, problem, cut):
    """Of a module whose own parameters have other values."""
    module = Parameters(problem)
    loss = torch_backend.pure_loss(module, lambda module, batch: module(problem, batch))
    step = funcga.accumulate(funcga.value_and_grad(loss), **cut, **problem.options())

    def call(params, batch):
        module.take({name: torch.zeros_like(leaf) for name, leaf in params.items()})
        found = step(params, batch)
        assert all(p.grad is None and not p.any() for p in module.parameters())
        assert int(module.passes) == 0
        return pair(found)

    return call


def module_value_and_grad(kit, problem, cut):
    module = Parameters(problem)
    gradient = torch_backend.module_value_and_grad(module, lambda module, batch: module(problem, batch))
    step = funcga.accumulate(gradient, **cut, **problem.options())

    def call(params, batch):
        module.take(params)
        module.passes.zero_()
        found = step(batch)
        assert all(p.grad is None and torch.equal(p, params[name]) for name, p in module.named_parameters())
        assert int(module.passes) == len(bounds(cut, rows_of(batch)))
        return pair(found)

    return call


SOURCES_OF_BOTH = [
    accumulate,
    gradient_alone,
    of_the_framework,
    stream,
    accumulator,
    multi_steps,
    flushed,
    applied,
    coupled,
]
SOURCES = [*SOURCES_OF_BOTH, pure_loss, module_value_and_grad]
