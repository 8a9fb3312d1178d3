"""Generated calls: trees, axes, weights, folds, ways to a gradient and ways to fold, against NumPy in float64.

The oracle knows the gradient of its loss in closed form and folds with `tests.oracle`. FUNCGA_FUZZ=2000 runs so many cases;
each is named by its seed.
"""

import os

import jax
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import funcga
from tests import oracle
from tests.kits import JAX, TORCH

CASES = int(os.environ.get("FUNCGA_FUZZ", "36"))
FOLDS = {
    "mean": funcga.mean(), "per_weight": funcga.per_weight(), "sum": funcga.sum(), "max": funcga.max(),
    "logsumexp": funcga.logsumexp(), "moments": funcga.moments(),
    "by_steps": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps),
}  # fmt: skip


def tree(r, leaf, depth=2):
    """A tree of at least one leaf: dicts, lists, tuples, and an empty one here and there."""
    kind = r.choice(["leaf", "dict", "tuple", "list"]) if depth else "leaf"
    if kind == "leaf":
        return leaf()
    children = [tree(r, leaf, depth - 1) for _ in range(r.integers(1, 4))] + [{}] * int(r.random() < 0.2)
    if kind == "dict":
        return {f"k{place}": child for place, child in enumerate(children)}
    return tuple(children) if kind == "tuple" else children


class Case:
    """One call: its arguments as NumPy trees, and what it should return."""

    def __init__(self, seed):
        self.r = r = np.random.default_rng(seed)
        self.rows = int(r.integers(1, 13))
        self.params = tree(r, lambda: r.normal(size=tuple(r.integers(1, 4, size=r.integers(0, 3)))))
        rows = lambda: r.normal(size=(self.rows, *r.integers(1, 4, size=r.integers(0, 3))))
        # all on axis 0, as by default, or each leaf on an axis of its own; a list may be one of examples, without axes
        self.explicit = bool(r.random() < 0.6)
        self.args = [tree(r, rows, 1) for _ in range(r.integers(1, 3))]
        self.args = [tuple(arg) if isinstance(arg, list) and not self.explicit else arg for arg in self.args]
        self.axes = [tree_map(lambda a: int(r.integers(0, a.ndim)) if self.explicit else 0, arg) for arg in self.args]
        self.args = [
            tree_map(lambda a, axis: np.moveaxis(a, 0, axis), *pair) for pair in zip(self.args, self.axes, strict=True)
        ]
        self.in_axes = (None, *self.axes) if self.explicit else None
        self.fold = str(r.choice(list(FOLDS)))
        self.summed, self.weighs = self.fold in ("per_weight", "sum"), bool(r.random() < 0.4)
        n = int(r.integers(1, self.rows + 1))
        self.split = {"n": n} if r.random() < 0.5 else {"microbatch_size": n}
        ends = np.array_split(np.arange(self.rows), n) if "n" in self.split else range(0, self.rows, n)
        starts = [int(np.min(part)) for part in ends]
        self.parts = [range(a, b) for a, b in zip(starts, [*starts[1:], self.rows], strict=True)]

    def cut(self):
        """The arguments of each micro-batch."""
        for rows in self.parts:
            take = lambda a, axis, rows=rows: np.take(a, rows, axis)
            yield [tree_map(take, *pair) for pair in zip(self.args, self.axes, strict=True)]

    # The loss of each row is (a q - 1)^2, a linear in the arguments and q quadratic in the parameters.

    def signal(self, xp, args):
        """a, one number for each row; every axis counts with weights of its own, so that no two may be confused."""
        total = 0
        for leaf, axis in zip(tree_leaves(args), tree_leaves(self.axes), strict=True):
            flat = xp.moveaxis(leaf, axis, 0).reshape(leaf.shape[axis], -1)
            total = total + (flat * xp.asarray(np.cos(np.arange(flat.shape[1]) + 1.0))).sum(1)
        return total

    def strength(self, params):
        return sum(((leaf + leaf * leaf) / (place + 2)).sum() for place, leaf in enumerate(tree_leaves(params)))

    def loss(self, xp, params, *args):
        each = (self.signal(xp, [*args]) * self.strength(params) - 1) ** 2
        return each.sum() if self.summed else each.mean()

    def by_hand(self):
        """The value and the gradient of each leaf, by NumPy."""
        values, weights, q = [], [], self.strength(self.params)
        for args in self.cut():
            a, reduce = self.signal(np, args), np.sum if self.summed else np.mean
            slope = reduce(2 * (a * q - 1) * a)
            grads = [slope * (1 + 2 * leaf) / (place + 2) for place, leaf in enumerate(tree_leaves(self.params))]
            values.append([reduce((a * q - 1) ** 2), *grads])
            weights.append(float((a**2).sum()) if self.weighs else len(a))
        return [oracle.fold(self.fold, list(column), weights) for column in zip(*values, strict=True)]

    def run(self, kit, way, gradient):
        grad_fn = gradient(lambda params, *args: self.loss(kit.xp, params, *args))
        weight = (lambda *args: (self.signal(kit.xp, [*args]) ** 2).sum()) if self.weighs else None
        options, params = {"fold": FOLDS[self.fold], "weight": weight}, kit.arrays(self.params)
        if way == "accumulate":
            step = funcga.accumulate(grad_fn, **self.split, in_axes=self.in_axes, **options)
            return step(params, *kit.arrays(self.args))
        items = [tuple(kit.arrays(args)) for args in self.cut()]
        if way == "stream":
            return funcga.stream(grad_fn, in_axes=self.in_axes, **options)(params, items)
        accumulator, states = funcga.Accumulator(FOLDS[self.fold]), []
        for item, rows in zip(items, self.parts, strict=True):
            value = grad_fn(params, *item)
            states.append(accumulator.update(accumulator.init(value), value, weight(*item) if weight else len(rows)))
        while len(states) > 1:  # in any grouping, as the monoid is associative
            place = int(self.r.integers(0, len(states) - 1))
            states[place : place + 2] = [accumulator.merge(*states[place : place + 2])]
        return accumulator.finalize(states[0])


def flipped(pair):
    return pair[1], pair[0]


GRADIENTS = {
    "value_and_grad": (lambda kit: funcga.value_and_grad, lambda out: out),
    "aux": (lambda kit: lambda f: funcga.grad(lambda *args: (f(*args),) * 2, has_aux=True), flipped),
    "argnums": (lambda kit: lambda f: funcga.value_and_grad(f, (0,)), lambda out: (out[0], out[1][0])),
    "framework": (
        lambda kit: (
            torch.func.grad_and_value if kit is TORCH else lambda f: lambda *args: flipped(jax.value_and_grad(f)(*args))
        ),
        flipped,
    ),
}


def check(kit, seed):
    case = Case(seed)
    way = case.r.choice(["accumulate", "accumulate", "stream", "Accumulator"])
    gradient, ordered = GRADIENTS[str(case.r.choice(list(GRADIENTS)))]
    value, grads = ordered(case.run(kit, way, gradient(kit)))
    expected = case.by_hand()
    found = [*tree_leaves(kit.numpy(value)), *tree_leaves(kit.numpy(grads))]
    wanted = [part for leaf in expected for part in (leaf if isinstance(leaf, tuple) else (leaf,))]
    for a, b in zip(found, wanted, strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * max(1, np.abs(b).max(initial=0)))


@pytest.mark.parametrize("seed", range(CASES))
def test_calls_in_torch(seed):
    check(TORCH, seed)


@pytest.mark.parametrize("seed", range(CASES // 12))
def test_calls_in_jax(seed, x64):
    check(JAX, seed)
