"""The README: each block runs as it stands when it is pasted into a file, its commands are what CI runs, and it stays short."""

import os
import re
import runpy
import warnings
from pathlib import Path

import pytest

from tests.processes import launched

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(folder):
    os.chdir(folder)
    warnings.simplefilter("error")
    runpy.run_path("pasted.py", run_name="__main__")


@pytest.mark.parametrize("block", BLOCKS, ids=[str(number) for number in range(len(BLOCKS))])
def test_a_block_runs_as_a_file(block, tmp_path):
    (tmp_path / "pasted.py").write_text(block)
    launched(run, tmp_path, count=1)


def test_it_stays_short():
    assert len(README.splitlines()) <= 170
    assert len(README.encode()) <= 10_000
    assert len(BLOCKS) == 2


def test_ci_runs_the_commands():
    blocks = [re.sub(r" \\\n +", " ", block) for block in re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)]
    commands = [command for command in blocks if "venv" in command]
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(command.split(" && ", 2)[2] in ci for command in commands)
