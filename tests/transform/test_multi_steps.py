"""`multi_steps` in both frameworks: windows, weights, schedules, what is dropped, the split form, and bad input."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import funcga
import jax_backend
import torch_backend
from funcga.transforms import TargetWeight, Transform
from tests import problems
from tests.kits import JAX, LIMITS, TORCH, difference

SHAPES = {"w": (3, 2), "b": (2,), "scale": ()}


def tree(kit, seed, dtype="float32"):
    r = problems.rng(seed)
    return kit.arrays({name: r.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()})


def grads_of(kit, count, dtype="float32", first=10):
    return [tree(kit, first + k, dtype) for k in range(count)]


def counting(kit, calls=None):
    """Plain SGD with lr 1, so that updates are the negated gradients that it saw; its state counts its runs."""

    def init(params):
        return {"runs": kit.backend.arrays.integer(0)}

    def update(grads, state, params=None, **extra):
        if calls is not None:
            calls.append((grads, params, extra))
        leaves, structure = kit.backend.trees.flatten(grads)
        return kit.backend.trees.unflatten(structure, [-leaf for leaf in leaves]), {"runs": state["runs"] + 1}

    return Transform(init, update)


def negated_mean(kit, grads, weights=None):
    stacked = [np.stack(leaves) for leaves in zip(*(kit.leaves(g) for g in grads), strict=True)]
    structure = kit.backend.trees.flatten(grads[0])[1]
    return kit.backend.trees.unflatten(
        structure, [kit.arrays(np.asarray(-np.average(s, axis=0, weights=weights), "float32")) for s in stacked]
    )


def is_zero(kit, updates):
    return all((leaf == 0).all() for leaf in kit.leaves(updates))


def test_an_update_is_the_mean_of_its_window(kit):
    calls = []
    tx, params, grads = funcga.multi_steps(counting(kit, calls), 3), tree(kit, 1), grads_of(kit, 7)
    state = tx.init(params)
    assert not tx.has_updated(state)
    for k, g in enumerate(grads):
        updates, state = tx.update(g, state, params)
        ends = k % 3 == 2
        assert bool(tx.has_updated(state)) == ends
        assert int(state.updates) == (k + 1) // 3
        assert int(state.offered) == (k + 1) % 3
        assert int(state.inner["runs"]) == (k + 1) // 3
        if ends:
            assert difference(kit, updates, negated_mean(kit, grads[k - 2 : k + 1])) <= LIMITS["float32"]
            assert is_zero(kit, state.window.accumulated)
        else:
            assert is_zero(kit, updates)
    assert len(calls) == 2 or kit is JAX  # there the shapes of updates are traced


def test_weights_are_those_of_the_micro_batches(kit):
    weights = [5, 0, 2.5]
    grads = grads_of(kit, 3)
    grads[1] = kit.backend.trees.unflatten(
        kit.backend.trees.flatten(grads[1])[1], [leaf * float("nan") for leaf in kit.backend.trees.flatten(grads[1])[0]]
    )
    tx, params = funcga.multi_steps(counting(kit), 3), tree(kit, 1)
    state = tx.init(params)
    for g, w in zip(grads, weights, strict=True):
        updates, state = tx.update(g, state, params, weight=w)
    assert difference(kit, updates, negated_mean(kit, [grads[0], grads[2]], [5, 2.5])) <= LIMITS["float32"]


def test_the_split_form_is_update(kit):
    tx, params, grads = funcga.multi_steps(counting(kit), 3), tree(kit, 1), grads_of(kit, 3)
    joined = split = tx.init(params)
    for k, g in enumerate(grads):
        updates, joined = tx.update(g, joined, params, weight=k + 1)
        split = tx.accumulate(g, split, weight=k + 1)
        assert not tx.has_updated(split)
    flushed, split = tx.flush(split, params)
    assert tx.has_updated(split)
    for a, b in ((flushed, updates), (split, joined)):
        assert difference(kit, a, b) == 0


def test_a_partial_window_is_exact(kit):
    tx, params, grads = funcga.multi_steps(counting(kit), 8), tree(kit, 1), grads_of(kit, 2)
    state = tx.init(params)
    for g, w in zip(grads, (1, 3), strict=True):
        _, state = tx.update(g, state, params, weight=w)
    updates, state = tx.flush(state, params)
    assert difference(kit, updates, negated_mean(kit, grads, [1, 3])) <= LIMITS["float32"]
    assert (int(state.updates), int(state.offered)) == (1, 0)


def test_n_may_be_a_schedule(kit):
    seen = []

    def n(updates):
        seen.append(int(updates))
        return 1 if updates == 0 else 3

    tx, params = funcga.multi_steps(counting(kit), n), tree(kit, 1)
    state = tx.init(params)
    ends = []
    for g in grads_of(kit, 7):
        _, state = tx.update(g, state, params)
        ends.append(bool(tx.has_updated(state)))
    assert ends == [True, False, False, True, False, False, True]
    assert seen == [0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("weight", [100, lambda updates: 100 if updates == 0 else 60])
def test_n_may_be_a_weight(kit, weight):
    tx, params = funcga.multi_steps(counting(kit), TargetWeight(weight)), tree(kit, 1)
    state = tx.init(params)
    ends = []
    for g, tokens in zip(grads_of(kit, 6), (40, 50, 30, 59, 1, 70), strict=True):
        _, state = tx.update(g, state, params, weight=tokens)
        ends.append(bool(tx.has_updated(state)))
    assert ends == [False, False, True, False, not isinstance(weight, int), True]


@pytest.mark.parametrize(("tenths", "target"), [(1, 10), (3, 30), (7, 21), (11, 55), (1, 4096)])
def test_weights_that_add_up_to_the_target_reach_it(kit, tenths, target):
    """In decimals; binary fractions are rounded, and ten times 0.1 is less than 1."""
    weight, target, n = tenths / 10, TargetWeight(target / 10), target // tenths
    assert [len(window) for window in funcga.windows(range(2 * n + 1), target, weight=lambda _: weight)] == [n, n, 1]
    if n < 100:
        found, _ = run(funcga.multi_steps(counting(kit), target), kit, tree(kit, 1), grads_of(kit, n), [weight] * n)
        assert [ends for _, ends in found] == [False] * (n - 1) + [True]


def poisoned(kit, grads, value=float("nan")):
    leaves, structure = kit.backend.trees.flatten(grads)
    return kit.backend.trees.unflatten(structure, [leaves[0] * 0 + value, *leaves[1:]])


def run(tx, kit, params, grads, weights=None):
    """What each call returns: (updates, has_updated), and the last state."""
    state, found = tx.init(params), []
    for k, g in enumerate(grads):
        updates, state = tx.update(g, state, params, weight=1 if weights is None else weights[k])
        found.append((updates, bool(tx.has_updated(state))))
    return found, state


def test_not_finite_is_passed_on_and_nothing_stays(kit):
    grads = grads_of(kit, 4)
    grads[0] = poisoned(kit, grads[0])
    found, state = run(funcga.multi_steps(counting(kit), 2), kit, tree(kit, 1), grads)
    assert any(np.isnan(leaf).any() for leaf in kit.leaves(found[1][0]))
    assert difference(kit, found[3][0], negated_mean(kit, grads[2:])) <= LIMITS["float32"]
    assert (int(state.dropped.microbatches), int(state.dropped.windows)) == (0, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_micro_batch_is_dropped_with_its_weight(kit, value):
    grads = grads_of(kit, 6)
    grads[2] = poisoned(kit, grads[2], value)
    grads[3], grads[4] = (poisoned(kit, g, value) for g in grads[3:5])
    tx = funcga.multi_steps(counting(kit), 3, drop="microbatch")
    found, state = run(tx, kit, tree(kit, 1), grads, [1, 2, 100, 100, 100, 4])
    assert [has for _, has in found] == [False, False, True, False, False, True]
    assert difference(kit, found[2][0], negated_mean(kit, grads[:2], [1, 2])) <= LIMITS["float32"]
    assert difference(kit, found[5][0], negated_mean(kit, grads[5:])) <= LIMITS["float32"]
    assert (int(state.dropped.microbatches), int(state.dropped.windows)) == (3, 0)
    assert int(state.updates) == int(state.inner["runs"]) == 2


def test_a_window_of_nothing_else_is_no_update(kit):
    grads = [poisoned(kit, g) for g in grads_of(kit, 2)]
    found, state = run(funcga.multi_steps(counting(kit), 2, drop="microbatch"), kit, tree(kit, 1), grads)
    assert [has for _, has in found] == [False, False]
    assert is_zero(kit, found[1][0])
    assert (int(state.updates), int(state.inner["runs"]), int(state.offered)) == (0, 0, 0)


def test_a_target_weight_counts_what_was_folded(kit):
    """As optax.MultiSteps does, where a skipped step has never been."""
    grads = grads_of(kit, 4)
    grads[1] = poisoned(kit, grads[1])
    tx = funcga.multi_steps(counting(kit), TargetWeight(2), drop="microbatch")
    found, state = run(tx, kit, tree(kit, 1), grads)
    assert [has for _, has in found] == [False, False, True, False]
    assert difference(kit, found[2][0], negated_mean(kit, [grads[0], grads[2]])) <= LIMITS["float32"]
    assert int(state.dropped.microbatches) == 1


def test_a_window_is_dropped(kit):
    grads = grads_of(kit, 4)
    grads[1] = poisoned(kit, grads[1])
    found, state = run(funcga.multi_steps(counting(kit), 2, drop="window"), kit, tree(kit, 1), grads)
    assert [has for _, has in found] == [False, False, False, True]
    assert is_zero(kit, found[1][0])
    assert difference(kit, found[3][0], negated_mean(kit, grads[2:])) <= LIMITS["float32"]
    assert (int(state.dropped.microbatches), int(state.dropped.windows)) == (2, 1)
    assert int(state.updates) == int(state.inner["runs"]) == 1


def test_drop_if_is_a_test_of_ones_own(kit):
    grads = grads_of(kit, 2)
    large = lambda g: abs(g["scale"]) >= float(max(abs(kit.leaves(x["scale"])[0]) for x in grads))
    tx = funcga.multi_steps(counting(kit), 2, drop="microbatch", drop_if=large)
    found, state = run(tx, kit, tree(kit, 1), grads)
    kept = min(grads, key=lambda g: abs(kit.leaves(g["scale"])[0]))
    assert difference(kit, found[1][0], negated_mean(kit, [kept])) <= LIMITS["float32"]
    assert int(state.dropped.microbatches) == 1


def test_sixteen_bits_are_summed_in_thirty_two(kit):
    half = lambda t: kit.backend.trees.unflatten(
        kit.backend.trees.flatten(t)[1], [kit.cast(leaf, "bfloat16") for leaf in kit.backend.trees.flatten(t)[0]]
    )
    ones = half(kit.arrays({"w": np.ones(3, "float32")}))
    calls = []
    tx = funcga.multi_steps(counting(kit, calls), 400, fold=funcga.sum())
    state = tx.init(ones)
    for _ in range(400):
        updates, state = tx.update(ones, state, ones)
    seen, params, _ = calls[0]
    assert kit.leaves(updates)[0].tolist() == [-400] * 3
    for found in (seen, params, updates, state.window.accumulated):
        assert str(found["w"].dtype).endswith("float32")
    assert str({TORCH: torch_backend, JAX: jax_backend}[kit].apply_updates(ones, updates)["w"].dtype).endswith(
        "bfloat16"
    )


def test_tokens_are_counted_past_twenty_four_bits(kit):
    tx, params = funcga.multi_steps(counting(kit), 3), kit.arrays({"w": np.ones(1, "float32")})
    state = tx.init(params)
    state = tx.accumulate(params, state, weight=2**24)
    state = tx.accumulate(params, state, weight=1)
    state = tx.accumulate(params, state, weight=1)
    assert sum(float(limb) for limb in state.window.tally.weight) == 2**24 + 2


@pytest.mark.parametrize(
    "fold",
    [funcga.sum(), funcga.per_weight(), funcga.max(), {"w": funcga.sum(), "b": funcga.mean(), "scale": funcga.max()}],
)
def test_other_folds(kit, fold):
    tx, params, grads = funcga.multi_steps(counting(kit), 2, fold=fold), tree(kit, 1), grads_of(kit, 2)
    state = tx.init(params)
    for g, w in zip(grads, (1, 3), strict=True):
        updates, state = tx.update(g, state, params, weight=w)
    accumulator = funcga.Accumulator(fold)
    expected = accumulator.init(grads[0])
    for g, w in zip(grads, (1, 3), strict=True):
        expected = accumulator.update(expected, g, weight=w)
    expected = accumulator.finalize(expected)
    for name in SHAPES:
        # not bitwise identical: kernels may multiply by the weight and add with one rounding
        np.testing.assert_allclose(*(kit.leaves(t)[0] for t in (updates[name], -expected[name])), rtol=3e-7)


def test_moments_reach_a_transform_that_wants_them(kit):
    """A gradient becomes a pair, and what is held of a leaf is several arrays."""
    seen = []
    inner = Transform(lambda p: (), lambda g, s, p=None: (seen.append(g) or p, s))
    tx, params, grads = funcga.multi_steps(inner, 2, fold=funcga.moments()), tree(kit, 1), grads_of(kit, 2)
    state = tx.init(params)
    for g in grads:
        _, state = tx.update(g, state, params)
    values = np.stack([kit.leaves(g["w"])[0] for g in grads])
    np.testing.assert_allclose(kit.leaves(seen[-1]["w"].variance)[0], values.var(axis=0), rtol=1e-5)


def test_float64_is_kept(kit, x64):
    params, grads = tree(kit, 1, "float64"), grads_of(kit, 3, "float64")
    tx = funcga.multi_steps(counting(kit), 3)
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params)
    expected = [-np.mean(s, axis=0) for s in zip(*map(kit.leaves, grads), strict=True)]
    for a, b in zip(kit.leaves(updates), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-15, atol=1e-15)
    assert str(updates["w"].dtype).endswith("float64")


def test_the_order_of_a_dict_does_not_matter(kit):
    tx, params, (g,) = funcga.multi_steps(counting(kit), 1), tree(kit, 1), grads_of(kit, 1)
    other = {name: g[name] for name in reversed([*g])}
    a, _ = tx.update(g, tx.init(params), params)
    b, _ = tx.update(other, tx.init(params), params)
    for name in SHAPES:
        np.testing.assert_array_equal(*(kit.leaves(t[name])[0] for t in (a, b)))


def test_extra_arguments_reach_the_inner_transform(kit):
    calls = []
    tx, params, (g,) = funcga.multi_steps(counting(kit, calls), 1), tree(kit, 1), grads_of(kit, 1)
    tx.update(g, tx.init(params), params, weight=3, value=7)
    assert calls[0][2] == {"value": 7}


@pytest.fixture
def standard_promotion():
    """As optax needs it, which multiplies a float by a count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_nothing_given_is_changed(kit):
    inner = {TORCH: lambda: torch_backend.from_optimizer(torch.optim.Adam, lr=0.1), JAX: lambda: optax.adam(0.1)}[kit]()
    tx, params, grads = funcga.multi_steps(inner, 2), tree(kit, 1), grads_of(kit, 2)
    state = tx.accumulate(grads[0], tx.init(params))
    before = [kit.leaves(t) for t in (state, params, grads[1])]
    tx.update(grads[1], state, params)
    tx.flush(state, params)
    for a, t in zip(before, (state, params, grads[1]), strict=True):
        for x, y in zip(a, kit.leaves(t), strict=True):
            np.testing.assert_array_equal(x, y)


