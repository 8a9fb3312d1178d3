"""Tree prefixes, matched by key, in both frameworks' trees."""

from collections import namedtuple

import numpy as np
import pytest

import funcga

Pair = namedtuple("Pair", "left right")
SUM, LARGEST = funcga.sum(), funcga.max()


@pytest.mark.parametrize(
    ("prefix", "summed"),
    [
        ({"a": SUM, "b": LARGEST}, [True, True, False, False]),
        ({"b": {"d": LARGEST, "c": SUM}, "a": (LARGEST, SUM)}, [False, True, True, False]),
        ({"a": Pair(SUM, LARGEST), "b": {"c": SUM, "d": SUM}}, [True, False, True, True]),
        (SUM, [True] * 4),
    ],
)
def test_a_fold_stands_for_all_below_and_keys_decide(kit, prefix, summed):
    one, x = kit.arrays((np.ones((), "float32"), np.ones(6, "float32")))
    output = lambda p, x: {"b": {"d": p, "c": p}, "a": Pair(p, p)}
    found = funcga.accumulate(output, 2, fold=prefix)(one, x)
    values = found["a"].left, found["a"].right, found["b"]["c"], found["b"]["d"]
    assert [float(value) == 2 for value in values] == summed
