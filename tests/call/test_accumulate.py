"""`accumulate` has the properties, in both frameworks, with every kind of gradient function and tree."""

import copy
import inspect
from collections import OrderedDict, namedtuple

import jax
import numpy as np
import pytest
import torch

import funcga
from tests import problems, properties
from tests.kits import LIMITS, counted, difference, dtypes


@pytest.mark.parametrize("problem", problems.PROBLEMS)
def test_equals_the_full_batch(kit, dtype, problem):
    properties.equals_the_full_batch(kit, funcga.accumulate, dtype, problem)


@pytest.mark.parametrize("check", properties.WITHOUT_PARAMETERS, ids=lambda f: f.__name__)
def test_property(kit, check):
    check(kit, funcga.accumulate)


def test_every_spelling_of_a_gradient(kit):
    params, batch, loss = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    value, grads = funcga.value_and_grad(loss)(params, *batch)
    grad, both, aux_grad = (
        (torch.func.grad, torch.func.grad_and_value, torch.func.grad)
        if kit.name == "torch"
        else (jax.grad, jax.value_and_grad, jax.grad)
    )
    run = lambda fn, **options: funcga.accumulate(fn, 5, **options)(params, *batch)
    assert difference(kit, run(grad(loss)), grads) <= LIMITS["float32"]
    in_order = (grads, value) if kit.name == "torch" else (value, grads)
    assert difference(kit, run(both(loss)), in_order) <= LIMITS["float32"]
    with_aux = aux_grad(lambda p, x, y: (loss(p, x, y), {"sum": x.sum()}), has_aux=True)
    got = run(with_aux, fold=(funcga.mean(), {"sum": funcga.sum()}))
    assert difference(kit, got, (grads, {"sum": batch[0].sum()})) <= LIMITS["float32"]
    assert difference(kit, run(lambda p, x, y: loss(p, x, y)), value) <= LIMITS["float32"]
    second = grad(lambda p, x, y: sum((g**2).sum() for g in grad(loss)(p, x, y).values()))
    assert difference(kit, funcga.accumulate(second, 1)(params, *batch), second(params, *batch)) <= LIMITS["float32"]


def test_a_batch_of_fewer_rows_than_n_has_one_micro_batch_for_each(kit):
    """The last batch of an epoch is as exact as the others, also where statistics say how many there were."""
    params, batch, loss = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    gradient = funcga.value_and_grad(loss)
    few = [leaf[:3] for leaf in batch]
    step = funcga.accumulate(lambda *args: (gradient(*args), len(args[1])), 7, fold=(funcga.mean(), funcga.sum()))
    result, rows = step(params, *few)
    assert int(rows) == 3
    assert difference(kit, result, gradient(params, *few)) <= LIMITS["float32"]
    moments = funcga.accumulate(lambda x: x.sum(), 7, in_axes=0, fold=funcga.moments())(few[0][:, 0])
    assert difference(kit, moments.mean, few[0][:, 0].mean()) <= LIMITS["float32"]
    result = funcga.coupled(lambda p, x: x * p, lambda p, s: (s @ s.T).sum(), 7)(batch[1].sum(), few[0])
    whole = funcga.value_and_grad(lambda p, x: ((x * p) @ (x * p).T).sum())(batch[1].sum(), few[0])
    assert difference(kit, result, whole) <= LIMITS["float32"]


def test_in_a_transform_of_its_framework(kit):
    """accumulate can itself be differentiated and vmapped."""
    params, batch, loss = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    step = funcga.accumulate(funcga.grad(loss), 5)
    whole = funcga.grad(loss)
    norm = lambda f: funcga.grad(lambda p: sum((g**2).sum() for g in f(p, *batch).values()))
    assert difference(kit, norm(step)(params), norm(whole)(params)) <= 2 * LIMITS["float32"]
    vmap = torch.func.vmap if kit.name == "torch" else jax.vmap
    pair = kit.arrays((np.stack([problems.regression(seed=s)[1][0] for s in (0, 3)]), problems.regression()[1][1]))
    got = (
        vmap(step, in_dims=(None, 0, None))(params, *pair)
        if kit.name == "torch"
        else vmap(step, (None, 0, None))(params, *pair)
    )
    for k in range(2):
        one = {name: leaf[k] for name, leaf in got.items()}
        assert difference(kit, one, whole(params, pair[0][k], pair[1])) <= LIMITS["float32"]


