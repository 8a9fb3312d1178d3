"""Values and weights whose products no float32 holds: the mean is right wherever it is itself a float32.

`Accumulator` and `multi_steps` hold w / unit * v of a weight w and a value v, where `unit` follows the total weight.
"""

import numpy as np
import pytest
import torch

import funcga
from tests.kits import JAX, TORCH

KITS = pytest.mark.parametrize("kit", [TORCH, JAX], ids=["torch", "jax"])
IDENTITY = funcga.transforms.Transform(lambda params: (), lambda grads, state, params=None: (grads, state))


def cases():
    """(values, weights) of windows: one size of values, and weights of one size or of any."""
    r = np.random.default_rng(0)
    for size, low, high, n in ((1e-36, 28, 30, 3), (1e37, -100, 30, 7)):
        values = size * r.uniform(0.5, 1, size=(n, 3)).astype("float32")
        weights = [float(np.float32(2.0 ** r.uniform(low, high))) for _ in range(n)]
        if n > 2:
            weights[int(r.integers(n))] = 0.0
        yield values.astype("float32"), weights
    yield np.full((3, 3), 1e33, "float32"), [262144.0] * 3
    yield np.full((3, 3), 1e-3, "float32"), [1e-36] * 3


CASES = pytest.mark.parametrize(("values", "weights"), [*cases()])


def mean(values, weights):
    return np.average(values.astype("float64"), axis=0, weights=weights)


def check(found, values, weights, rtol=2e-6):
    # What contributes less than the least normal float32 may be lost.
    least = float(np.finfo("float32").tiny)
    np.testing.assert_allclose(np.asarray(found, "float64"), mean(values, weights), rtol=rtol, atol=least)


def trees(kit, values):
    return [{"w": kit.arrays(value)} for value in values]


@KITS
@CASES
def test_an_accumulator(kit, values, weights):
    accumulator = funcga.Accumulator()
    grads = trees(kit, values)
    state, parts = accumulator.init(grads[0]), []
    for value, weight in zip(grads, weights, strict=True):
        state = accumulator.update(state, value, weight=weight)
        parts.append(accumulator.update(accumulator.init(value), value, weight=weight))
    check(kit.numpy(accumulator.finalize(state))["w"], values, weights)
    merged = accumulator.init(grads[0])
    for part in parts:
        merged = accumulator.merge(merged, part)
    check(kit.numpy(accumulator.finalize(merged))["w"], values, weights)


@CASES
@pytest.mark.parametrize(
    ("kit", "options"),
    [(TORCH, {}), (TORCH, {"donate": True}), (JAX, {})],
    ids=lambda part: getattr(part, "name", str(part)),
)
def test_windows_of_multi_steps(kit, options, values, weights):
    """One window after another, the second of which begins in the state that the first has left."""
    tx = funcga.multi_steps(IDENTITY, len(weights), **options)
    state = tx.init(trees(kit, values)[0])
    for order in (1, -1):
        for value, weight in zip(trees(kit, values[::order]), weights[::order], strict=True):
            updates, state = tx.update(value, state, weight=weight)
        check(kit.numpy(updates)["w"], values, weights)
        for value, weight in zip(trees(kit, values), weights, strict=True):
            state = tx.accumulate(value, state, weight=weight)
        updates, state = tx.flush(state)
        check(kit.numpy(updates)["w"], values, weights)
    assert float(state.window.tally.weight[0]) == 0


def test_under_vmap_and_grad_of_torch():
    accumulator = funcga.Accumulator()

    def folded(values, weights):
        state = accumulator.init(torch.zeros(2))
        for value, weight in zip(values, weights, strict=True):
            state = accumulator.update(state, value, weight=weight)
        return accumulator.finalize(state)

    generator = torch.Generator().manual_seed(0)
    values, weights = torch.randn(4, 3, 2, generator=generator), 1e5 * torch.rand(4, 3, generator=generator)
    expected = (values * weights[..., None]).sum(1) / weights.sum(1)[:, None]
    torch.testing.assert_close(torch.func.vmap(folded)(values, weights), expected)
    slope = torch.func.grad(lambda w: folded(values[0], w).sum())(weights[0])
    torch.testing.assert_close(slope, (values[0] - expected[0]).sum(1) / weights[0].sum())


@KITS
def test_a_state_without_a_unit_goes_on(kit):
    """As earlier versions have saved them: sums of w * v."""
    accumulator, one = funcga.Accumulator(), kit.arrays(np.ones(2, "float32"))
    state = accumulator.init(one)
    state = state._replace(leaves=(one * 300,), tally=accumulator.update(state, one, weight=100).tally)
    old = type(state)(*state[:3])
    assert old.unit == 1
    found = accumulator.finalize(accumulator.update(old, one, weight=50))
    np.testing.assert_allclose(kit.numpy(found), 350 / 150, rtol=1e-7)
    tx = funcga.multi_steps(IDENTITY, 2)
    state = tx.accumulate({"w": one}, tx.init({"w": one}), weight=100)
    window = type(state.window)({"w": one * 300}, *state.window[1:4])
    updates, state = tx.update({"w": one}, state._replace(window=window), weight=50)
    np.testing.assert_allclose(kit.numpy(updates)["w"], 350 / 150, rtol=1e-7)