def test_it_is_a_pair(kit):
    init, update = funcga.multi_steps(counting(kit), 2)
    updates, _ = update(tree(kit, 2), init(tree(kit, 1)), tree(kit, 1))
    assert is_zero(kit, updates)


# bad input


def refused(kit, call, *texts):
    """That the call raises FuncgaError with these texts."""
    with pytest.raises(funcga.FuncgaError) as error:
        call()
    for text in texts:
        assert text in str(error.value)


def test_states_without_across_are_not_merged(kit):
    tx = funcga.multi_steps(counting(kit), 2)
    states = [tx.accumulate(grad, tx.init(tree(kit, 1))) for grad in grads_of(kit, 2)]
    refused(kit, lambda: tx.merge(states), "merge", "across=")


def test_the_names_of_optaxs_state_are_told(kit):
    state = funcga.multi_steps(counting(kit), 2).init(tree(kit, 1))
    for name, ours in (("mini_step", "state.offered"), ("gradient_step", "state.updates"), ("other", "'other'")):
        with pytest.raises(AttributeError, match=ours):
            getattr(state, name)


@pytest.mark.parametrize("n", [0, -1, 2.5, "8", None, True])
def test_n_must_be_a_number(n):
    with pytest.raises(funcga.FuncgaError, match=r"n is .*(TargetWeight|at least 1)"):
        funcga.multi_steps(counting(TORCH), n)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "many", True])
