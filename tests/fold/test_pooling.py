"""`pooled()`: the statistics of many micro-batches are those of one batch, and the running ones after it."""

import numpy as np
import pytest

import funcga
from funcga import FuncgaError
from tests.kits import difference

RAGGED = (1, 5, 2, 9, 3)


def rows(count=20, channels=3, mean=0.0, dtype="float64"):
    random = np.random.default_rng(0)
    return (mean + random.standard_normal((count, channels)) * np.arange(1, channels + 1)).astype(dtype)


def parts(x):
    return np.split(x, np.cumsum(RAGGED)[:-1])


def leaf(kit, x):
    """As a hand-written BatchNorm has them."""
    return funcga.statistics.batch_moments(kit.arrays({"mean": x.mean(0), "var": x.var(0)}), len(x))


def pool(kit, items, accumulator=None):
    accumulator = accumulator or funcga.Accumulator(funcga.pooled())
    state = accumulator.init(leaf(kit, items[0]))
    for x in items:
        state = accumulator.update(state, leaf(kit, x), weight=7)  # a weight counts for nothing
    return state


def test_far_from_zero_a_sum_of_squares_fails(kit):
    """10,000 +- 1 in float32: squares have no digits left for the variance, deviations have."""
    x = rows(count=400, mean=1e4, dtype="float32")
    items, exact = np.array_split(x, 7), x.astype("float64").var(0)
    found = funcga.Accumulator(funcga.pooled()).finalize(pool(kit, items)).variance
    np.testing.assert_allclose(kit.numpy(found), exact, rtol=1e-4)
    squares = sum((np.float32(1) * p * p).sum(0) for p in items) / np.float32(len(x))
    by_squares = squares - (sum(p.sum(0) for p in items) / np.float32(len(x))) ** 2
    assert (np.abs(by_squares - exact) > 0.5 * exact).any()


def test_large_values(kit):
    """Their squares are beyond float32, and their variance is not, or is infinite; against float64."""
    least = float(np.finfo("float32").smallest_normal)
    for values in ([0, 3e19], [3e19, 0, -1e19], [2e19] * 5, [1e38, -1e38, 3e38], [-3e38, 3e38], [1e-12, 3e19]):
        x, weights = np.array(values, "float32"), np.arange(len(values)) * 1000.0 + 1
        exact = x.astype("float64")
        mean = np.average(exact, weights=weights)
        with np.errstate(over="ignore"):
            want = np.array([mean, np.average((exact - mean) ** 2, weights=weights)]).astype("float32")
        accumulator = funcga.Accumulator((funcga.moments(), funcga.pooled()))
        states = []
        for value, weight in zip(x, weights, strict=True):
            pooled = np.array([weight, value, 0], "float32")
            state = accumulator.init(kit.arrays((value, pooled)))
            states.append(accumulator.update(state, kit.arrays((value, pooled)), weight=weight))
        for order in (states, states[::-1]):
            state = order[0]
            for other in order[1:]:
                state = accumulator.merge(state, other)
            moments, pooled = accumulator.finalize(state)
            for found in (moments, pooled[1:]):
                # sums of a few float32 numbers
                found = [float(kit.numpy(part)) for part in found]
                np.testing.assert_allclose(found, want, rtol=1e-6, atol=4e-7 * abs(exact).max() + least)


def test_a_count_of_zero_adds_nothing(kit):
    x = rows(dtype="float32")
    nothing = funcga.statistics.batch_moments(
        kit.arrays({"mean": x[0] * np.nan, "var": x[0] * np.nan}), kit.arrays(np.int32(0))
    )
    accumulator = funcga.Accumulator(funcga.pooled())
    state = pool(kit, parts(x))
    found, expected = accumulator.finalize(accumulator.update(state, nothing)), accumulator.finalize(state)
    assert difference(kit, found, expected) == 0
    empty = accumulator.finalize(accumulator.update(accumulator.init(nothing), nothing))
    assert all((part == 0).all() for part in kit.leaves(empty))


def test_the_order_of_keys_is_that_of_the_old(kit):
    old = kit.arrays(
        {
            "b": {"var": np.ones(2, "float32"), "mean": np.zeros(2, "float32")},
            "a": {"mean": np.zeros(2, "float32"), "var": np.ones(2, "float32")},
        }
    )
    new = funcga.normalizers.Pooled(
        *kit.arrays((np.ones(2, "float32"), np.full(2, 5.0, "float32"), np.ones(2, "float32")))
    )
    after = funcga.statistics.running_statistics(old, {"a": new, "b": new}, share=0.5, unbiased=False)
    assert [*after] == ["b", "a"] or kit.name == "jax"
    for layer in after.values():
        assert [float(layer[name][0]) for name in ("mean", "var")] == [2.5, 1]


