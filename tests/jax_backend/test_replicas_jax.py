"""Replicas in JAX: the merge is exact, is one reduction outside of every loop, and says so when it cannot be made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from funcga import CARRY
from jax_backend import collectives
from tests import problems
from tests.kits import JAX, difference
from tests.test_errors import check_refused

LIMITS = {"float32": 1e-6, "float64": 1e-13}


def mesh(devices=4):
    return Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))


def grid(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def regression(dtype="float32", rows=16):
    params, batch, loss = problems.regression(dtype, rows)
    return JAX.arrays(params), JAX.arrays(batch), loss


def layers(dtype="float32", rows=16, width=8):
    """params, batch and a mean loss of a model that is scanned over its layers."""
    r = problems.rng(3)
    params = {"first": r.normal(size=(5, width)), "layers": r.normal(size=(3, width, width)) / width**0.5}
    batch = r.normal(size=(rows, 5))

    def loss(params, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x @ params["first"], params["layers"])
        return (x**2).mean()

    return JAX.arrays(jax.tree.map(lambda a: a.astype(dtype), params)), JAX.arrays(batch.astype(dtype)), loss


def tree_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check_one_reduction(step, *args, of, dtype="float32", replicas=4):
    """One all-reduce outside of every loop, of these gradients once and the tally of each replica as floats."""
    found = collectives(step, *args)
    assert [(c.kind, c.depth) for c in found] == [("all-reduce", 0)]
    tally = {"float32": 4 * 4, "float64": 2 * 8}[dtype]
    assert found[0].bytes == tree_bytes(of) + replicas * tally


# -- equality with the full batch on one device


@pytest.mark.parametrize(
    ("devices", "n", "check_vma", "dtype"),
    [(1, 8, True, "float32"), (2, 4, True, "float64"), (4, 3, False, "float64"), (4, 1, True, "float32")],
)
def test_the_gradient_is_that_of_the_whole_batch(devices, n, check_vma, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, batch, loss = layers(dtype)
        full = jax.value_and_grad(loss)(params, batch)
        step = funcga.accumulate(jax.value_and_grad(loss), n, across="data")
        step = jax.jit(jax_backend.replicated(step, mesh(devices), check_vma=check_vma))
        assert difference(JAX, step(params, batch), full) <= LIMITS[dtype]
        if devices > 1:
            check_one_reduction(step, params, batch, of=full, dtype=dtype, replicas=devices)


@pytest.mark.parametrize("fold", ["per_weight", "mean"])
def test_uneven_weights(fold):
    """Rows of 0 to 7 tokens: each replica and micro-batch has another number of them, and in the end none has any."""
    params, (batch,), loss = problems.tokens(rows=12)
    params, batch = JAX.arrays(params), JAX.arrays(batch)
    full = problems.full_gradient(JAX, params, (batch,), loss, problems.token_count)
    gradient = jax.value_and_grad(loss if fold == "per_weight" else problems.token_mean)
    step = funcga.accumulate(gradient, 3, fold=getattr(funcga, fold)(), weight=problems.token_count, across="data")
    step = jax.jit(jax_backend.replicated(step, mesh()))
    assert difference(JAX, step(params, batch), full) <= LIMITS["float32"]
    check_one_reduction(step, params, batch, of=full)
    assert not any(leaf.any() for leaf in JAX.leaves(step(params, {**batch, "mask": 0 * batch["mask"]})))


@pytest.mark.parametrize(("kind", "check_vma"), [("accumulate", True), ("stream", False)])
def test_in_shard_map_and_in_stream(kind, check_vma):
    params, batch, loss = regression()
    full = jax.value_and_grad(loss)(params, *batch)
    stream = funcga.stream(jax.value_and_grad(loss), across="data")
    streamed = lambda params, x, y: stream(params, [(x[:1], y[:1]), (x[1:], y[1:])])
    step = streamed if kind == "stream" else funcga.accumulate(jax.value_and_grad(loss), 3, across=("data",))
    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma)
    assert difference(JAX, jax.jit(mapped)(params, *batch), full) <= LIMITS["float32"]
    check_one_reduction(mapped, params, *batch, of=full)


def test_numbers_and_numpy_arrays_are_not_summed_twice():
    """What is differentiated may be a Python float or NumPy's, which JAX would take for the same everywhere."""
    x = jnp.arange(8, dtype=jnp.float32)
    loss = lambda p, q, s, x: (p * q * s * x).mean()
    step = funcga.accumulate(jax.grad(loss, argnums=(0, 1, 2)), 2, across="data", in_axes=(None, None, None, 0))
    local = lambda x: step(3.0, np.float32([2.0]), np.float32(1), x)
    for check_vma in (True, False):
        mapped = jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P(), check_vma=check_vma)
        p, q, s = jax.jit(mapped)(x)
        assert (float(p), q.tolist(), float(s)) == (7.0, [10.5], 21.0)


