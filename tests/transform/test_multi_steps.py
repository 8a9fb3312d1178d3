"""`multi_steps` beside what `tests/core/test_windows.py` has in both frameworks: targets, dtypes, units, and bad input."""

import jax
import numpy as np
import optax
import pytest
import torch

import funcga
from funcga.transforms import TargetWeight, Transform
from tests.core.test_windows import LIMIT, folded, grads_of, made, run, spoilt, tree
from tests.kits import JAX, TORCH, difference


def negated(kit, grads):
    leaves, structure = kit.backend.trees.flatten(grads)
    return kit.backend.trees.unflatten(structure, [-leaf for leaf in leaves])


def recording(kit, calls):
    """Negated gradients; what an update was called with is kept."""

    def update(grads, state, params=None, **extra):
        calls.append((grads, params, extra))
        return negated(kit, grads), state

    return Transform(lambda params: (), update)


@pytest.mark.parametrize(("tenths", "target"), [(1, 10), (7, 21), (1, 4096)])
def test_weights_that_add_up_to_the_target_reach_it(kit, tenths, target):
    """In decimals; binary fractions are rounded, and ten times 0.1 is less than 1."""
    weight, target, n = tenths / 10, TargetWeight(target / 10), target // tenths
    assert [len(window) for window in funcga.windows(range(2 * n + 1), target, weight=lambda _: weight)] == [n, n, 1]
    if n < 100:
        found, _ = run(made(kit, target), kit, grads_of(kit, n), [weight] * n)
        assert [ends for _, ends in found] == [False] * (n - 1) + [True]


def test_a_target_weight_counts_what_was_folded(kit):
    """As optax.MultiSteps does, where a skipped step has never been."""
    grads = grads_of(kit, 4)
    grads[1] = spoilt(kit, grads[1])
    found, state = run(made(kit, TargetWeight(2), drop="microbatch"), kit, grads)
    assert [ends for _, ends in found] == [False, False, True, False]
    assert difference(kit, found[2][0], folded(kit, [grads[0], grads[2]])) <= LIMIT
    assert int(state.dropped.microbatches) == 1


def test_drop_if_is_a_test_of_ones_own(kit):
    grads = grads_of(kit, 2)
    sizes = [abs(float(kit.numpy(g["scale"]))) for g in grads]
    tx = made(kit, 2, drop="microbatch", drop_if=lambda g: abs(g["scale"]) >= max(sizes))
    found, state = run(tx, kit, grads)
    assert difference(kit, found[1][0], grads[sizes.index(min(sizes))]) <= LIMIT
    assert int(state.dropped.microbatches) == 1


def test_it_is_a_pair_and_passes_extra_arguments_on(kit):
    """And the order of a dict does not matter."""
    calls = []
    init, update = funcga.multi_steps(recording(kit, calls), 1)
    params, (g,) = tree(kit, 1), grads_of(kit, 1)
    updates, _ = update({name: g[name] for name in reversed([*g])}, init(params), params, weight=3, value=7)
    assert calls[0][2] == {"value": 7}
    assert all(difference(kit, updates[name], negated(kit, g[name])) <= LIMIT for name in g)


def test_params_of_other_dtypes_and_in_another_order(kit, x64):
    """What the transform sees of each is in the dtype of its parameter, whatever the gradients are."""
    calls = []
    tx = funcga.multi_steps(recording(kit, calls), 2)
    params = {"b": tree(kit, 1, "float64")["b"], "w": tree(kit, 1)["w"]}
    grads = {name: tree(kit, 2, "float64")[name] for name in params}
    state = tx.init(params)
    before = [leaf.dtype for leaf in kit.backend.trees.flatten(state)[0]]
    _, state = tx.update(grads, state, {name: params[name] for name in ("w", "b")})
    assert [leaf.dtype for leaf in kit.backend.trees.flatten(state)[0]] == before
    updates, _ = tx.update(grads, state, {name: params[name] for name in ("w", "b")})
    for found in (calls[-1][0], updates):
        assert [str(found[name].dtype).removeprefix("torch.") for name in ("b", "w")] == ["float64", "float32"]


IDENTITY = Transform(lambda params: (), lambda grads, state, params=None: (grads, state))


