"""Tree prefixes, matched by key, in both frameworks' trees."""

from collections import namedtuple
from dataclasses import dataclass

import jax
import numpy as np
import pytest
import torch

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


@dataclass
class Output:
    loss: object
    extra: object = None


torch.utils._pytree.register_dataclass(Output)
jax.tree_util.register_dataclass(Output, data_fields=["loss", "extra"], meta_fields=[])


def test_a_field_that_is_none_takes_any_fold(kit):
    """torch has no child there, JAX one that is None."""
    one, x = kit.arrays(np.float32(1)), kit.arrays(np.arange(4, dtype="float32"))
    for extra in (None, funcga.sum(), {"a": funcga.sum()}):
        if kit.name == "jax" and isinstance(extra, dict):
            continue  # a prefix that is longer than the tree
        step = funcga.accumulate(lambda p, x: Output(x.mean()), 2, fold=Output(funcga.mean(), extra))
        result = step(one, x)
        assert (float(result.loss), result.extra) == (1.5, None)
    step = funcga.accumulate(lambda p, x: Output(x.mean(), x.sum()), 2, fold=Output(funcga.mean(), funcga.sum()))
    assert (float(step(one, x).loss), float(step(one, x).extra)) == (1.5, 6)
    whole = funcga.accumulate(lambda p, b: b.loss.mean(), 2, in_axes=(None, Output(0, 0)))
    assert float(whole(one, Output(x))) == 1.5
    with pytest.raises(funcga.FuncgaError, match="is no prefix of what grad_fn returns"):
        funcga.accumulate(lambda p, x: Output(x.mean(), x.sum()), 2, fold=Output(funcga.mean()))(one, x)


def test_equal_keys_of_other_types_are_other_keys():
    one, x = torch.ones(()), torch.arange(4.0)
    for key in (1, True, 1.0):
        result = funcga.accumulate(lambda p, x, key=key: {key: x.mean()}, 2)(one, x)
        assert [type(found) for found in result] == [type(key)]
        assert [type(found) for found in funcga.to_torch({key: x})] == [type(key)]
