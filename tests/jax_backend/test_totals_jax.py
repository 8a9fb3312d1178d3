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
    """(a loss, the dtype of the total, the total, a gradient) of micro-batches that count so much each."""
    loss = lambda w, x, *, totals: ((w * x).sum() * 0, totals)
    options = {"fold": ((funcga.sum(), funcga.max()), funcga.sum()), "across": "data" if replicas > 1 else None}
    totals = lambda x: jnp.int32(amount) + (x[0] * 0).astype("int32")
    gradient = funcga.value_and_grad(loss, has_aux=True)
    step = funcga.accumulate(gradient, n, totals=totals, **options)
    step = jax_backend.replicated(step, mesh(replicas)) if replicas > 1 else step
    results = [step(jnp.ones(()), jnp.ones(n * replicas))]
    if replicas == 1:
        results.append(funcga.stream(gradient, totals=totals, **options)(jnp.ones(()), [jnp.ones(1)] * n))
    found = {(float(value), total.dtype, float(total), float(gradient)) for (value, total), gradient in results}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("each", "replicas"), [(2**24 + 1, 1), (2**29 - 1, 2), (-(2**29) + 2, 1), (0, 1), (2**31 - 1, 1), (-(2**30) - 7, 2)]
)
def test_integers_are_added_exactly_and_rounded_once(each, replicas):
    """Also to totals that no int32 holds."""
    expected = float(np.float32(4 * replicas * each))
    assert counted(each, replicas=replicas) == (0, np.float32, expected, 0)


def test_a_coupled_loss_is_divided_by_a_large_total_as_well():
    summary = lambda w, x, *, totals: (w * x).sum() / totals
    for amount in (2**28, 2**30):
        totals = lambda x, amount=amount: jnp.int32(amount)
        step = funcga.coupled(summary, lambda w, s: s, 4, fold=funcga.sum(), totals=totals)
        loss, gradient = step(jnp.ones(()), jnp.ones(4))
        assert loss == gradient == 1 / amount
