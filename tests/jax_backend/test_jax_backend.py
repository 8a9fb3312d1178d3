"""What the JAX backend promises beyond the shared properties: traces, memory, sharding, compilation."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import funcga
from benchmarks.contenders.jax import scan
from benchmarks.jax_problem import Problem
from benchmarks.jax_workloads import scanned, tiny
from tests import problems
from tests.kits import JAX, LIMITS, counted, difference


def regression():
    params, batch, loss = problems.regression()
    return JAX.arrays(params), JAX.arrays(batch), loss


@pytest.mark.parametrize(("n", "bodies"), [(1, 1), (4, 1), (5, 2), (12, 1)])
def test_the_body_is_traced_once_and_twice_for_a_remainder(n, bodies):
    params, batch, loss = regression()
    traced, calls = counted(loss)
    step = funcga.accumulate(jax.value_and_grad(traced), n)
    jax.jit(step)(params, *batch)
    assert len(calls) == bodies
    step = funcga.accumulate(jax.value_and_grad(traced), n)
    calls.clear()
    for _ in range(3):  # outside of jit it is jitted, once
        step(params, *batch)
    assert len(calls) == bodies


@pytest.mark.parametrize(("make", "fold"), [(tiny, "mean"), (scanned, "mean"), (scanned, "per_weight")])
def test_temporary_memory_is_that_of_a_scan_by_hand(make, fold):
    workload = make(8, 0)
    gradient, by_hand = jax.value_and_grad(workload.loss), scan.make(Problem(workload.loss, 8, workload.size))
    lowered = lambda f: jax.jit(f).lower(workload.params, workload.batch)
    memory = lambda f: lowered(f).compile().memory_analysis().temp_size_in_bytes
    ours = memory(funcga.accumulate(gradient, 8, fold=getattr(funcga, fold)()))
    assert ours <= memory(by_hand) + 256  # a few scalars


def test_static_and_traced_arguments():
    """Outside of jit, arrays are traced and everything else is part of the program."""
    gradient, calls = counted(lambda p, x, scale=1, train=True: p * x.mean() * (scale if train else 0))
    step = funcga.accumulate(gradient, 3)
    p, x = jnp.float32(2), jnp.arange(6, dtype=jnp.float32)
    assert float(step(p, x, scale=3)) == 15
    assert float(step(p + 1, x, scale=3)) == 22.5
    assert len(calls) == 1
    assert float(step(p, x, scale=3, train=False)) == 0
    assert float(step(p, x, scale=4)) == 20
    assert len(calls) == 3


def test_keys_are_split_and_carried():
    keys = jax.random.split(jax.random.key(0), 6)
    x = jnp.zeros(6)
    draw = lambda keys, x: x + jax.vmap(jax.random.normal)(keys)
    out = funcga.accumulate(draw, 4, in_axes=0, fold=funcga.concat())(keys, x)
    np.testing.assert_array_equal(out, draw(keys, x))

    def noisy(key, x):
        key, use = jax.random.split(key)
        return x.mean() + jax.random.normal(use), key

    options = {"in_axes": (funcga.CARRY, 0), "fold": (funcga.mean(), funcga.carry())}
    key, drawn = jax.random.key(1), 0
    for _ in range(3):
        key, use = jax.random.split(key)
        drawn += jax.random.normal(use) / 3
    for step in (funcga.accumulate(noisy, 3, **options), lambda k, x: funcga.stream(noisy, **options)(k, [x[:2]] * 3)):
        mean, after = jax.jit(step, donate_argnums=0)(jax.random.key(1), x)
        np.testing.assert_allclose(mean, drawn, rtol=1e-6)
        assert after == key


def test_what_a_stream_compiles(monkeypatch):
    """One program for each shape of micro-batch, whatever stands first in a window."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    params, batch, loss = regression()
    step = funcga.stream(jax.value_and_grad(loss))
    cut = lambda *sizes: [tuple(a[:k] for a in batch) for k in sizes]
    step(params, cut(4, 4, 3))
    step(params, cut(3, 4, 4))
    compiled.clear()
    for window in ((4, 4, 3), (3, 3), (4, 3, 3, 4)):
        items = cut(*window)
        compiled.clear()
        step(params, items)
        assert compiled == []