# -- models


def test_a_model_that_starts_from_zeros():
    """It does not pass JAX's check of types; the error says what to write, and with that it is exact."""
    params, batch, _ = layers()

    def loss(params, x):
        step = lambda h, w: (jnp.tanh(h + x @ params["first"] @ w), None)
        return (lax.scan(step, jnp.zeros((len(x), 8)), params["layers"])[0] ** 2).mean()

    full = jax.value_and_grad(loss)(params, batch)
    step = funcga.accumulate(jax.value_and_grad(loss), 2, across="data")
    with pytest.raises(TypeError) as caught:
        jax_backend.replicated(step, mesh())(params, batch)
    assert "jax_backend.replicated(step, mesh, check_vma=False)" in caught.value.__notes__[0]
    step = jax.jit(jax_backend.replicated(step, mesh(), check_vma=False))
    assert difference(JAX, step(params, batch), full) <= LIMITS["float32"]
    check_one_reduction(step, params, batch, of=full)


# -- folds: small leaves travel with the sums, large ones in their own way

FOLDS = {**problems.FOLDS, "by_steps": funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)}
del FOLDS["carry"]
SMALL_AND_LARGE = pytest.mark.parametrize(("size", "check_vma"), [(3, True), (20_000, False)], ids=["small", "large"])


@SMALL_AND_LARGE
def test_every_fold(size, check_vma):
    """Over replicas as over micro-batches."""
    x = jnp.asarray(problems.rng(4).normal(size=(16, size)), jnp.float32)
    grad_fn = lambda _, x: {name: (x if name == "concat" else x.mean(0)) * 2 for name in FOLDS}
    one = funcga.accumulate(grad_fn, 8, fold=FOLDS)(jnp.zeros(()), x)
    step = funcga.accumulate(grad_fn, 2, fold=FOLDS, across="data")
    step = jax.jit(jax_backend.replicated(step, mesh(), check_vma=check_vma))
    many = step(jnp.zeros(()), x)
    for name in FOLDS:
        assert difference(JAX, many[name], one[name]) <= LIMITS["float32"]
    assert all(c.depth == 0 for c in collectives(step, jnp.zeros(()), x))


@SMALL_AND_LARGE
def test_extremes(size, check_vma):
    """Of several dtypes; where one replica has a NaN, its sign whichever, the result is one."""
    values = np.array([[3, -7, 0, 5]] * size).T
    kinds = ("float32", "bfloat16", "int8", "bool")
    fold = {"max": funcga.max(), "min": funcga.min()}
    grad_fn = lambda _, x: dict.fromkeys(fold, jax.tree.map(lambda leaf: leaf[0], x))
    step = funcga.accumulate(grad_fn, 1, fold=fold, across="data")
    step = jax.jit(jax_backend.replicated(step, mesh(), check_vma=check_vma))
    found = step(jnp.zeros(()), {kind: jnp.asarray(values).astype(kind) for kind in kinds})
    for kind in kinds:
        for name in fold:
            assert found[name][kind].dtype == kind
            expected = getattr(jnp.asarray(values).astype(kind), name)(axis=0)
            np.testing.assert_array_equal(found[name][kind], expected.astype(kind))
    for special in (np.nan, -np.nan, np.inf):
        spoilt = {kind: jnp.asarray(values).astype(kind).at[2].set(special) for kind in kinds[:2]}
        found = step(jnp.zeros(()), spoilt)
        for kind in kinds[:2]:
            for name in fold:
                expected = getattr(np.float32(spoilt[kind]), name)(axis=0)
                np.testing.assert_array_equal(np.float32(found[name][kind]), expected)