@pytest.mark.parametrize(("size", "weights"), [(1e37, [2e5, 0.0, 3e8, 7.0]), (1e-36, [3e8, 1e9, 4e8, 0.0])])
def test_values_and_weights_whose_products_no_float32_holds(kit, size, weights):
    """One window after another, the second of which begins in the state that the first has left."""
    values = (size * np.random.default_rng(0).uniform(0.5, 1, (4, 3))).astype("float32")
    expected = np.average(values.astype("float64"), axis=0, weights=weights)
    accumulator, tx = funcga.Accumulator(), funcga.multi_steps(IDENTITY, 4, donate=kit is TORCH)
    state, merged = tx.init({"w": kit.arrays(values[0])}), accumulator.init(kit.arrays(values[0]))
    for order in (1, -1):
        for value, weight in zip(values[::order], weights[::order], strict=True):
            updates, state = tx.update({"w": kit.arrays(value)}, state, weight=weight)
        np.testing.assert_allclose(kit.numpy(updates)["w"], expected, rtol=2e-6)
    for value, weight in zip(values, weights, strict=True):
        one = kit.arrays(value)
        merged = accumulator.merge(merged, accumulator.update(accumulator.init(one), one, weight=weight))
    np.testing.assert_allclose(kit.numpy(accumulator.finalize(merged)), expected, rtol=2e-6)


def test_a_state_without_a_unit_goes_on(kit):
    """As earlier versions have saved them: sums of w * v."""
    accumulator, one = funcga.Accumulator(), kit.arrays(np.ones(2, "float32"))
    state = accumulator.init(one)
    state = state._replace(accumulated=one * 300, tally=accumulator.update(state, one, weight=100).tally)
    old = type(state)(*state[:4], like=state.like)
    assert old.unit == 1
    found = accumulator.finalize(accumulator.update(old, one, weight=50))
    np.testing.assert_allclose(kit.numpy(found), 350 / 150, rtol=1e-7)
    tx = funcga.multi_steps(IDENTITY, 2)
    state = tx.accumulate({"w": one}, tx.init({"w": one}), weight=100)
    window = type(state.window)({"w": one * 300}, *state.window[1:4])
    updates, state = tx.update({"w": one}, state._replace(window=window), weight=50)
    np.testing.assert_allclose(kit.numpy(updates)["w"], 350 / 150, rtol=1e-7)


# -- in jit


def test_a_target_of_many_bits_inside_of_jit():
    tx, params = made(JAX, TargetWeight(3_000_000_000)), tree(JAX, 1)
    state, ends = tx.init(params), []
    for g in grads_of(JAX, 3):
        _, state = jax.jit(tx.update)(g, state, params, weight=1e9)
        ends.append(bool(tx.has_updated(state)))
    assert ends == [False, False, True]


# -- bad input


def refused(call, *texts):
    with pytest.raises(funcga.FuncgaError) as error:
        call()
    assert all(text in str(error.value) for text in texts), str(error.value)


def test_n_must_be_a_number(kit):
    nan = np.float32("nan")
    for n in (0, -1, 2.5, "8", None, True, np.int64(0), np.array(True), np.array(-1), nan, kit.arrays(nan)):
        refused(lambda n=n: made(kit, n), "n is ")
    for weight in (0, -1, float("nan"), float("inf"), "many", True):
        refused(lambda weight=weight: TargetWeight(weight), "target weight is")
    for value in (0, float("nan"), float("inf"), 0.5, "2"):
        tx, params = made(kit, lambda updates, value=value: value), tree(kit, 1)
        call = lambda tx=tx, params=params: tx.update(tree(kit, 2), tx.init(params), params)
        refused(call, "the schedule of n returned", "after 0 updates")


