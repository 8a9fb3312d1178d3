"""One suite for both backends: `kit` runs a test in torch and in JAX, `precise` also in float32 and float64."""

import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile

# Several processes run at a time, so one thread each: those of OpenMP would wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jax
import pytest
import torch

from tests.kits import JAX, TORCH

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The files that take longest, which start first, so that workers end together.
LONGEST = (
    "examples", "wrapped", "parity", "laws", "compiled", "docs", "torch_backend", "replicas_jax", "multi_steps_jax",
    "benchmarks_torch", "coupled", "sharded_jax", "coupled_jax", "compiled_loss", "verify", "coupled_replicas",
    "accumulate", "scan_layers", "frameworks", "jax_backend", "architecture", "processes_jax", "totals",
    "recipes_coupled", "engine", "fuzz_calls", "multi_steps_replicas_jax", "export_jax", "pure_loss", "nested",
    "replicas", "nnx", "private", "totals_verify", "logsumexp", "totals_jax", "fuzz_jax", "fuzz_wrapped",
    "optax_adapter", "replica_failures", "fuzz_verify", "dtensor", "training", "randomness", "totals_replicas",
    "verify_coupled", "fuzz_mesh", "mappings", "replicated", "fuzz_replicas", "multi_steps", "benchmarks_jax",
)  # fmt: skip

# The files that compare to the bit what several programs have rounded. In all others LLVM does not optimise what XLA has
# made of a program, which is the same and takes as much memory: that would be a third of the time to compile it.
OPTIMISED = ("accumulator", "exact", "optax_adapter", "laws", "reproducible_jax", "tally")


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, metavar="N", help="generate N cases of each kind, in place of some hundred")


def pytest_configure(config):
    if config.option.fuzz is not None:
        os.environ["FUNCGA_FUZZ"] = str(config.option.fuzz)  # which the files of these tests read, in every worker
    config.option.loadscopereorder = False  # xdist would start the files with the most tests first
    # a process that reads what another is still writing compiles it for itself
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache entry")
    if not hasattr(config, "workerinput"):
        compile_quickly()
        share_what_is_compiled()
    lower_in_one_context()
    gc.set_threshold(300_000)  # to collect tests and to trace makes so much, of which hardly anything lies in cycles


# With the older of its two ways to write fusions XLA compiles in half the time, and in 4/5 of it where LLVM gets a program
# whole. It is no promise that there are two ways.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def compile_quickly():
    """XLA takes as little time as it can, in this process, in every worker, and in every process that a test starts."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"}
    # A process with a flag that XLA does not know is aborted.
    known = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True, check=False
    )
    if known.returncode == 0:
        os.environ["XLA_FLAGS"] = environment["XLA_FLAGS"]


def share_what_is_compiled():
    """Every worker, and every process that a test starts, finds what XLA has compiled in this run, and no other run."""
    settings = {
        "jax_compilation_cache_dir": tempfile.mkdtemp(prefix="compiled-"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def lower_in_one_context():
    """JAX would make a context of MLIR for every program, which takes half of the time to lower a small one."""
    from jax._src.interpreters import mlir  # private: without it nothing but time is lost

    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def pytest_collection_modifyitems(items):
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


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
