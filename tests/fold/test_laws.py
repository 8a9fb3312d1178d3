"""The laws, as properties: for every fold, dtype, weight, split, order and tree, against the NumPy oracle."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import funcga
from tests import oracle, problems
from tests.kits import JAX, TORCH


def pooled_of_any_value():
    """pooled() with a lift that makes its leaf of any value v: |v| items of mean v and variance v * v."""
    lift = lambda xp, v, weight: funcga.reducers.pooled.lift(xp, xp.stack((abs(v), v, v * v)), weight)
    return funcga.Fold(replace(funcga.reducers.pooled, lift=lift, stacked=None), funcga.normalizers.pooled)


FOLDS = {
    **problems.FOLDS,
    "by_steps": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps),
    "pooled": pooled_of_any_value(),
}
COMMUTATIVE = [name for name in FOLDS if name not in ("concat", "carry")]
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}
KITS = pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)
# examples are few because each may compile; derandomised, so that a red run is red for everybody
few = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

numbers = st.floats(-100, 100, width=16)
weights = st.one_of(st.just(0), st.integers(0, 5), st.floats(0.0, 4.0, width=16), st.sampled_from([2**24 + 1, 10**6]))
# JAX compiles each operation for every shape anew, so it gets one with rows and one without.
SHAPES = {"torch": [(2,), (2, 3), (1, 1, 2), ()], "jax": [(2, 3), ()]}
trees = st.sampled_from([
    lambda a: a,
    lambda a: [a, (a + 1, None)],
    lambda a: {"b": a, "a": {"c": a * 2}},
])  # fmt: skip


@st.composite
def windows(draw, kit, name):
    """(values, weights, dtype, tree): NumPy values of one shape, one for each of 1 to 6 micro-batches."""
    # concat needs an axis to collect along; all other folds take scalars
    shape = draw(st.sampled_from([shape for shape in SHAPES[kit.name] if shape or name != "concat"]))
    count = draw(st.integers(1, 6))
    size = int(np.prod(shape))
    value = st.lists(numbers, min_size=size, max_size=size).map(lambda v: np.array(v, "float32").reshape(shape))
    values = draw(st.lists(value, min_size=count, max_size=count))
    return (
        values,
        draw(st.lists(weights, min_size=count, max_size=count)),
        draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        draw(trees),
    )


def build(kit, value, dtype, tree):
    return tree(kit.cast(kit.arrays(value), dtype))


def run(kit, accumulator, values, window_weights, dtype, tree):
    state = accumulator.init(build(kit, values[0], dtype, tree))
    for value, weight in zip(values, window_weights, strict=True):
        state = accumulator.update(state, build(kit, value, dtype, tree), weight=weight)
    return state


def of_result(name, dtype):
    """The dtype of what a fold makes of values of this one."""
    return "float32" if name == "pooled" else dtype


def assert_close(left, right, dtype, size):
    """Equal up to the rounding of a result of this dtype, and of float32 sums whose terms add up to `size`."""
    for a, b in zip(left, right, strict=True):
        assert a.shape == b.shape
        with np.errstate(over="ignore"):
            b = b.astype("float16").astype("float64") if dtype == "float16" else b  # what such a result can hold
        infinite = np.isinf(b)
        np.testing.assert_array_equal(a[infinite], b[infinite])
        least = 2.0**-24 if dtype == "float16" else 0  # its subnormal numbers are as far apart
        near = EPS[dtype] * np.abs(b[~infinite]) + 16 * EPS["float32"] * size + least
        assert (np.abs(a[~infinite] - b[~infinite]) <= near).all()


def magnitude(name, values, window_weights):
    """What the absolute values of all terms of the fold add up to, for the largest leaf of the trees."""
    tops = [2 * float(np.abs(v).max(initial=0)) + 1 for v in values]
    total = sum(window_weights)
    if name == "sum":
        return sum(tops)
    if name == "per_weight":
        return sum(tops) / (total or 1)
    if name == "by_steps":
        return sum(w * t for w, t in zip(window_weights, tops, strict=True)) / len(tops)
    if name == "pooled":
        return sum(tops) + max(tops) ** 2
    return max(tops) ** (2 if name == "moments" else 1)


@KITS
@pytest.mark.parametrize("name", FOLDS)
@few
@given(data=st.data())
def test_finalize_is_the_fold(kit, name, data):
    """The oracle's result, in the tree and the dtypes of the values."""
    window = data.draw(windows(kit, name))
    values, window_weights, dtype, tree = window
    result = funcga.Accumulator(FOLDS[name]).finalize(run(kit, funcga.Accumulator(FOLDS[name]), *window))
    rounded = [[leaf.astype("float64") for leaf in kit.leaves(build(kit, v, dtype, tree))] for v in values]
    expected = [oracle.fold(name, [leaves[i] for leaves in rounded], window_weights) for i in range(len(rounded[0]))]
    flat = [array for e in expected for array in (e if isinstance(e, tuple) else (e,))]
    assert_close(kit.leaves(result), flat, of_result(name, dtype), magnitude(name, values, window_weights))


