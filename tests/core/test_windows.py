"""`multi_steps` and `Accumulator`: a window spread over calls, its state, what is dropped, donated, left by an error."""

import io

import jax
import numpy as np
import pytest
import torch

import funcga
import jax_backend
import torch_backend
from tests import oracle
from tests.core.sources import negated
from tests.kits import JAX, TORCH, Unseen, difference, dtypes

SHAPES = {"b": (2,), "scale": (), "w": (3, 2)}
LIMIT = 3e-7  # a few roundings of float32


def tree(kit, seed, dtype="float32", shapes=SHAPES):
    r = np.random.default_rng(seed)
    return kit.arrays({name: r.normal(size=shape).astype(dtype) for name, shape in shapes.items()})


def grads_of(kit, count, seed=10, shapes=SHAPES):
    return [tree(kit, seed + k, shapes=shapes) for k in range(count)]


def rounds(kit, count):
    """Gradients, for windows of one transform after the other: other values, other shapes, and the first again."""
    wide = {"b": (5,), "scale": (), "w": (2, 2)}
    for seed, shapes in ((10, SHAPES), (30, SHAPES), (50, wide), (10, SHAPES)):
        yield grads_of(kit, count, seed, shapes), tree(kit, 1, shapes=shapes)


def folded(kit, grads, weights=None, name="mean"):
    """What NumPy makes of them."""
    weights = np.ones(len(grads)) if weights is None else weights
    leaf = lambda key: oracle.fold(name, [kit.numpy(g[key]) for g in grads], weights).astype("float32")
    return kit.arrays({key: np.asarray(leaf(key)) for key in SHAPES})


def spoilt(kit, grads, value=float("nan")):
    return {**grads, "b": grads["b"] * 0 + value}


def counting():
    """Negated gradients; the state counts its runs."""

    def update(grads, state, params=None, **extra):
        return negated().update(grads, ())[0], {"runs": state["runs"] + 1}

    return update


def made(kit, n, **options):
    start = lambda params: {"runs": kit.backend.arrays.as_array(0, kit.xp.int32)}
    return funcga.multi_steps(funcga.transforms.Transform(start, counting()), n, **options)


def run(tx, kit, grads, weights=None, state=None, params=None):
    """What each call returns, (updates, whether it was an update), and the last state."""
    params, found = tree(kit, 1) if params is None else params, []
    state = tx.init(params) if state is None else state
    for index, grad in enumerate(grads):
        updates, state = tx.update(grad, state, params, weight=1 if weights is None else weights[index])
        found.append((negated().update(updates, ())[0], bool(tx.has_updated(state))))
    return found, state


def test_windows_follow_one_another(kit):
    weights, tx = [5, 0.5, 2.5, 1, 1, 2**24, 3], made(kit, 3)
    for grads, params in rounds(kit, 7):
        found, state = run(tx, kit, grads, weights, params=params)
        assert [ends for _, ends in found] == [False, False, True] * 2 + [False]
        for index, (update, ends) in enumerate(found):
            if ends:
                wanted = folded(kit, grads[index - 2 : index + 1], weights[index - 2 : index + 1])
                assert difference(kit, update, wanted) <= LIMIT
            else:
                assert not any(leaf.any() for leaf in kit.leaves(update))
        assert (int(state.updates), int(state.offered), int(state.inner["runs"])) == (2, 1, 2)


def test_update_is_accumulate_and_flush(kit):
    tx = made(kit, 3)
    for grads, params in rounds(kit, 3):
        (*_, (joined, _)), after = run(tx, kit, grads, [1, 2, 3], params=params)
        state = tx.init(params)
        for index, grad in enumerate(grads):
            state = tx.accumulate(grad, state, weight=index + 1)
            assert not tx.has_updated(state)
        updates, state = tx.flush(state, params)
        assert tx.has_updated(state)
        assert difference(kit, negated().update(updates, ())[0], joined) == 0
        assert difference(kit, state, after) == 0


def test_an_empty_window_is_not_flushed(kit):
    tx, params = made(kit, 3), tree(kit, 1)
    with pytest.raises(funcga.FuncgaError, match="the window is empty"):
        tx.flush(tx.init(params), params)


