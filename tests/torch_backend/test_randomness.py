"""Noise that belongs to an example: other in each micro-batch, reproducible, and independent of n."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
import jax_backend
import torch_backend
from funcga.tools.example_keys import in_torch
from tests.kits import TORCH

MODULES = {"torch": torch_backend, "jax": jax_backend}
UNIFORM = {"torch": torch.rand, "jax": jax.random.uniform}
ROWS = 12


def key(kit, seed=3):
    return seed if kit is TORCH else jax.random.key(seed)


def keys(kit, indices=range(ROWS), seed=3):
    return MODULES[kit.name].example_keys(key(kit, seed), kit.arrays(np.array(indices, dtype="int32")))


def noise(kit, given, shape=(2,)):
    return kit.leaves(MODULES[kit.name].sampled(UNIFORM[kit.name], given, shape))[0]


def test_noise_is_the_example_s_own(kit):
    whole = noise(kit, keys(kit))
    assert whole.shape == (ROWS, 2)
    assert len({*whole.flatten()}) == 2 * ROWS
    np.testing.assert_array_equal(noise(kit, keys(kit, [7, 2])), whole[[7, 2]])
    assert not (noise(kit, keys(kit, seed=4)) == whole).any()
    nested = MODULES[kit.name].example_keys(keys(kit)[0], kit.arrays(np.arange(ROWS, dtype="int32")))
    assert not (noise(kit, nested) == whole).any()
    assert noise(kit, keys(kit)[:0]).shape == (0, 2)


def test_seeds_are_those_of_split_mix():
    """The published generator: the n-th number of the stream that begins at 0 is the mix of n times gamma."""
    mix = in_torch._mixed
    gamma = in_torch._GAMMA
    found = [mix(torch.tensor(n) * gamma).item() % 2**64 for n in (1, 2, 3)]
    assert found == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def dropout_module():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))


def test_seeded_is_a_function_of_its_keys():
    module = dropout_module()
    square = lambda m, x: (m(x) ** 2).mean()
    loss = torch_backend.pure_loss(module, torch_backend.seeded(square))
    params, x = dict(module.named_parameters()), torch.ones(8, 3)
    first, second = keys(TORCH, range(8)), keys(TORCH, range(8, 16))
    before = torch.get_rng_state()
    assert loss(params, first, x) == loss(params, first, x) != loss(params, second, x)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(int(first[0]))
    assert square(module, x) == loss(params, first, x)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        torch_backend.seeded(lambda w, x: (torch.rand(3), 1 / 0))(None, first, x)
    assert torch.equal(torch.get_rng_state(), before)


BAD = {
    "keys are int64[12], and the micro-batch has 2 rows: keys are int64[rows], one for each row, and stand before the "
    "batch.": lambda: torch_backend.seeded(lambda w, x: x.sum())(torch.ones(()), keys(TORCH), torch.ones(2)),
    "a key or index is float32[2]: they are integers, or tensors of some": lambda: torch_backend.example_keys(0, torch.ones(2)),
    "a key or index is float32[]: they are integers, or tensors of some": lambda: torch_backend.example_keys(torch.tensor(0.7), 1),
    "keys are float32[2], and the micro-batch has 0 rows": lambda: torch_backend.seeded(lambda w, x: x.sum())(torch.ones(()), torch.ones(2)),
    "indices is float32[2]: it must be an integer, or an array of some: jnp.arange(len(x)).": lambda: jax_backend.example_keys(jax.random.key(0), jnp.ones(2)),
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_input(text):
    with pytest.raises(funcga.FuncgaError) as error:
        BAD[text]()
    assert str(error.value).startswith(text)


RAISED = {
    "torch, key": lambda: torch_backend.example_keys(0.5, 1),
    "torch, 65 bits": lambda: torch_backend.example_keys(2**64, 1),
    "torch, one key": lambda: torch_backend.sampled(torch.rand, torch.tensor(1)),
    "torch, floats": lambda: torch_backend.sampled(torch.rand, torch.ones(2)),
    "jax, no key": lambda: jax_backend.example_keys(0, jnp.arange(2)),
    "jax, keys": lambda: jax_backend.example_keys(jax.random.split(jax.random.key(0)), jnp.arange(2)),
    "jax, one key": lambda: jax_backend.sampled(jax.random.uniform, jax.random.key(0)),
    "jax, floats": lambda: jax_backend.sampled(jax.random.uniform, jnp.ones(2)),
}


@pytest.mark.parametrize("name", RAISED)
def test_what_frameworks_refuse(name):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        RAISED[name]()


def test_a_pure_loss_is_seeded_from_either_side():
    module, rows = dropout_module(), torch.ones(8, 3)
    square = lambda module, x: (module(x) ** 2).sum()
    inside = torch_backend.pure_loss(module, torch_backend.seeded(square))
    outside = torch_backend.seeded(torch_backend.pure_loss(module, square))
    args = torch_backend.trainable(module), keys(TORCH, range(8)), rows
    assert inside(*args) == outside(*args)


def test_indices_of_more_than_32_bits_are_refused_in_jax():
    for indices in (2**32 + 1, np.array([2**32 + 1, 1])):
        with pytest.raises(funcga.FuncgaError, match=r"keys are made of 32 bits, 0 to 2\*\*32 - 1"):
            jax_backend.example_keys(jax.random.key(0), indices)


@pytest.mark.parametrize(("impl", "typed"), [("threefry2x32", False), ("rbg", True)])
def test_every_generator_of_jax_draws_what_an_example_draws_alone(impl, typed):
    make, sampler = jax.random.key if typed else jax.random.PRNGKey, jax.random.normal
    with jax.legacy_prng_key("allow"), jax.default_prng_impl(impl):
        key = jax_backend.example_keys(make(3), 1)  # of an epoch
        alone = [jax_backend.example_keys(key, i) for i in range(6)]
        together = jax_backend.example_keys(key, jnp.arange(6))
        square = jax_backend.example_keys(key, jnp.arange(6).reshape(2, 3))
        drawn = np.stack([sampler(k, (2,)) for k in alone])
        for rows in ([0, 1, 2, 3, 4, 5], [4, 1], [5]):
            np.testing.assert_array_equal(jax_backend.sampled(sampler, together[jnp.array(rows)], (2,)), drawn[rows])
        np.testing.assert_array_equal(jax_backend.sampled(sampler, square[1], (2,)), drawn[3:])
        assert jax_backend.sampled(sampler, together[:0], (2,)).shape == (0, 2)
        draw = lambda k, x: x + jax_backend.sampled(sampler, k, (2,))
        for n in (1, 3):
            step = funcga.accumulate(draw, n, in_axes=0, fold=funcga.concat())
            np.testing.assert_allclose(step(together, jnp.zeros((6, 2))), drawn, rtol=1e-6)