def running(kit, **options):
    old = {"a": kit.arrays({"mean": np.array([1.0, -2.0, 3.0]), "var": np.array([1.0, 4.0, 9.0])})}
    x = rows()
    pooled = {"a": funcga.Accumulator(funcga.pooled()).finalize(pool(kit, parts(x)))}
    return old, x, funcga.statistics.running_statistics(old, pooled, **options)


def test_the_running_statistics_of_torch_and_of_flax(kit, x64):
    for share, unbiased in ((0.1, True), (0.01, False), (kit.arrays(np.float64(0.25)), True)):
        old, x, new = running(kit, share=share, unbiased=unbiased)
        part, before = float(share), {k: kit.numpy(v) for k, v in old["a"].items()}
        mean = (1 - part) * before["mean"] + part * x.mean(0)
        var = (1 - part) * before["var"] + part * x.var(0, ddof=int(unbiased))
        np.testing.assert_allclose(kit.numpy(new["a"]["mean"]), mean, rtol=1e-14)
        np.testing.assert_allclose(kit.numpy(new["a"]["var"]), var, rtol=1e-14)


def test_running_statistics_of_nothing_stay_and_keep_their_dtype(kit):
    old = {k: kit.cast(kit.arrays(np.array([1.5, 2.0], "float32")), "bfloat16") for k in ("mean", "var")}
    zeros = kit.arrays(np.zeros(2, "float32"))
    new = funcga.statistics.running_statistics(
        old, funcga.normalizers.Pooled(zeros, zeros, zeros), share=0.5, unbiased=True
    )
    assert difference(kit, new, old) == 0
    assert str(new["mean"].dtype).endswith("bfloat16")
    ones = zeros + 1
    new = funcga.statistics.running_statistics(
        old, funcga.normalizers.Pooled(ones, ones, zeros), share=0.5, unbiased=True
    )
    assert [float(v) for v in new["var"]] == [0.75, 1.0]  # of one item the variance is 0, not NaN


def test_refusals(kit):
    x = kit.arrays(np.ones((4, 2), "float32"))
    good = {"mean": x[0], "var": x[0]}
    pooled = funcga.normalizers.Pooled(x[0], x[0], x[0])
    update = lambda old, new, share=0.1: funcga.statistics.running_statistics(old, new, share=share, unbiased=True)
    fold = lambda: funcga.accumulate(lambda x: {"s": x}, 2, in_axes=0, fold=funcga.pooled())(x)
    cases = [
        (
            lambda: funcga.statistics.batch_moments(good, -1),
            "count is -1: it is how many items a micro-batch has, at least 0.",
        ),
        (
            lambda: funcga.statistics.batch_moments({"a": {"mean": x[0], "variance": x[0]}}, 2),
            "which is no layer's statistics. They are nested dicts, in which each layer is",
        ),
        (lambda: update(good, pooled, 1.5), "share is 1.5: it is the part of the new statistics, from 0 to 1"),
        (
            lambda: update({"a": good}, {"a": x}),
            "the pooled statistics are not those of these layers: at statistics['a'] it has an array, and there is dict",
        ),
        (
            lambda: update({"a": good}, {"b": pooled}),
            "the pooled statistics are not those of these layers: at statistics it has dict(['b']), and there is dict(['a'])",
        ),
        (
            lambda: update({"a": good}, {"a": funcga.normalizers.Pooled(x, x, x)}),
            "`a.mean` is float32[2], and the pooled statistics for it are float32[4, 2]. Give a Pooled of that shape: what "
            "fold=funcga.pooled() makes of the statistics of micro-batches.",
        ),
        (
            fold,
            "output['s'] is float32[2, 2], and the fold `pooled, pooled` takes leaves of 3 arrays that are stacked on "
            f"axis 0: {kit.xp.__name__}.stack([...]); funcga.statistics.batch_moments makes those of pooled().",
        ),
    ]
    for call, text in cases:
        with pytest.raises(FuncgaError) as caught:
            call()
        assert text in str(caught.value)


def test_a_layer_has_a_mean_and_a_variance(kit):
    x = kit.arrays(np.ones(2, "float32"))
    with pytest.raises(KeyError, match="variance"):
        funcga.statistics.running_statistics(
            {"mean": x, "variance": x}, funcga.normalizers.Pooled(x, x, x), share=0.1, unbiased=True
        )


def test_a_mean_and_a_variance_of_different_shapes(kit):
    x = kit.arrays(np.ones((4, 2), "float32"))
    with pytest.raises((ValueError, RuntimeError)):
        funcga.statistics.batch_moments({"a": {"mean": x[0], "var": x}}, 2)
    with pytest.raises((ValueError, RuntimeError)):
        funcga.statistics.batch_moments({"a": {"mean": x[0], "var": x[0]}}, x)
