"""`accumulate` of unusual gradient functions, trees, dtypes and folds. Windows like any other are in `tests/core`."""

import inspect
from collections import OrderedDict, namedtuple

import numpy as np
import pytest

import funcga
from tests.kits import LIMITS, difference, dtypes

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "tree",
    [
        lambda a: {"z": a, "a": [a + 1], "none": None},
        lambda a: OrderedDict([("z", a), ("a", (a, None))]),
        lambda a: Point(a, {"empty": (), "k": {1: a, 0: a + 1}}),
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
        f"{kit.xp.__name__}.stack([...]); funcga.statistics.batch_moments makes those of pooled()."
    )
