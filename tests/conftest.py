"""One suite for both backends: `kit` runs a test in torch and in JAX, `precise` also in float32 and float64."""

import os
import shutil
import tempfile

import jax
import pytest

from tests.kits import JAX, TORCH

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# What XLA has compiled in this run, for every worker, and every process that a test starts, to find: the same programs
# would be compiled again in each. It lasts as long as the run, so nothing depends on an earlier one.
COMPILED = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def pytest_configure(config):
    # a worker that reads what another is still writing compiles it for itself
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache entry")
    if hasattr(config, "workerinput"):
        return  # it has the environment of the process that started it
    settings = COMPILED | {"jax_compilation_cache_dir": tempfile.mkdtemp(prefix="compiled-")}
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


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
