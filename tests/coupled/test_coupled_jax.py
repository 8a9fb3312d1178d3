"""coupled in JAX: one program, which is differentiated, mapped, and spread over devices."""

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
from jax_backend import collectives
from jax_backend.hlo import folded_in_place
from tests.coupled import losses
from tests.jax_backend.test_replicas_jax import mesh
from tests.kits import JAX, difference

LIMIT = 1e-12
pytestmark = pytest.mark.usefixtures("x64", "as_users_write_it")


def problem(name, rows=12):
    return losses.problem(JAX, name, rows)


# --- one program


def test_a_step_is_jitted_donated_and_mapped():
    (params, batch), name = problem("InfoNCE", 11), "InfoNCE"
    step, expected = losses.step(JAX, name, 3), losses.expected(JAX, name, params, batch)
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    values, grads = jax.jit(jax.vmap(step, in_axes=(0, None)))(several, batch)
    first = jax.tree.map(lambda leaf: leaf[0], (values, grads))
    assert difference(JAX, first, expected) < LIMIT
    donated = jax.tree.map(jnp.copy, params)
    updated = jax.jit(
        lambda params, batch: jax.tree.map(jnp.subtract, params, step(params, batch)[1]), donate_argnums=0
    )
    result = updated(donated, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    assert difference(JAX, result, jax.tree.map(jnp.subtract, params, expected[1])) < LIMIT


def test_a_step_is_differentiated():
    """Its value and, to second order, its gradient."""
    name = "VICReg"
    params, batch = problem(name, 11)
    step = losses.step(JAX, name, 3)
    whole = jax.value_and_grad(lambda params: losses.LOSSES[name].whole(jnp, params, batch))
    after = lambda step: (
        lambda params: step(params)[0] + sum((leaf**3).sum() for leaf in jax.tree.leaves(step(params)[1]))
    )
    found, expected = (
        jax.jit(jax.value_and_grad(after(each)))(params) for each in (lambda params: step(params, batch), whole)
    )
    assert difference(JAX, found, expected) < LIMIT


def test_layers_that_are_scanned_are_folded_in_place():
    r = np.random.default_rng(0)
    params = {"layers": jnp.asarray(r.normal(size=(3, 5, 5)) / 2), "scale": jnp.asarray(0.3)}
    x = jnp.asarray(r.normal(size=(11, 5)))
    summary_fn = lambda params, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]

    def loss_fn(params, s):
        return jax.nn.logsumexp(s @ s.T * params["scale"], 1).mean()

    step = funcga.coupled(summary_fn, loss_fn, 3)
    (path,) = folded_in_place(step, params, x)
    assert path.endswith("['layers']")
    whole = lambda params: loss_fn(params, summary_fn(params, x))
    assert difference(JAX, step(params, x), losses.differentiated(JAX, whole, params)) < LIMIT


def test_a_step_is_exported_for_any_number_of_rows():
    (rows,) = jax.export.symbolic_shape("rows")
    step = jax.jit(funcga.coupled(lambda w, x: jnp.tanh(x * w), lambda w, s: jax.nn.logsumexp(s @ s.T * w), 4))
    w, x = jnp.asarray(0.3), jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)))
    exported = jax.export.export(step)(w, jax.ShapeDtypeStruct((4 * rows, 3), x.dtype))
    assert difference(JAX, exported.call(w, x), step(w, x)) < LIMIT


# --- devices


# What each sends, outside of every loop. Rows are gathered by a reduction, in which each device has its own.
# Totals that are no numbers of rows come first.
REDUCTIONS = {"InfoNCE": 2, "GRPO": 2, "CE + auxiliary": 3}


@pytest.mark.parametrize(("name", "devices"), [("InfoNCE", 3), ("GRPO", 2), ("CE + auxiliary", 2)])
def test_devices_give_the_whole_batch(name, devices):
    params, batch = problem(name)
    step = jax.jit(jax_backend.replicated(losses.step(JAX, name, 3, across="data"), mesh(devices)))
    assert difference(JAX, step(params, batch), losses.expected(JAX, name, params, batch)) < LIMIT
    assert [(c.kind, c.depth) for c in collectives(step, params, batch)] == [("all-reduce", 0)] * REDUCTIONS[name]


@pytest.mark.parametrize(("name", "kind"), [("InfoNCE", AxisType.Explicit), ("MoE balance", AxisType.Auto)])
def test_a_batch_that_is_sharded(name, kind):
    """Outside of shard_map the compiler merges what lies on several devices."""
    params, batch = problem(name)
    on = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    expected = losses.expected(JAX, name, params, batch)
    batch = jax.device_put(batch, NamedSharding(on, P("data")))
    params = jax.device_put(params, NamedSharding(on, P()))
    with jax.set_mesh(on) if kind is AxisType.Explicit else jax.default_device(jax.devices()[0]):
        result = losses.step(JAX, name, 3)(params, batch)
    assert difference(JAX, result, expected) < LIMIT
