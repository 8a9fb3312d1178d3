"""The README: each block runs as it stands when it is pasted into a file, its commands are what CI runs, and it stays short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[str(number) for number in range(len(BLOCKS))])
def test_a_block_runs_as_a_file(block, tmp_path):
    (tmp_path / "pasted.py").write_text(block)
    done = subprocess.run([sys.executable, "-W", "error", "pasted.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_it_stays_short():
    assert len(README.splitlines()) <= 180
    assert len(README.encode()) <= 10_000
    assert len(BLOCKS) == 3


def test_ci_runs_the_commands():
    blocks = [re.sub(r" \\\n +", " ", block) for block in re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)]
    commands = [command for command in blocks if "venv" in command]
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(command.split(" && ", 2)[2] in ci for command in commands)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
