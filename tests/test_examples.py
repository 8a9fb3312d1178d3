"""Every example runs as its first lines say, and prints what they say."""

import os
import random
import re
import runpy
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
RUN = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
PRINTS = {  # what the output has to hold, and how often
    "replicas_torch": (r"weights \[0\.2117, 0\.3172\]", 2),
    "ddp_torch": (r"weights \[0\.2117, 0\.3172\]", 2),
    "fsdp2_torch": (r"weights \[0\.2117, 0\.3172\]", 2),
    "replicas_jax": (r"each update: one all-reduce of [\d,]+ bytes, in 0 loops", 1),
    "multi_steps_torch": (r"update [1-7]: loss 0\.|to 1e-5: True$", 8),
    "multi_steps_jax": (r"updates 60.*(?:loss 0\.00\d|params to 1e-4: True)$", 2),
    "gpt2_torch": (r"^29 of 29 leaves of accumulated and transformers are close", 1),
    "flax_jax": (r"^8 of 8 leaves of accumulated and whole are close", 1),
    "equinox_jax": (r"^7 of 7 leaves of accumulated and whole are close", 1),
    "parity_torch_flax": (r"^rel may be 1e-12.*\n9 of 9 leaves of torch and flax are close", 1),
}
NEEDS = {"gpt2_torch": "transformers", "flax_jax": "flax", "equinox_jax": "equinox", "parity_torch_flax": "flax"}

APART = {"replicas_jax"}  # it says how many devices JAX has, which it takes before it has any


@pytest.mark.parametrize("name", PRINTS)
def test_the_example_prints_what_it_says(name, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    path = EXAMPLES / f"{name}.py"
    tool, *arguments = re.search(rf"^    (\w+ .*examples/{name}\.py.*)$", path.read_text(), re.M)[1].split()
    if tool == "python" and arguments == [f"examples/{name}.py"] and name not in APART:
        with as_a_program():
            runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
    else:
        printed = printed_apart(tool, arguments)
    pattern, times = PRINTS[name]
    assert len(re.findall(pattern, printed, re.M)) == times, printed


@contextmanager
def as_a_program():
    """What runs inside finds what a program finds that was just started, and leaves nothing behind but imports."""
    path, modules, wide, dtype = sys.path[:], set(sys.modules), jax.config.jax_enable_x64, torch.get_default_dtype()
    states = random.getstate(), np.random.get_state()
    sys.path.insert(0, str(EXAMPLES))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng([]), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("default")
            yield
    finally:
        sys.path[:] = path
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_default_dtype(dtype)
        jax.config.update("jax_enable_x64", wide)
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == EXAMPLES:
                del sys.modules[name]  # so that nothing else is called `sentences`


def printed_apart(tool, arguments):
    """What the program prints in processes of its own."""
    command = [*RUN[tool], *arguments]
    if tool == "torchrun":
        command[len(RUN[tool]) : len(RUN[tool])] = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_example_leaves_nothing_behind():
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), sys.path[:]
    with as_a_program():
        import sentences

        assert Path(sentences.__file__).parent == EXAMPLES
        torch.manual_seed(1)
        random.seed(1)
        torch.set_default_dtype(torch.float64)
        jax.config.update("jax_enable_x64", True)
        assert warnings.filters[0][0] == "default"  # it is warned, and goes on
        assert jax.numpy.ones(1).dtype == "float64"
    assert "sentences" not in sys.modules
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_default_dtype(), sys.path) == before[1:]
    assert jax.numpy.ones(1).dtype == "float32"


def test_every_example_is_here():
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(PRINTS)
