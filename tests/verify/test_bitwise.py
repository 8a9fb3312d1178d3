"""`verify(..., bitwise=True)`: the bits of a step in any order of its micro-batches."""

import pytest

import funcga
from tests import problems
from tests.kits import JAX, TORCH


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)
def test_plain_sums_depend_on_the_order_and_exact_ones_do_not(kit):
    params, batch, loss = problems.regression("float32", 24)
    args = funcga.value_and_grad(loss), kit.arrays(params), *kit.arrays(batch)
    (cause,) = funcga.verify(*args, n=4, bitwise=True).causes
    assert cause.name == "order of sums"
    assert cause.fix.startswith("fold=funcga.reproducible(funcga.mean())")
    fold = funcga.reproducible(funcga.mean())
    funcga.verify(*args, n=4, fold=fold, bitwise=True).assert_exact()
    # Exact sums are diagnosed as plain ones are.
    (cause,) = funcga.verify(*args, n=4, fold=funcga.reproducible(funcga.sum())).causes
    assert cause.name == "mean under sum"


# In how many calls the gradient comes back, and the cause: with 4, two calls are the same, and each micro-batch has
# another gradient in another place.
@pytest.mark.parametrize(("period", "n", "name"), [(4, 4, "order of kernels"), (7, 2, "bits not repeatable")])
def test_gradients_that_depend_on_the_order(period, n, name):
    numbers = iter(range(1000))
    x = TORCH.arrays(problems.rng(0).normal(size=(8, 3)).astype("float32"))
    # In float32 alone, as kernels that add in any order are.
    gradient = lambda x: x.sum(0) * (1 + 1e-6 * (next(numbers) % period) * (str(x.dtype) == "torch.float32"))
    (cause,) = funcga.verify(gradient, x, n=n, in_axes=0, fold=funcga.reproducible(funcga.sum()), bitwise=True).causes
    assert cause.name == name
    assert "reproducible" not in cause.fix
