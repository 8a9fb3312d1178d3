"""Every example runs as its first lines say, and prints what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
PRINTS = {  # what the output has to hold, and how often
    "replicas_torch": (r"weights \[0\.2117, 0\.3172\]", 2),
    "ddp_torch": (r"weights \[0\.2117, 0\.3172\]", 2),
    "fsdp2_torch": (r"weights \[0\.2117, 0\.3172\]", 2),
    "replicas_jax": (r"each update: one all-reduce of [\d,]+ bytes, in 0 loops", 1),
    "batchnorm_torch": (r"^merged: .*to 1e-6: True$|^(?:threaded|frozen): .*: False$", 3),
    "batchnorm_jax": (r"^merged: .*to 1e-6: True$|^(?:threaded|frozen): .*: False$", 3),
    "multi_steps_torch": (r"update [1-7]: loss 0\.|to 1e-5: True$", 8),
    "multi_steps_jax": (r"updates 60.*(?:loss 0\.00\d|params to 1e-4: True)$", 2),
    "gpt2_torch": (r"^29 of 29 leaves of accumulated and transformers are close", 1),
    "flax_jax": (r"^8 of 8 leaves of accumulated and whole are close", 1),
    "equinox_jax": (r"^7 of 7 leaves of accumulated and whole are close", 1),
    "parity_torch_flax": (r"^rel may be 1e-12.*\n9 of 9 leaves of torch and flax are close", 1),
}
NEEDS = {
    "gpt2_torch": "transformers",
    "flax_jax": "flax",
    "batchnorm_jax": "flax",
    "equinox_jax": "equinox",
    "parity_torch_flax": "flax",
}


@pytest.mark.parametrize("name", PRINTS)
def test_the_example_prints_what_it_says(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    path = ROOT / "examples" / f"{name}.py"
    tool, *arguments = re.search(rf"^    (\w+ .*examples/{name}\.py.*)$", path.read_text(), re.M)[1].split()
    command = [*RUN[tool], *arguments]
    if tool == "torchrun":
        command[len(RUN[tool]) : len(RUN[tool])] = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    pattern, times = PRINTS[name]
    assert len(re.findall(pattern, done.stdout, re.M)) == times, done.stdout


def test_every_example_is_here():
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(PRINTS)
