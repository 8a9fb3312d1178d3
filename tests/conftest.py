"""One suite for both backends: `kit` runs a test in torch and in JAX, `precise` also in float32 and float64."""

import jax
import pytest

from tests.kits import JAX, TORCH

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(params=[TORCH, JAX], ids=lambda kit: kit.name)
def kit(request):
    return request.param


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
