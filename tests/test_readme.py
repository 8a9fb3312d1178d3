"""Every code block of the README runs, in every framework that it is for, and its commands are what CI runs."""

import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch.distributed as dist

import funcga
from tests.kits import JAX, TORCH

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def context(kit):
    """The names that the README's blocks take for granted: a user's own parameters, batch, loss and loader."""
    r = np.random.default_rng(0)
    floats = lambda *shape: kit.arrays(r.normal(size=shape).astype("float32"))
    params = {"w": floats(3, 2), "b": floats(2)}
    batch = {"x": floats(10, 3), "y": floats(10, 2)}
    labels = kit.arrays(np.where(np.arange(6) < [[6], [2], [0], [5], [1]], 1, -100).astype("int32"))
    predict = lambda params, x: x @ params["w"] + params["b"]
    loss_fn = lambda params, batch: ((predict(params, batch["x"]) - batch["y"]) ** 2).mean()

    def sum_of_token_losses(params, batch):
        mask = kit.cast(batch["labels"] != -100, "float32")
        return (mask * predict(params, batch["x"])[:, None, 0] ** 2).sum()

    tx = optax.adam(1e-3)
    return {
        "funcga": funcga, "params": params, "batch": batch, "x": batch["x"], "y": batch["y"], "predict": predict,
        "loss_fn": loss_fn, "sum_of_token_losses": sum_of_token_losses, "optax": optax, "tx": tx,
        "tokens": {"x": floats(5, 3), "labels": labels}, "state": {"seen": 0},
        "loader": [{k: v[i : i + 1] for k, v in batch.items()} for i in range(10)],
        "grads": params, "opt_state": tx.init(params) if kit is JAX else None,
    }  # fmt: skip


def frameworks(block):
    """A block that imports a framework is for that one, any other for both."""
    named = [kit for kit in (TORCH, JAX) if re.search(rf"^import {kit.name}$", block, re.MULTILINE)]
    return named or [TORCH, JAX]


CASES = [(kit, block) for block in BLOCKS for kit in frameworks(block)]


@pytest.fixture
def replica(tmp_path, request):
    """For a block that needs one: a process group of one."""
    if "torch.distributed" not in request.getfixturevalue("block"):
        yield
        return
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("kit", "block"), CASES, ids=[f"{k.name}-{b.strip().splitlines()[0][:40]}" for k, b in CASES])
@pytest.mark.usefixtures("replica")
def test_a_block_runs(kit, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where files are saved
    with jax.numpy_dtype_promotion("standard"):
        names = context(kit)
        exec(compile("import funcga\n" + block, "README.md", "exec"), names)
    if "grads" in block:
        assert all(np.isfinite(leaf).all() for leaf in kit.leaves(names["grads"]))


def test_there_are_blocks():
    assert len(CASES) > 12


def test_the_first_block_gives_the_full_gradient(kit):
    names = context(kit)
    exec(BLOCKS[0], names)
    expected = funcga.grad(names["loss_fn"])(names["params"], names["batch"])
    for a, b in zip(kit.leaves(names["grads"]), kit.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_ci_runs_the_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    assert len(commands) == 3
    installs_and_runs = [command.split(" && ", 2)[2] for command in commands]
    ci = (ROOT / ".ci" / "run").read_text()
    assert all(command in ci for command in installs_and_runs)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    headings = {
        "#" + re.sub(r"[^\w -]", "", h).lower().replace(" ", "-")
        for h in re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    }
    assert set(re.findall(r"\]\((#[^)]+)\)", README)) <= headings
