"""`drop=` over devices: each leaves its own micro-batches out, and all of them have the same result."""

import jax
import jax.numpy as jnp
import pytest

import funcga
import jax_backend
from jax_backend import collectives
from tests.call.test_drop import KINDS, expected, loss_of, problem
from tests.jax_backend.test_replicas_jax import mesh
from tests.kits import JAX, difference

PARTS = [(0, 3), (3, 6), (6, 9), (9, 12)]  # the micro-batches of 12 rows on 2 devices
pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_nan_and_inf_at_every_leaf_and_micro_batch_of_every_device(drop):
    params, x, flags = problem(JAX, 12)
    step = funcga.accumulate(jax.value_and_grad(loss_of(jnp)), 2, drop=drop, across="data")
    step = jax.jit(jax_backend.replicated(step, mesh(2)))
    assert [(c.kind, c.depth) for c in collectives(step, params, x, JAX.arrays(flags))] == [("all-reduce", 0)]
    for spoilt in (None, *PARTS):
        for kind in range(len(KINDS)) if spoilt in PARTS[:2] else [0]:
            flags[:] = 0
            rows = [*range(12)]
            if spoilt is not None:
                flags[spoilt[0], kind] = 1
                rows = [row for row in rows if not spoilt[0] <= row < spoilt[1]] if drop == "microbatch" else []
            loss, grads = step(params, x, JAX.arrays(flags.copy()))
            wanted = expected(params, x, rows)
            assert difference(JAX, {"loss": loss, "grads": grads}, JAX.arrays(wanted)) <= 1e-12
    flags[:] = 1
    assert not any(leaf.any() for leaf in JAX.leaves(step(params, x, JAX.arrays(flags))))
