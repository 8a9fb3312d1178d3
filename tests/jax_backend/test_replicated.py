"""`replicated`, `collectives` and `check_replicas`: what they promise beyond the merge itself."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from jax_backend import collectives
from jax_backend.hlo import Collective
from tests.jax_backend.test_replicas_jax import LIMITS, grid, layers, mesh, regression
from tests.kits import JAX, counted, difference
from tests.test_errors import check_refused

# -- collectives


def test_depth():
    """Loops in loops, and branches in them."""

    def local(x):
        def inner(x, _):
            return lax.cond(x[0] > 0, lambda x: lax.psum(x, "data") * 0.5, lambda x: x * 1.0, x), None

        def outer(x, _):
            x = lax.pmax(lax.scan(inner, x, None, length=3)[0], "data")
            return x, None

        return lax.psum(lax.scan(outer, x, None, length=5)[0], "data")

    mapped = jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P(), check_vma=False)
    assert sorted(c.depth for c in collectives(mapped, jnp.arange(8.0))) == [0, 1, 2]


ASYNCHRONOUS = """
HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], /*index=1*/f32[8]{0:T(8,128)}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %start = (bf16[8]{0}, f32[8]{0}) all-reduce-start(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %done = f32[8]{0} all-reduce-done(%start)
}

%wrapped (q: bf16[4,2]) -> bf16[8,2] {
  %q = bf16[4,2]{1,0} parameter(0)
  ROOT %gathered = bf16[8,2]{1,0} all-gather(%q), dimensions={0}
}

