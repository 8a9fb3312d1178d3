"""Programs for accelerators that this machine does not have: the main steps are lowered for them, on a CPU."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from tests.problems import rng

PLATFORMS = ("cpu", "cuda", "tpu")
pytestmark = pytest.mark.usefixtures("as_users_write_it")


def arrays(dtype="float32"):
    r = rng(12)
    params = {"layers": r.normal(size=(2, 4, 4)) / 2, "out": r.normal(size=4)}
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, r.normal(size=(8, 4))))


def loss(params, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return ((x * params["out"]) ** 2).mean()


def check_same(left, right):
    """The same to rounding: of two programs XLA contracts other products and sums."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        eps = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.floating) else 0.0
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        assert np.abs(a - b).max() <= 8 * eps * np.abs(b).max()


def check_exported(step, *args):
    """The program for all platforms, which can call nothing of the host, returns on this one what the step returns."""
    exported = jax.export.export(jax.jit(step), platforms=PLATFORMS)(*args)
    assert exported.platforms == PLATFORMS
    check_same(exported.call(*args), jax.jit(step)(*args))


FOLDS = ("mean", "per_weight", "sum", "max", "min", "logsumexp", "moments")


def test_accumulate():
    """Every fold, ragged micro-batches, weights, rows and state."""
    params, x = arrays("bfloat16")

    def grad_fn(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return (value, {name: grads for name in FOLDS}), x[:, 0], state + x.sum().astype("float32")  # noqa: C420

    folds = (funcga.mean(), {name: getattr(funcga, name)() for name in FOLDS}), funcga.concat(), funcga.carry()
    options = {"fold": folds, "in_axes": (None, funcga.CARRY, 0)}
    step = funcga.accumulate(grad_fn, 3, weight=lambda x: (x > 0).sum(), **options)
    check_exported(step, params, jnp.float32(0), x)


def test_on_a_mesh():
    """One program for four devices."""
    params, x = arrays()
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    fold = ((funcga.mean(), funcga.max()), funcga.concat())
    grad_fn = lambda params, x: (jax.value_and_grad(loss)(params, x), x)
    step = funcga.accumulate(grad_fn, 2, fold=fold, across="data")
    exported = jax.export.export(jax.jit(jax_backend.replicated(step, mesh)), platforms=PLATFORMS)(params, x)
    assert exported.nr_devices == 4
    check_same(jax.jit(exported.call)(params, x), jax_backend.replicated(step, mesh)(params, x))


def test_what_a_platform_cannot_run_is_found():
    """The check can fail: a program that calls back to the host."""
    params, x = arrays()

    def called(params, x):
        x = jax.pure_callback(lambda x: x, jax.typeof(x), lax.stop_gradient(x))
        return loss(params, x)

    with pytest.raises(NotImplementedError):
        check_exported(funcga.accumulate(jax.grad(called), 2), params, x)
