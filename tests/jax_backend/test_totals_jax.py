"""totals= in JAX: over the devices of a mesh, one sum more, outside of every loop; and in 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcga
import jax_backend
from jax_backend import collectives
from tests import objectives
from tests.jax_backend.test_replicas_jax import mesh
from tests.kits import JAX

pytestmark = pytest.mark.usefixtures("as_users_write_it")


def problem(dtype="float64"):
    return JAX.arrays(jax.tree.map(lambda leaf: leaf.astype(dtype), objectives.rollouts(12)))


@pytest.mark.parametrize(("name", "sums"), [("DAPO", 1), ("CE + auxiliary", 2)])
def test_one_sum_more_for_each_dtype_outside_of_the_loops(name, sums):
    params, batch = problem("float32")
    step = jax_backend.replicated(objectives.step(JAX, name, 3, across="data"), mesh())
    found = collectives(step, params, batch)
    assert {(each.kind, each.depth) for each in found} == {("all-reduce", 0)}
    assert len(found) == 1 + sums


# -- without 64-bit types


def counted(amount, n=4, replicas=1):
    """The loss, 0 * total, of micro-batches that count so much each, and the total."""
    loss = lambda w, x, *, totals: ((w * x).sum() * 0, totals)
    options = {"fold": ((funcga.sum(), funcga.max()), funcga.sum()), "across": "data" if replicas > 1 else None}
    totals = lambda x: jnp.int32(amount) + (x[0] * 0).astype("int32")
    gradient = funcga.value_and_grad(loss, has_aux=True)
    step = funcga.accumulate(gradient, n, totals=totals, **options)
    step = jax_backend.replicated(step, mesh(replicas)) if replicas > 1 else step
    results = [step(jnp.ones(()), jnp.ones(n * replicas))]
    if replicas == 1:
        results.append(funcga.stream(gradient, totals=totals, **options)(jnp.ones(()), [jnp.ones(1)] * n))
    found = {(float(value), int(total), float(gradient)) for (value, total), gradient in results}
    assert len(found) == 1 or all(value != value for value, _, _ in found)
    return found.pop()


@pytest.mark.parametrize(("each", "replicas"), [(2**24 + 1, 1), (2**29 - 1, 2), (-(2**29) + 2, 1), (0, 1)])
def test_int32_is_exact(each, replicas):
    each //= replicas
    assert counted(each, replicas=replicas) == (0, 4 * replicas * each, 0)


@pytest.mark.parametrize(("each", "replicas"), [(2**29, 1), (2**29, 2), (2**31 - 1, 1), (-(2**30), 2)])
def test_what_int32_does_not_hold_spoils_the_result(each, replicas):
    value, _, gradient = counted(each, replicas=replicas)
    assert np.isnan([value, gradient]).all()


def test_it_spoils_a_coupled_loss_as_well():
    summary = lambda w, x, *, totals: (w * x).sum() * 0 / totals
    for amount, fits in ((2**28, True), (2**30, False)):
        totals = lambda x, amount=amount: jnp.int32(amount)
        step = funcga.coupled(summary, lambda w, s: s, 4, fold=funcga.sum(), totals=totals)
        loss, gradient = step(jnp.ones(()), jnp.ones(4))
        assert np.isfinite([loss, gradient]).all() == fits
