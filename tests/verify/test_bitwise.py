"""`verify(..., bitwise=True)`: the bits of a step in any order of its micro-batches, and `check_replicas` of its result."""

import pytest

import funcga
from tests import problems
from tests.kits import JAX, TORCH

KITS = pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)


def case(kit):
    params, batch, loss = problems.regression("float32", 24)
    return funcga.value_and_grad(loss), kit.arrays(params), kit.arrays(batch)


@KITS
def test_plain_sums_depend_on_the_order_and_exact_ones_do_not(kit):
    gradient, params, batch = case(kit)
    assert funcga.verify(gradient, params, *batch, n=8).ok
    verdict = funcga.verify(gradient, params, *batch, n=8, bitwise=True)
    assert [cause.name for cause in verdict.causes] == ["order of sums"]
    assert verdict.causes[0].fix.startswith("fold=funcga.reproducible(funcga.mean())")
    fold = funcga.reproducible(funcga.mean())
    funcga.verify(gradient, params, *batch, n=8, fold=fold, bitwise=True).assert_exact()


@KITS
def test_exact_sums_are_diagnosed_as_plain_ones_are(kit):
    gradient, params, batch = case(kit)
    verdict = funcga.verify(gradient, params, *batch, n=4, fold=funcga.reproducible(funcga.sum()))
    assert [cause.name for cause in verdict.causes] == ["mean under sum"]


def test_exact_sums_of_gradients_that_depend_on_the_order():
    numbers = iter(range(1000))
    x = TORCH.arrays(problems.rng(0).normal(size=(8, 3)).astype("float32"))
    # Two calls are the same, and each micro-batch has another gradient in another place.
    gradient = lambda x: x.sum(0) * (1 + 1e-6 * (next(numbers) % 4) * (str(x.dtype) == "torch.float32"))
    exact = funcga.reproducible(funcga.sum())
    verdict = funcga.verify(gradient, x, n=4, in_axes=0, fold=exact, bitwise=True)
    assert [cause.name for cause in verdict.causes] == ["order of kernels"]
    assert "although its sums are exact" in verdict.causes[0].what
    assert "reproducible" not in verdict.causes[0].fix


def test_what_is_not_repeatable():
    numbers = iter(range(1000))
    kit = TORCH
    x = kit.arrays(problems.rng(0).normal(size=(8, 3)).astype("float32"))
    # In float32 alone, as kernels that add in any order are.
    gradient = lambda x: x.sum(0) * (1 + 1e-6 * (next(numbers) % 7) * (str(x.dtype) == "torch.float32"))
    verdict = funcga.verify(gradient, x, n=2, in_axes=0, fold=funcga.reproducible(funcga.sum()), bitwise=True)
    assert [cause.name for cause in verdict.causes] == ["bits not repeatable"]
