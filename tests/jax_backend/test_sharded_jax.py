"""Parameters that are sharded over a mesh: every fold keeps them so, whether types or the compiler say how they lie."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from tests.kits import JAX, difference
from tests.problems import rng

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "mixed": (AUTO, EXPLICIT)}
N, ROWS = 3, 24

# Layers of two matrices, as they are sharded: both ways at once, fully over `data`, or in tensor parallel over `model`.
LAYOUTS = {
    "both": {"a": P(None, "data", "model"), "b": P(None, "model", "data"), "c": P("model")},
    "fsdp": {"a": P(None, "data"), "b": P(None, "data"), "c": P()},
    "tp": {"a": P(None, None, "model"), "b": P(None, "model"), "c": P()},
}


def arrays(dtype="float32"):
    r = rng(8)
    params = {"a": r.normal(size=(2, 4, 8)) / 2, "b": r.normal(size=(2, 8, 4)) / 3, "c": r.normal(size=(4,))}
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, r.normal(size=(ROWS, 4))))


def over(kinds):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=KINDS[kinds])


def cut(array, *spec):
    """The array so sharded over those of these axes that are Explicit."""
    sharding = as_cut(array, *spec)
    return array if sharding is None else jax.sharding.reshard(array, sharding)


def as_cut(array, *spec):
    mesh = jax.typeof(array).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if EXPLICIT not in kinds.values():
        return None
    return NamedSharding(mesh, P(*[axis if kinds.get(axis) is EXPLICIT else None for axis in spec]))


def layer(x, w):
    """One layer, as it is written for Explicit axes: gathered over `data`, computed in parts over `model`."""
    hidden = jnp.tanh(x @ cut(w["a"], None, "model"))
    return x + jnp.einsum("rh,hd->rd", hidden, cut(w["b"], "model"), out_sharding=as_cut(x, "data")), None


def loss(params, x, scanned=True):
    layers = {name: params[name] for name in "ab"}
    if scanned:
        x, _ = lax.scan(layer, x, layers)
    else:
        for i in range(2):
            x, _ = layer(x, {name: w[i] for name, w in layers.items()})
    return ((x * cut(params["c"])) ** 2).mean()


def placed(mesh, layout):
    params, x = arrays()
    params = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params, LAYOUTS[layout])
    return params, jax.device_put(x, NamedSharding(mesh, P("data")))


def whole():
    """(loss, grads) of all rows, on one device in float64."""
    with jax.enable_x64(True):
        params, x = arrays("float64")
        return jax.tree.map(np.asarray, jax.value_and_grad(loss)(params, x))


def check(found, expected, like=None):
    gathered = jax.tree.map(np.asarray, found)
    with jax.enable_x64(True):
        assert difference(JAX, jax.tree.map(jnp.asarray, gathered), jax.tree.map(jnp.asarray, expected)) < 1e-6
    if like is not None:
        check_lies_as(found[1], like)


def check_lies_as(grads, params):
    """Each device has as many bytes of the gradients as of the parameters."""
    for name in params:
        own, theirs = (tree[name].addressable_shards[0].data.shape for tree in (grads, params))
        assert own == theirs, (name, own, theirs)


def placed_parts(mesh, count=N):
    return [jax.device_put(part, NamedSharding(mesh, P("data"))) for part in np.split(arrays()[1], count)]


@pytest.mark.parametrize(
    ("kinds", "layout", "scanned", "jitted"),
    [
        ("auto", "both", True, False),
        ("explicit", "both", False, True),
        ("mixed", "fsdp", True, True),
        ("explicit", "tp", False, False),
    ],
)
def test_accumulate(kinds, layout, scanned, jitted):
    params, x = placed(over(kinds), layout)
    step = funcga.accumulate(jax.value_and_grad(partial(loss, scanned=scanned)), N)
    assert jax_backend.hlo.folded_in_place(step, params, x) == ["output[1]['a']", "output[1]['b']"] * scanned
    like = params if kinds == "explicit" or not jitted else None  # in jit the compiler chooses what types do not say
    check((jax.jit(step) if jitted else step)(params, x), whole(), like)


FOLDS = ["mean", "per_weight", "sum", "max", "min", "logsumexp", "moments"]


@pytest.mark.parametrize("kinds", KINDS)
def test_every_fold(kinds):
    """Of the parameters' own gradients, beside rows that are collected and state that is threaded."""
    mesh = over(kinds)
    params, x = placed(mesh, "both")
    alone, rows = arrays()

    def grad_fn(params, state, x):
        grads = jax.grad(loss)(params, x)
        state = jax.tree.map(lambda s, g: s + g, state, grads)
        return dict.fromkeys(FOLDS, grads), jnp.tanh(x), state

    folds = {name: getattr(funcga, name)() for name in FOLDS}, funcga.concat(), funcga.carry()
    step = funcga.accumulate(grad_fn, N, fold=folds, in_axes=(None, funcga.CARRY, 0), weight=lambda x: (x > 0).sum())
    expected = step(alone, jax.tree.map(jnp.zeros_like, alone), rows)
    with jax.set_mesh(mesh) if kinds == "explicit" else contextlib.nullcontext():
        found = step(params, jax.tree.map(jnp.zeros_like, params), x)
    check(found, expected)
    for fold in ("mean", "sum", "max"):
        check_lies_as(found[0][fold], params)
    check_lies_as(found[0]["moments"]["a"]._asdict(), dict.fromkeys(("mean", "variance"), params["a"]))
    check_lies_as(found[2], params)


