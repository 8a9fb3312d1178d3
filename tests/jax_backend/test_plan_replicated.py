"""Plans of steps over a mesh: against the programs that XLA makes of the real steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
from jax_backend import replicated
from tests.jax_backend.test_replicas_jax import LIMITS, mesh
from tests.kits import JAX, difference

F32 = 4  # bytes


def bytes_of(step, *args, **options):
    """What one device holds at most, as XLA says of the step that is compiled."""
    sizes = jax.jit(step, **options).lower(*args).compile().memory_analysis()
    taken = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return taken - sizes.alias_size_in_bytes


def loss(params, x, y):
    hidden = jnp.tanh(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["b"])
    return jnp.square(hidden.sum(-1) - y).mean()


def problem(rows=88):
    random = np.random.default_rng(0)
    params = {"a": random.normal(size=(16, 32)) / 4, "b": random.normal(size=(32, 32)) / 6}
    batch = random.normal(size=(rows, 16)), random.normal(size=rows)
    return jax.tree.map(lambda a: jnp.asarray(a, "float32"), (params, batch))


GRADIENT = funcga.value_and_grad(loss)


def over(devices, n, gradient=GRADIENT, **options):
    return replicated(funcga.accumulate(gradient, n, across="data", **options), mesh(devices))


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def on_mesh(devices, params, batch):
    cut, whole = NamedSharding(mesh(devices), P("data")), NamedSharding(mesh(devices), P())
    return jax.device_put(params, whole), jax.device_put(batch, cut)


def look_at(n, monkeypatch):
    """Plans look at this n, and at no other."""
    monkeypatch.setattr("funcga.tools.plan.smallest_that_fits", lambda peak, rows, memory: peak(n) and n)


@pytest.mark.parametrize(("devices", "n"), [(2, 1), (2, 8), (4, 5)])
def test_the_peak_is_that_of_the_real_step(devices, n, monkeypatch):
    """Of micro-batches that are ragged; wherever the arrays lie, and of shapes alone."""
    params, batch = problem()
    look_at(n, monkeypatch)
    plan = funcga.plan(over(devices, 1), params, *batch, memory="1 GiB")
    assert plan.peak_bytes == bytes_of(over(devices, n), params, *batch)
    assert plan.microbatch_size == -(-(88 // devices) // n)
    assert plan.parts["arguments"] == F32 * (16 * 32 + 32 * 32) + F32 * 17 * 88 // devices
    assert plan.parts["results"] >= F32 * (16 * 32 + 32 * 32 + 1)
    for like, rows in (on_mesh(devices, params, batch), shapes((params, batch))) if n == 5 else ():
        assert funcga.plan(over(devices, 1), like, *rows, memory="1 GiB") == plan


def test_as_a_user_writes_it():
    """The n of the plan fits, the one before it does not, and the step of that n has the gradient of the whole batch."""
    params, batch = problem(rows=4000)
    state = jax.tree.map(jnp.zeros_like, (params, params))
    memory = "240 KB"
    plan = funcga.plan(over(4, 1), *shapes((params, *batch)), memory=memory, state=shapes(state))
    assert plan.fits
    assert plan.n > 2
    taken = lambda n: bytes_of(over(4, n), params, *batch) + plan.parts["state"]
    assert taken(plan.n - 1) > 240_000 >= taken(plan.n) == plan.peak_bytes
    step = over(4, plan.n)
    assert difference(JAX, step(params, *batch), jax.value_and_grad(loss)(params, *batch)) <= LIMITS["float32"]

    # The whole update, in the memory of the parameters: nothing is held that was not planned.
    def update(params, *batch):
        value, grads = step(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    assert bytes_of(update, params, *batch, donate_argnums=0) <= plan.peak_bytes - plan.parts["state"]


def test_a_step_under_jit():
    params, batch = problem()
    step = funcga.accumulate(GRADIENT, 3, across="data")
    expected = funcga.plan(over(2, 1), params, *batch, memory=1)
    for jitted in (jax.jit(replicated(step, mesh(2)), donate_argnums=0), replicated(jax.jit(step), mesh(2))):
        assert funcga.plan(jitted, params, *batch, memory=1) == expected
    alone = jax.jit(funcga.accumulate(GRADIENT, 3))
    assert funcga.plan(GRADIENT, params, *batch, memory=1) == funcga.plan(alone, params, *batch, memory=1)


def test_state_and_parameters_that_are_cut():
    """A device has its part: of parameters as FSDP lays them out, and of the state of their optimizer."""
    on = mesh()

    def gathered(params, x):
        return jnp.tanh(x @ lax.all_gather(params, "data", tiled=True)).mean()

    def step(n):
        # The backward pass of the gathering has scattered the gradients already.
        step = funcga.accumulate(jax.grad(gathered), n, across=())
        return replicated(step, on, in_specs=(P("data"), P("data")), out_specs=P("data"))

    params, x = jnp.ones((32, 8)), jnp.ones((40, 32))
    state = jax.ShapeDtypeStruct((32, 8), "float32", sharding=NamedSharding(on, P("data")))
    plan = funcga.plan(step(1), params, x, memory="1 GiB", state=state)
    assert plan.parts["state"] == F32 * 32 * 8 // 4
    assert plan.parts["arguments"] == F32 * 32 * 8 // 4 + F32 * 40 * 32 // 4
    assert plan.peak_bytes == bytes_of(step(1), params, x) + plan.parts["state"]


def counted_loss(w, x, *, totals, scale):
    return (x @ w).sum() / totals.astype("float32") * scale["a"].sum() + jax.random.normal(scale["key"])


STEPS = {
    "two passes": lambda n: funcga.coupled(
        lambda w, x: jnp.tanh(x @ w), lambda w, s: (s @ s.T).mean(), n, across="data"
    ),
    "totals": lambda n: funcga.accumulate(
        funcga.value_and_grad(counted_loss), n, fold=funcga.sum(), totals=lambda x: len(x), across="data"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_whatever_is_folded(name):
    """Keyword arguments are on every device."""
    params, x, scale = jnp.ones((8, 16)), jnp.ones((40, 8)), {"a": jnp.ones(5), "key": jax.random.key(0)}
    options = {"scale": scale} if name == "totals" else {}
    step = lambda n: replicated(STEPS[name](n), mesh())
    plan = funcga.plan(step(1), params, x, memory=1, **options)
    assert {row.n for row in plan.rows} == {1, 10}
    for row in plan.rows:
        of_arrays = lambda w, x, options, n=row.n: step(n)(w, x, **options)
        assert row.peak_bytes == bytes_of(of_arrays, params, x, options)
    whole = F32 * 8 * 16 + (F32 * 5 + 8 if options else 0)
    assert plan.parts["arguments"] == whole + F32 * 40 * 8 // 4


def test_refusals():
    params, batch = problem()
    step = funcga.accumulate(GRADIENT, 2, across="data")
    with pytest.raises(funcga.FuncgaError, match=r"Wrap the step, jax_backend.replicated\(step, mesh"):
        funcga.plan(step, params, *batch)
    update = replicated(lambda params, *batch: step(params, *batch)[0], mesh())
    with pytest.raises(funcga.FuncgaError, match="runs on every device is no step of accumulate or coupled"):
        funcga.plan(update, params, *batch)
    with pytest.raises(ValueError, match="4 does not evenly divide 87"):  # JAX itself
        funcga.plan(over(4, 2), params, *(leaf[:87] for leaf in batch))
    with pytest.raises(funcga.FuncgaError, match="has no across="):
        funcga.plan(replicated(funcga.accumulate(GRADIENT, 2), mesh()), params, *batch)
