"""Tree prefixes, matched by key, in both frameworks' trees."""

from collections import namedtuple
from dataclasses import dataclass

import jax
import numpy as np
import pytest
import torch

import funcga
from funcga._backend.prefixes import PrefixError, broadcast, leaf_paths, outline

Pair = namedtuple("Pair", "left right")


def spread(kit, prefix, tree):
    leaves = len(kit.backend.trees.flatten(tree)[0])
    return [placed.value for placed in broadcast(prefix, tree, leaves, lambda v: isinstance(v, str), kit.backend.trees)]


def test_leaf_paths(kit):
    tree = {"a": [1, (2,)], "b": Pair(3, {"c": 4})}
    paths = leaf_paths(tree, kit.backend.trees, "tree")
    assert paths == ["tree['a'][0]", "tree['a'][1][0]", "tree['b'].left", "tree['b'].right['c']"]
    assert leaf_paths(1, kit.backend.trees, "x") == ["x"]
    assert leaf_paths({}, kit.backend.trees) == []


def test_a_value_stands_for_all_below(kit):
    assert spread(kit, "m", {"a": 1, "b": [2, 3]}) == ["m"] * 3
    assert spread(kit, ("m", {"a": "s", "b": "t"}), (1, {"a": 2, "b": [3, 4]})) == ["m", "s", "t", "t"]
    assert spread(kit, ["m", "s"], (1, 2)) == ["m", "s"]
    assert spread(kit, ("m", "s"), Pair(1, [2, 2])) == ["m", "s", "s"]
    assert spread(kit, {}, {}) == []


def test_keys_decide_not_their_order(kit):
    tree = {"b": 1, "a": 2}
    assert dict(zip(leaf_paths(tree, kit.backend.trees), spread(kit, {"a": "A", "b": "B"}, tree), strict=True)) == {
        "['b']": "B", "['a']": "A",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prefix", "tree", "path"),
    [
        (("m",), (1, 2), ""),
        ({"a": "m"}, {"b": 1}, ""),
        ({"a": ("m",)}, {"a": 1}, "['a']"),
        ([1.5], [1], "[0]"),
        ({"a": {"b": "m"}}, {"a": {"b": 1, "c": 2}}, "['a']"),
    ],
)
def test_where_they_part(kit, prefix, tree, path):
    with pytest.raises(PrefixError) as caught:
        spread(kit, prefix, tree)
    assert caught.value.path == path


def test_outline(kit):
    tree = {"a": [1, 2, 3, 4, 5, 6], "b": {"c": {"d": 1}}}
    assert outline(tree, kit.backend.trees, str) == (
        "dict(['a']: list([0]: 1, [1]: 2, [2]: 3, [3]: 4, ... 2 more), ['b']: dict(['c']: ...))"
    )


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