def test_a_target_weight_must_be_positive(weight):
    with pytest.raises(funcga.FuncgaError, match="target weight is"):
        TargetWeight(weight)


def test_a_schedule_must_give_a_number(kit):
    tx, params = funcga.multi_steps(counting(kit), lambda updates: 0), tree(kit, 1)
    refused(
        kit, lambda: tx.update(tree(kit, 2), tx.init(params), params), "the schedule of n returned 0 after 0 updates"
    )


@pytest.mark.parametrize(
    ("tx", "text"),
    [
        (torch.optim.AdamW, "from_optimizer(torch.optim.AdamW, lr=1e-3)"),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), "from_optimizer(torch.optim.SGD, lr=1e-3)"),
        (optax.adam, "Call it first"),
        (3, "no functions init and update"),
        (None, "no functions init and update"),
        ((1, 2), "no functions init and update"),
    ],
)
def test_the_inner_transform_must_be_one(tx, text):
    with pytest.raises(funcga.FuncgaError) as error:
        funcga.multi_steps(tx, 2)
    assert text in str(error.value)


@pytest.mark.parametrize("choice", [{"drop": "all"}, {"drop_if": abs}, {"drop": "window", "drop_if": 3}])
def test_what_is_dropped_must_be_known(choice):
    with pytest.raises(funcga.FuncgaError, match="drop"):
        funcga.multi_steps(counting(TORCH), 2, **choice)


