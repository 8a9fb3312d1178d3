"""`Accumulator`: its state is a plain tree, and its four functions obey the laws (test_laws.py) anywhere."""

import io

import jax
import numpy as np
import pytest
import torch

import funcga
from tests import problems
from tests.kits import JAX, LIMITS, TORCH, difference
from tests.problems import FOLDS


def values(kit, count=4):
    r = problems.rng(3)
    return [
        kit.arrays({"a": r.normal(size=(2, 3)).astype("float32"), "b": r.normal(size=4).astype("float32")})
        for _ in range(count)
    ]


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_equals_accumulate(kit, fold):
    items = values(kit)
    accumulator = funcga.Accumulator(fold)
    state = accumulator.init(items[0])
    for k, item in enumerate(items):
        state = accumulator.update(state, item, weight=k + 1)
    result = accumulator.finalize(state)
    index = kit.arrays(np.arange(4, dtype="int32"))
    stacked = {name: kit.xp.stack([item[name] for item in items]) for name in items[0]}
    if fold.reducer is funcga.reducers.carry:
        expected = items[-1]
    else:
        expected = funcga.accumulate(
            lambda i, stacked: {k: v[0] for k, v in stacked.items()},
            4,
            in_axes=0,
            fold=fold,
            weight=lambda i, _: i.sum() + 1,
        )(index, stacked)
    assert difference(kit, result, expected) <= LIMITS["float32"]


def test_merging_halves(kit):
    accumulator = funcga.Accumulator(FOLDS["moments"])
    items = values(kit)
    whole = left = right = accumulator.init(items[0])
    for k, item in enumerate(items):
        whole = accumulator.update(whole, item, weight=k)
        left, right = (
            (accumulator.update(left, item, k), right) if k < 2 else (left, accumulator.update(right, item, k))
        )
    merged = accumulator.finalize(accumulator.merge(left, right))
    assert difference(kit, merged, accumulator.finalize(whole)) <= LIMITS["float32"]


