"""Experts along an axis of a mesh, reduced after the step, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import funcga
import jax_backend
from jax_backend import collectives
from tests.kits import JAX, difference

BOTH = ("data", "expert")
SPECS = {"dense": {"w": PartitionSpec()}, "experts": {"w": PartitionSpec("expert")}}
ROWS = PartitionSpec(BOTH)
pytestmark = pytest.mark.usefixtures("x64")


def grid():
    return jax.make_mesh((2, 2), BOTH, axis_types=(jax.sharding.AxisType.Auto,) * 2)


def problem(rows=32):
    random = np.random.default_rng(0)
    params = {"dense": {"w": random.normal(size=(3, 3))}, "experts": {"w": random.normal(size=(4, 3, 3))}}
    batch = random.normal(size=(rows, 3)), random.integers(4, size=rows), random.normal(size=(rows, 3))
    return JAX.arrays(params), JAX.arrays((*batch, (random.random(rows) < 0.6) * 1.0))


def loss_of(axis=None, reduction="sum"):
    """The loss of tokens that go to experts, which lie along an axis."""

    def loss_fn(params, tokens, which, targets, counts):
        hidden, w = jnp.tanh(tokens @ params["dense"]["w"]), params["experts"]["w"]
        if axis is None:
            out = jnp.einsum("ti,tij->tj", hidden, w[which])
        else:
            came, theirs = (
                lax.all_gather(hidden, axis),
                lax.all_gather(which, axis) - (lax.axis_index(axis) * len(w)).astype(which.dtype),
            )
            is_here = (theirs >= 0) & (theirs < len(w))
            made = jnp.einsum("nti,ntij->ntj", came, w[jnp.clip(theirs, 0, len(w) - 1)])
            out = lax.psum_scatter(jnp.where(is_here[..., None], made, 0), axis)
        errors = jnp.square(out - targets).sum(-1) * counts
        return errors.sum() if reduction == "sum" else errors.sum() / jnp.maximum(counts.sum(), 1)

    return loss_fn


def truth(params, batch):
    return jax.value_and_grad(lambda params: loss_of()(params, *batch) / batch[-1].sum())(params)


def count(tokens, which, targets, counts):
    return counts.sum()


def over(step):
    return jax.jit(
        jax_backend.replicated(
            step, grid(), axis=BOTH, in_specs=(SPECS, *[ROWS] * 4), out_specs=(PartitionSpec(), SPECS)
        )
    )


def own_copies(params):
    """The params, marked as differing between devices: else JAX sums their gradients in every micro-batch."""
    return {
        "dense": {"w": lax.pcast(params["dense"]["w"], BOTH, to="varying")},
        "experts": {"w": lax.pcast(params["experts"]["w"], "data", to="varying")},
    }


def test_experts_are_reduced_after_the_step():
    params, batch = problem()
    sums = funcga.accumulate(jax.value_and_grad(loss_of("expert")), 4, fold=funcga.sum(), across=())

    def reduced(params, *batch):
        loss, grads = sums(own_copies(params), *batch)
        loss, dense, counts = lax.psum((loss, grads["dense"], count(*batch)), BOTH)
        grads = {"dense": dense, "experts": lax.psum(grads["experts"], "data")}
        return jax.tree.map(lambda leaf: leaf / counts, (loss, grads))

    step = over(reduced)
    assert difference(JAX, step(params, *batch), truth(params, batch)) <= 1e-12
    # One all-reduce for each set of axes, after the loop.
    assert [each.kind for each in collectives(step, params, *batch) if not each.depth] == ["all-reduce"] * 2


@pytest.mark.parametrize("across", [[BOTH, {"dense": BOTH, "experts": "data"}], {"dense": BOTH, "experts": "data"}])
def test_axes_for_each_leaf_are_refused(across):
    params, batch = problem()
    step = funcga.accumulate(jax.value_and_grad(loss_of("expert")), 4, fold=funcga.sum(), across=across)
    with pytest.raises(
        funcga.FuncgaError, match="replicas are named by an axis of the mesh, which is that of all leaves"
    ):
        over(step)(params, *batch)
    with pytest.raises(
        funcga.FuncgaError, match="replicas are named by an axis of the mesh, which is that of all leaves"
    ):
        funcga.check_replicas(params, across)
    tx = funcga.multi_steps(optax.sgd(0.1), 2, across=across)
    with pytest.raises(
        funcga.FuncgaError, match="replicas are named by an axis of the mesh, which is that of all leaves"
    ):
        tx.update(params, tx.init(params), params)


def test_a_function_is_no_axis():
    step = funcga.accumulate(jax.grad(lambda w, x: (w * x).sum()), 2, across=lambda path: "data")
    with pytest.raises(funcga.FuncgaError, match="in JAX replicas are named by an axis"):
        jax_backend.replicated(step, jax.make_mesh((2,), ("data",)))(jnp.ones(()), jnp.ones(4))