def cases(kit):
    g = tree(kit, 2)
    other = {TORCH: JAX, JAX: TORCH}[kit]
    yield "a leaf is missing", {"w": g["w"], "b": g["b"]}, 1, "missing `grads['scale']`, new nothing"
    yield "a leaf is new", {**g, "more": g["b"]}, 1, "new `grads['more']`"
    yield "another shape", {**g, "b": g["w"]}, 1, "grads['b'] is float32[3, 2], and the state was made for"
    yield "integers", {**g, "b": kit.arrays(np.ones(2, "int32"))}, 1, "grads['b'] is int32[2]"
    yield "no array", {**g, "b": "b"}, 1, "grads['b'] is of type str"
    yield "the other framework", {**g, "b": other.arrays(np.ones(2, "float32"))}, 1, "grads['b'] is"
    yield "a negative weight", g, -1, "the weight of a micro-batch is -1"
    yield "a weight of NaN", g, float("nan"), "the weight of a micro-batch is nan"
    yield "a weight that is none", g, "8", "the weight of a micro-batch is"


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("donate", [False, True])
def test_a_bad_call_leaves_the_state_good(kit, k, donate):
    if donate and kit is JAX:
        pytest.skip("donation is jit's in JAX")
    _, bad, weight, text = [*cases(kit)][k]
    tx, params, grads = funcga.multi_steps(counting(kit), 2, donate=donate), tree(kit, 1), grads_of(kit, 2)
    state = tx.accumulate(grads[0], tx.init(params))
    refused(kit, lambda: tx.update(bad, state, params, weight=weight), text)
    updates, _ = tx.update(grads[1], state, params)
    assert difference(kit, updates, negated_mean(kit, grads)) <= LIMITS["float32"]