@pytest.mark.parametrize(("kinds", "layout"), [("auto", "fsdp"), ("explicit", "both")])
def test_stream(kinds, layout):
    """Accumulators lie as the parameters do, and one program adds every micro-batch, however many there are."""
    mesh = over(kinds)
    params, _ = placed(mesh, layout)
    rows = placed_parts(mesh, 2 * N)
    step = funcga.stream(jax.value_and_grad(loss))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    for count in (2 * N, N):
        found = step(params, rows[:count])
        check_lies_as(found[1], params)
    assert len(compiled) == 3  # what begins, what ends, and what is between
    check(step(params, rows), whole(), params)


@pytest.mark.parametrize(("kinds", "layout"), [("auto", "fsdp"), ("explicit", "both")])
def test_multi_steps(kinds, layout):
    """The state, the updates and what is accumulated lie as the parameters do, with one program for all calls."""
    mesh = over(kinds)
    params, _ = placed(mesh, layout)
    tx = funcga.multi_steps(optax.trace(0.9), N)
    step = jax.jit(lambda state, x: tx.update(jax.grad(loss)(params, x), state, params, weight=len(x)))
    state = tx.init(params)
    check_lies_as(state.window.accumulated, params)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        for x in placed_parts(mesh):
            updates, state = step(state, x)
            if kinds == "explicit":
                for tree in (updates, state.window.accumulated, state.inner.trace):
                    check_lies_as(tree, params)
    assert int(state.updates) == 1
    check((0.0, updates), (0.0, whole()[1]))


@pytest.mark.parametrize(("kinds", "scanned"), [("auto", True), ("explicit", False), ("mixed", True)])
def test_replicated(kinds, scanned):
    """Replicas over `data`, each of which has its parameters in parts over `model`."""
    params, x = placed(over(kinds), "tp")
    step = funcga.accumulate(jax.value_and_grad(partial(loss, scanned=scanned)), N, across="data")
    step = jax_backend.replicated(step, over(kinds), axis="data")
    like = None if kinds == "mixed" else params  # JAX itself gathers what a shard_map of such a mesh returns
    check(step(params, x), whole(), like)


@pytest.mark.parametrize(
    ("kinds", "scanned", "streamed"), [("auto", True, False), ("auto", False, True), ("explicit", False, False)]
)
def test_replicated_with_weights(kinds, scanned, streamed):
    """A weight that is an array varies over `data` alone."""
    mesh = over(kinds)
    params, x = placed(mesh, "tp")
    options = {"weight": lambda x: (x > 0).sum(), "across": "data"}
    gradient = jax.value_and_grad(partial(loss, scanned=scanned))
    step = funcga.accumulate(gradient, N, **options)
    if streamed:
        fold = funcga.stream(gradient, **options)
        step = lambda params, x: fold(params, jnp.split(x, N))
    found = jax_backend.replicated(step, mesh, axis="data")(params, x)
    with jax.enable_x64(True):
        alone, rows = arrays("float64")
        parts = np.split(np.asarray(rows), 2 * N)
        weights = [(part > 0).sum() for part in parts]
        values = [jax.tree.map(np.asarray, jax.value_and_grad(loss)(alone, jnp.asarray(part))) for part in parts]
    check(found, jax.tree.map(lambda *each: np.average(each, axis=0, weights=weights), *values))