def test_a_state_is_pure(kit):
    accumulator = funcga.Accumulator()
    item = values(kit)[0]
    empty = accumulator.init(item)
    before = kit.leaves(empty)
    accumulator.merge(accumulator.update(empty, item), empty)
    for a, b in zip(before, kit.leaves(empty), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all((leaf == 0).all() for leaf in kit.leaves(accumulator.finalize(empty)))


def test_through_scan_and_jit():
    accumulator = funcga.Accumulator((funcga.mean(), funcga.max()))
    xs = JAX.arrays(problems.rng(4).normal(size=(6, 3)).astype("float32"))
    like = (jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((), "float32"))

    @jax.jit
    def run(xs):
        step = lambda state, x: (accumulator.update(state, (x, x.max()), weight=x[0] ** 2), None)
        return accumulator.finalize(jax.lax.scan(step, accumulator.init(like), xs)[0])

    mean, top = run(xs)
    np.testing.assert_allclose(mean, np.average(xs, axis=0, weights=np.asarray(xs)[:, 0] ** 2), rtol=1e-5)
    assert float(top) == float(xs.max())


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_through_torch_save(fold):
    accumulator = funcga.Accumulator(fold)
    items = values(TORCH)
    state = accumulator.update(accumulator.init(items[0]), items[0], weight=torch.tensor(3))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    result = accumulator.finalize(accumulator.update(loaded, items[1], weight=2))
    expected = accumulator.finalize(accumulator.update(state, items[1], weight=2))
    assert difference(TORCH, result, expected) == 0


def test_results_keep_dtypes(kit):
    like = {"half": kit.cast(kit.arrays(np.ones(2, "float32")), "bfloat16"), "count": kit.arrays(np.int32(1))}
    accumulator = funcga.Accumulator({"half": funcga.mean(), "count": funcga.sum()})
    state = accumulator.init(like)
    for _ in range(300):
        state = accumulator.update(state, like)
    result = accumulator.finalize(state)
    assert str(result["half"].dtype).endswith("bfloat16")
    assert str(result["count"].dtype).endswith("int32")
    assert (float(result["half"][0]), int(result["count"])) == (1.0, 300)


def test_tally_is_exact_past_two_to_the_24(kit):
    accumulator = funcga.Accumulator()
    value = kit.arrays(np.float32(1))
    state = accumulator.update(accumulator.init(value), value, weight=kit.arrays(np.int32(2**24)))
    for _ in range(5):
        state = accumulator.update(state, value, weight=kit.arrays(np.int32(1)))
    state = accumulator.update(state, value, weight=kit.arrays(np.float32(0.5)))
    assert sum(float(limb) for limb in state.tally.weight) == 2**24 + 5.5
    assert int(state.tally.steps) == 7


def test_a_result_can_be_written_to():
    accumulator = funcga.Accumulator((funcga.sum(), funcga.concat(), funcga.carry()))
    value = (torch.ones(2), torch.ones(2), torch.ones(2))
    state = accumulator.update(accumulator.init(value), value)
    for leaf in accumulator.finalize(state):
        leaf.mul_(7)
    assert all((leaf == 1).all() for leaf in TORCH.leaves(accumulator.finalize(state)))


def test_update_does_not_broadcast(kit):
    accumulator = funcga.Accumulator()
    state = accumulator.init(kit.arrays(np.zeros((2, 3), "float32")))
    with pytest.raises(funcga.FuncgaError, match=r"output is float32\[3\], and the state was made for float32\[2, 3\]"):
        accumulator.update(state, kit.arrays(np.zeros(3, "float32")))


def test_no_graph_outlives_its_micro_batch():
    """Gradients with respect to a module's own parameters are in a graph, by which they can be differentiated again."""
    params = {"w": torch.nn.Parameter(torch.ones(3))}
    accumulator, gradient = (
        funcga.Accumulator(),
        funcga.value_and_grad(lambda params, x: (params["w"] * x).pow(2).sum()),
    )
    value = gradient(params, torch.arange(3.0))
    assert value[1]["w"].requires_grad
    state = accumulator.update(accumulator.init(value), value)
    assert not any(leaf.requires_grad for leaf in state.leaves)
    assert difference(TORCH, accumulator.finalize(state)[1], {"w": 2 * torch.arange(3.0).square()}) == 0


def test_it_is_differentiated_through_inside_of_a_transform():
    accumulator = funcga.Accumulator()

    def squares(x):
        state = accumulator.update(accumulator.update(accumulator.init(x), x * x, weight=1), 4 * x, weight=3)
        return accumulator.finalize(state).sum()

    x = torch.arange(3.0)
    assert difference(TORCH, torch.func.grad(squares)(x), (2 * x + 12) / 4) == 0


@pytest.mark.parametrize("name", ["mean", "per_weight", "sum", "max", "min", "logsumexp", "moments", "concat", "carry"])
def test_a_result_is_the_caller_s_own(kit, name):
    """A state may be donated, or a result written to: the other one stays as it is."""
    accumulator = funcga.Accumulator(getattr(funcga, name)())
    state = accumulator.init(kit.arrays(np.zeros(3, "float32")))
    state = accumulator.update(state, kit.arrays(np.arange(3, dtype="float32")))
    leaves = [leaf for leaf in kit.backend.trees.flatten(state)[0] if kit.backend.arrays.is_array(leaf)]
    before, expected = kit.leaves(leaves), kit.leaves(accumulator.finalize(state))
    result = accumulator.finalize(state)
    if kit.name == "torch":
        for leaf in kit.backend.trees.flatten(result)[0]:
            leaf.add_(1)
        for leaf, array in zip(kit.leaves(leaves), before, strict=True):
            np.testing.assert_array_equal(leaf, array)
    else:
        for leaf in leaves:
            leaf.delete()  # what becomes of what is donated
        for leaf, array in zip(kit.leaves(result), expected, strict=True):
            np.testing.assert_array_equal(leaf, array)


def test_a_normalizer_may_return_a_view():
    first = funcga.normalizers.Normalizer(lambda xp, reduced, tally: reduced[:1])
    accumulator = funcga.Accumulator(funcga.Fold(funcga.reducers.sum, first))
    state = accumulator.update(accumulator.init(torch.zeros(2)), torch.ones(2))
    accumulator.finalize(state).add_(1)
    assert accumulator.finalize(state).tolist() == [1]


@pytest.mark.parametrize("weight", [1e-40, 1e39])
def test_weights_that_a_float32_cannot_hold(kit, weight, x64):
    narrow, wide = (kit.arrays(np.ones(2, dtype)) for dtype in ("float32", "float64"))
    accumulator = funcga.Accumulator()
    with pytest.raises(funcga.FuncgaError, match="which a float32 cannot hold"):
        accumulator.update(accumulator.init(narrow), narrow, weight=weight)
    state = accumulator.update(accumulator.init(wide), wide, weight=weight)
    np.testing.assert_allclose(kit.numpy(accumulator.finalize(state)), [1, 1])


@pytest.mark.parametrize("first", [TORCH, JAX], ids=lambda kit: kit.name)
@pytest.mark.parametrize("kind", ["number", "int", "float"])
def test_a_state_goes_on_in_the_other_framework(first, kind):
    """Without JAX's 64-bit types, whether the weights are numbers or arrays; counts stay exact."""
    accumulator, weights, state = funcga.Accumulator(), (2**24, 1, 3), None
    for kit, weight in zip((first, JAX if first is TORCH else TORCH, first), weights, strict=True):
        value = kit.arrays(np.full(2, weight, "float32"))
        state = accumulator.init(value) if state is None else kit.arrays(state)
        dtype = {"number": None, "int": "int32", "float": "float32"}[kind]
        state = accumulator.update(
            state, value, weight=weight if dtype is None else kit.arrays(np.asarray(weight, dtype))
        )
    assert sum(float(limb) for limb in state.tally.weight) == 2**24 + 4
    expected = sum(float(w) ** 2 for w in weights) / sum(weights)
    np.testing.assert_allclose(first.numpy(accumulator.finalize(state)), expected, rtol=1e-6)


CONVERT = {TORCH: funcga.to_torch, JAX: funcga.to_jax}
FOLDS_THAT_TRAVEL = {
    "mean": funcga.mean(), "per_weight": funcga.per_weight(), "sum": funcga.sum(), "max": funcga.max(),
    "moments": funcga.moments(), "logsumexp": funcga.logsumexp(), "concat": funcga.concat(), "carry": funcga.carry(),
    "exact": funcga.reproducible(funcga.mean()),
}  # fmt: skip


@pytest.mark.parametrize("first", [TORCH, JAX])
@pytest.mark.parametrize("name", FOLDS_THAT_TRAVEL)
def test_a_window_may_change_the_framework_after_any_value(name, first):
    """The state has the structure, shapes and dtypes of the other framework's own, and so goes through jit there."""
    accumulator, second = funcga.Accumulator(FOLDS_THAT_TRAVEL[name]), JAX if first is TORCH else TORCH
    update = {TORCH: accumulator.update, JAX: jax.jit(accumulator.update)}
    # Multiples of a power of two, so that no order of additions rounds.
    values = np.random.default_rng(0).integers(-8, 8, (5, 3)).astype("float32") / 4
    weights = [2, 1, 0, 5, 3]

    def folded(changes: int):
        state = accumulator.init(first.arrays(values[0]))
        own = accumulator.init(second.arrays(values[0]))
        for index, (value, weight) in enumerate(zip(values, weights, strict=True)):
            if index == changes:
                state = CONVERT[second](state)
                like = lambda leaf: (tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
                kinds = [[like(leaf) for leaf in second.leaves(each)] for each in (state, own)]
                assert kinds[0] == kinds[1]
            kit = first if index < changes else second
            state = update[kit](state, kit.arrays(value), weight=weight)
            own = update[second](own, second.arrays(value), weight=weight)
        return kit.leaves(accumulator.finalize(state))

    expected = folded(len(values))
    for changes in range(len(values)):
        for left, right in zip(folded(changes), expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-6)
            if name in ("sum", "max", "concat", "carry", "exact"):
                np.testing.assert_array_equal(left, right)


def test_a_state_of_64_bits_goes_on_in_torch():
    accumulator, ones = funcga.Accumulator(), np.ones(2, "float32")
    with jax.enable_x64(True):
        state = accumulator.update(
            accumulator.init(JAX.arrays(ones)), JAX.arrays(ones), weight=JAX.arrays(np.int64(2**40))
        )
        state = funcga.to_torch(state)
    for weight in (1, torch.tensor(2), torch.tensor(3.0)):
        state = accumulator.update(state, torch.ones(2), weight=weight)
    assert sum(float(addend) for addend in state.tally.weight) == 2**40 + 6
