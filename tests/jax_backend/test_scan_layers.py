"""Gradients of scanned layers: folded layer by layer inside of the loop, as they would be when it has stacked them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType

import funcga
import jax_backend


def layers(length=3, width=4, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        name: jax.random.normal(key, (length, width, width), dtype) / 2 for name, key in zip("ab", keys, strict=True)
    }


def rows(count=7, width=4):
    return jax.random.normal(jax.random.key(1), (count, width))


def layer(x, w):
    return jnp.tanh(jax.nn.relu(x @ w["a"]) @ w["b"]), None


def loss(params, x, body=layer, **options):
    return (lax.scan(body, x, params, **options)[0] ** 2).mean()


def in_half(params, x):
    half = lambda tree: jax.tree.map(lambda leaf: leaf.astype("bfloat16"), tree)
    return loss(half(params), half(x)).astype("float32")


def tied(params, x):
    """Both operands of the scan are one leaf: what it stacks is added up afterwards."""
    body = lambda x, w: (jnp.tanh(x @ w[0]["a"]) @ w[1]["a"] @ w[0]["b"] @ w[1]["b"], None)
    return loss((params, params), x, body)


def hidden(params, x):
    """A checkpoint around the whole scan."""
    return jax.checkpoint(loss)(params, x)


def penalised(params, x):
    return loss(params, x) + jnp.float32(0.1) * (params["a"] ** 2).sum()


def as_it_is(gradient):
    return gradient


def read(gradient):
    """The gradient function, whose results something else reads as well: none of them is folded in place."""
    return lambda *args: lax.optimization_barrier(gradient(*args))


def check_same(make, params, x, places, ulps=4):
    """The fold in place, make(as_it_is), has so many leaves, and is that of the stack, make(read).

    But for some ulps of the largest element: of products and sums XLA contracts some, and others not.
    """
    steps = make(as_it_is), make(read)
    assert [len(jax_backend.hlo.folded_in_place(step, params, x)) for step in steps] == [places, 0]
    ours, theirs = (jax.jit(lambda *args, step=step: step(*args))(params, x) for step in steps)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert left.dtype == right.dtype
        assert jnp.abs(left - right).max(initial=0) <= ulps * jnp.finfo(left.dtype).eps * jnp.abs(right).max(initial=0)


@pytest.mark.parametrize(
    ("loss_fn", "places"),
    [
        (lambda p, x: loss(p, x, jax.checkpoint(layer), reverse=True, unroll=2), 2),
        (jax.jit(lambda p, x: jax.jit(loss)(p, x) * 2.0), 2),
        (in_half, 2),
        (penalised, 1),  # the other one has a second term
        (tied, 0),
        (hidden, 0),
        (lambda p, x: loss(jax.tree.map(lambda leaf: leaf * 2.0, p), x), 0),
        (lambda p, x: loss(p, x) + loss(p, x, reverse=True), 0),
        (lambda p, x: lax.cond(x[0, 0] > 0, loss, penalised, p, x), 0),
        (jax.jit(loss, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])), 0),
    ],
    ids=["remat", "jit", "cast", "penalty", "tied", "hidden", "scaled", "twice", "cond", "sharded"],
)
def test_what_a_scan_stacks_and_nothing_else_reads(loss_fn, places):
    make = lambda of: funcga.accumulate(of(jax.value_and_grad(loss_fn)), 3)
    check_same(make, layers(), rows(6), places)


FOLDS = {"mean": 2, "sum": 2, "max": 2, "moments": 0}


@pytest.mark.parametrize("fold", FOLDS)
def test_elementwise_folds_of_weighed_microbatches(fold):
    weight = lambda x: (x[:, 0] > 0).sum()
    make = lambda of: funcga.accumulate(of(funcga.grad(loss)), 3, fold=getattr(funcga, fold)(), weight=weight)
    check_same(make, layers(), rows(), FOLDS[fold])


def test_a_microbatch_that_is_dropped():
    params, x = layers(), rows(6).at[2].set(jnp.nan)
    found = funcga.accumulate(jax.grad(loss), 3, drop="microbatch")(params, x)
    expected = jax.grad(loss)(params, jnp.delete(x, jnp.array([2, 3]), axis=0))
    assert all(jnp.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6) for name in params)


def squares(step, params, x):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(step(params, x)))


def test_the_step_can_be_transformed():
    params, x = layers(), rows()
    step = lambda of: funcga.accumulate(of(jax.grad(loss)), 7)
    check_same(lambda of: jax.grad(lambda p, x: squares(jax.checkpoint(step(of)), p, x)), params, x, 2)
    check_same(lambda of: jax.vmap(step(of), (None, 0)), params, jnp.stack([x, 2 * x]), 2)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    check_same(lambda of: jax.vmap(step(of), (0, None)), twice, x, 2)


def test_effects_stay_where_they_are():
    def told(params, x):
        jax.debug.callback(lambda value: None, x[0, 0])
        return loss(params, x)

    check_same(lambda of: funcga.accumulate(of(jax.grad(told)), 7), layers(), rows(), 0)


def test_no_array_of_the_parameters_size_stands_beside_the_accumulator():
    params, x = layers(8, 64), rows(16, 64)
    size = sum(leaf.nbytes for leaf in params.values())

    def memory(of):
        step = jax.jit(funcga.accumulate(of(jax.grad(loss)), 8))
        return step.lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert memory(as_it_is) < size / 2 < size < memory(read)


def test_what_is_cast_is_added_as_it_was_cast():
    def cast(params, x):
        stack = lambda name: lax.scan(lambda x, w: (x, w * x.sum() * 9), x, params[name])[1]
        return stack("a").astype("bfloat16").astype("float32"), jax.jit(lambda: stack("b").astype("int32"))()

    folds = funcga.mean(), funcga.mean(dtype="float32")
    check_same(lambda of: funcga.accumulate(of(cast), 3, fold=folds), layers(), rows(6), 2)


def test_no_layers():
    found = funcga.accumulate(jax.grad(loss), 3)(layers(0), rows(6))
    assert (found["a"].shape, found["b"].shape) == ((0, 4, 4), (0, 4, 4))


# -- on a mesh, and how to ask


def tensor_parallel(params, x):
    """Columns of the first matrix and rows of the second on each device, and a sum in every layer."""
    first = lax.axis_index("model") == 0

    def body(x, w):
        return lax.psum(jax.nn.relu(x @ w["a"]) @ w["b"] + jnp.where(first, x, 0), "model"), None

    return (lax.scan(body, x, params)[0] ** 2).mean()


def whole_layers(params, x):
    return (lax.scan(lambda x, w: (jax.nn.relu(x @ w["a"]) @ w["b"] + x, None), x, params)[0] ** 2).mean()


def test_layers_that_communicate_are_folded_in_place():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"a": jax.P(None, None, "model"), "b": jax.P(None, "model")}
    step = lambda of: funcga.accumulate(of(jax.grad(tensor_parallel)), 2, across="data")
    over = lambda of: jax.shard_map(step(of), mesh=mesh, in_specs=(specs, jax.P("data")), out_specs=specs)
    params, x = layers(), rows(8)
    check_same(over, params, x, 2)
    assert jax_backend.hlo.folded_in_place(over(as_it_is), params, x) == ["output['a']", "output['b']"]
    found, expected = jax.jit(over(as_it_is))(params, x), jax.grad(whole_layers)(params, x)
    assert all(jnp.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6) for name in params)
