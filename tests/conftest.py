"""What pytest does before any test: options, the order of the files, and how quickly XLA compiles.

The process that only hands files to the workers imports no framework: what does is in `tests/fixtures.py`.
"""

import importlib
import importlib.util
import mmap
import os
import shutil
import tempfile
from pathlib import Path

# Several processes run at a time, so one thread each: those of OpenMP would wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The files that take longest, which start first, so that workers end together.
LONGEST = (
    "features", "toggle", "compiled", "parity", "conformance", "exact", "folds", "examples", "wrapped", "plans",
    "frameworks", "nothing_is_replaced", "kept", "typing", "gradients", "drop", "plan", "scan_layers", "fused", "removable",
    "replicas_jax", "docs", "nnx",
    "private", "from_optimizer", "reproducible_jax", "verify", "compiled_loss", "multi_steps_replicas_jax",
    "processes_jax", "coupled_replicas", "coupled_jax", "benchmarks_torch", "multi_steps_reproducible", "pipeline",
    "sharded_jax", "recipes_coupled", "multi_steps_jax", "observe", "torch_backend", "training", "untouched",
    "plan_replicated", "jax_backend", "mappings", "nested", "replicated", "laws", "totals", "coupled", "recomputing",
    "command_line", "experts_jax", "fuzz_verify", "observe_replicas", "experts", "optax_adapter", "dtensor",
    "observe_updates", "windows", "logsumexp", "randomness", "benchmarks_jax", "house", "faults", "totals_jax",
    "architecture", "bitwise", "replica_failures", "errors", "engine", "replicas",
)  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, metavar="N", help="generate N cases of each kind, in place of some hundred")
    parser.addoption("--device", choices=["simulated", "cuda"], help="run the tests of devices, on this one")


def pytest_configure(config):
    if config.option.fuzz is not None:
        os.environ["FUNCGA_FUZZ"] = str(config.option.fuzz)  # which the files of these tests read, in every worker
    config.option.loadscopereorder = False  # xdist would start the files with the most tests first
    # a process that reads what another is still writing compiles it for itself
    config.addinivalue_line("filterwarnings", "ignore:Error (reading|writing) persistent compilation cache entry")
    config.addinivalue_line("filterwarnings", "ignore:Guards may run slower on Python 3.13.0")  # of torch.compile
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        compile_quickly()
        share_what_is_compiled()
    if config.option.device == "simulated":
        importlib.import_module("tests.simulated").install_if_possible()
    if is_worker or config.getoption("dist", "no") == "no":
        config.pluginmanager.register(importlib.import_module("tests.devices"))
        config.pluginmanager.register(importlib.import_module("tests.fixtures"))


# With the older of its two ways to write fusions XLA compiles in half the time, and in 4/5 of it where LLVM gets a program
# whole. It is no promise that there are two ways.
QUICK = {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}


def compile_quickly():
    """XLA and inductor take as little time as they can, in every worker, and in every process that a test starts."""
    # Inductor writes the same code without a pool of processes that import torch, and without a program (which imports torch)
    # for each instruction set of the processor, to see whether it runs.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # of a whole process, for each graph
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    known = known_to_xla(QUICK)  # a process with a flag that XLA does not know is aborted
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), *(f"--{name}={QUICK[name]}" for name in known)]
    )


def known_to_xla(names):
    """Those of the flags whose names the library has as strings of C; it also lists those that it no longer takes."""
    known = set()
    for path in Path(importlib.util.find_spec("jaxlib").origin).parent.glob("*.so"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            known |= {name for name in names if library.find(name.encode() + b"\0") >= 0}
    return sorted(known)


def share_what_is_compiled():
    """Every worker, and every process that a test starts, finds what XLA has compiled in this run, and no other run."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_collection_modifyitems(items):
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