@pytest.mark.parametrize("n", [np.int64(0), np.float32("nan"), np.float64(2.5), np.array(True), np.array(-1)])
def test_n_of_another_library_must_be_a_number_too(kit, n):
    for value in (n, kit.arrays(n) if n.dtype != "float64" and n.dtype != "int64" else n):
        refused(kit, partial(funcga.multi_steps, counting(kit), value), "n is")


def test_numbers_of_another_library(kit):
    for n in (np.int64(2), kit.arrays(np.int32(2)), TargetWeight(np.float32(2)), TargetWeight(kit.arrays(np.int32(2)))):
        found, _ = run(funcga.multi_steps(counting(kit), n), kit, tree(kit, 1), grads_of(kit, 4))
        assert [has for _, has in found] == [False, True, False, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5, "2"])
def test_schedules_of_nonsense(kit, value):
    tx, params = funcga.multi_steps(counting(kit), lambda updates: value), tree(kit, 1)
    refused(kit, lambda: tx.update(tree(kit, 2), tx.init(params), params), "the schedule of n returned")


@pytest.mark.parametrize("weight", [1e39, 10**40, 1e-46])
def test_weights_that_a_float32_cannot_hold(kit, weight):
    tx, params = funcga.multi_steps(counting(kit), 2), tree(kit, 1)
    refused(kit, lambda: tx.accumulate(tree(kit, 2), tx.init(params), weight=weight), "a float32 cannot hold")


