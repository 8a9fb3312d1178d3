"""All stock folds at once, as one tree of folds over one output, in every dtype, against NumPy in float64.

At each of four calls of a step: at first, with other values, with another structure, and as at first.
"""

from itertools import product

import jax
import numpy as np
import pytest
import torch

import funcga
from tests import oracle, properties
from tests.core.sources import bounds
from tests.kits import JAX, TORCH, dtypes

FOLDS = {
    "mean": funcga.mean(),
    "per_weight": funcga.per_weight(),
    "sum": funcga.sum(),
    "by_steps": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps),
    "weighted sum": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.identity),
    "max": funcga.max(),
    "min": funcga.min(),
    "logsumexp": funcga.logsumexp(),
    "moments": funcga.moments(),
    "concat": funcga.concat(),
    "pooled": funcga.pooled(),
    "ratio": funcga.ratio(),
    "reproducible": funcga.reproducible(funcga.mean()),
}
# How far results may be off: one unit in the last place of the dtype, or some hundred roundings of the accumulator's.
LIMITS = {"float64": 1e-13, "float32": 2e-5, "bfloat16": 2**-8, "float16": 2**-10}
MANY = 300  # so many that sums of 16 bits would lose the last ones


def output(kit, x):
    """What every fold is of, of the one row of x."""
    row = x[0]
    stacked = kit.xp.stack([abs(row), row, row * row])
    values = dict.fromkeys(FOLDS, row) | {"concat": x, "pooled": stacked, "ratio": stacked[1:]}
    return {**values, "nothing": None, "number": 2.0}


def expected(name, rows, weights):
    if name == "concat":
        return [rows]
    if name == "ratio":
        return [sum(rows) / sum(rows * rows)]
    if name == "weighted sum":
        return [sum(weights) * oracle.fold("mean", [*rows], weights)]
    if name == "reproducible":
        name = "mean"
    found = oracle.fold(name, [*rows], weights)
    return [*found] if isinstance(found, tuple) else [found]


def streamed(gradient, n, **options):
    """`accumulate` by `stream`, on micro-batches that are cut here."""
    step, axes = funcga.stream(gradient, **options), options.get("in_axes")
    leading = {0: 0, None: 1}.get(axes, 1)  # arguments that are not cut

    def on_batch(*args):
        rows, kinds = len(args[-1]["x"] if isinstance(args[-1], dict) else args[-1]), [tuple, list]
        cut = bounds({"n": n}, rows)
        items = [[rows_of(arg, a, b) for arg in args[leading:]] for a, b in cut]
        return step(*args[:leading], [kinds[index % 2](item) for index, item in enumerate(items)])

    return on_batch


def rows_of(arg, a, b):
    return {name: leaf[a:b] for name, leaf in arg.items()} if isinstance(arg, dict) else arg[a:b]


def by_state(gradient, n, fold=None, weight=None, in_axes=0):
    """`accumulate` by an Accumulator, without state that is threaded."""
    accumulator = funcga.Accumulator(fold)

    def on_batch(*args):
        state = None
        for a, b in bounds({"n": n}, len(args[-1])):
            part = [arg[a:b] for arg in args]
            value = gradient(*part)
            state = accumulator.init(value) if state is None else state
            state = accumulator.update(state, value, weight=b - a if weight is None else weight(*part))
        return accumulator.finalize(state)

    return on_batch


WAYS = {"accumulate": funcga.accumulate, "stream": streamed, "Accumulator": by_state}


def close(kit, found, name, wanted, limit):
    for leaf, value in zip(kit.leaves(found[name]), wanted, strict=True):
        np.testing.assert_allclose(leaf, value, rtol=limit, atol=limit / 10, err_msg=name)


CASES = [
    *product([TORCH], LIMITS, WAYS, ["rows", "numbers", "arrays"]),
    # each is a program to compile, or a hundred small ones
    *product([JAX], LIMITS, ["accumulate"], ["rows", "arrays"]),
    *product([JAX], ["float32"], ["stream", "Accumulator"], ["numbers", "arrays"]),
]