def test_weights_under_vmap(kit):
    """A weight that differs between the examples of a vmap stays on the device and is still exact."""
    params, (batch,), loss = problems.tokens()
    params, batch = kit.arrays(params), kit.arrays(batch)
    step = funcga.accumulate(funcga.value_and_grad(loss), 4, fold=funcga.per_weight(), weight=lambda b: b["mask"].sum())
    vmap = torch.func.vmap if kit.name == "torch" else jax.vmap
    masks = kit.xp.stack([batch["mask"], 1 - batch["mask"]])
    got = vmap(lambda mask: step(params, {**batch, "mask": mask}))(masks)
    for k in range(2):
        one = problems.full_gradient(kit, params, ({**batch, "mask": masks[k]},), loss, problems.token_count)
        assert difference(kit, (got[0][k], [got[1][0][k], (got[1][1][0][k],)]), one) <= LIMITS["float32"]


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "tree",
    [
        lambda a: a,
        lambda a: [a, a + 1],
        lambda a: (a, [a * 2, {"k": a}]),
        lambda a: {"z": a, "a": a + 1, "none": None},
        lambda a: OrderedDict([("z", a), ("a", (a, None))]),
        lambda a: Point(a, {"empty": (), "a": a}),
        lambda a: {1: a, 0: a + 1},
    ],
)
def test_any_tree_comes_back_as_it_was(kit, tree):
    x = kit.arrays(np.arange(10, dtype="float32").reshape(5, 2))
    params = tree(kit.arrays(np.ones(2, "float32")))
    flatten = kit.backend.trees.flatten
    gradient = lambda p, x: kit.backend.trees.unflatten(
        flatten(p)[1], [leaf if leaf is None else leaf * x.mean() for leaf in flatten(p)[0]]
    )
    out = funcga.accumulate(gradient, 3)(params, x)
    assert flatten(out)[1] == flatten(params)[1]
    assert type(out) is type(params) or not isinstance(params, dict | tuple)
    assert difference(kit, out, gradient(params, x)) <= LIMITS["float32"]


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_any_axis_of_any_rank(kit, axis, n):
    x = kit.arrays(problems.rng(2).normal(size=(7, 7, 7)).astype("float32"))
    out = funcga.accumulate(lambda x: x, n, in_axes=axis, fold=funcga.concat(axis))(x)
    np.testing.assert_array_equal(kit.numpy(out), kit.numpy(x))


def test_keyword_arguments_are_passed_whole(kit):
    x = kit.arrays(np.arange(6, dtype="float32"))
    seen = []

    def gradient(p, x, *, scale, mode, flag, table=None):
        seen.append((mode, flag, table["t"].shape))
        return p * x.mean() * scale

    out = funcga.accumulate(gradient, 3)(
        kit.arrays(np.float32(2)), x, scale=kit.arrays(np.float32(3)), mode="a", flag=True, table={"t": x}
    )
    assert float(out) == 15
    assert set(seen) == {("a", True, (6,))}


def test_a_signature_is_kept(kit):
    def gradient(params, batch):
        """What it is."""

    step = funcga.accumulate(gradient, 2)
    assert (step.__name__, step.__doc__) == ("gradient", "What it is.")
    assert str(inspect.signature(step)) == "(params, batch)"
    assert funcga.accumulate(funcga.grad(gradient), 2).__doc__.startswith("The fold of grad_fn over the micro-batches")
    assert str(inspect.signature(funcga.accumulate(funcga.grad(lambda w, *, scale: w), 2))) == "(w, *, scale)"


def test_numpy_arrays_join_the_arrays_of_the_call():
    params, (x, y), loss = problems.regression()
    import jax.numpy as jnp

    mixed = {k: jnp.asarray(v) for k, v in params.items()}
    got = funcga.accumulate(funcga.grad(loss), 5)(mixed, x, y)
    from tests.kits import JAX

    assert difference(JAX, got, funcga.grad(loss)(mixed, jnp.asarray(x), jnp.asarray(y))) <= LIMITS["float32"]