@pytest.mark.parametrize("choice", [(True, ()), None, "yes", 2.5, 1])
def test_a_test_that_says_no_yes_or_no(kit, choice):
    tx = funcga.multi_steps(counting(kit), 2, drop="microbatch", drop_if=lambda grads: choice)
    params = tree(kit, 1)
    refused(kit, lambda: tx.accumulate(tree(kit, 2), tx.init(params)), "drop_if returned", ".any()")
    tx = funcga.multi_steps(counting(kit), 2, drop="microbatch", drop_if=lambda grads: grads["b"] > 0)
    refused(kit, lambda: tx.accumulate(tree(kit, 2), tx.init(params)), "drop_if returned bool[2]")
    tx = funcga.multi_steps(counting(kit), 2, drop="microbatch", drop_if=lambda grads: grads["w"].sum())
    refused(kit, lambda: tx.accumulate(tree(kit, 2), tx.init(params)), "drop_if returned float32[]", "Compare a number")


def test_a_test_that_counts():
    """As a number of what is not finite: any is too many."""
    count = lambda grads: (~jnp.isfinite(grads["w"])).sum() > 0
    tx, params = funcga.multi_steps(counting(JAX), 2, drop="microbatch", drop_if=count), tree(JAX, 1)
    for update in (tx.update, jax.jit(tx.update)):
        state = tx.init(params)
        bad = {**tree(JAX, 2), "w": jnp.full((3, 2), jnp.nan)}
        for g in (bad, tree(JAX, 3)):
            updates, state = update(g, state, params)
        assert (int(state.dropped.microbatches), int(state.updates)) == (1, 1)
        assert difference(JAX, updates, negated_mean(JAX, [tree(JAX, 3)])) <= LIMITS["float32"]


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32")], ids=str)
def test_sums_in_another_dtype_than_the_params(kit, x64, dtypes):
    """`mean(dtype=)` chooses the accumulator; the transform sees what it would see without."""
    own, accumulator = dtypes
    params, grads = tree(kit, 1, own), grads_of(kit, 4, own)
    tx = funcga.multi_steps(counting(kit), 2, fold=funcga.mean(dtype=accumulator))
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state, params, weight=3)
    assert str(state.window.accumulated["w"].dtype).endswith(accumulator)
    assert str(updates["w"].dtype).endswith(own)
    expected = [-np.mean(s, axis=0) for s in zip(*map(kit.leaves, grads[2:]), strict=True)]
    for a, b in zip(kit.leaves(updates), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-7, atol=3e-7)