def test_a_tree_of_folds_in_one_reduction_for_each_dtype():
    """float32 gradients, their loss, a maximum and values for each row in one all-reduce; an int32 count, and bools."""
    params, batch, loss = regression()

    def grad_fn(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        seen = {"rows": jnp.int32(len(x)), "odd": x[:, 0] > 0, "largest": jnp.abs(x).max(), "each": x[:, 1]}
        return (value, seen), grads

    folds = {"rows": funcga.sum(), "odd": funcga.concat(), "largest": funcga.max(), "each": funcga.concat()}
    step = functools.partial(funcga.accumulate, grad_fn, fold=((funcga.mean(), folds), funcga.mean()))
    step = jax.jit(jax_backend.replicated(step(2, across="data"), mesh()))
    (value, seen), grads = step(params, *batch)
    full = jax.value_and_grad(loss)(params, *batch)
    assert difference(JAX, (value, grads), full) <= LIMITS["float32"]
    assert int(seen["rows"]) == 16
    np.testing.assert_array_equal(seen["odd"], batch[0][:, 0] > 0)
    np.testing.assert_array_equal(seen["each"], batch[0][:, 1])
    assert float(seen["largest"]) == float(jnp.abs(batch[0]).max())
    found = collectives(step, params, *batch)
    assert [(c.kind, c.depth) for c in found] == [("all-reduce", 0)] * 2


def test_a_monoid_of_the_users_is_combined_in_replica_order():
    """2x2 matrices under multiplication: associative, not commutative, and no collective does it."""
    eye = lambda xp, like: xp.broadcast_to(xp.eye(2, dtype=like.dtype), like.shape)
    monoid = funcga.Monoid(eye, lambda xp, a, b: a @ b)
    fold = funcga.Fold(funcga.Reducer(lambda xp, value, weight: value, monoid), funcga.normalizers.identity)
    x = jnp.asarray(problems.rng(5).normal(size=(8, 2, 2)), jnp.float32)
    out = jax_backend.replicated(funcga.accumulate(lambda _, x: x[0], 2, fold=fold, across="data"), mesh())(
        jnp.zeros(()), x
    )
    assert difference(JAX, out, functools.reduce(jnp.matmul, x)) <= LIMITS["float32"]


@pytest.mark.parametrize("size", [1, 20_000])
def test_carried_state_is_that_of_the_last_replica(size):
    kinds = ("float32", "bfloat16", "bool", "int32")
    state = {kind: jnp.zeros(size, kind) for kind in kinds} | {"key": jax.random.split(jax.random.key(0), size)}

    def grad_fn(state, x):
        new = {kind: jnp.full_like(state[kind], x[0]) for kind in kinds}
        return x.astype("float32").mean(), new | {"key": jax.vmap(lambda k: jax.random.fold_in(k, x[0]))(state["key"])}

    step = funcga.accumulate(grad_fn, 2, in_axes=(CARRY, 0), fold=(funcga.mean(), funcga.carry()), across="data")
    step, x = jax.jit(jax_backend.replicated(step, mesh())), jnp.arange(8)
    value, last = step(state, x)
    assert float(value) == 3.5
    expected = functools.reduce(lambda s, i: grad_fn(s, x[i : i + 1])[1], [6, 7], state)
    for found, wanted in ((tree.pop("key") for tree in (last, expected)), *zip(*map(jax.tree.leaves, (last, expected)), strict=True)):  # fmt: skip
        assert found.dtype == wanted.dtype
        as_numbers = jax.random.key_data if jnp.issubdtype(found.dtype, jax.dtypes.prng_key) else np.asarray
        np.testing.assert_array_equal(as_numbers(found), as_numbers(wanted))
    assert all(c.depth == 0 for c in collectives(step, state, x))


UNUSUAL = [-0.0, 0.0, jnp.inf, -jnp.inf, jnp.nan, -jnp.nan, 1e-40, -1e-40]  # also numbers that are subnormal in float32
FLOATS, INTEGERS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"), ("int8", "uint32")


@pytest.mark.parametrize("size", [1, 5_000], ids=["small", "large"])
def test_what_is_not_summed_keeps_its_bits(size):
    """Rows and threaded state: -0.0, subnormal numbers and NaN come back as they were."""
    numbers = dict.fromkeys(FLOATS, np.float32(UNUSUAL))
    numbers |= dict.fromkeys(INTEGERS, np.array([0, -1, 127, -128, 1, 2, 3, 4]))
    rows = {kind: np.repeat(leaf.astype(jnp.dtype(kind))[:, None], size, axis=1) for kind, leaf in numbers.items()}
    # One micro-batch: a loop of XLA on the CPU slices bfloat16 as float32, and processors that have an instruction for the
    # way back make 0.0 of subnormal numbers, with replicas or without.
    last_of = lambda x: jax.tree.map(lambda leaf: leaf[-1], x)
    fold = funcga.concat(), funcga.carry()
    step = funcga.accumulate(lambda state, x: (x, last_of(x)), 1, in_axes=(CARRY, 0), fold=fold, across="data")
    step = jax.jit(jax_backend.replicated(step, mesh()))
    for order in (rows, {kind: leaf[::-1] for kind, leaf in rows.items()}):
        each, last = step(jax.tree.map(np.zeros_like, last_of(order)), jax.device_put(order))
        for kind in rows:
            assert np.asarray(each[kind]).tobytes() == order[kind].tobytes(), kind
            assert np.asarray(last[kind]).tobytes() == order[kind][-1].tobytes(), kind


def test_axes_in_order():
    """Two axes: replicas are in the order of the axes that across names, as a batch that is cut along them."""
    for names, size in ((("data", "model"), 1), (("model", "data"), 20_000), (("model", "data"), 1)):
        rows = jnp.broadcast_to(jnp.arange(16.0)[:, None], (16, size))
        step = funcga.accumulate(lambda _, x: (x, x.mean()), 2, fold=(funcga.concat(), funcga.mean()), across=names)
        out, mean = jax_backend.replicated(step, grid(), axis=names)(jnp.zeros(()), rows)
        np.testing.assert_array_equal(out, rows)
        assert float(mean) == 7.5


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_counts_reach_the_result(dtype):
    """The tally is exact past 2**24, without 64-bit types."""
    weights = jnp.asarray([2**24, 1, 1, 6], dtype)
    fold, ones = funcga.per_weight(), lambda _, w: jnp.float32(1)
    step = funcga.accumulate(ones, 1, fold=fold, weight=lambda w: w[0], across="data")
    assert float(jax_backend.replicated(step, mesh())(jnp.zeros(()), weights)) == float(
        np.float32(4) / np.float32(2**24 + 8)
    )


# -- scatter


def test_scattered_gradients():
    params, batch, loss = layers(width=8)
    full = jax.value_and_grad(loss)(params, batch)
    across = jax_backend.Replicas("data", scatter=(None, {"first": 1, "layers": -1}))
    specs = (P(), {"first": P(None, "data"), "layers": P(None, None, "data")})
    step = jax_backend.replicated(
        funcga.accumulate(jax.value_and_grad(loss), 2, across=across), mesh(), out_specs=specs
    )
    out = step(params, batch)
    assert difference(JAX, out, full) <= LIMITS["float32"]
    assert out[1]["first"].sharding.spec == P(None, "data")
    found = collectives(step, params, batch)
    assert {(c.kind, c.depth) for c in found} == {("all-reduce", 0), ("reduce-scatter", 0)}
    assert sum(c.bytes for c in found if c.kind == "reduce-scatter") == tree_bytes(params)
    assert [c.bytes for c in found if c.kind == "all-reduce"] == [4 + 4 * 16]


MEAN = funcga.mean()


@pytest.mark.parametrize(
    ("scatter", "fold", "text"),
    [
        (
            (None, {"v": 0, "w": None}), (MEAN, {"w": MEAN, "v": funcga.max()}),
            "scatter=0 for output[1]['v'], and its fold is no sum: only what is summed over the replicas can be "
            "scattered. Write None in its place, or fold it with funcga.mean(), funcga.per_weight() or funcga.sum().",
        ),
        (
            (0,), MEAN,
            "scatter is no prefix of what grad_fn returns: at output it has tuple([0]), and there is tuple([0], [1]). Give one "
            "value for all that stands below, or a container with the same keys.",
        ),
    ],
    ids=["max", "prefix"],
)  # fmt: skip
def test_what_cannot_be_scattered(scatter, fold, text):
    grad_fn = lambda p, x: (x.mean(), {"w": x.mean(0), "v": jnp.zeros(8)})
    step = funcga.accumulate(grad_fn, 1, fold=fold, across=jax_backend.Replicas("data", scatter))
    step = jax_backend.replicated(step, mesh(), out_specs=(P(), P("data")))
    check_refused(text, step, jnp.zeros(()), jnp.arange(24.0).reshape(8, 3))


# -- what is refused


def step_across(across):
    params, batch, loss = regression()
    return funcga.accumulate(jax.value_and_grad(loss), 2, across=across), params, *batch


@pytest.mark.parametrize("across", [3, {}, object, grid, ("data", "data")])
def test_what_names_no_replicas(across):
    across = across() if across is grid else across
    found = (
        ", and in JAX replicas are named by an axis of the mesh, which is that of all leaves. Write the name, "
        'across="data", or a tuple of names, each once, and call the step inside jax.shard_map or through '
        "jax_backend.replicated(step, mesh)."
    )
    check_refused(f"across is {across!r:.60}{found}", *step_across(across))
    check_refused(found, jax_backend.Replicas, across)
    check_refused(found, funcga.check_replicas, jnp.zeros(2), across)


OUTSIDE = (
    'across="{}" merges over an axis of a mesh, which has replicas only inside of jax.shard_map, where it is manual, and '
    'here {} is. Wrap the step, jax_backend.replicated(step, mesh, axis="{}"), or call it inside jax.shard_map'
)


def test_outside_of_shard_map():
    says = OUTSIDE.format("data", "no axis", "data")
    step, *args = step_across("data")
    check_refused(says, step, *args)
    check_refused(says, jax.jit(step), *args)
    check_refused(says, step_across(jax_backend.Replicas("data"))[0], *args)
    check_refused(says, funcga.stream(jax.grad(problems.mean_loss), across="data"), args[0], [args[1:]])


def test_other_axes():
    step, *args = step_across("dta")
    check_refused(OUTSIDE.format("dta", '"data"', "dta"), jax_backend.replicated(step, mesh()), *args)
    step, *args = step_across("model")
    check_refused(OUTSIDE.format("model", '"data"', "model"), jax_backend.replicated(step, grid(), axis="data"), *args)
    rows = jax_backend.replicated(lambda p, x: p, mesh(), in_specs=(P(), P("rows")))
    with pytest.raises(ValueError, match="refers to 'rows'"):  # JAX itself
        rows(jnp.ones(()), jnp.ones(8))


def test_an_empty_stream_and_an_unknown_collective():
    step = funcga.stream(jax.grad(problems.mean_loss), across="data")
    params, *_ = regression()
    check_refused("the stream is empty", jax_backend.replicated(lambda p, x: step(p, []), mesh()), params, jnp.zeros(4))
    of = lambda: funcga.Monoid(lambda xp, like: like, lambda xp, a, b: a, collective="mean")
    check_refused("collective is 'mean': it names the reduction that is combine", of)
