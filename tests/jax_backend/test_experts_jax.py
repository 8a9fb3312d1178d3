"""`across=` for each leaf over the axes of a mesh: experts along one of them, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import funcga
import jax_backend
from jax_backend import Replicas, collectives
from tests.kits import JAX, difference

BOTH = ("data", "expert")
SPECS = {"dense": {"w": PartitionSpec()}, "experts": {"w": PartitionSpec("expert")}}
ROWS = PartitionSpec(BOTH)
HOWS = {
    "prefix": [BOTH, {"dense": BOTH, "experts": "data"}],
    "function": lambda path: "data" if path.startswith("1.experts.") else BOTH,
    "replicas": Replicas(BOTH, leaves=[("expert", "data"), {"dense": BOTH, "experts": "data"}]),
}
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


@pytest.mark.parametrize("how", HOWS)
def test_exact_against_one_device(how):
    params, batch = problem()
    gradient = jax.value_and_grad(loss_of("expert"))
    step = over(funcga.accumulate(gradient, 4, fold=funcga.per_weight(), weight=count, across=HOWS[how]))
    assert difference(JAX, step(params, *batch), truth(params, batch)) <= 1e-12
    # One all-reduce for each set of axes, after the loop.
    assert [each.kind for each in collectives(step, params, *batch) if not each.depth] == ["all-reduce"] * 2


def test_a_leaf_that_is_not_merged_and_the_weights_of_the_window():
    value = lambda x: {"all": x.mean(), "some": x.mean(), "own": x.mean()}
    across = {"all": BOTH, "some": "data", "own": ()}
    step = funcga.accumulate(value, 2, weight=lambda x: x.sum(), in_axes=0, across=across)
    names = PartitionSpec(BOTH)
    specs = {"all": PartitionSpec(), "some": PartitionSpec("expert"), "own": names}
    kept = lambda x: jax.tree.map(jnp.atleast_1d, step(x)) | {"all": step(x)["all"]}
    x = jnp.arange(1.0, 17)
    found = jax.jit(jax.shard_map(kept, mesh=grid(), in_specs=names, out_specs=specs))(x)
    of_device = (x.reshape(4, 2, 2).mean(-1) * x.reshape(4, 2, 2).sum(-1)).sum(-1) / x.sum()
    assert found["all"] == pytest.approx(float(of_device.sum()), rel=1e-14)
    np.testing.assert_allclose(found["some"], of_device.reshape(2, 2).sum(0), rtol=1e-14)
    np.testing.assert_allclose(found["own"], of_device, rtol=1e-14)


def test_a_transform():
    params, batch = problem()
    tx = funcga.multi_steps(optax.sgd(0.1), 2, fold=funcga.per_weight(), across=HOWS["prefix"][1])
    specs = jax_backend.state_specs(tx)

    def window(params, *batch):
        own = {
            "dense": lax.pcast(params["dense"], BOTH, to="varying"),
            "experts": lax.pcast(params["experts"], "data", to="varying"),
        }
        state = tx.init(params)
        for half in zip(*(jnp.split(leaf, 2) for leaf in batch), strict=True):
            grads = jax.grad(loss_of("expert"))(own, *half)
            updates, state = tx.update(grads, state, params, weight=half[-1].sum())
        return optax.apply_updates(params, updates)

    assert specs.window == PartitionSpec(("data", "expert"))
    step = jax.jit(jax.shard_map(window, mesh=grid(), in_specs=(SPECS, *[ROWS] * 4), out_specs=SPECS))
    _, grads = truth(params, batch)
    assert difference(JAX, step(params, *batch), jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)) <= 1e-12


def test_check_replicas():
    mesh = grid()
    params = {"dense": jnp.ones(4), "experts": jnp.arange(4.0)}
    specs = {"dense": PartitionSpec(), "experts": PartitionSpec("expert")}
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)), params, specs)
    funcga.check_replicas(params, {"dense": BOTH, "experts": "data"})
    per_device = [np.arange(2.0) + (index >= 2) for index in range(4)]  # the two along "data" differ
    pieces = [jax.device_put(piece, device) for piece, device in zip(per_device, mesh.devices.ravel(), strict=True)]
    sharding = jax.NamedSharding(mesh, PartitionSpec("expert"))
    params["experts"] = jax.make_array_from_single_device_arrays((4,), sharding, pieces)
    with pytest.raises(funcga.FuncgaError, match="`params\\['experts'\\]` is not the same"):
        funcga.check_replicas(params, {"dense": BOTH, "experts": "data"})
    funcga.check_replicas(params, {"dense": BOTH, "experts": ()})


def refusal(across, fold=None, weight=count, reduction="sum", **options):
    params, batch = problem()
    gradient = jax.value_and_grad(loss_of("expert", reduction))
    step = funcga.accumulate(gradient, 4, fold=fold or funcga.per_weight(), weight=weight, across=across, **options)
    with pytest.raises(funcga.FuncgaError) as error:
        over(step)(params, *batch)
    return str(error.value)


PREFIX = HOWS["prefix"]
REFUSED = [
    ("at output[1]['experts'] it has None", [BOTH, {"dense": BOTH, "experts": None}], {}),
    ("at output[1] it has dict", [BOTH, {"dense": BOTH}], {}),
    ("for `output[0]`: it is None there", lambda path: "data" if "experts" in path else None, {}),
    ('lies along "expert" would be summed', Replicas("data", leaves=lambda path: BOTH), {}),
    ("is no axis of the mesh", [BOTH, {"dense": BOTH, "experts": "dta"}], {}),
    ("Leave observe= out", PREFIX, {"observe": funcga.gradient_norms()}),
    ("Leave drop= out", PREFIX, {"drop": "window"}),
    ("across= has 1 for some leaves. Name the axes of every leaf", (BOTH, {"dense": BOTH, "experts": 1}), {}),
    (
        "is of the whole window", PREFIX,
        {"fold": (funcga.mean(), {"dense": funcga.mean(), "experts": funcga.concat()})},
    ),
    ("each as if it weighed 1", PREFIX, {"fold": funcga.reproducible(funcga.mean()), "reduction": "mean"}),
    (
        "`output[1]['experts']['w']` has from grad_fn what the losses of other devices along \"expert\"", PREFIX,
        {"fold": funcga.mean(), "reduction": "mean"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "across", "options"), REFUSED)
def test_refusals(text, across, options):
    assert text in refusal(across, **options)


def test_refusals_of_other_functions():
    with pytest.raises(funcga.FuncgaError, match="its weights not counted"):
        Replicas("data", leaves={"a": "expert"})
    params, batch = problem()
    step = funcga.coupled(lambda p, x: x, lambda p, x: x.sum() * p["w"].sum(), 2, across=PREFIX)
    with pytest.raises(funcga.FuncgaError, match="Name the replicas of all leaves at once"):
        jax_backend.replicated(step, grid(), axis=BOTH)(params["dense"], batch[0])


def test_gradients_that_come_unweighed_from_other_devices():
    """Where all have one weight it is the mean; with different ones the gradients that are mixed have none any more."""
    params, batch = problem()
    batch = (*batch[:3], jnp.ones_like(batch[3]))
    gradient = jax.value_and_grad(loss_of("expert", "mean"))
    step = over(funcga.accumulate(gradient, 4, across=HOWS["prefix"]))
    assert difference(JAX, step(params, *batch), truth(params, batch)) <= 1e-12
    tx = funcga.multi_steps(optax.sgd(0.1), 2, across=HOWS["prefix"][1])
    with pytest.raises(funcga.FuncgaError, match="per_weight"):
        jax.shard_map(
            lambda params: tx.update(params, tx.init(params), params, weight=2.0),
            mesh=grid(), in_specs=(SPECS,), out_specs=PartitionSpec(), check_vma=False,
        )(params)  # fmt: skip
