"""coupled: the loss and the gradient of the whole batch, however it is cut, in both frameworks."""

import jax
import numpy as np
import pytest

import funcga
from tests.coupled import losses
from tests.kits import JAX, TORCH, difference
from tests.objectives import cut

# Sums of some hundred numbers in float64, in another order.
LIMIT = 1e-12


@pytest.fixture(autouse=True)
def as_users_write_it(x64):
    """Strict promotion does not allow a count among floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("options", [{"n": 1}, {"n": 3}, {"n": 7}, {"microbatch_size": 4}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("name", losses.LOSSES)
def test_any_number_of_microbatches_gives_the_whole_batch(kit, name, options):
    params, batch = losses.problem(kit, name)
    result = losses.step(kit, name, **options)(params, batch)
    assert difference(kit, result, losses.expected(kit, name, params, batch)) < LIMIT


@pytest.mark.parametrize("name", losses.LOSSES)
def test_both_frameworks_give_the_same(name):
    results = [losses.step(kit, name, 3)(*losses.problem(kit, name)) for kit in (TORCH, JAX)]
    assert difference(TORCH, results[0], funcga.to_torch(results[1])) < LIMIT


# How far the gradient of three micro-batches is off, in percent: measured, and rounded down.
OFF = {"InfoNCE": 30, "SigLIP": 78, "VICReg": 9, "Barlow Twins": 54, "MoE balance": 15}


@pytest.mark.parametrize("name", OFF)
def test_the_mean_of_microbatch_losses_is_another_gradient(name):
    params, batch = losses.problem(TORCH, name)
    usual = losses.usual(TORCH, name, params, cut(batch, 0, 4, 8, 11))
    _, whole = losses.expected(TORCH, name, params, batch)
    flat = lambda tree: np.concatenate([leaf.ravel() for leaf in TORCH.leaves(tree)])
    off = 100 * np.linalg.norm(flat(usual) - flat(whole)) / np.linalg.norm(flat(whole))
    assert OFF[name] <= off < OFF[name] + 1
