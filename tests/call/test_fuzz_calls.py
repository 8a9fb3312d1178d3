"""Generated calls: trees, axes, weights, folds, ways to a gradient and ways to fold, against NumPy in float64.

The oracle knows the gradient of its loss in closed form and folds with `tests.oracle`. FUNCGA_FUZZ=2000
runs so many cases; each is named by its seed.
"""

import os

import jax
import numpy as np
import pytest
import torch

import funcga
from tests import oracle
from tests.kits import JAX, TORCH

CASES = int(os.environ.get("FUNCGA_FUZZ", "60"))
FOLDS = {
    "mean": funcga.mean(), "per_weight": funcga.per_weight(), "sum": funcga.sum(), "max": funcga.max(),
    "min": funcga.min(), "logsumexp": funcga.logsumexp(), "moments": funcga.moments(),
    "by_steps": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps),
}  # fmt: skip


def tree(r, leaf, depth=2):
    """A tree of at least one leaf: dicts, lists, tuples, an empty one or None here and there."""
    kind = r.choice(["leaf", "dict", "tuple", "list"]) if depth else "leaf"
    if kind == "leaf":
        return leaf()
    children = [tree(r, leaf, depth - 1) for _ in range(r.integers(1, 4))]
    if r.random() < 0.2:
        children.append(None if r.random() < 0.5 else {})
    if kind == "dict":
        return {f"k{place}": child for place, child in enumerate(children)}
    return tuple(children) if kind == "tuple" else children


def leaves_of(tree):
    """The arrays in one fixed order, by code of its own; the keys of the dicts are in order anyway."""
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in leaves_of(tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for child in tree for leaf in leaves_of(child)]
    return [] if tree is None else [tree]


def without_none(tree):
    if isinstance(tree, dict):
        return {key: without_none(child) for key, child in tree.items() if child is not None}
    return (
        type(tree)(without_none(child) for child in tree if child is not None)
        if isinstance(tree, tuple | list)
        else tree
    )


def mapped(function, tree, *others):
    if isinstance(tree, dict):
        return {key: mapped(function, tree[key], *[other[key] for other in others]) for key in tree}
    if isinstance(tree, tuple | list):
        return type(tree)(mapped(function, *children) for children in zip(tree, *others, strict=True))
    return None if tree is None else function(tree, *others)


class Case:
    """One call: its arguments as NumPy trees, and what it should return."""

    def __init__(self, seed):
        self.r = r = np.random.default_rng(seed)
        self.rows = int(r.integers(1, 13))
        self.params = tree(r, lambda: r.normal(size=tuple(r.integers(1, 4, size=r.integers(0, 3)))))
        self.args = [tree(r, self._rows, 1) for _ in range(r.integers(1, 3))]
        # all on axis 0, as by default, or each leaf on an axis of its own
        self.explicit = bool(r.random() < 0.6)
        if not self.explicit:  # a list may be one of examples, which is refused then
            self.args = [tuple(arg) if isinstance(arg, list) else arg for arg in self.args]
        self.axes = [mapped(lambda a: int(r.integers(0, a.ndim)) if self.explicit else 0, arg) for arg in self.args]
        self.args = self.each(lambda a, axis: np.moveaxis(a, 0, axis))
        self.in_axes = (None, *self.axes) if self.explicit else None
        self.fold = str(r.choice(list(FOLDS)))
        self.summed = self.fold in ("per_weight", "sum")
        self.weighs = bool(r.random() < 0.4)
        self.sizes = self._sizes()

    def each(self, function):
        """The arguments with a function of every leaf and its axis."""
        return [mapped(function, arg, axes) for arg, axes in zip(self.args, self.axes, strict=True)]

    def _rows(self):
        return self.r.normal(size=(self.rows, *self.r.integers(1, 4, size=self.r.integers(0, 3))))

    def _sizes(self):
        """The rows of the micro-batches, and n or microbatch_size that make them."""
        if self.r.random() < 0.5:
            n = int(self.r.integers(1, self.rows + 1))
            self.split = {"n": n}
            return [len(part) for part in np.array_split(np.arange(self.rows), n)]
        size = int(self.r.integers(1, self.rows + 2))
        self.split = {"microbatch_size": size}
        return [min(size, self.rows - start) for start in range(0, self.rows, size)]

    def micro_batches(self):
        start, found = 0, []
        for size in self.sizes:
            rows = range(start, start + size)
            found.append(self.each(lambda a, axis, rows=rows: np.take(a, rows, axis)))
            start += size
        return found

    # what a loss is: of each row (a q - 1)^2, a linear in the arguments and q quadratic in the parameters

    def signal(self, xp, args):
        """a, one number for each row; every axis counts with weights of its own, so that no two may be confused."""
        total = 0
        for arg, axes in zip(args, self.axes, strict=True):
            for leaf, axis in zip(leaves_of(arg), leaves_of(axes), strict=True):
                flat = xp.moveaxis(leaf, axis, 0).reshape(leaf.shape[axis], -1)
                total = total + (flat * self.ramp(xp, flat.shape[1], flat)).sum(1)
        return total

    def ramp(self, xp, size, like):
        ramp = np.cos(np.arange(size) + 1.0)
        return xp.asarray(ramp, dtype=like.dtype)

    def strength(self, xp, params):
        total = 0
        for place, leaf in enumerate(leaves_of(params)):
            total = total + ((leaf + leaf * leaf) / (place + 2)).sum()
        return total

    def loss(self, xp, params, *args):
        each = (self.signal(xp, args) * self.strength(xp, params) - 1) ** 2
        return each.sum() if self.summed else each.mean()

    def weight(self, xp):
        return lambda *args: (self.signal(xp, args) ** 2).sum()

    # the oracle

    def by_hand(self):
        """(value, grads) by NumPy: grads are the leaves alone."""
        values, weights = [], []
        q = self.strength(np, self.params)
        for args in self.micro_batches():
            a = self.signal(np, args)
            reduce = np.sum if self.summed else np.mean
            slope = reduce(2 * (a * q - 1) * a)
            grads = [slope * (1 + 2 * leaf) / (place + 2) for place, leaf in enumerate(leaves_of(self.params))]
            values.append([reduce((a * q - 1) ** 2), *grads])
            weights.append(float((a**2).sum()) if self.weighs else len(a))
        folded = [oracle.fold(self.fold, list(column), weights) for column in zip(*values, strict=True)]
        return folded[0], folded[1:]

    # the ways

    def run(self, kit, way, gradient):
        xp = torch if kit.name == "torch" else jax.numpy
        loss = lambda params, *args: self.loss(xp, params, *args)
        grad_fn = gradient(loss)
        options = {"fold": FOLDS[self.fold], "weight": self.weight(xp) if self.weighs else None}
        params = kit.arrays(self.params)
        if way == "accumulate":
            step = funcga.accumulate(grad_fn, **self.split, in_axes=self.in_axes, **options)
            return step(params, *kit.arrays(self.args))
        items = [tuple(kit.arrays(args)) for args in self.micro_batches()]
        if way == "stream":
            in_axes = self.in_axes
            return funcga.stream(grad_fn, in_axes=in_axes, **options)(params, items)
        weights = [
            self.weight(xp)(*item) if self.weighs else size for item, size in zip(items, self.sizes, strict=True)
        ]
        accumulator = funcga.Accumulator(FOLDS[self.fold])
        states = []
        for item, weight in zip(items, weights, strict=True):
            value = grad_fn(params, *item)
            states.append(accumulator.update(accumulator.init(value), value, weight))
        while len(states) > 1:  # in any grouping, as the monoid is associative
            place = int(self.r.integers(0, len(states) - 1))
            states[place : place + 2] = [accumulator.merge(*states[place : place + 2])]
        return accumulator.finalize(states[0])