def folded_twice(kind, gradient):
    """f(w, x): the sum of the gradient over two halves, by one function that is made once."""
    if kind == "accumulate":
        return funcga.accumulate(gradient, 2, fold=funcga.sum())
    step = funcga.stream(gradient, fold=funcga.sum())
    return lambda w, x: step(w, [x[:2], x[2:]])


@pytest.mark.parametrize("kind", ["accumulate", "stream"])
def test_a_trace_sees_what_is_closed_over_now(kind):
    """As a loop by hand does inside of jit: nothing that was traced is kept beyond the trace."""
    scale = [1.0]
    step = folded_twice(kind, lambda w, x: w * scale[0] * x.sum())
    w, x = jnp.float32(1), jnp.ones(4)
    for number in (1.0, 2.0):
        scale[0] = number
        assert float(jax.jit(lambda w: step(w, x))(w)) == 4 * number
        assert float(jax.jit(lambda x: step(w, x))(x)) == 4 * number
        assert float(jax.jit(lambda: step(w, x))()) == 4 * number
    scale[0] = 3.0
    with jax.disable_jit():
        assert float(step(w, x)) == 12


def test_one_stream_in_two_widths_and_of_weak_types():
    """What a micro-batch returns depends on more than the shapes and dtypes that came in."""
    ones = jnp.ones(2)
    step = funcga.stream(lambda p, x: (p * x.sum(), x.shape[0] * jnp.arange(2)), fold=funcga.sum())
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            assert step(ones, [ones, ones])[1].dtype == ("int64" if wide else "int32")
    scaled = funcga.stream(lambda p, s, x: jnp.asarray(p * s * x.sum(), p.dtype) * s, in_axes=(None, None, 0))
    with jax.numpy_dtype_promotion("standard"):
        assert scaled(jnp.bfloat16(1), jnp.asarray(2.0), [ones, ones]).dtype == "bfloat16"
        assert scaled(jnp.bfloat16(1), jnp.float32(2), [ones, ones]).dtype == "float32"


@pytest.mark.parametrize("kind", ["accumulate", "stream"])
def test_shapes_without_numbers(kind):
    step = folded_twice(kind, lambda w, x: w * x.sum())
    w, x = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((4,), "float32")
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):  # of JAX, as it would compute
        step(w, jnp.ones(4))
    assert jax.eval_shape(step, w, x).shape == ()


@pytest.mark.parametrize(("kind", "weight"), [("accumulate", 1e-40), ("accumulate", 10**40), ("stream", 3e38)])
def test_weights_that_a_float32_cannot_hold(kind, weight):
    def run(weigh, dtype="float32"):
        w, x = jnp.ones((), dtype), jnp.arange(4, dtype=dtype)
        gradient = lambda w, x: {"mean": w * x.mean(), "sum": w * x.sum()}
        folds = {"mean": funcga.mean(), "sum": funcga.sum()}
        if kind == "accumulate":
            return funcga.accumulate(gradient, 2, fold=folds, weight=weigh)(w, x)
        return funcga.stream(gradient, fold=folds, weight=weigh)(w, [x[:2], x[2:]])

    with pytest.raises(funcga.FuncgaError) as error:
        run(lambda x: weight)
    assert str(error.value) == (
        f"the weight of a micro-batch is {weight!r}, which a float32 cannot hold, in which they are counted here. "
        f"Weigh in other units, as by tokens / 1e6."
    )


def exported(step, rows):
    """f(w, x): the step, exported for any number of rows that this expression can be."""
    symbols = jax.export.symbolic_shape(rows)
    struct = jax.ShapeDtypeStruct((*symbols, 3), "float32")
    program = jax.export.export(jax.jit(step))(jax.ShapeDtypeStruct((3,), "float32"), struct)
    return program.call


