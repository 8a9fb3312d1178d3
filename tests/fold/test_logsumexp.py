"""`logsumexp()`: the log of a sum of exponentials over any split, and its derivative, against NumPy and the frameworks."""

import jax
import numpy as np
import pytest
import torch

import funcga
from tests.kits import JAX, TORCH, difference

INF, NAN = float("inf"), float("nan")


def logsumexp(kit, x):
    """The framework's own, over axis 0."""
    return torch.logsumexp(x, 0) if kit.name == "torch" else jax.nn.logsumexp(x, axis=0)


def folded(kit, **options):
    """f(x): the same, folded over rows, or over micro-batches of them."""
    return funcga.accumulate(lambda x: logsumexp(kit, x), in_axes=0, fold=funcga.logsumexp(), **options)


def values(scale=1.0, rows=20, shape=(4,), seed=0):
    return scale * np.random.default_rng(seed).standard_normal((rows, *shape))


@pytest.mark.parametrize(("kit", "scale"), [(TORCH, 1.0), (TORCH, 1e4), (JAX, 1.0)])
def test_its_derivative_is_the_softmax(kit, x64, scale):
    """exp(v - result), whether the step is taken in funcga's own gradient or in the framework's."""
    x, w = kit.arrays(values(scale)), kit.arrays(values(seed=1)[0])
    softmax = np.exp(kit.numpy(x) - kit.numpy(logsumexp(kit, x)))
    framework = torch.func.grad if kit.name == "torch" else jax.grad
    for split, transform in (({"n": 7}, funcga.grad), ({"microbatch_size": 6}, framework), ({"n": 1}, funcga.grad)):
        step = folded(kit, **split)
        found = transform(lambda x, step=step: (w * step(x)).sum())(x)
        assert difference(kit, found, kit.arrays(softmax * kit.numpy(w))) <= 1e-14


def test_its_derivative_where_values_are_equal(kit, x64):
    """The largest value is not unique, and what is folded first does not count for more."""
    x = kit.arrays(np.zeros((6, 2)))
    for split in ({"microbatch_size": 4}, {"n": 6}):
        step = folded(kit, **split)
        found = funcga.grad(lambda x, step=step: step(x).sum())(x)
        np.testing.assert_allclose(kit.numpy(found), np.full((6, 2), 1 / 6), rtol=1e-15)


SPECIAL = {
    "some are -inf": [-INF, 1.0, -INF, 2.0],
    "all are -inf": [-INF] * 4,
    "one is inf": [0.0, INF, 1.0, -INF],
    "some are inf": [INF, INF, -INF, INF],
    "one is NaN": [1.0, NAN, INF, -INF],
    "NaN among -inf": [-INF, NAN, -INF, -INF],
}


def test_infinities_and_nan_come_through(kit, x64):
    # each value by itself, so that no sum of the framework's own is in it, or in pairs
    steps = funcga.accumulate(lambda x: x[0], 4, in_axes=0, fold=funcga.logsumexp()), folded(kit, n=2)
    for name, values in SPECIAL.items():
        for order in (values, values[::-1], np.roll(values, 1)):
            rows = kit.arrays(np.array(order))
            for step in steps:
                found, expected = kit.numpy(step(rows)), kit.numpy(logsumexp(kit, rows))
                np.testing.assert_allclose(found, expected, rtol=1e-15, err_msg=name)


def test_its_derivative_by_minus_infinity_is_0(kit, x64):
    step = funcga.accumulate(lambda x: x[0], 4, in_axes=0, fold=funcga.logsumexp())
    for name in ("some are -inf", "all are -inf"):
        x = np.array(SPECIAL[name])
        expected = np.exp(x - np.logaddexp.reduce(x)) if np.isfinite(x).any() else np.zeros(4)
        for transform in (funcga.grad, torch.func.grad if kit.name == "torch" else jax.grad):
            found = transform(lambda x: step(x))(kit.arrays(x))
            np.testing.assert_allclose(kit.numpy(found), expected, rtol=1e-15)