@pytest.mark.parametrize("name", ["sum", "per_weight", "max", "min", "logsumexp"])
def test_other_folds(kit, name):
    weights, tx = [1, 3, 2, 5], made(kit, 2, fold=getattr(funcga, name)())
    for grads, params in rounds(kit, 4):
        found, _ = run(tx, kit, grads, weights, params=params)
        for last in (1, 3):
            wanted = folded(kit, grads[last - 1 : last + 1], weights[last - 1 : last + 1], name)
            assert difference(kit, found[last][0], wanted) <= LIMIT


def test_a_tree_of_folds(kit):
    fold = {"w": funcga.sum(), "b": funcga.mean(), "scale": funcga.max()}
    tx = made(kit, 2, fold=fold)
    for grads, params in rounds(kit, 2):
        found, _ = run(tx, kit, grads, [1, 3], params=params)
        for key, name in (("w", "sum"), ("b", "mean"), ("scale", "max")):
            assert difference(kit, found[1][0][key], folded(kit, grads, [1, 3], name)[key]) <= LIMIT


@pytest.mark.parametrize(
    ("n", "ends"),
    [
        (lambda updates: 1 + 2 * (updates > 0), [0, 3]),
        (funcga.transforms.TargetWeight(100), [2, 4]),
        (funcga.transforms.TargetWeight(lambda updates: 40 + 60 * updates), [0, 3]),
    ],
    ids=["schedule", "weight", "schedule of weights"],
)
def test_when_a_window_ends(kit, n, ends):
    found, _ = run(made(kit, n), kit, grads_of(kit, 5), [40, 50, 30, 50, 60])
    assert [index for index, (_, ended) in enumerate(found) if ended] == ends


@pytest.mark.parametrize("sizes", [(5, 1, 2), (1, 6), (4,)], ids=str)
def test_the_loss_of_the_window_reaches_the_wrapped_transform(kit, sizes):
    """The documented way: `update(loss=)` would pass on the last one. The windows are whole or partial."""
    rows, told = np.random.default_rng(0).normal(size=8).astype("float32"), []

    def update(grads, state, params=None, *, loss):
        told.append(float(loss))
        return grads, state

    tx, losses = funcga.multi_steps(funcga.transforms.Transform(lambda params: (), update), 9), funcga.Accumulator()
    state, of_window = tx.init(tree(kit, 1)), losses.init(kit.arrays(np.float32(0)))
    for part in np.split(rows, np.cumsum(sizes))[: len(sizes)]:
        state = tx.accumulate(tree(kit, 2), state, weight=len(part))
        of_window = losses.update(of_window, kit.arrays(part.mean()), weight=len(part))
    tx.flush(state, tree(kit, 1), loss=losses.finalize(of_window))
    assert abs(told[0] - rows[: sum(sizes)].astype("float64").mean()) < LIMIT


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_micro_batch_is_dropped_with_its_weight(kit, value):
    grads, weights = grads_of(kit, 6), [1, 2, 100, 100, 100, 4]
    for index in (2, 3, 4):
        grads[index] = spoilt(kit, grads[index], value)
    found, state = run(made(kit, 3, drop="microbatch"), kit, grads, weights)
    assert [ends for _, ends in found] == [False, False, True, False, False, True]
    assert difference(kit, found[2][0], folded(kit, grads[:2], weights[:2])) <= LIMIT
    assert difference(kit, found[5][0], grads[5]) <= LIMIT
    assert (int(state.dropped.microbatches), int(state.dropped.windows), int(state.inner["runs"])) == (3, 0, 2)


def test_a_window_of_nothing_else_is_no_update(kit):
    grads = [spoilt(kit, grad) for grad in grads_of(kit, 2)]
    found, state = run(made(kit, 2, drop="microbatch"), kit, grads)
    assert [ends for _, ends in found] == [False, False]
    assert not any(leaf.any() for leaf in kit.leaves(found[1][0]))
    assert (int(state.updates), int(state.inner["runs"]), int(state.offered)) == (0, 0, 0)


def test_a_window_is_dropped(kit):
    grads = grads_of(kit, 4)
    grads[1] = spoilt(kit, grads[1])
    found, state = run(made(kit, 2, drop="window"), kit, grads)
    assert [ends for _, ends in found] == [False, False, False, True]
    assert not any(leaf.any() for leaf in kit.leaves(found[1][0]))
    assert difference(kit, found[3][0], folded(kit, grads[2:])) <= LIMIT
    assert (int(state.dropped.microbatches), int(state.dropped.windows), int(state.inner["runs"])) == (2, 1, 1)


