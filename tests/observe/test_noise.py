"""gradient_noise: by Monte Carlo, on problems whose covariance is known, its estimates are unbiased and its errors hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcga

WINDOWS = 20_000
SIZES = [1, 2, 4, 3, 6]
# Of |x - w|^2 / 2 a row's gradient is w - x: its mean is w - E[x], and its covariance that of x.
DEVIATIONS = np.array([2.0, 1.0, 0.5, 0.25])


@pytest.mark.parametrize("signal", [0.0, 3.0])
def test_estimates_are_unbiased_and_their_errors_are_not_too_small(signal, x64):
    loss_fn = lambda w, x: 0.5 * jnp.mean(jnp.sum((w - x) ** 2, axis=1))
    step = funcga.stream(funcga.grad(loss_fn), observe=funcga.gradient_noise())
    ends = np.cumsum(SIZES)

    def window(key):
        x = jnp.asarray(DEVIATIONS) * jax.random.normal(key, (ends[-1], len(DEVIATIONS)))
        items = [(x[end - size : end],) for end, size in zip(ends, SIZES, strict=True)]
        return step(jnp.full(len(DEVIATIONS), signal), items)[1]

    noise = jax.jit(jax.vmap(window))(jax.random.split(jax.random.key(0), WINDOWS))
    trace, norm_squared = (DEVIATIONS**2).sum(), len(DEVIATIONS) * signal**2
    for estimate, error, truth in (
        (noise.trace, noise.trace_error, trace),
        (noise.norm_squared, noise.norm_squared_error, norm_squared),
    ):
        deviation = float(jnp.std(estimate))
        # Three standard errors of a mean of so many windows.
        assert abs(float(jnp.mean(estimate)) - truth) < 3 * deviation / WINDOWS**0.5
        # The root of the mean variance that it says, against the deviation that there is.
        ratio = float(jnp.sqrt(jnp.mean(error**2))) / deviation
        assert ratio > 0.95
        if estimate is noise.norm_squared:
            assert ratio < 2.5
        if signal == 0:
            assert ratio < 1.5


def test_large_gradients(kit):
    """Fourth powers of the norm are beyond float32: the errors are infinite, and the estimates are right."""
    values = np.array([1e12, -2e12, 4e12, 3e12])
    step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 4, observe=funcga.gradient_noise())
    _, noise = step(kit.arrays(np.float32(1)), kit.arrays(values.astype("float32")))
    assert abs(float(noise.trace) / values.var(ddof=1) - 1) < 1e-5  # a few roundings of float32
    assert abs(float(noise.norm_squared) / (values.mean() ** 2 - values.var(ddof=1) / 4) - 1) < 1e-5
    assert float(noise.trace_error) == float(noise.norm_squared_error) == np.inf
    # Such a window does not stay in an average for ever.
    usual = type(noise)(*kit.arrays(tuple(np.float32(number) for number in (8, 2, 4, 1, 1, 2))))
    _, state = funcga.observers.averaged(noise, None, 0.9)
    for window in (noise, usual, noise):
        average, state = funcga.observers.averaged(window, state, 0.9)
    assert all(np.isfinite(float(number)) for number in state)
    assert abs(float(average.trace) - 8) < 1e-5


def test_a_micro_batch_without_a_weight_says_nothing(kit):
    step = funcga.stream(
        funcga.grad(lambda w, x: (w * x).mean()),
        weight=lambda x: len(x) * (len(x) > 1),
        observe=funcga.gradient_noise(),
    )
    rows = [kit.arrays(np.array(values, "float32")) for values in ([1, 2], [float("nan")], [4, 4, 1], [3, 5])]
    found, wanted = (step(kit.arrays(np.float32(1)), [(x,) for x in items])[1] for items in (rows, rows[:1] + rows[2:]))
    np.testing.assert_allclose([float(number) for number in found], [float(number) for number in wanted], rtol=1e-6)