def test_wider_gradients_than_the_params(kit, x64):
    params, grads = tree(kit, 1), grads_of(kit, 4, "float64")
    tx = funcga.multi_steps(counting(kit), 4)
    state = tx.init(params)
    before = [leaf.dtype for leaf in kit.backend.trees.flatten(state)[0]]
    for g in grads[:3]:
        _, state = tx.update(g, state, params)
        assert [leaf.dtype for leaf in kit.backend.trees.flatten(state)[0]] == before
    updates, state = tx.update(grads[3], state, params)
    assert str(updates["w"].dtype).endswith("float32")


def test_params_in_another_order(kit, x64):
    """What the transform sees of each is in its own dtype."""
    calls = []
    tx = funcga.multi_steps(counting(kit, calls), 1)
    params = {"b": tree(kit, 1, "float64")["b"], "w": tree(kit, 1)["w"]}
    other = {name: params[name] for name in ("w", "b")}
    tx.update(params, tx.init(params), other)
    seen = calls[-1][0]
    assert str(seen["b"].dtype).endswith("float64")
    assert str(seen["w"].dtype).endswith("float32")


def test_params_of_other_shapes_or_no_arrays(kit):
    tx, params, g = funcga.multi_steps(counting(kit), 2), tree(kit, 1), tree(kit, 2)
    state = tx.init(params)
    refused(kit, lambda: tx.update(g, state, {**params, "b": params["w"]}), "params['b'] is float32[3, 2]")
    refused(kit, lambda: tx.update(g, state, {**params, "b": "b"}), "params['b'] is of type str")


def test_a_transform_can_be_copied(kit):
    tx, params, grads = funcga.multi_steps(counting(kit), 2), tree(kit, 1), grads_of(kit, 2)
    for copied in (copy.copy(tx), copy.deepcopy(tx)):
        state = copied.init(params)
        state = copied.accumulate(grads[0], state)
        updates, state = copied.update(grads[1], state, params)
        assert difference(kit, updates, negated_mean(kit, grads)) <= LIMITS["float32"]
    copy.deepcopy(tx)  # also when it was used


@pytest.mark.parametrize("name", ["weights", "wieght", "Weight"])
def test_a_weight_that_is_misspelt(kit, name):
    """Wrapped transforms ignore what they do not know, so that it would be lost."""
    tx, params = funcga.multi_steps(counting(kit), 2), tree(kit, 1)
    refused(kit, lambda: tx.update(tree(kit, 2), tx.init(params), params, **{name: 3}), f"`{name}` is no argument")


def test_a_fold_that_is_not_called():
    with pytest.raises(funcga.FuncgaError, match=r"fold=funcga.mean\(\)"):
        funcga.multi_steps(counting(TORCH), 2, fold=funcga.mean)


def test_a_module_is_no_tree_of_params():
    module = torch.nn.Linear(2, 2)
    for params in (module, module.parameters(), module.named_parameters()):
        refused(
            TORCH,
            lambda params=params: funcga.multi_steps(counting(TORCH), 2).init(params),
            "tx.init(torch_backend.trainable",
        )


