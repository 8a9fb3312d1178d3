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
few = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

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
def test_laws(kit, name, data):
    window = data.draw(windows(kit, name))
    values, window_weights, dtype, tree = window
    accumulator, size = funcga.Accumulator(FOLDS[name]), magnitude(name, values, window_weights)
    finalize, merge = lambda state: kit.leaves(accumulator.finalize(state)), accumulator.merge
    folded = lambda values, weights: run(kit, accumulator, values, weights, dtype, tree)
    close = lambda left, right, size=size: assert_close(left, right, of_result(name, dtype), size)
    state = folded(values, window_weights)
    whole = finalize(state)

    # The result is that of the oracle, in the tree of the values.
    rounded = [[leaf.astype("float64") for leaf in kit.leaves(build(kit, v, dtype, tree))] for v in values]
    expected = [oracle.fold(name, [leaves[i] for leaves in rounded], window_weights) for i in range(len(rounded[0]))]
    close(whole, [array for e in expected for array in (e if isinstance(e, tuple) else (e,))])

    # merge(s, init) = s = merge(init, s), to the bit.
    empty = accumulator.init(build(kit, values[0], dtype, tree))
    for merged in (merge(state, empty), merge(empty, state)):
        equal(finalize(merged), whole)

    # update(s, v, w) = merge(s, update(init, v, w)), to the bit.
    updated = accumulator.update(state, build(kit, values[0], dtype, tree), weight=window_weights[0])
    equal(kit.leaves(updated), kit.leaves(merge(state, folded(values[:1], window_weights[:1]))))

    # Any split will do, and for most folds any order.
    if (place := data.draw(st.integers(1, len(values)))) < len(values):
        parts = [folded(values[part], window_weights[part]) for part in (slice(place), slice(place, None))]
        close(finalize(merge(*parts)), whole)
    if name in COMMUTATIVE:
        order = data.draw(st.permutations(range(len(values))))
        close(finalize(folded([values[i] for i in order], [window_weights[i] for i in order])), whole)

    # merge is associative, and for most folds commutative.
    size = magnitude(name, values * 3, window_weights * 3)
    a, b, c = (folded(values[k:] + values[:k], window_weights[k:] + window_weights[:k]) for k in range(3))
    close(finalize(merge(merge(a, b), c)), finalize(merge(a, merge(b, c))), size)
    if name in COMMUTATIVE:
        close(finalize(merge(a, b)), finalize(merge(b, a)), size)


def equal(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)
