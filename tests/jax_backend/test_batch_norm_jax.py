"""BatchNorm of flax in accumulation: running statistics merged once a window are those of one batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcga
from jax_backend import replicated

linen = pytest.importorskip("flax.linen")

FOLD = ((funcga.mean(), funcga.pooled()), funcga.mean())


class Net(linen.Module):
    momentum: float = 0.9

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(3, param_dtype="float64")(x)
        norm = linen.BatchNorm(
            use_running_average=False,
            momentum=self.momentum,
            use_fast_variance=False,
            param_dtype="float64",
            force_float32_reductions=False,
        )
        return norm(x).sum(-1)


def flax_problem():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((12, 2))).cumsum(0)
    variables = Net().init(jax.random.key(0), x)
    return variables["params"], variables["batch_stats"], x


def flax_loss(momentum):
    def loss(params, batch_stats, x):
        out, state = Net(momentum).apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
        return (out**2).mean(), state["batch_stats"]

    return loss


def flax_observed(params, batch_stats, x):
    value, seen = flax_loss(0.0)(params, batch_stats, x)
    return value, funcga.statistics.batch_moments(seen, len(x))


def test_flax_with_momentum_0_returns_the_statistics_of_the_micro_batch(x64):
    params, batch_stats, x = flax_problem()
    _, one = flax_loss(0.9)(params, batch_stats, x)
    gradient = jax.value_and_grad(flax_observed, has_aux=True)
    for options in ({"n": 4}, {"n": None, "microbatch_size": 5}):
        step = funcga.accumulate(gradient, **options, fold=FOLD, in_axes=(None, None, 0))
        (_, pooled), _ = step(params, batch_stats, x)
        new = funcga.statistics.running_statistics(batch_stats, pooled, share=1 - 0.9, unbiased=False)
        assert jax.tree.structure(new) == jax.tree.structure(batch_stats)
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
    state = batch_stats
    for part in jnp.split(x, 4):  # as batch_stats are carried through a loop
        _, state = flax_loss(0.9)(params, state, part)
    apart = [abs(a - b).max() for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(one), strict=True)]
    moved = [abs(a - b).max() for a, b in zip(jax.tree.leaves(batch_stats), jax.tree.leaves(one), strict=True)]
    assert all(a > 0.3 * b for a, b in zip(apart, moved, strict=True))


def test_statistics_of_replicas_in_jax(x64):
    params, batch_stats, x = flax_problem()
    gradient, axes = jax.value_and_grad(flax_observed, has_aux=True), (None, None, 0)
    (_, one), _ = funcga.accumulate(gradient, 1, fold=FOLD, in_axes=axes)(params, batch_stats, x)
    step = funcga.accumulate(gradient, 2, fold=FOLD, in_axes=axes, across="data")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    (_, many), _ = replicated(step, mesh)(params, batch_stats, x)
    for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
