"""The tally counts exactly, and the error-free sum that it rests on is error-free."""

from fractions import Fraction

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from funcga._fold import two_sum

# XLA flushes subnormal numbers to zero, so none may arise
floats = st.floats(-(2.0**60), 2.0**60, width=32).map(lambda x: x if abs(x) > 2.0**-60 else 0.0)


@settings(deadline=None)
@given(floats, floats)
def test_two_sum_is_exact(a, b):
    high, low = two_sum(np.float32(a), np.float32(b))
    assert Fraction(float(high)) + Fraction(float(low)) == Fraction(a) + Fraction(b)


@settings(deadline=None)
@given(floats, floats)
def test_two_sum_is_exact_when_compiled(a, b):
    high, low = jax.jit(two_sum)(np.float32(a), np.float32(b))
    assert Fraction(float(high)) + Fraction(float(low)) == Fraction(a) + Fraction(b)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=6))
def test_counts_add_up(kit_weights):
    from tests.kits import JAX, TORCH

    for kit in (TORCH, JAX):
        total = kit.backend.arrays.tally(0, steps=0)
        for weight in kit_weights:
            total = total.merge(kit.backend.arrays.tally(weight))
        assert sum(Fraction(float(limb)) for limb in total.weight) == sum(kit_weights)
        assert int(total.steps) == len(kit_weights)


def test_merge_is_commutative(kit):
    a, b = (kit.backend.arrays.tally(w, s) for w, s in ((2**24 + 1, 3), (0.5, 4)))
    for merged in (a.merge(b), b.merge(a)):
        assert sum(float(limb) for limb in merged.weight) == 2**24 + 1.5
        assert int(merged.steps) == 7