MADE = {
    "drop is 'all'": lambda: made(TORCH, 2, drop="all"),
    "drop is None": lambda: made(TORCH, 2, drop_if=abs),
    "drop_if is 3": lambda: made(TORCH, 2, drop="window", drop_if=3),
    "fold= is no Fold": lambda: made(TORCH, 2, fold=funcga.mean).init(tree(TORCH, 1)),
    "no array was found in `params`": lambda: made(TORCH, 2).init(torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize("text", MADE)
def test_what_cannot_be_made(text):
    refused(MADE[text], text)


@pytest.mark.parametrize("tx", [torch.optim.AdamW, optax.adam, 3, None], ids=["class", "function", "number", "None"])
def test_what_is_no_transform_has_no_update(tx):
    with pytest.raises(AttributeError, match="update"):
        funcga.multi_steps(tx, 2)


def bad_calls(kit):
    """(grads, weight, text) of calls that are refused in the middle of a window."""
    g, other = tree(kit, 2), {TORCH: JAX, JAX: TORCH}[kit]
    return [
        ({"w": g["w"], "b": g["b"]}, 1, "missing `grads['scale']`, new nothing"),
        ({**g, "more": g["b"]}, 1, "new `grads['more']`"),
        ({**g, "b": g["w"]}, 1, "grads['b'] is float32[3, 2], and the state was made for"),
        ({**g, "b": kit.arrays(np.ones(2, "int32"))}, 1, "grads['b'] is int32[2]"),
        ({**g, "b": "b"}, 1, "grads['b'] is of type str"),
        ({**g, "b": other.arrays(np.ones(2, "float32"))}, 1, "grads['b'] is"),
        (g, -1, "the weight of a micro-batch is -1"),
        (g, float("nan"), "the weight of a micro-batch is nan"),
        (g, "8", "the weight of a micro-batch is"),
        (g, 1e39, "a float32 cannot hold"),
        (g, 10**40, "a float32 cannot hold"),
        (g, 1e-46, "a float32 cannot hold"),
    ]


def test_a_bad_call_leaves_the_state_good(kit):
    tx, params, grads = made(kit, 2, donate=kit is TORCH), tree(kit, 1), grads_of(kit, 2)
    state = tx.accumulate(grads[0], tx.init(params))
    for bad, weight, text in bad_calls(kit):
        refused(lambda bad=bad, weight=weight: tx.update(bad, state, params, weight=weight), text)
    for name in ("weights", "wieght", "Weight"):  # wrapped transforms ignore what they do not know
        refused(lambda name=name: tx.update(grads[1], state, params, **{name: 3}), f"`{name}` is no argument")
    for wrong, text in (
        ({**params, "b": params["w"]}, "params['b'] is float32[3, 2]"),
        ({**params, "b": "b"}, "params['b'] is of type str"),
        ({"w": params["w"]}, "missing `params['b']`"),
    ):
        refused(lambda wrong=wrong: tx.update(grads[1], state, wrong), text)
    refused(lambda: tx.flush(state, {"w": params["w"]}), "missing `params['b']`")
    for call in (lambda: tx.update(grads[1], (), params), lambda: tx.has_updated(()), lambda: tx.flush({}, params)):
        refused(call, "MultiStepsState")
    refused(lambda: tx.merge([state, state]), "merge", "across=")
    refused(lambda: tx.flush(tx.init(params), params), "the window is empty", "if state.offered > 0")
    updates, _ = tx.update(grads[1], state, params)
    assert difference(kit, negated(kit, updates), folded(kit, grads)) <= LIMIT


def test_params_and_folds_must_fit(kit):
    w = {"w": tree(kit, 1)["w"]}
    texts = "params['w'] is int32[2], and the fold `weighted, by_weight` is not defined for int", "None in its place"
    refused(lambda: made(kit, 2).init({"w": kit.arrays(np.ones(2, "int32"))}), *texts)
    text = "the tree of folds is no prefix of the params: at params"
    refused(lambda: made(kit, 2, fold={"v": funcga.mean()}).init(w), text)
    texts = "the fold of params['w'] collects rows", "funcga.mean()"
    refused(lambda: made(kit, 2, fold=funcga.concat()).init(w), *texts)


@pytest.mark.parametrize("choice", [(True, ()), None, 1])
def test_a_test_that_says_no_yes_or_no(kit, choice):
    called = lambda drop_if: made(kit, 2, drop="microbatch", drop_if=drop_if)
    params = tree(kit, 1)
    for drop_if, texts in (
        (lambda grads: choice, ("drop_if returned", ".any()")),
        (lambda grads: grads["b"] > 0, ("drop_if returned bool[2]",)),
        (lambda grads: grads["w"].sum(), ("drop_if returned float32[]", "Compare a number")),
    ):
        tx = called(drop_if)
        refused(lambda tx=tx: tx.accumulate(tree(kit, 2), tx.init(params)), *texts)
