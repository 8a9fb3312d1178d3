"""Every source, of every problem, cut in every way, gives what the whole batch gives, and leaves all else alone.

At each of four calls.
"""

from itertools import product

import jax
import numpy as np
import pytest
from torch.utils._pytree import tree_leaves

from tests.core.sources import CUTS, PROBLEMS, SOURCES, SOURCES_OF_BOTH, accumulate, compiled, four
from tests.kits import JAX, LIMITS, TORCH, difference, dtypes


def cases():
    for source, problem, cut in product(SOURCES, PROBLEMS, CUTS):
        yield TORCH, source, problem, cut, "float64"
    for source, problem in product(SOURCES, PROBLEMS):  # rounding is no other where rows are cut otherwise
        yield TORCH, source, problem, "size=4", "float32"
    # each is a program to compile: two problems for a source, and all of them for `accumulate`
    for (first, source), (second, problem) in product(enumerate(SOURCES_OF_BOTH), enumerate(PROBLEMS)):
        if source is accumulate or (second - first) % len(PROBLEMS) < 2:
            yield JAX, source, problem, *(("n=5", "float64") if (first + second) % 2 else ("size=4", "float32"))
    for kit, problem in product((TORCH, JAX), ("mean of rows", "mean over tokens")):
        yield kit, compiled, problem, "n=5", "float64"


def named(case):
    kit, source, problem, cut, dtype = case
    return f"{kit.name}-{source.__name__}-{problem}-{cut}-{dtype}"


@pytest.mark.parametrize("case", [*cases()], ids=named)
def test_a_window_gives_what_the_whole_batch_gives(case):
    kit, source, problem, cut, dtype = case
    with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("standard"), np.errstate(invalid="ignore"):
        problems = four(PROBLEMS[problem])
        calls = [problem.arrays(kit, dtype) for problem in problems]
        results = pure(kit, source(kit, problems[0], CUTS[cut]), calls)
        for found, problem in zip(results, problems, strict=True):
            truth = problem.truth(dtype)
            wanted = kit.arrays({key: truth[key] for key in found})
            assert difference(kit, found, wanted) <= LIMITS[dtype]
            assert {*dtypes(kit, found)} == {dtype}


def memory(leaves):
    return {leaf.untyped_storage().data_ptr() for leaf in leaves}


def pure(kit, step, calls):
    """The result of each call, which shares no memory with the arguments, and which no other call overwrites.

    The last call is the first one again, and has the same bits.
    """
    before = kit.leaves(calls)
    results, kept = [], []
    for args in calls:
        results.append(step(*args))
        kept.append(kit.leaves(results[-1]))
    for name, left, right in (
        ("result", kit.leaves(results), [leaf for leaves in kept for leaf in leaves]),
        ("first result again", kept[-1], kept[0]),
        ("argument", kit.leaves(calls), before),
    ):
        for leaf, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(leaf, other, err_msg=name)
    if kit is TORCH:
        *apart, given = [memory(tree_leaves(tree)) for tree in (*results, calls)]
        assert sum(map(len, apart)) + len(given) == len(set().union(*apart, given))
        assert all(leaf.grad is None and not leaf.requires_grad for leaf in tree_leaves((results, calls)))
    return results