@pytest.mark.parametrize("drop", [None, "microbatch", "window"])
def test_an_empty_window_is_no_update_and_no_dropped_one_inside_of_jit(drop):
    tx, params = funcga.multi_steps(counting(JAX), 2, drop=drop), tree(JAX, 1)
    _, state = jax.jit(tx.flush)(tx.init(params), params)
    assert (int(state.dropped.windows), int(state.dropped.microbatches), int(state.updates)) == (0, 0, 0)
    assert not bool(tx.has_updated(state))


def test_a_target_of_many_bits_inside_of_jit():
    tx, params = funcga.multi_steps(counting(JAX), TargetWeight(3_000_000_000)), tree(JAX, 1)
    state, ends = tx.init(params), []
    for g in grads_of(JAX, 3):
        _, state = jax.jit(tx.update)(g, state, params, weight=1e9)
        ends.append(bool(tx.has_updated(state)))
    assert ends == [False, False, True]


def test_params_must_be_those_of_the_state(kit):
    tx, params, g = funcga.multi_steps(counting(kit), 2), tree(kit, 1), tree(kit, 2)
    state = tx.accumulate(g, tx.init(params))
    for call in (lambda: tx.update(g, state, {"w": params["w"]}), lambda: tx.flush(state, {"w": params["w"]})):
        refused(kit, call, "missing `params['b']`")


def test_an_empty_window_is_not_flushed(kit):
    tx, params = funcga.multi_steps(counting(kit), 2), tree(kit, 1)
    state = tx.init(params)
    refused(kit, lambda: tx.flush(state, params), "the window is empty", "if state.offered > 0")
    tx.flush(tx.accumulate(tree(kit, 2), state), params)


def test_a_state_of_another_transform(kit):
    tx, params, g = funcga.multi_steps(counting(kit), 2), tree(kit, 1), tree(kit, 2)
    for call in (lambda: tx.update(g, (), params), lambda: tx.has_updated(()), lambda: tx.flush({}, params)):
        refused(kit, call, "MultiStepsState")


def test_integers_among_the_params(kit):
    tx = funcga.multi_steps(counting(kit), 2)
    texts = "params['w'] is int32[2], and its gradients are to be averaged", "None in its place"
    refused(kit, lambda: tx.init({"w": kit.arrays(np.ones(2, "int32"))}), *texts)


def test_the_folds_must_fit_the_params(kit):
    tx = funcga.multi_steps(counting(kit), 2, fold={"v": funcga.mean()})
    refused(kit, lambda: tx.init(tree(kit, 1)), "the tree of folds is no prefix of the params: at params")


def test_rows_are_not_collected(kit):
    tx = funcga.multi_steps(counting(kit), 2, fold=funcga.concat())
    params = {"w": tree(kit, 1)["w"]}
    refused(kit, lambda: tx.init(params), "the fold of params['w'] collects rows", "funcga.mean()")


def test_memory_is_given_away_in_jit_in_jax():
    tx = funcga.multi_steps(optax.adam(1e-3), 2, donate=True)
    with pytest.raises(funcga.FuncgaError, match="donate_argnums"):
        tx.init(tree(JAX, 1))


@pytest.mark.usefixtures("standard_promotion")
def test_traced_and_eager_are_the_same():
    tx, params, grads = funcga.multi_steps(optax.adam(0.1), 2, drop="microbatch"), tree(JAX, 1), grads_of(JAX, 4)
    grads[1] = poisoned(JAX, grads[1])
    eager = jitted = tx.init(params)
    compiled = jax.jit(tx.update)
    for g in grads:
        a, eager = tx.update(g, eager, params)
        b, jitted = compiled(g, jitted, params)
        assert difference(JAX, a, b) <= LIMITS["float32"]
        assert jax.tree.structure(eager) == jax.tree.structure(jitted)
        assert [x.dtype for x in jax.tree.leaves(eager)] == [x.dtype for x in jax.tree.leaves(jitted)]
    assert jnp.array_equal(eager.dropped.microbatches, jitted.dropped.microbatches)