@pytest.mark.parametrize("where", ["on the host", "an array"])
@pytest.mark.parametrize("drop", ["window", "microbatch"])
def test_what_has_no_weight_is_not_looked_at(kit, drop, where):
    """A fully masked micro-batch, whose mean is 0 / 0, adds nothing to means, and costs no window its update."""
    grads = grads_of(kit, 3)
    grads[0] = spoilt(kit, grads[0])
    weigh = (lambda w: kit.arrays(np.float32(w))) if where == "an array" else int
    found, state = run(made(kit, 3, drop=drop), kit, grads, [*map(weigh, (0, 2, 5))])
    assert difference(kit, found[2][0], folded(kit, grads[1:], [2, 5])) <= LIMIT
    assert (int(state.dropped.microbatches), int(state.dropped.windows), int(state.updates)) == (0, 0, 1)
    for observe in (None, funcga.gradient_noise()):
        sums = made(kit, 3, drop=drop, fold=funcga.sum(), observe=observe)  # which do not look at weights
        _, state = run(sums, kit, grads, [*map(weigh, (0, 2, 5))])
        assert int(state.dropped.microbatches) == (3 if drop == "window" else 1)


def test_without_drop_it_is_passed_on_and_nothing_stays(kit):
    grads = grads_of(kit, 4)
    grads[0] = spoilt(kit, grads[0])
    found, _ = run(made(kit, 2), kit, grads)
    assert np.isnan(kit.numpy(found[1][0]["b"])).all()
    assert difference(kit, found[3][0], folded(kit, grads[2:])) <= LIMIT


def test_a_weight_of_zero_leaves_a_nan_out(kit):
    grads = grads_of(kit, 3)
    grads[1] = spoilt(kit, grads[1])
    for zero in (0, kit.arrays(np.float32(0))):
        found, _ = run(made(kit, 3), kit, grads, [5, zero, 2.5])
        assert difference(kit, found[2][0], folded(kit, [grads[0], grads[2]], [5, 2.5])) <= LIMIT


@pytest.mark.parametrize("donate", [False, True])
def test_a_weight_of_zero_that_only_a_device_knows_leaves_a_nan_out(donate):
    fold = funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps)
    for weights in ([0, 5, 2.5], [5, 0, 2.5]):
        grads, zero = grads_of(TORCH, 3), weights.index(0)
        wanted = folded(TORCH, grads, weights, "by_steps")
        grads[zero] = spoilt(TORCH, grads[zero])
        unseen = [torch.tensor(float(weight)).as_subclass(Unseen) for weight in weights]
        found, _ = run(made(TORCH, 3, fold=fold, donate=donate), TORCH, grads, unseen)
        assert difference(TORCH, found[2][0], wanted) <= LIMIT


@pytest.mark.parametrize("bad", ["shape", "structure", "weight"])
def test_after_an_error_the_state_is_as_before(kit, bad):
    tx, params, grads = made(kit, 2), tree(kit, 1), grads_of(kit, 2)
    state = tx.accumulate(grads[0], tx.init(params))
    before = kit.leaves(state)
    wrong = {"shape": {**grads[1], "w": grads[1]["b"]}, "structure": {"w": grads[1]["w"]}, "weight": grads[1]}[bad]
    with pytest.raises(funcga.FuncgaError):
        tx.update(wrong, state, params, weight=-1 if bad == "weight" else 1)
    for leaf, other in zip(kit.leaves(state), before, strict=True):
        np.testing.assert_array_equal(leaf, other)
    updates, _ = tx.update(grads[1], state, params)
    assert difference(kit, negated().update(updates, ())[0], folded(kit, grads)) <= LIMIT


