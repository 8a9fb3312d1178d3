"""What all tests share. One suite for both backends: `kit` runs a test in torch and in JAX, `dtype` in float32 and float64."""

import functools
import gc

import jax
import pytest
import torch

from tests.kits import JAX, TORCH

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
gc.set_threshold(300_000)  # to collect tests and to trace makes so much, of which hardly anything lies in cycles

# The files that compare to the bit what several programs have rounded. In all others LLVM does not optimise what XLA has
# made of a program, which is the same and takes as much memory: that would be a third of the time to compile it.
OPTIMISED = ("accumulator", "exact", "optax_adapter", "laws", "reproducible_jax")


def lower_in_one_context():
    """JAX would make a context of MLIR for every program, which takes half of the time to lower a small one."""
    from jax._src.interpreters import mlir  # private: without it nothing but time is lost

    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


lower_in_one_context()


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


@pytest.fixture
def as_users_write_it():
    """JAX as it comes: strict promotion allows no count among floats, and the code of optax and flax relies on the usual one."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Arrays this small are only slowed down by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def compiles_as_the_file_wants_it(request):
    optimised = request.path.stem.removeprefix("test_") in OPTIMISED
    jax.config.update("jax_disable_most_optimizations", not optimised)


@pytest.fixture(autouse=True, scope="module")
def collects_its_own_garbage():
    """What other files have left, imports and caches, is not searched again at every collection."""
    gc.freeze()