@pytest.mark.parametrize(("kit", "dtype", "way", "weighing"), CASES, ids=lambda part: getattr(part, "name", part))
def test_every_fold(kit, dtype, way, weighing):
    many = MANY if way == "accumulate" else 9
    weight = {"rows": None, "numbers": lambda x, w: 0.5, "arrays": lambda x, w: w.sum()}[weighing]
    fold = {**FOLDS, "nothing": funcga.mean(), "number": funcga.mean()}
    step = WAYS[way](lambda x, w: output(kit, x), many, in_axes=0, fold=fold, weight=weight)
    with jax.enable_x64(dtype == "float64"):
        for seed, width in ((2, 3), (3, 3), (4, 2), (2, 3)):
            r = np.random.default_rng(seed)
            rows, each = r.uniform(0.5, 1.5, (many, width)), r.integers(0, 4, many)
            x = kit.cast(kit.arrays(rows.astype("float64" if dtype == "float64" else "float32")), dtype)
            rows = kit.leaves(x)[0]  # as they are rounded
            weights = {"rows": np.ones(many), "numbers": np.full(many, 0.5), "arrays": each}[weighing]
            found = step(x, kit.arrays(each.astype("int32")))
            for name in FOLDS:
                close(kit, found, name, expected(name, rows, weights), LIMITS[dtype])
            narrow = {
                name: leaf for name, leaf in found.items() if name not in ("pooled", "ratio", "number", "nothing")
            }
            assert {*dtypes(kit, narrow)} == {dtype}
            assert (found["nothing"], float(found["number"])) == (None, 2)


@pytest.mark.parametrize("way", ["accumulate", "stream"])
def test_state_is_threaded_in_order_beside_folds(kit, way):
    step = WAYS[way](
        lambda state, x: (x.sum(), {"seen": state["seen"] + 1, "s": 2 * state["s"] + x.sum()}), 4,
        in_axes=(funcga.CARRY, 0), fold=(funcga.max(), funcga.carry()),
    )  # fmt: skip
    for start, count in ((1, 7), (3, 7), (2, 9), (1, 7)):
        rows = np.arange(start, start + count, dtype="float32")
        state = {"s": kit.arrays(np.float32(start)), "seen": kit.arrays(np.int32(start - 1))}
        largest, after = step(state, kit.arrays(rows))
        sums = [rows[a:b].sum() for a, b in bounds({"n": 4}, count)]
        by_hand = float(start)
        for total in sums:
            by_hand = 2 * by_hand + total
        assert (float(largest), float(after["s"]), int(after["seen"])) == (max(sums), by_hand, start + 3)
        assert (float(state["s"]), int(state["seen"])) == (start, start - 1)


@pytest.mark.parametrize("way", ["accumulate", "stream"])
def test_state_that_changes_its_type_is_threaded_as_in_a_loop_and_a_scan_refuses_it(kit, way):
    step = WAYS[way](
        lambda state, x: (x.sum(), kit.cast(state, "float32") * 0.5 + x.sum()),
        2,
        in_axes=(funcga.CARRY, 0),
        fold=(funcga.max(), funcga.carry()),
    )
    state, rows = kit.arrays((np.int32(8), np.ones(4, "float32")))
    if kit.name == "torch" or way == "stream":
        assert float(step(state, rows)[1]) == 5
    else:
        with pytest.raises(TypeError, match="int32"):
            step(state, rows)