@pytest.mark.parametrize(
    "fold", [funcga.mean(), {"b": funcga.mean(), "scale": funcga.max(), "w": funcga.sum()}], ids=["mean", "mixed"]
)
def test_nothing_given_is_changed(kit, fold):
    """Also where a great weight changes the unit that the sums of means are in, and where nothing is added."""
    grads, tx, params = grads_of(kit, 3), made(kit, 3, fold=fold), tree(kit, 1)
    state = tx.accumulate(grads[1], tx.accumulate(grads[0], tx.init(params)))
    before = kit.leaves((state, params, grads))
    calls = lambda weight: [
        tx.update(grads[2], state, params, weight=weight), tx.flush(state, params), tx.accumulate(grads[2], state, weight=weight)
    ]  # fmt: skip
    for weight in (1, 5000, 0):
        for leaf, other in zip(kit.leaves(calls(weight)), kit.leaves(calls(weight)), strict=True):
            np.testing.assert_array_equal(leaf, other)
    for leaf, other in zip(kit.leaves((state, params, grads)), before, strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_sixteen_bits_are_summed_in_thirty_two(kit):
    ones = {"w": kit.cast(kit.arrays(np.ones(3, "float32")), "bfloat16")}
    tx = funcga.multi_steps(negated(), 400, fold=funcga.sum())
    state = tx.init(ones)
    update = tx.update if kit is TORCH else jax.jit(tx.update)
    for _ in range(400):
        updates, state = update(ones, state, ones)
    assert kit.leaves(updates)[0].tolist() == [-400] * 3
    apply_updates = (torch_backend if kit is TORCH else jax_backend).apply_updates
    assert dtypes(kit, apply_updates(ones, updates)) == ["bfloat16"]


# -- memory that is given away, in torch


@pytest.mark.parametrize("fold", [funcga.mean(), funcga.sum(), funcga.max()], ids=["mean", "sum", "max"])
def test_giving_the_state_away_changes_no_bit(fold):
    found = []
    for donate in (False, True):
        tx, params = funcga.multi_steps(negated(), 3, fold=fold, donate=donate), tree(TORCH, 1)
        state, updates = tx.init(params), []
        for index, grad in enumerate(grads_of(TORCH, 8)):
            update, state = tx.update(grad, state, params, weight=index + 1)
            updates.append(update)
        last, state = tx.flush(state, params)
        found.append(TORCH.leaves((updates, last, state)))
    for leaf, other in zip(*found, strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("fold", [funcga.mean(), funcga.sum(), funcga.max()], ids=["mean", "sum", "max"])
def test_what_a_transform_keeps_is_not_emptied(fold):
    """Its state and its updates are the gradients themselves, in the memory that they came in."""
    keeps = funcga.transforms.Transform(
        lambda params: {"last": params}, lambda grads, state, params=None: (grads, {"last": grads})
    )
    tx, params = funcga.multi_steps(keeps, 1, fold=fold, donate=True), tree(TORCH, 1)
    state, kept = tx.init(params), []
    grads = grads_of(TORCH, 3)
    for grad in grads:
        updates, state = tx.update({name: leaf.clone() for name, leaf in grad.items()}, state, params)
        kept.append((updates, state.inner["last"]))
    for grad, leaves in zip(grads, kept, strict=True):
        assert difference(TORCH, leaves, (grad, grad)) == 0


def test_an_error_of_the_transform_leaves_a_state_that_was_given_away():
    fails = [True]

    def update(grads, state, params=None):
        if fails.pop() if fails else False:
            raise KeyError("mine")
        return negated().update(grads, ())

    tx, params = (
        funcga.multi_steps(funcga.transforms.Transform(lambda params: (), update), 3, donate=True),
        tree(TORCH, 1),
    )
    grads, state = grads_of(TORCH, 2), tx.init(params)
    for grad, weight in zip(grads, (1, 3), strict=True):
        state = tx.accumulate(grad, state, weight=weight)
    with pytest.raises(KeyError):
        tx.flush(state, params)
    updates, _ = tx.flush(state, params)
    assert difference(TORCH, negated().update(updates, ())[0], folded(TORCH, grads, [1, 3])) <= LIMIT


# -- states


@pytest.mark.parametrize("name", ["mean", "per_weight", "sum", "max", "logsumexp", "moments", "concat", "carry"])
def test_a_state_of_an_accumulator(kit, name):
    """It is pure, the result is the caller's own, and merged halves are the whole."""
    accumulator = funcga.Accumulator(getattr(funcga, name)())
    for grads, _ in rounds(kit, 4):
        check_states(kit, accumulator, name, [{"b": grad["b"], "w": grad["w"]} for grad in grads])


def check_states(kit, accumulator, name, grads):
    whole = left = right = accumulator.init(grads[0])
    for index, grad in enumerate(grads):
        before = kit.leaves((whole, grad))
        after = accumulator.update(whole, grad, weight=index)
        for leaf, other in zip(kit.leaves((whole, grad)), before, strict=True):
            np.testing.assert_array_equal(leaf, other)
        whole = after
        if index < 2:
            left = accumulator.update(left, grad, weight=index)
        else:
            right = accumulator.update(right, grad, weight=index)
    expected = kit.leaves(accumulator.finalize(whole))
    by_hand = [oracle.fold(name, [kit.numpy(grad[key]) for grad in grads], range(4)) for key in ("b", "w")]
    by_hand = [part for leaf in by_hand for part in (leaf if isinstance(leaf, tuple) else (leaf,))]
    for leaf, other in zip(expected, by_hand, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)
    merged = accumulator.finalize(accumulator.merge(left, right))
    for leaf, other in zip(kit.leaves(merged), expected, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)
    if kit is TORCH:
        for leaf in kit.backend.trees.flatten(accumulator.finalize(whole))[0]:
            leaf.add_(1)
        for leaf, other in zip(kit.leaves(accumulator.finalize(whole)), expected, strict=True):
            np.testing.assert_array_equal(leaf, other)


def test_a_state_keeps_no_graph_and_goes_through_torch_save():
    accumulator, w = funcga.Accumulator(), torch.ones(2, requires_grad=True)
    state = accumulator.update(accumulator.init(w), (w * 3).square(), weight=3)
    assert not any(leaf.requires_grad for leaf in [state.accumulated])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = accumulator.update(torch.load(file, weights_only=True), torch.ones(2))
    assert accumulator.finalize(loaded).tolist() == [7, 7]


def test_an_accumulator_in_scan_and_jit():
    accumulator = funcga.Accumulator((funcga.mean(), funcga.max()))
    xs = JAX.arrays(np.random.default_rng(4).normal(size=(6, 3)).astype("float32"))
    like = (jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((), "float32"))
    step = lambda state, x: (accumulator.update(state, (x, x.max()), weight=x[0] ** 2), None)
    mean, top = jax.jit(lambda xs: accumulator.finalize(jax.lax.scan(step, accumulator.init(like), xs)[0]))(xs)
    np.testing.assert_allclose(mean, np.average(xs, axis=0, weights=np.asarray(xs)[:, 0] ** 2), rtol=1e-5)
    assert float(top) == float(xs.max())


@pytest.mark.parametrize("weight", [1e-40, 1e39])
def test_a_weight_that_a_float32_cannot_hold_is_refused(kit, weight):
    accumulator, value = funcga.Accumulator(), kit.arrays(np.ones(2, "float32"))
    with pytest.raises(funcga.FuncgaError, match="which a float32 cannot hold"):
        accumulator.update(accumulator.init(value), value, weight=weight)


def test_values_are_not_broadcast(kit):
    accumulator = funcga.Accumulator()
    state = accumulator.init(kit.arrays(np.zeros((2, 3), "float32")))
    with pytest.raises(funcga.FuncgaError, match=r"output is float32\[3\], and the state was made for float32\[2, 3\]"):
        accumulator.update(state, kit.arrays(np.zeros(3, "float32")))


def test_a_loss_scale_follows_what_is_finite(kit):
    """Halved where a window is not finite, which is no update; doubled after so many good ones."""
    tx = funcga.transforms.loss_scaled(negated(), init_scale=8.0, growth_interval=3)
    params, grads = tree(kit, 1), grads_of(kit, 5)
    state, scales = tx.init(params), []
    for index, grad in enumerate(grads):
        scale = float(state.scale)
        scaled = {name: leaf * scale for name, leaf in grad.items()}
        updates, state = tx.update(spoilt(kit, scaled) if index == 1 else scaled, state, params)
        if index == 1:
            assert not any(leaf.any() for leaf in kit.leaves(updates))
        else:
            assert difference(kit, negated().update(updates, ())[0], grad) <= LIMIT
        scales.append(float(state.scale))
    assert scales == [8, 4, 4, 4, 8]