%unused (u: f32[8]) -> f32[8] {
  %u = f32[8]{0} parameter(0)
  ROOT %never = f32[8]{0} all-reduce(%u), to_apply=%add
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="all-reduce(%a)"}
  %loop = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body
  %b = bf16[4,2]{1,0} constant({...})
  %later = ((bf16[4,2]{1,0}), bf16[8,2]{1,0}) async-start(%b), calls=%wrapped
  %two = (pred[3]{0}, f8e4m3fn[5]{0}) all-to-all(%c, %d), dimensions={0}
  %c = pred[3]{0} constant({...})
  ROOT %d = f8e4m3fn[5]{0} constant({...})
}
"""


def test_asynchronous_forms():
    """As a GPU compiler writes them; what never runs is not counted."""
    compiled = SimpleNamespace(as_text=lambda: ASYNCHRONOUS)
    assert collectives(SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda: compiled))) == [
        Collective("all-reduce", 1, 32),
        Collective("all-gather", 0, 16),
        Collective("all-to-all", 0, 8),
    ]


# -- replicated


def test_it_is_traced_once_and_leaves_signatures_alone():
    """Outside of jit and inside; keyword arguments, settings and None among the arguments."""
    params, (x, y), loss = regression()
    traced, calls = counted(
        lambda p, b, scale=1.0, *, kind: loss(p["inner"], *b["xy"]) * scale if kind == "a" else None
    )
    step = jax_backend.replicated(funcga.accumulate(jax.value_and_grad(traced), 2, across="data"), mesh())
    tree, batch = {"inner": params, "none": None}, {"xy": (x, y), "none": None}
    full = jax.value_and_grad(loss)(params, x, y)
    for _ in range(3):
        value, grads = step(tree, batch, kind="a", scale=jnp.float32(2))
    assert len(calls) == 1
    assert grads["none"] is None
    assert difference(JAX, (value, grads["inner"]), jax.tree.map(lambda leaf: 2 * leaf, full)) <= LIMITS["float32"]
    jitted = jax.jit(functools.partial(step, kind="a"))
    for _ in range(3):
        value, grads = jitted(tree, batch)
    assert len(calls) == 2
    assert difference(JAX, (value, grads["inner"]), full) <= LIMITS["float32"]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_wherever_the_arrays_lie(kind):
    """In NumPy, on one device, cut over all of them, or the same on all of them."""
    params, batch, loss = regression()
    full = jax.value_and_grad(loss)(params, *batch)
    on = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    step = jax_backend.replicated(funcga.accumulate(jax.value_and_grad(loss), 2, across="data"), on)
    cut, whole = NamedSharding(on, P("data")), NamedSharding(on, P())
    for place in (lambda a: a, np.asarray, lambda a: jax.device_put(a, cut), lambda a: jax.device_put(a, whole)):
        out = step(jax.device_put(params, whole), *map(place, batch))
        assert difference(JAX, out, full) <= LIMITS["float32"]
        out = jax.jit(step)(params, *map(place, batch))
        assert difference(JAX, out, full) <= LIMITS["float32"]
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(out))
    assert {
        c.kind for c in collectives(step, jax.device_put(params, whole), *(jax.device_put(a, cut) for a in batch))
    } == {"all-reduce"}


def merged(across="data", grad=jax.value_and_grad, n=2, **options):
    return jax_backend.replicated(funcga.accumulate(grad(regression()[2]), n, across=across), mesh(), **options)


NO_ACROSS = (
    'the step runs on every device along "data", in jax_backend.replicated, and has no across=: each device would have '
    'the fold of its own rows. Write across="data"; or across=() if the step merges in another way.'
)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: jax_backend.replicated(len, grid()),
            'the mesh has the axes "data" and "model", and axis= does not say which of them has the replicas. Write '
            'replicated(step, mesh, axis="data").',
        ),
        (
            lambda: merged(in_specs=(P(), P("data"))),
            "in_specs is no prefix of the positional arguments: at args it has tuple([0], [1]), and there is tuple([0], [1], [2]).",
        ),
        (
            lambda: merged(in_specs=({"w": P()}, P("data"), P("data"))),
            "at args[0] it has dict(['w']), and there is dict(['b'], ['w']). Give one value for all that stands below, or a "
            "container with the same keys.",
        ),
        (lambda: merged(None), NO_ACROSS),
        (lambda: merged(None, jax.grad, check_vma=False), NO_ACROSS),
        (
            lambda: merged(()),
            "a result of the step is not the same on all devices along data, as nothing has merged it over all of it. "
            'Merge where it is folded, funcga.accumulate(grad_fn, n, across="data"); or leave it cut, as what scatter= '
            'scatters: out_specs with P("data") in its place.',
        ),
        (lambda: merged(None, n="auto"), 'n="auto" tries sizes out when it is called'),
    ],
)
def test_what_is_refused(make, text):
    params, batch, _ = regression()
    check_refused(text, lambda: make()(params, *batch))


def test_rows_that_do_not_divide():
    params, batch, _ = regression(rows=13)
    for step in (merged(), jax.jit(merged())):
        with pytest.raises(ValueError, match="4 does not evenly divide 13"):  # JAX itself
            step(params, *batch)
    nested = jax_backend.replicated(lambda p, batch, scale: batch["x"].sum(), mesh())
    with pytest.raises(ValueError, match="4 does not evenly divide 13"):
        nested(params, {"x": batch[0]}, batch[0][:12])
    with pytest.raises(ValueError, match="rows"):
        jax_backend.replicated(lambda p, x: x, mesh(), axis="rows")(jnp.ones(()), jnp.ones(8))
    with pytest.raises(ValueError, match="in_specs entry which is too long"):  # JAX itself
        nested(params, {"x": batch[0][:12]}, jnp.float32(2))


def test_rows_are_cut_where_the_step_splits():
    """A table that in_axes passes whole is whole on every device, and columns are cut where in_axes says so."""
    table, x = jnp.arange(24.0).reshape(24, 1), jnp.arange(16.0).reshape(2, 8)
    w = jnp.ones(())
    loss = lambda w, table, x: w * (table.sum() + x.sum(0).mean())
    step = jax_backend.replicated(funcga.accumulate(jax.grad(loss), 2, in_axes=(None, None, 1), across="data"), mesh())
    assert step(w, table, x) == jax.grad(loss)(w, table, x)


# -- check_replicas

WHOLE = P()


def apart(spec=WHOLE, on=None, where=2, shape=(4,), value=5.0):
    """An array whose copies should be the same, with another value on one device."""
    on = mesh() if on is None else on
    sharding = NamedSharding(on, spec)
    whole = np.zeros(shape, np.float32)
    pieces = []
    for i, (device, index) in enumerate(sharding.addressable_devices_indices_map(shape).items()):
        pieces.append(jax.device_put(whole[index] + (value if i == where else 0.0), device))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def test_replicas_that_hold_the_same():
    same = jax.device_put({"w": jnp.arange(8.0), "n": jnp.full(4, jnp.nan)}, NamedSharding(mesh(), P()))
    funcga.check_replicas(same, "data")
    funcga.check_replicas({**same, "one": jnp.zeros(3), "none": None, "key": jax.random.key(0), "f": 1.0}, "data")
    funcga.check_replicas(jax.device_put(jnp.arange(8.0), NamedSharding(mesh(1), P())), "data")
    check_refused(
        'none of the arrays in params lies on a mesh, so there is nothing to compare along "data". Put them on the mesh',
        funcga.check_replicas,
        {"w": jnp.zeros(3), "n": np.zeros(2)},
        "data",
    )
    funcga.check_replicas(jax.device_put(jnp.arange(8.0), NamedSharding(mesh(), P("data"))), "data")
    funcga.check_replicas(jax.device_put(jnp.arange(8.0), NamedSharding(grid(), P("model"))), "data")
    funcga.check_replicas(jax.device_put(jax.random.key(3), NamedSharding(mesh(), P())), "data")


def test_replicas_that_drifted_apart():
    params = {"b": jnp.zeros(2), "w": [apart()]}
    check_refused(
        "`params['w'][0]` is not the same on all replicas: cpu:0 and cpu:2 hold different values along "
        '"data". What is averaged would belong to no parameters at all. Give every replica the same: params = '
        "jax.device_put(params, jax.NamedSharding(mesh, P())).",
        funcga.check_replicas,
        params,
        "data",
    )
    check_refused(
        "`params['w'][0]` is not the same on all replicas", funcga.check_replicas, {**params, "x": apart()}, "data"
    )
    check_refused("`params`", funcga.check_replicas, apart(value=-0.0, where=0) * 1 + apart(value=np.nan), ("data",))
    check_refused("cpu:1 and cpu:3", funcga.check_replicas, apart(P("model"), grid(), where=3), "data")
    funcga.check_replicas(apart(P("data"), grid(), where=3), "data")  # copies along model alone
    check_refused("cpu:2 and cpu:3", funcga.check_replicas, apart(P("data"), grid(), where=3), "model")


def test_check_replicas_where_it_cannot_see():
    with pytest.raises(AttributeError, match="not available on traced array"):
        jax.jit(lambda p: funcga.check_replicas(p, "data"))(jnp.zeros(2))
    check_refused(
        'across="rows" is no axis of the mesh that params lie on, which has "data". Write across="data".',
        funcga.check_replicas,
        apart(),
        "rows",
    )


# -- a sharded batch outside of shard_map


def sharded(kind, rows=48):
    params, batch, loss = layers(rows=rows)
    on = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    place = lambda tree, spec: jax.device_put(tree, NamedSharding(on, spec))
    return place(params, P()), place(batch, P("data")), params, batch, loss


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("size", [8, 20, 6])
def test_no_row_of_a_sharded_batch_moves(kind, size):
    """Micro-batches take as many rows from each device, and are gathered only where they do not divide."""
    params, batch, *whole, loss = sharded(kind)
    seen = []

    def seeing(params, x):
        jax.debug.inspect_array_sharding(x, callback=lambda sharding: seen.append(sharding.spec))
        return loss(params, x)

    out = funcga.accumulate(jax.value_and_grad(seeing), microbatch_size=size)(params, batch)
    assert difference(JAX, out, jax.value_and_grad(loss)(*whole)) <= LIMITS["float32"]
    assert {*seen} == {P() if size == 6 else P("data")}


@pytest.mark.parametrize(("size", "axis"), [(8, 0), (20, -1), (10, 0)])
def test_rows_of_a_sharded_batch_stay_in_order(size, axis):
    _, batch, _, whole, _ = sharded(AxisType.Auto)
    grad_fn = lambda p, x: (jnp.moveaxis(x, 0, axis) * p, x.mean())
    step = funcga.accumulate(grad_fn, microbatch_size=size, fold=(funcga.concat(axis), funcga.mean()))
    np.testing.assert_array_equal(step(jnp.float32(2), batch)[0], jnp.moveaxis(whole, 0, axis) * 2)


def test_an_order_that_counts_is_kept():
    """Threaded state, moments, and what has no row for each row: micro-batches are those of a batch on one device."""
    _, batch, _, whole, _ = sharded(AxisType.Auto)
    each = funcga.accumulate(lambda p, x: x[:1] * p, 6, fold=funcga.concat())
    np.testing.assert_array_equal(each(jnp.float32(1), batch), whole[::8])
    step = funcga.accumulate(
        lambda s, x: (x.mean(), x[0]), 6, in_axes=(funcga.CARRY, 0), fold=(funcga.mean(), funcga.carry())
    )
    np.testing.assert_array_equal(step(jnp.zeros(5), batch)[1], whole[40])
    spread = funcga.accumulate(lambda p, x: x.mean(0), 6, fold=funcga.moments())
    np.testing.assert_allclose(spread(jnp.float32(1), batch).variance, whole.reshape(6, 8, 5).mean(1).var(0), rtol=1e-4)