def flipped(pair):
    """(value, grads) of what torch.func returns."""
    return pair[1], pair[0]


GRADIENTS = {
    "torch": {
        "value_and_grad": (funcga.value_and_grad, lambda out: out),
        "aux": (lambda f: funcga.grad(lambda *args: (f(*args),) * 2, has_aux=True), flipped),
        "argnums": (lambda f: funcga.value_and_grad(f, (0,)), lambda out: (out[0], out[1][0])),
        "torch.func": (torch.func.grad_and_value, flipped),
    },
    "jax": {
        "value_and_grad": (funcga.value_and_grad, lambda out: out),
        "aux": (lambda f: funcga.grad(lambda *args: (f(*args),) * 2, has_aux=True), flipped),
        "jax.grad": (jax.value_and_grad, lambda out: out),
    },
}


def assert_close(kit, got, expected, path=""):
    got, expected = np.asarray(kit.numpy(got)), np.asarray(expected)
    assert got.shape == expected.shape, path
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9 * max(1, np.abs(expected).max(initial=0)))


def check(kit, seed):
    case = Case(seed)
    way = case.r.choice(["accumulate", "accumulate", "stream", "Accumulator"])
    names = list(GRADIENTS[kit.name])
    name = names[case.r.integers(0, len(names))]
    gradient, ordered = GRADIENTS[kit.name][name]
    if name == "torch.func":
        case.params = without_none(case.params)  # which it does not take
    value, grads = ordered(case.run(kit, way, gradient))
    expected_value, expected_grads = case.by_hand()
    if case.fold == "moments":
        moments = [value, *moments_of(grads, case.params)]
        for found, expected in zip(moments, [expected_value, *expected_grads], strict=True):
            assert_close(kit, found[0], expected[0])
            assert_close(kit, found[1], expected[1])
        return
    assert_close(kit, value, expected_value)
    for found, expected in zip(leaves_of(grads), expected_grads, strict=True):
        assert_close(kit, found, expected)


def moments_of(grads, like):
    """The (mean, variance) of every leaf, in order."""
    if isinstance(like, dict):
        return [found for key in like for found in moments_of(grads[key], like[key])]
    if isinstance(like, tuple | list):
        return [found for pair in zip(grads, like, strict=True) for found in moments_of(*pair)]
    return [] if like is None else [grads]


@pytest.mark.parametrize("seed", range(CASES))
def test_calls_in_torch(seed):
    check(TORCH, seed)


@pytest.mark.parametrize("seed", range(CASES // 12))
def test_calls_in_jax(seed, x64):
    check(JAX, seed)