def test_sums_agree_to_the_bit_with_numpy():
    """Left-to-right float32 sums are one number in NumPy, torch and JAX."""
    from tests.kits import JAX, TORCH

    rows = problems.rng(5).normal(size=(37, 11)).astype("float32") * 10.0 ** problems.rng(6).integers(-3, 4, (37, 11))
    rows = rows.astype("float32")
    expected = np.zeros(11, "float32")
    for row in rows:
        expected = expected + row
    for kit in (TORCH, JAX):
        out = funcga.accumulate(lambda x: x[0], 37, in_axes=0, fold=funcga.sum())(kit.arrays(rows))
        np.testing.assert_array_equal(kit.numpy(out), expected)


def test_parts_of_a_fold_mix(kit):
    every_alike = funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)
    by_steps = funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps)
    x = kit.arrays(np.arange(10, dtype="float32"))
    means = [chunk.mean() for chunk in np.split(np.arange(10.0), [4, 7])]
    assert float(funcga.accumulate(lambda x: x.mean(), 3, in_axes=0, fold=every_alike)(x)) == pytest.approx(
        np.mean(means)
    )
    expected = sum(w * m for w, m in zip((4, 3, 3), means, strict=True)) / 3
    assert float(funcga.accumulate(lambda x: x.mean(), 3, in_axes=0, fold=by_steps)(x)) == pytest.approx(expected)


def test_a_fold_of_ones_own(kit):
    """A reducer may lift several arrays, and any associative operation is a monoid."""
    log_mean_exp = funcga.Fold(
        funcga.Reducer(lambda xp, v, w: (xp.exp(v) * w, xp.ones_like(v) * w), funcga.monoids.sum),
        funcga.normalizers.Normalizer(lambda xp, r, tally: xp.log(r[0] / r[1])),
    )
    product = funcga.Fold(
        funcga.Reducer(lambda xp, v, w: v, funcga.Monoid(lambda xp, like: xp.ones_like(like), lambda xp, a, b: a * b)),
        funcga.normalizers.identity,
    )
    x = kit.arrays(np.array([1.0, 2.0, 3.0, 4.0], "float32"))
    out = funcga.accumulate(lambda x: (x.sum(), x.sum()), 4, in_axes=0, fold=(log_mean_exp, product))(x)
    assert float(out[0]) == pytest.approx(np.log(np.mean(np.exp([1, 2, 3, 4]))))
    assert float(out[1]) == 24


def test_dtypes_on_request(kit, x64):
    x = kit.arrays(np.array([1e8, 1.0, -1e8, 1.0], "float32"))
    run = lambda fold: funcga.accumulate(lambda x: x.sum(), 4, in_axes=0, fold=fold)(x)
    assert float(run(funcga.sum())) == 1.0
    wide = run(funcga.sum(dtype="float64"))
    assert (float(wide), dtypes(kit, wide)) == (2.0, ["float32"])
    assert dtypes(kit, run(funcga.mean(out_dtype="float64"))) == ["float64"]
    ints = kit.arrays(np.array([1, 2, 3, 5], "int32"))
    average = funcga.accumulate(lambda x: x.sum(), 4, in_axes=0, fold=funcga.mean(dtype="float32"))(ints)
    assert (float(average), dtypes(kit, average)) == (2.75, ["float32"])


