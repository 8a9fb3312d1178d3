"""What every correct implementation of accumulation satisfies, each as a function that asserts it.

The suite calls them with funcga's own `accumulate`; `test_teeth.py` calls them with wrong ones, which they must reject.
"""

import numpy as np

import funcga
from tests import problems
from tests.kits import LIMITS, difference


def equals_the_full_batch(kit, accumulate, dtype, problem):
    params, batch, loss, fold, weight = problems.PROBLEMS[problem](dtype)
    params, batch = kit.arrays(params), kit.arrays(batch)
    full = problems.full_gradient(kit, params, batch, loss, weight)
    rows = len(kit.leaves(batch)[0])
    gradient = funcga.value_and_grad(loss)
    # each is another program in JAX: all of them for one problem in one dtype, some for the others
    some = kit.name == "jax" and (dtype, problem) != ("float32", "tokens")
    for n in (1, 2, 5, rows) if some else range(1, rows + 1):
        result = accumulate(gradient, n, fold=fold, weight=weight)(params, *batch)
        assert difference(kit, result, full) <= LIMITS[dtype], f"n={n}"
    for size in (1, 4, rows - 1, rows + 1) if some else range(1, rows + 2):
        result = accumulate(gradient, microbatch_size=size, fold=fold, weight=weight)(params, *batch)
        assert difference(kit, result, full) <= LIMITS[dtype], f"microbatch_size={size}"


def ignores_empty_microbatches(kit, accumulate):
    """A mean over no tokens is NaN; with weight 0 it contributes nothing, forwards and backwards."""
    params, (batch,), loss = problems.tokens(rows=6)
    batch["mask"][2:4] = 0
    params, batch = kit.arrays(params), kit.arrays(batch)
    full = problems.full_gradient(kit, params, (batch,), loss, problems.token_count)
    step = accumulate(funcga.value_and_grad(problems.token_mean), 3, weight=problems.token_count)
    with np.errstate(invalid="ignore"):
        assert difference(kit, step(params, batch), full) <= LIMITS["float32"]


def sums_16_bit_floats_in_32(kit, accumulate):
    ones = kit.cast(kit.arrays(np.ones((1024, 3), "float32")), "bfloat16")
    rows = accumulate(lambda x: x.sum(0), 1024, in_axes=0, fold=funcga.sum())(ones)
    assert str(rows.dtype).endswith("bfloat16")
    assert [float(v) for v in rows] == [1024.0] * 3
    tenths = kit.cast(kit.arrays(np.full((1000, 1), 0.1, "float32")), "bfloat16")
    mean = accumulate(lambda x: x.sum(0), 1000, in_axes=0, fold=funcga.mean())(tenths)
    assert float(mean[0]) == float(tenths[0, 0])


def counts_past_two_to_the_24(kit, accumulate):
    """2**24 tokens and then single ones: the mean of a constant must stay that constant, the count an integer."""
    weights = np.array([2**24] + [1] * 64, "int32")
    values = np.array([0.0] + [1.0] * 64, "float32")
    step = accumulate(lambda v, w: v.sum(), 65, in_axes=0, fold=funcga.per_weight(), weight=lambda v, w: w.sum())
    assert float(step(kit.arrays(values), kit.arrays(weights))) == np.float32(64 / (2**24 + 64))


def leaves_arguments_alone(kit, accumulate):
    """Nothing is mutated, nothing returned aliases an argument or a later result."""
    params, batch, loss = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    before = kit.leaves((params, batch))
    echo = lambda p, x, y: (p["w"], x.mean(0), p["b"])
    fold = (funcga.mean(), funcga.mean(), funcga.max())
    for step in (
        accumulate(funcga.value_and_grad(loss), 5),
        accumulate(echo, 1, fold=fold),
        accumulate(echo, 3, fold=fold),
    ):
        first = step(params, *batch)
        kept = kit.leaves(first)
        second = step(params, *batch)
        for a, b, c in zip(kept, kit.leaves(first), kit.leaves(second), strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)
        if kit.name == "torch":
            pointers = [
                {x.untyped_storage().data_ptr() for x in kit.backend.trees.flatten(t)[0]} for t in (first, second)
            ]
            given = {x.untyped_storage().data_ptr() for x in kit.backend.trees.flatten((params, batch))[0]}
            assert not pointers[0] & pointers[1]
            assert not (pointers[0] | pointers[1]) & given
    for a, b in zip(before, kit.leaves((params, batch)), strict=True):
        np.testing.assert_array_equal(a, b)


def keeps_the_order_of_rows(kit, accumulate):
    x = kit.arrays(np.arange(11, dtype="float32").reshape(11, 1))
    step = accumulate(
        lambda x: (x * 2, x.max(), x.min()), 4, in_axes=0, fold=(funcga.concat(), funcga.max(), funcga.min())
    )
    doubled, top, bottom = step(x)
    np.testing.assert_array_equal(kit.numpy(doubled)[:, 0], 2 * np.arange(11))
    assert (float(top), float(bottom)) == (10, 0)


def threads_state_in_order(kit, accumulate):
    x = kit.arrays(np.arange(1, 8, dtype="float32"))
    # a product with a shift does not commute: only the right order gives the right state
    step = accumulate(
        lambda state, x: (x.sum(), {"s": 2 * state["s"] + x.sum()}), 7, in_axes=(funcga.CARRY, 0),
        fold=(funcga.sum(), funcga.carry()),
    )  # fmt: skip
    total, state = step({"s": kit.arrays(np.float32(1))}, x)
    expected = 1.0
    for value in range(1, 8):
        expected = 2 * expected + value
    assert (float(total), float(state["s"])) == (28, expected)


def keeps_dtypes(kit, accumulate):
    out = accumulate(
        lambda x: (kit.cast(x.mean(), "float16"), kit.cast(x.mean(), "bfloat16"), x.mean(), kit.cast(x.sum(), "int32")), 3,
        in_axes=0, fold=(funcga.mean(), funcga.mean(), funcga.mean(), funcga.sum()),
    )(kit.arrays(np.arange(8, dtype="float32")))  # fmt: skip
    assert [str(v.dtype).removeprefix("torch.") for v in out] == ["float16", "bfloat16", "float32", "int32"]
    assert [float(v) for v in out] == [3.5, 3.5, 3.5, 28]


def gives_zeros_for_no_weight(kit, accumulate):
    params, (batch,), loss = problems.tokens(rows=4)
    batch["mask"][:] = 0
    params, batch = kit.arrays(params), kit.arrays(batch)
    for fold, fn in ((funcga.per_weight(), loss), (funcga.mean(), problems.token_mean)):
        out = accumulate(funcga.value_and_grad(fn), 3, fold=fold, weight=problems.token_count)(params, batch)
        assert all((leaf == 0).all() for leaf in kit.leaves(out))


WITHOUT_PARAMETERS = [
    ignores_empty_microbatches,
    sums_16_bit_floats_in_32,
    counts_past_two_to_the_24,
    leaves_arguments_alone,
    keeps_the_order_of_rows,
    threads_state_in_order,
    keeps_dtypes,
    gives_zeros_for_no_weight,
]
