"""`accumulate` of unusual gradient functions, trees, dtypes and folds. Windows like any other are in `tests/core`."""

import copy
import inspect
from collections import OrderedDict, namedtuple

import jax
import numpy as np
import pytest
import torch

import funcga
from tests import problems
from tests.kits import JAX, LIMITS, counted, difference, dtypes


def test_a_function_that_is_no_gradient_and_auxs_of_the_framework(kit):
    params, batch, loss = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    value, grads = funcga.value_and_grad(loss)(params, *batch)
    assert difference(kit, funcga.accumulate(loss, 5)(params, *batch), value) <= LIMITS["float32"]
    grad = torch.func.grad if kit.name == "torch" else jax.grad
    with_aux = grad(lambda p, x, y: (loss(p, x, y), {"sum": x.sum()}), has_aux=True)
    found = funcga.accumulate(with_aux, 5, fold=(funcga.mean(), {"sum": funcga.sum()}))(params, *batch)
    assert difference(kit, found, (grads, {"sum": batch[0].sum()})) <= LIMITS["float32"]


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


def test_keyword_arguments_need_not_be_arrays(kit):
    seen = []
    gradient = lambda p, x, *, mode, flag, table: seen.append((mode, flag, table["t"].shape)) or p * x.mean()
    one, x = kit.arrays((np.float32(1), np.arange(6, dtype="float32")))
    assert float(funcga.accumulate(gradient, 3)(one, x, mode="a", flag=True, table={"t": x})) == 2.5
    assert set(seen) == {("a", True, (6,))}


def test_a_monoid_of_ones_own(kit):
    product = funcga.Monoid(lambda xp, like: xp.ones_like(like), lambda xp, a, b: a * b)
    fold = funcga.Fold(funcga.Reducer(lambda xp, v, w: v, product), funcga.normalizers.identity)
    x = kit.arrays(np.array([1.0, 2.0, 3.0, 4.0], "float32"))
    assert float(funcga.accumulate(lambda x: x.sum(), 4, in_axes=0, fold=fold)(x)) == 24


def test_unusual_dtypes_and_shapes(kit):
    """Averages of integers, bools past 8 bits, 16 bits summed as integers, the largest of 8 bits, and an empty leaf."""
    folded = lambda function, n, fold, x: funcga.accumulate(function, n, in_axes=0, fold=fold)(x)
    average = folded(lambda x: x.sum(), 4, funcga.mean(dtype="float32"), kit.arrays(np.array([1, 2, 3, 5], "int32")))
    assert (float(average), dtypes(kit, average)) == (2.75, ["float32"])
    ones = np.ones(300, "float32")
    assert int(folded(lambda x: x.sum() > 0, 300, funcga.sum(), kit.arrays(ones))) == 300
    halves = kit.cast(kit.arrays(ones[:4]), "bfloat16")
    assert float(folded(lambda x: x.sum(), 4, funcga.sum(dtype="int32"), halves)) == 4
    small = kit.cast(kit.arrays(np.arange(1, 5, dtype="float32").reshape(4, 1)), "float8_e4m3fn")
    largest = folded(lambda x: (x[0], x[0]), 4, (funcga.max(), funcga.min()), small)
    assert [float(v[0]) for v in largest] == [4, 1]
    assert dtypes(kit, largest) == ["float8_e4m3fn"] * 2
    empty = kit.arrays(np.ones((4, 0), "float32"))
    found = folded(lambda x: (x, x.sum(0)), 2, (funcga.concat(), funcga.mean()), empty)
    assert [tuple(leaf.shape) for leaf in found] == [(4, 0), (0,)]


def test_a_signature_is_kept(kit):
    def gradient(params, batch):
        """What it is."""

    step = funcga.accumulate(gradient, 2)
    assert (step.__name__, step.__doc__) == ("gradient", "What it is.")
    assert str(inspect.signature(step)) == "(params, batch)"
    assert funcga.accumulate(funcga.grad(gradient), 2).__doc__.startswith("The fold of grad_fn over the micro-batches")
    assert str(inspect.signature(funcga.accumulate(funcga.grad(lambda w, *, scale: w), 2))) == "(w, *, scale)"


def test_numpy_arrays_join_the_arrays_of_the_call():
    params, batch, loss = problems.regression()
    params = JAX.arrays(params)
    for step in (
        funcga.accumulate(funcga.grad(loss), 5),
        lambda params, *batch: funcga.stream(funcga.grad(loss))(params, [batch, batch]),
    ):
        assert difference(JAX, step(params, *batch), funcga.grad(loss)(params, *JAX.arrays(batch))) <= LIMITS["float32"]


def test_grad_fn_is_called_once_for_each_microbatch():
    x = funcga.to_torch(np.arange(6, dtype="float32"))
    gradient, calls = counted(lambda x: x.sum())
    funcga.accumulate(gradient, 3, in_axes=0)(x)
    assert len(calls) == 3


def test_a_copy_of_a_fold_is_the_fold(kit):
    step = lambda fold: funcga.accumulate(lambda s, x: (x.sum(), s + x.sum()), 2, in_axes=(funcga.CARRY, 0), fold=fold)
    fold = copy.deepcopy((funcga.sum(), funcga.carry()))
    one, x = kit.arrays(np.float32(1)), kit.arrays(np.ones(4, "float32"))
    assert [float(v) for v in step(fold)(one, x)] == [4, 5]


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
