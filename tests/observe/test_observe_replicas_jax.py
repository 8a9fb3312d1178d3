"""observe= in JAX over the devices of a mesh: what all micro-batches say, by one sum that is there anyway."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import funcga
import jax_backend
from jax_backend import Replicas, collectives
from jax_backend.hlo import folded_in_place
from tests.jax_backend.test_replicas_jax import mesh
from tests.kits import JAX, difference
from tests.observe import oracle
from tests.test_errors import check_refused

LIMIT = 1e-12
ROWS, DEVICES, N = 24, 4, 3
OBSERVE = {"noise": funcga.gradient_noise(groups=lambda path: path), "norms": funcga.gradient_norms()}


def loss_fn(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    return jnp.mean((h @ params["head"]) ** 2)


def problem(dtype="float64"):
    generator = np.random.default_rng(0)
    params = {"layers": generator.normal(size=(3, 4, 4)), "head": generator.normal(size=4)}
    return JAX.arrays(jax.tree.map(lambda leaf: leaf.astype(dtype), (params, generator.normal(size=(ROWS, 4)))))


def expected(params, x, replicas):
    size = ROWS // (N * replicas)
    parts = oracle.apart(ROWS, [size] * (N * replicas))
    each = [jax.jit(jax.grad(loss_fn))(params, x[part]) for part in parts]
    weights = [1] * len(parts)
    flats = {name: [oracle.flat([gradient[name]]) for gradient in each] for name in params}
    whole = [oracle.flat(jax.tree.leaves(gradient)) for gradient in each]
    # The estimates are in rows.
    return {name: oracle.noise(flats[name], [size] * len(parts)) for name in params}, oracle.norms(whole, weights)


def check(observed, params, x, replicas):
    noise, (norms, mean) = expected(params, x, replicas)
    for name, (trace, norm_squared) in noise.items():
        assert abs(observed["noise"][name].trace / trace - 1) < LIMIT
        assert abs(observed["noise"][name].norm_squared / norm_squared - 1) < LIMIT
    assert abs(observed["norms"].mean / mean - 1) < LIMIT
    assert np.allclose(np.sort(observed["norms"].microbatches), np.sort(norms), rtol=LIMIT, atol=0)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=str)
def test_replicas_are_observed(axes):
    """Over all axes of a mesh, or one, where the other is left to the compiler."""
    params, x = problem()
    names = ("data", "model")[: len(axes)]
    devices = jax.make_mesh(axes, names, axis_types=(AxisType.Auto,) * len(axes))
    step = funcga.accumulate(funcga.grad(loss_fn), N, across="data", observe=OBSERVE)
    step = jax_backend.replicated(step, devices, axis="data")
    grads, observed = step(params, x)
    assert difference(JAX, grads, jax.grad(loss_fn)(params, x)) < LIMIT
    check(observed, params, x, axes[0])


def test_no_collective_more():
    params, x = problem("float32")
    steps = [
        jax_backend.replicated(
            funcga.accumulate(funcga.grad(loss_fn), N, across="data", observe=observe), mesh(DEVICES)
        )
        for observe in (None, funcga.gradient_noise())
    ]
    found = [[(each.kind, each.depth) for each in collectives(step, params, x)] for step in steps]
    assert found[0] == found[1] == [("all-reduce", 0)]


def test_layers_are_folded_in_place_beside_observers():
    params, x = problem("float32")
    step = funcga.accumulate(funcga.value_and_grad(loss_fn), N, observe=funcga.gradient_noise())
    assert folded_in_place(step, params, x) == ["output[1]['layers']"]


def test_what_is_scattered_is_refused():
    step = lambda across: funcga.accumulate(funcga.grad(loss_fn), N, across=across, observe=OBSERVE)
    jax_backend.replicated(step(Replicas("data")), mesh(DEVICES))(*problem("float32"))
    check_refused("observe= was given together with scatter=", step, Replicas("data", scatter=0))