@KITS
@pytest.mark.parametrize("name", FOLDS)
@few
@given(data=st.data())
def test_init_is_the_identity(kit, name, data):
    """merge(s, init) = s = merge(init, s), to the bit."""
    window = data.draw(windows(kit, name))
    accumulator = funcga.Accumulator(FOLDS[name])
    state = run(kit, accumulator, *window)
    empty = accumulator.init(build(kit, window[0][0], *window[2:]))
    for merged in (accumulator.merge(state, empty), accumulator.merge(empty, state)):
        for a, b in zip(kit.leaves(accumulator.finalize(merged)), kit.leaves(accumulator.finalize(state)), strict=True):
            np.testing.assert_array_equal(a, b)


@KITS
@pytest.mark.parametrize("name", FOLDS)
@few
@given(data=st.data())
def test_merge_is_associative_so_any_split_will_do(kit, name, data):
    window = data.draw(windows(kit, name))
    values, window_weights, dtype, tree = window
    accumulator = funcga.Accumulator(FOLDS[name])
    whole = accumulator.finalize(run(kit, accumulator, *window))
    place = data.draw(st.integers(1, len(values)))
    parts = [run(kit, accumulator, values[:place], window_weights[:place], dtype, tree)]
    if place < len(values):
        parts.append(run(kit, accumulator, values[place:], window_weights[place:], dtype, tree))
    merged = parts[0] if len(parts) == 1 else accumulator.merge(*parts)
    size = magnitude(name, values, window_weights)
    assert_close(kit.leaves(accumulator.finalize(merged)), kit.leaves(whole), of_result(name, dtype), size)


@KITS
@pytest.mark.parametrize("name", FOLDS)
@few
@given(data=st.data())
def test_update_is_a_merge(kit, name, data):
    """update(s, v, w) = merge(s, update(init, v, w)), to the bit."""
    window = data.draw(windows(kit, name))
    values, window_weights, dtype, tree = window
    accumulator = funcga.Accumulator(FOLDS[name])
    state = run(kit, accumulator, *window)
    updated = accumulator.update(state, build(kit, values[0], dtype, tree), weight=window_weights[0])
    alone = run(kit, accumulator, values[:1], window_weights[:1], dtype, tree)
    for a, b in zip(kit.leaves(updated), kit.leaves(accumulator.merge(state, alone)), strict=True):
        np.testing.assert_array_equal(a, b)


@KITS
@pytest.mark.parametrize("name", FOLDS)
@few
@given(data=st.data())
def test_merge_of_states_is_associative_and_commutative(kit, name, data):
    window = data.draw(windows(kit, name))
    values, window_weights, dtype, tree = window
    accumulator = funcga.Accumulator(FOLDS[name])
    merge, size = accumulator.merge, magnitude(name, values * 3, window_weights * 3)
    a, b, c = (
        run(kit, accumulator, values[k:] + values[:k], window_weights[k:] + window_weights[:k], dtype, tree)
        for k in range(3)
    )
    left, right = (accumulator.finalize(s) for s in (merge(merge(a, b), c), merge(a, merge(b, c))))
    assert_close(kit.leaves(left), kit.leaves(right), of_result(name, dtype), size)
    if name in COMMUTATIVE:
        one, other = (accumulator.finalize(s) for s in (merge(a, b), merge(b, a)))
        assert_close(kit.leaves(one), kit.leaves(other), of_result(name, dtype), size)


@KITS
@pytest.mark.parametrize("name", COMMUTATIVE)
@few
@given(data=st.data())
def test_order_does_not_matter(kit, name, data):
    window = data.draw(windows(kit, name))
    values, window_weights, dtype, tree = window
    accumulator = funcga.Accumulator(FOLDS[name])
    order = data.draw(st.permutations(range(len(values))))
    shuffled = [values[i] for i in order], [window_weights[i] for i in order], dtype, tree
    whole = accumulator.finalize(run(kit, accumulator, *window))
    other = accumulator.finalize(run(kit, accumulator, *shuffled))
    assert_close(kit.leaves(other), kit.leaves(whole), of_result(name, dtype), magnitude(name, values, window_weights))


@KITS
@few
@given(rows=st.integers(1, 9), data=st.data())
def test_any_split_gives_the_full_batch(kit, rows, data):
    """accumulate(g, n) = g for every n and any microbatch_size, with the fold that matches the loss."""
    x = kit.arrays(np.array(data.draw(st.lists(numbers, min_size=rows, max_size=rows)), "float32"))
    n = data.draw(st.integers(1, rows))
    size = data.draw(st.integers(1, rows + 1))
    mean = lambda x: (x.mean(), (x * x).mean())
    total = lambda x: (x.sum(), (x * x).sum())
    for step, whole in (
        (funcga.accumulate(mean, n, in_axes=0), mean(x)),
        (funcga.accumulate(mean, microbatch_size=size, in_axes=0), mean(x)),
        (funcga.accumulate(total, n, in_axes=0, fold=funcga.sum()), total(x)),
        (funcga.accumulate(total, n, in_axes=0, fold=funcga.per_weight()), mean(x)),
    ):
        scale = 1 + 10 * float(abs(x).max()) ** 2
        for a, b in zip(kit.leaves(step(x)), kit.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=scale * 4 * EPS["float32"])
