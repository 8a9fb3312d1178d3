"""Every feature on a device: the host's numbers, and as many launches and waits as the docs say."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

import funcga
import funcga.tools.reproducible.in_torch as joining
from tests import simulated
from tests.processes import processes
from tests.simulated import table
from tests.simulated.features import FEATURES, OPTIONS, Problem, merged, whole


def on_host(tree):
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def close(found, wanted):
    # Weights that the host does not see are multiplied by as they are, and others as shares.
    limits = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
    pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True)
    for a, b in pairs:
        limit = limits.get(a.dtype, 1e-5)
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=limit, atol=limit / 10, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in FEATURES if name != "autocast"])
def test_a_device_has_the_numbers_of_the_host(name):
    feature = FEATURES[name]
    made = [feature.step(Problem(device, 7, dtype=feature.dtype)) for device in ("cuda", "cpu")]
    for _ in range(2):
        found, wanted = (step() for step in made)
        close(found, wanted)
    assert all(leaf.is_cuda for leaf in torch.utils._pytree.tree_leaves(found))


def _merged(group, name):
    step = merged(name, group, Problem("cuda"))
    step()
    return on_host(step())


@pytest.mark.cuda
@pytest.mark.parametrize("name", OPTIONS)
def test_devices_have_the_numbers_of_one_process(name):
    wanted = whole(name, Problem("cpu", n=8))()
    backend = "simulated" if simulated.is_installed() else "nccl"
    for found in processes(torch.cuda.device_count(), backend).run(_merged, name):
        close(found, wanted)


def launched(step, calls=2):
    for _ in range(calls):
        step()
    with simulated.Events() as events:
        step()
    return events.launches


@pytest.mark.simulated
def test_exact_sums_of_short_leaves_are_one_sequence_of_kernels():
    """Of 8 leaves as of 32: one sequence for the loss, and one for all gradients, which autograd adds one by one."""
    beyond = []
    for layers in (4, 16):
        problem = Problem("cuda", layers=layers)
        exact, plain = (FEATURES[name].step(problem) for name in ("`reproducible(mean())`", "plain"))
        added = 2 * layers * (problem.n - 1)
        beyond.append(launched(exact) - (launched(plain) - added))
    assert beyond[0] == beyond[1]
    assert 412 <= beyond[0] <= 415


@pytest.mark.simulated
def test_leaves_are_joined_up_to_so_many_elements(monkeypatch):
    """What lies between a gradient and its sum is not held for all leaves at once."""
    params = {str(index): torch.ones(64, 64, device="cuda") for index in range(40)}
    loss = lambda params, x: sum((x.mean() * leaf).square().sum() for leaf in params.values())
    step = funcga.accumulate(funcga.grad(loss), 4, fold=funcga.reproducible(funcga.mean()))
    arguments, results, peaks, launches = (params, torch.ones(8, 3, device="cuda")), [], [], []
    for most in (1, 2 * 64 * 64):
        monkeypatch.setattr(joining, "JOINED_ON_DEVICE", most)
        launches.append(launched(lambda: step(*arguments)))
        torch.cuda.reset_peak_memory_stats()
        results.append(step(*arguments))
        peaks.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
    funcga.compare(*results, rtol=0, atol=0).assert_close()
    assert 2730 <= launches[0] - launches[1] <= 2745  # of 20 sequences of kernels
    assert peaks[1] <= peaks[0] + 16 * 4 * most


PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "mixed_precision.md"


@pytest.mark.simulated
@pytest.mark.filterwarnings(
    "ignore:An output with one or more elements was resized"
)  # by mse_loss of the simulated device
def test_a_window_of_the_page_on_mixed_precision_waits_once():
    """GradScaler reads whether all gradients are finite. Its scale is on the device, so nothing is copied."""
    source = "".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    program, loop = (
        source.split("for _ in range(3):\n")[0],
        source.split("for _ in range(3):\n")[1].split("\nwhole =")[0],
    )
    on_device = program.replace("nn.Linear(64, 1))", "nn.Linear(64, 1)).cuda()").replace(
        "torch.randn(64, 1)", "torch.randn(64, 1).cuda()"
    )
    on_device = on_device.replace("torch.randn(64, 20)", "torch.randn(64, 20).cuda()")
    names = {}
    exec(on_device, names)
    window = "if True:\n" + loop
    exec(window, names)
    exec(window, names)
    with simulated.Events() as events:
        exec(window, names)
    assert (events.waits, events.copied.total()) == (1, 0)


@pytest.mark.simulated
def test_the_page_has_the_numbers_of_this_run():
    page = table.PAGE.read_text()
    assert table.with_table(page) == page, "write the page anew: python -m tests.simulated"
