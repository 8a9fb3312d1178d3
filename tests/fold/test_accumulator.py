"""`Accumulator`: its state is a plain tree, and its four functions obey the laws (test_laws.py) anywhere."""

import jax
import numpy as np
import pytest
import torch

import funcga
from tests.kits import JAX, TORCH


@pytest.mark.parametrize("seed", range(2))
def test_counts_are_exact(kit, seed):
    """Of numbers and of arrays, compiled or not, and in any grouping; and so are halves beside great numbers."""
    r = np.random.default_rng(seed)
    weights = [2**24, 1, *(2 ** r.integers(0, 30, 6)).tolist(), 1, 3]
    accumulator, value = funcga.Accumulator(), kit.arrays(np.float32(1))
    update = accumulator.update if kit is TORCH else jax.jit(accumulator.update)
    numbers = arrays = accumulator.init(value)
    for weight in weights:
        numbers = accumulator.update(numbers, value, weight=weight)
        arrays = update(arrays, value, weight=kit.arrays(np.int32(weight)))
    half = accumulator.update(accumulator.init(value), value, weight=0.5)
    for state in (numbers, arrays, accumulator.merge(numbers, half), accumulator.merge(half, arrays)):
        rest = 0 if int(state.tally.steps) == len(weights) else 0.5
        assert sum(float(limb) for limb in state.tally.weight) == sum(weights) + rest


@pytest.mark.parametrize("name", ["mean", "max", "carry"])
def test_a_state_may_be_donated_in_jax(name):
    """A result that was taken from it stays."""
    accumulator = funcga.Accumulator(getattr(funcga, name)())
    state = accumulator.init(JAX.arrays(np.zeros(3, "float32")))
    state = accumulator.update(state, JAX.arrays(np.arange(3, dtype="float32")))
    result, expected = accumulator.finalize(state), JAX.leaves(accumulator.finalize(state))
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # what becomes of what is donated
    for leaf, array in zip(JAX.leaves(result), expected, strict=True):
        np.testing.assert_array_equal(leaf, array)


@pytest.mark.parametrize("weight", [1e-40, 1e39])
def test_a_weight_that_only_a_float64_can_hold(kit, weight, x64):
    accumulator, value = funcga.Accumulator(), kit.arrays(np.ones(2))
    state = accumulator.update(accumulator.init(value), value, weight=weight)
    np.testing.assert_allclose(kit.numpy(accumulator.finalize(state)), [1, 1])


def test_a_normalizer_may_return_a_view():
    first = funcga.normalizers.Normalizer(lambda xp, reduced, tally: reduced[:1])
    accumulator = funcga.Accumulator(funcga.Fold(funcga.reducers.sum, first))
    state = accumulator.update(accumulator.init(torch.zeros(2)), torch.ones(2))
    accumulator.finalize(state).add_(1)
    assert accumulator.finalize(state).tolist() == [1]


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


@pytest.mark.parametrize("weight", [1, 1.0, 16])
def test_a_mean_of_floats_before_a_sum_of_integers(kit, weight):
    fold = {"loss": funcga.mean(), "tokens": funcga.sum()}
    accumulator, value = funcga.Accumulator(fold), kit.arrays({"loss": np.float32(0.5), "tokens": np.int32(3)})
    state = accumulator.init(value)
    for _ in range(3):
        state = accumulator.update(state, value, weight)
    found = accumulator.finalize(state)
    assert (float(found["loss"]), int(found["tokens"])) == (0.5, 9)