@pytest.mark.parametrize("way", WAYS)
def test_integers_bools_and_complex_numbers(kit, way):
    values = lambda x: {
        "sum": x.sum(), "max": x.max(), "min": x.min(), "any": (x < 0).any(), "all": (x < 0).all(), "rows": x,
        "complex": x.sum() * kit.arrays(np.complex64(1j)), "counted": x.sum() > 0,
        "ratio": kit.xp.stack([x.sum(), x.sum() * 0 + 1]),
    }  # fmt: skip
    fold = {
        "sum": funcga.sum(), "max": funcga.max(), "min": funcga.min(), "any": funcga.max(), "all": funcga.min(),
        "rows": funcga.concat(), "complex": funcga.mean(), "counted": funcga.sum(),
        "ratio": funcga.ratio(),
    }  # fmt: skip
    step = WAYS[way](values, 4, in_axes=0, fold=fold)
    for rows in ([2**24 + 1, 3, -5, 8], [7, -3, 2**24 + 1, 5], [2**24, 3, 1, -5, 8, 5], [2**24 + 1, 3, -5, 8]):
        x = np.array(rows, "int32")
        with jax.numpy_dtype_promotion("standard"):
            found = step(kit.arrays(x))
        parts = [x[a:b] for a, b in bounds({"n": 4}, len(x))]
        means = sum(float(part.sum()) * len(part) for part in parts) / len(x)
        numbers = {name: kit.numpy(leaf).tolist() for name, leaf in found.items()}
        assert numbers == {
            "sum": sum(rows), "max": max(rows), "min": min(rows), "any": True,
            "all": all((part < 0).any() for part in parts), "rows": rows, "complex": numbers["complex"],
            "counted": sum(bool(part.sum() > 0) for part in parts), "ratio": float(np.float32(sum(rows) / 4)),
        }  # fmt: skip
        assert abs(numbers["complex"] - 1j * means) < 1


MANY_OF_MANY = 10**14 + 1, 3 * 10**14  # float32 has 24 bits of it


@pytest.mark.parametrize("way", WAYS)
def test_a_ratio_of_integers_is_what_their_quotient_is(kit, x64, way):
    """As of 64 bits in JAX; in torch in its default dtype, though not in fewer than 32 bits, and in the one asked for."""
    counts, exact = kit.arrays(np.array([[*MANY_OF_MANY]] * 3)), MANY_OF_MANY[0] / MANY_OF_MANY[1]
    ratio = lambda **options: WAYS[way](lambda x: x.sum(0), 3, in_axes=0, fold=funcga.ratio(**options))(counts)
    defaults = [torch.float64] if kit is JAX else [torch.float64, torch.float32, torch.bfloat16]
    for default in defaults:
        torch.set_default_dtype(default)
        try:
            found = ratio()
        finally:
            torch.set_default_dtype(torch.float32)
        is_wide = default is torch.float64
        assert str(found.dtype).endswith("float64" if is_wide else "float32")
        assert abs(float(found) / exact - 1) < (1e-15 if is_wide else 3e-7)
    assert float(ratio(out_dtype="float64")) == exact
    assert float(ratio(out_dtype="bfloat16")) == float(torch.tensor(exact).bfloat16())


@pytest.mark.parametrize("way", [way for way in WAYS if way != "Accumulator"])
@pytest.mark.parametrize("check", properties.WITHOUT_PARAMETERS, ids=lambda check: check.__name__)
def test_property(kit, way, check):
    check(kit, WAYS[way])


def test_dtypes_that_are_asked_for(kit, x64):
    x = kit.arrays(np.array([1e8, 1.0, -1e8, 1.0], "float32"))
    fold = {
        "narrow": funcga.sum(), "wide": funcga.sum(dtype="float64"), "out": funcga.mean(out_dtype="float64"),
        "half": funcga.sum(out_dtype="bfloat16"),
    }  # fmt: skip
    found = funcga.accumulate(lambda x: dict.fromkeys(fold, x.sum()), 4, in_axes=0, fold=fold)(x)
    assert (float(found["narrow"]), float(found["wide"])) == (1, 2)
    kinds = {name: dtypes(kit, leaf)[0] for name, leaf in found.items()}
    assert kinds == {"narrow": "float32", "wide": "float32", "out": "float64", "half": "bfloat16"}