def test_integers_and_bools_are_summed_without_overflow(kit):
    x = kit.arrays(np.full(300, 100, "int32"))
    small = funcga.accumulate(lambda x: kit.cast(x.sum(), "int8") // 100, 100, in_axes=0, fold=funcga.sum())
    assert int(small(x[:100])) == 100
    assert int(funcga.accumulate(lambda x: x.sum() > 0, 300, in_axes=0, fold=funcga.sum())(x)) == 300
    big = kit.arrays(np.full(4, 2**24 + 1, "int32"))
    assert int(funcga.accumulate(lambda x: x.sum(), 4, in_axes=0, fold=funcga.sum())(big)) == 4 * (2**24 + 1)


def test_numbers_and_none_in_the_output(kit):
    x = kit.arrays(np.arange(4, dtype="float32"))
    out = funcga.accumulate(lambda x: {"loss": x.mean(), "two": 2.0, "nothing": None}, 2, in_axes=0)(x)
    assert (float(out["loss"]), float(out["two"]), out["nothing"]) == (1.5, 2.0, None)


def test_complex_values(kit):
    x = kit.arrays((np.arange(5) + 1j * np.arange(5)[::-1]).astype("complex64"))
    out = funcga.accumulate(lambda x: x.mean(), 2, in_axes=0)(x)
    np.testing.assert_allclose(kit.numpy(out), 2 + 2j, rtol=1e-6)


def test_weights_of_every_kind(kit):
    x = kit.arrays(np.array([1.0, 2.0, 4.0], "float32"))
    kinds = [
        lambda x: 2,
        lambda x: 0.5,
        lambda x: np.float32(3),
        lambda x: np.array(2),
        lambda x: True,
        lambda x: x.max() * 0 + 7,
    ]
    for weight in kinds:
        out = funcga.accumulate(lambda x: x.sum(), 3, in_axes=0, weight=weight)(x)
        assert float(out) == pytest.approx(7 / 3)
    uneven = funcga.accumulate(lambda x: x.sum(), 3, in_axes=0, weight=lambda x: x.sum())(x)
    assert float(uneven) == pytest.approx((1 + 4 + 16) / 7)


def test_very_large_weights(kit):
    x = kit.arrays(np.array([1.0, 2.0, 4.0], "float32"))
    for weight in (2**31, 10**12, 1e30):
        assert float(
            funcga.accumulate(lambda x: x.sum(), 3, in_axes=0, weight=lambda x, w=weight: w)(x)
        ) == pytest.approx(7 / 3)
        accumulator = funcga.Accumulator()
        state = accumulator.update(accumulator.init(x), x, weight=weight)
        assert float(accumulator.finalize(state)[2]) == 4


def test_weight_gets_what_is_split(kit):
    x = kit.arrays(np.arange(6, dtype="float32"))
    seen = []

    def weight(*args):
        seen.append([tuple(a["x"].shape) if isinstance(a, dict) else tuple(a.shape) for a in args])
        return 1

    gradient = lambda p, a, q, b, s: (p * a.mean() * q * b["x"].mean() * b["whole"].sum(), s)
    one = kit.arrays(np.float32(1))
    step = funcga.accumulate(
        gradient, 2, weight=weight, fold=(funcga.mean(), funcga.carry()),
        in_axes=(None, np.int64(0), None, {"x": 0, "whole": None}, funcga.CARRY),
    )  # fmt: skip
    step(one, x, one, {"x": x, "whole": x}, one)
    assert [(3,), (3,)] in seen
    assert all(shapes == [(3,), (3,)] for shapes in seen)


def test_grad_fn_is_called_once_for_each_microbatch():
    x = funcga.to_torch(np.arange(6, dtype="float32"))
    gradient, calls = counted(lambda x: x.sum())
    funcga.accumulate(gradient, 3, in_axes=0)(x)
    assert len(calls) == 3


def test_errors_of_grad_fn_pass_through(kit):
    class Mine(Exception):
        pass

    def gradient(x):
        raise Mine

    with pytest.raises(Mine):
        funcga.accumulate(gradient, 2, in_axes=0)(kit.arrays(np.ones(4, "float32")))


def test_the_largest_of_8_bit_floats(kit):
    x = kit.cast(kit.arrays(np.arange(1, 5, dtype="float32").reshape(4, 1)), "float8_e4m3fn")
    out = funcga.accumulate(lambda x: (x[0], x[0]), 4, in_axes=0, fold=(funcga.max(), funcga.min()))(x)
    assert [float(v[0]) for v in out] == [4, 1]
    assert "float8_e4m3fn" in str(out[0].dtype)


def test_an_empty_leaf(kit):
    x = kit.arrays(np.ones((4, 0), "float32"))
    out = funcga.accumulate(lambda x: (x, x.sum(0)), 2, in_axes=0, fold=(funcga.concat(), funcga.mean()))(x)
    assert [tuple(leaf.shape) for leaf in out] == [(4, 0), (0,)]


def test_16_bit_floats_summed_as_integers(kit):
    ones = kit.cast(kit.arrays(np.ones(4, "float32")), "bfloat16")
    assert float(funcga.accumulate(lambda x: x.sum(), 4, in_axes=0, fold=funcga.sum(dtype="int32"))(ones)) == 4


def test_a_copy_of_a_fold_is_the_fold(kit):
    step = lambda fold: funcga.accumulate(lambda s, x: (x.sum(), s + x.sum()), 2, in_axes=(funcga.CARRY, 0), fold=fold)
    fold = copy.deepcopy((funcga.sum(), funcga.carry()))
    one, x = kit.arrays(np.float32(1)), kit.arrays(np.ones(4, "float32"))
    assert [float(v) for v in step(fold)(one, x)] == [4, 5]


def test_a_ratio_has_a_denominator_of_its_own(kit):
    """Accuracy over tokens, where micro-batches are weighed by their rows and have different numbers of tokens."""
    rng = np.random.default_rng(0)
    correct, counted = rng.integers(0, 2, (7, 5)), rng.integers(0, 2, (7, 5))
    pairs = kit.arrays(np.stack([correct * counted, counted], 1).astype("int32"))
    grad_fn = lambda w, pairs: {"accuracy": pairs.sum((0, 2)), "each": pairs.sum(0) * 1}
    if kit.name == "jax":
        grad_fn = lambda w, pairs: {"accuracy": pairs.sum((0, 2), dtype="int32"), "each": pairs.sum(0, dtype="int32")}
    found = funcga.accumulate(grad_fn, 3, fold=funcga.ratio())(kit.arrays(np.zeros((), "float32")), pairs)
    assert dtypes(kit, found) == ["float32", "float32"]
    np.testing.assert_allclose(kit.leaves(found["accuracy"])[0], (correct * counted).sum() / counted.sum(), rtol=1e-7)
    np.testing.assert_allclose(kit.leaves(found["each"])[0], (correct * counted).sum(0) / counted.sum(0), rtol=1e-7)


def test_a_ratio_of_nothing_is_zero_and_integers_are_exact(kit):
    accumulator = funcga.Accumulator(funcga.ratio(out_dtype="float64" if kit.name == "torch" else "float32"))
    pair = kit.arrays(np.array([0, 0], "int32"))
    state = accumulator.init(pair)
    assert float(accumulator.finalize(state)) == 0
    state = accumulator.update(state, kit.arrays(np.array([2**24 + 1, 2**25], "int32")), weight=0)
    state = accumulator.update(state, kit.arrays(np.array([2**24 - 1, 0], "int32")), weight=3)
    assert float(accumulator.finalize(state)) == 1
    for _ in range(6):  # more than 31 bits
        state = accumulator.merge(state, state)
    assert float(accumulator.finalize(accumulator.update(state, kit.arrays(np.array([-1, -1], "int32"))))) == 1


def test_a_ratio_of_no_pair_is_refused(kit):
    with pytest.raises(funcga.FuncgaError) as error:
        funcga.accumulate(lambda w, x: x[:3], 2, fold=funcga.ratio())(
            kit.arrays(np.zeros((), "float32")), kit.arrays(np.ones((6,), "float32"))
        )
    assert str(error.value) == (
        "output is float32[3], and the fold `pairs, ratio` takes leaves of 2 arrays that are stacked on axis 0: "
        f"{kit.xp.__name__}.stack([correct, counted]) for ratio()."
    )


@pytest.mark.parametrize(("fold", "expected"), [(funcga.max(), True), (funcga.min(), False)])
def test_extremes_of_bools_are_bools(kit, fold, expected):
    b = kit.arrays(np.array([True, False, True, True]))
    gradient = lambda p, b: {"any": b.any(), "each": b[:1] & b[-1:]}
    one = kit.arrays(np.float32(1))
    for result in (
        funcga.accumulate(lambda p, b: {"any": b[0], "each": b[:1]}, 4, fold=fold)(one, b),
        funcga.stream(gradient, fold=fold)(one, [b[:2], b[1:2], b[2:]]),
    ):
        assert {str(leaf.dtype).removeprefix("torch.") for leaf in result.values()} == {"bool"}
        assert kit.numpy(result)["any"] == expected
        assert kit.numpy(result)["each"].tolist() == [expected]
    accumulator = funcga.Accumulator(fold)
    nothing = kit.numpy(accumulator.finalize(accumulator.init(b)))
    assert nothing.dtype == bool
    assert nothing.tolist() == [not expected] * 4  # the identity
    as_numbers = funcga.accumulate(lambda p, b: b[0], 4, fold=type(fold)(
        funcga.Reducer(fold.reducer.lift, fold.reducer.monoid, dtype="int32"), fold.normalizer
    ))(one, b)  # fmt: skip
    assert str(as_numbers.dtype).removeprefix("torch.") == "int32"