def test_a_program_for_any_number_of_rows():
    def gradient(w, x):
        loss, grads = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return loss, grads, grads, x @ w, x.max(0)

    folds = (funcga.mean(), funcga.mean(), funcga.moments(), funcga.concat(), funcga.max())
    step = funcga.accumulate(gradient, 4, fold=folds)
    call, w = exported(step, "4*b"), jnp.arange(3.0)
    for count in (4, 12):
        x = jnp.asarray(np.random.default_rng(count).standard_normal((count, 3)), jnp.float32)
        assert difference(JAX, call(w, x), step(w, x)) <= LIMITS["float32"]
        assert difference(JAX, call(w, x)[:2], gradient(w, x)[:2]) <= LIMITS["float32"]


def test_rows_that_may_not_divide_cannot_be_exported():
    """JAX says which comparison it cannot decide."""
    with pytest.raises(Exception, match="is inconclusive"):
        exported(funcga.accumulate(lambda w, x: w * x.sum(), 4), "b")


@pytest.mark.parametrize(
    ("fold", "leaf"), [("mean", np.arange(3)), ("max", jax.random.key(0))], ids=["integers", "key"]
)
def test_gradients_of_what_is_no_float(fold, leaf):
    """JAX has float0 for them, an array of nothing."""
    gradient = jax.grad(lambda params, x: (params["w"] * x).sum(), allow_int=True)
    params = {"w": jnp.float32(1), "other": leaf}
    with pytest.raises(funcga.FuncgaError) as error:
        funcga.accumulate(gradient, 2, fold=getattr(funcga, fold)())(params, jnp.ones(4))
    name = getattr(funcga, fold)().name
    assert str(error.value).startswith(
        f"output['other'] is float0[{'3' if leaf.shape else ''}], and the fold `{name}` is not defined for other values."
    )
    apart = jax.grad(lambda w, other, x: (w * x).sum())
    step = funcga.accumulate(apart, 2, in_axes=(None, None, 0), fold=funcga.sum())
    assert float(step(params["w"], params["other"], jnp.ones(4))) == 4


def test_one_random_key_is_not_split():
    gradient = jax.value_and_grad(lambda params, x, key: (params * x).sum() + jax.random.uniform(key))
    with pytest.raises(funcga.FuncgaError, match=r"`key` is key<fry>\[\]: it has no axis 0 to split"):
        funcga.accumulate(gradient, 2)(jnp.ones(()), jnp.ones(4), jax.random.key(0))
    for keys in (jax.random.PRNGKey(0), jax.random.split(jax.random.PRNGKey(0), 3)):
        with pytest.raises(funcga.FuncgaError, match=r"different numbers of rows: `x` has 4 and `key`"):
            funcga.accumulate(gradient, 2)(jnp.ones(()), jnp.ones(4), keys)


def weighed(calls, runs):
    """A weight of rows that says how often it was traced, and run."""

    def weight(x):
        calls.append(1)
        jax.debug.callback(lambda first: runs.append(first), x[0])
        return (x > -1).sum()

    return weight


@pytest.mark.parametrize("fold", [funcga.mean(), (funcga.mean(), funcga.max())], ids=["means", "others"])
@pytest.mark.parametrize(("n", "sizes"), [(4, 1), (3, 2)])
def test_a_weight_is_evaluated_once_for_each_micro_batch(n, sizes, fold):
    gradient = jax.value_and_grad(lambda w, x: jnp.mean((w * x) ** 2))
    w, x = jnp.float32(1), jnp.arange(8.0)
    calls, runs = [], []
    funcga.accumulate(gradient, n, fold=fold, weight=weighed(calls, runs))(w, x)
    jax.effects_barrier()
    assert (len(calls), sorted(map(float, runs))) == (sizes, [float(part[0]) for part in np.array_split(x, n)])
    calls.clear(), runs.clear()
    parts = [(part,) for part in np.array_split(x, n)]
    funcga.stream(gradient, fold=fold, weight=weighed(calls, runs))(w, parts)
    jax.effects_barrier()
    assert (len(calls), len(runs)) == (sizes, n)