def test_a_fold_is_a_prefix_and_parts_of_folds_mix(kit):
    """One Fold for all that stands below it; a fold of one's own lifts two arrays of a leaf."""
    root = funcga.Fold(
        funcga.Reducer(lambda xp, v, w: (v * v * w, xp.ones_like(v) * w), funcga.monoids.sum),
        funcga.normalizers.Normalizer(lambda xp, reduced, tally: xp.sqrt(reduced[0] / reduced[1])),
    )
    step = funcga.accumulate(
        lambda x: ({"a": x.sum(), "b": (x.sum(), x.max())}, x.sum()), 2, in_axes=0,
        fold=({"b": funcga.max(), "a": funcga.sum()}, root),
    )  # fmt: skip
    for first, count in ((1, 5), (3, 5), (1, 6), (1, 5)):
        x = np.arange(first, first + count, dtype="float32")
        found = step(kit.arrays(x))
        sums = [x[a:b].sum() for a, b in bounds({"n": 2}, count)]
        assert [float(leaf) for leaf in (found[0]["a"], *found[0]["b"])] == [sum(sums), max(sums), x.max()]
        squares = sum(total**2 * (b - a) for total, (a, b) in zip(sums, bounds({"n": 2}, count), strict=True))
        np.testing.assert_allclose(float(found[1]), np.sqrt(squares / count), rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_is_bitwise_that_of_a_loop_in_numpy(kit, way):
    step, r = WAYS[way](lambda x: x[0], 20, in_axes=0, fold=funcga.sum()), np.random.default_rng(5)
    for width in (3, 3, 2, 3):
        rows = (r.normal(size=(20, width)) * 10.0 ** r.integers(-3, 4, (20, width))).astype("float32")
        total = np.zeros(width, "float32")
        for row in rows:
            total = total + row
        np.testing.assert_array_equal(kit.numpy(step(kit.arrays(rows))), total)


def test_reproducible_sums_depend_on_no_order(kit):
    step = funcga.accumulate(lambda x: x[0], 24, in_axes=0, fold=funcga.reproducible(funcga.sum()))
    for seed, width in ((6, 3), (7, 3), (8, 2), (6, 3)):
        rows, found = (np.random.default_rng(seed).normal(size=(24, width)) * 1e3).astype("float32"), []
        for order in (slice(None), slice(None, None, -1)):
            found.append(kit.numpy(step(kit.arrays(np.ascontiguousarray(rows[order])))))
        np.testing.assert_array_equal(*found)
        np.testing.assert_allclose(found[0], rows.astype("float64").sum(0), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("weight", [2**31, 10**12, 1e30, 1e-30, True, np.float32(3), np.array(2)], ids=str)
def test_a_common_weight_of_any_size_and_kind_changes_nothing(kit, weight):
    x = kit.arrays(np.array([1.0, 2.0, 4.0], "float32"))
    for way in WAYS.values():
        found = way(lambda x: x.sum(), 3, in_axes=0, weight=lambda x: weight, fold=funcga.mean())(x)
        np.testing.assert_allclose(float(found), 7 / 3, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_says_whether_a_micro_batch_counts(kit, way):
    """A bool, which only the device knows. JAX compares no bool with a number under strict promotion."""
    x = kit.arrays(np.arange(1.0, 7.0, dtype="float32"))
    for fold, want in ((funcga.mean(), 4.5), (funcga.moments(), (4.5, 1.0))):
        step = WAYS[way](lambda x: x.mean(), 3, in_axes=0, fold=fold, weight=lambda x: x[0] > 2)
        np.testing.assert_allclose([kit.numpy(part) for part in kit.leaves(step(x))], np.ravel(want), rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_great_values_are_not_multiplied_out_of_their_range(kit, way):
    """The sum of 64 rows of 1e37, each weighed by its rows, would be infinite."""
    x = kit.arrays(np.full((64, 1), 1e37, "float32"))
    weights = [lambda x: 1000 * len(x), lambda x: 1000 * (x > 0).sum()]
    if kit is TORCH and not x.is_cpu:
        weights.pop()  # torch has no unit for weights that only a device knows
    for n in (4, 5):
        for weight in weights:
            found = WAYS[way](lambda x: x.mean(0), n, in_axes=0, fold=funcga.mean(), weight=weight)(x)
            np.testing.assert_allclose(kit.numpy(found), 1e37, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("light", ["first", "last", "amid"])
def test_a_light_micro_batch_changes_nothing_for_heavy_ones(kit, way, light):
    """Weights of which one is a millionth of the others: sums in its unit would be infinite."""
    if kit is TORCH and way == "Accumulator" and not kit.arrays(np.zeros(1, "float32")).is_cpu:
        return  # torch has no unit for weights that only a device knows
    weights = np.full(6, 1e6, "float32")
    weights[{"first": 0, "last": 5, "amid": 2}[light]] = 1
    x = np.stack([np.full(6, 1e34, "float32"), weights], 1)
    of = lambda x: x[:, 0].mean()
    found = WAYS[way](of, 6, in_axes=0, fold=funcga.mean(), weight=lambda x: x[0, 1])(kit.arrays(x))
    np.testing.assert_allclose(float(found), np.average(np.float64(x[:, 0]), weights=weights), rtol=1e-6)


def test_collected_rows_along_any_axis(kit):
    for axis in (1, -1, -3):
        step = funcga.accumulate(lambda x: x, 3, in_axes=axis, fold=funcga.concat(axis))
        for seed, rows in ((2, 7), (3, 7), (4, 8), (2, 7)):
            x = kit.arrays(np.random.default_rng(seed).normal(size=(rows, 5, 6)).astype("float32"))
            np.testing.assert_array_equal(kit.numpy(step(x)), kit.numpy(x))


@pytest.mark.parametrize("way", ["accumulate", "stream"])
def test_what_grad_fn_returns_may_be_buffers_of_its_own(way):
    """As a captured CUDA graph returns the same memory at every call; no result lies there."""
    state, rows, total = torch.zeros(()), torch.zeros(2), torch.zeros(())

    def reuses(before, x):
        torch.add(before, x.sum(), out=state)
        torch.add(total.copy_(x.sum()), 0, out=total)
        return (rows.copy_(x), total, total), state

    latest = funcga.Monoid(lambda xp, like: xp.zeros_like(like), lambda xp, a, b: b)
    last = funcga.Fold(funcga.Reducer(lambda xp, v, w: v, latest), funcga.normalizers.identity)
    fold = (funcga.concat(), funcga.sum(), last), funcga.carry()
    step, x = WAYS[way](reuses, 3, in_axes=(funcga.CARRY, 0), fold=fold), torch.arange(6.0)
    scales = (1, 2, 3, 1)
    results = [step(torch.tensor(float(scale)), scale * x) for scale in scales]
    for scale, ((collected, summed, latest), after) in zip(scales, results, strict=True):
        assert torch.equal(collected, scale * x)
        assert [float(leaf) for leaf in (summed, latest, after)] == [15 * scale, 9 * scale, 16 * scale]


def test_a_window_goes_on_in_the_other_framework():
    accumulator, value = funcga.Accumulator({"m": funcga.mean(), "s": funcga.moments()}), np.float32([1, 2])
    weights, state = (2**24, 1, 3), None
    for kit, weight in zip((TORCH, JAX, TORCH), weights, strict=True):
        of_kit = {name: kit.arrays(value * weight) for name in ("m", "s")}
        state = accumulator.init(of_kit) if state is None else kit.arrays(state)
        state = accumulator.update(state, of_kit, weight=weight)
    assert sum(float(part) for part in state.tally.weight) == 2**24 + 4
    mean = value * sum(w * w for w in weights) / sum(weights)
    found = accumulator.finalize(state)
    for leaf in (found["m"], found["s"].mean):
        np.testing.assert_allclose(TORCH.numpy(leaf), mean, rtol=1e-6)
