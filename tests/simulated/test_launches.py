"""How many kernels a window launches with the options of `accumulate`: of 8 leaves, wide enough to be no short ones."""

import pytest
import torch
from torch.nn import functional as F

import funcga
from tests import simulated
from tests.simulated import features
from tests.simulated.features import Problem, accumulated, forward

pytestmark = pytest.mark.simulated

# n = 4, from the second window on; a loop by hand launches 139, and 147 with 16-bit parameters.
NORMS, NOISE = {"observe": funcga.gradient_norms()}, {"observe": funcga.gradient_noise()}
MOST = {
    "plain": (torch.float32, {}, 131),
    "16-bit parameters": (torch.bfloat16, {}, 149),
    "gradient_norms()": (torch.float32, NORMS, 167),
    "gradient_norms(), 16-bit parameters": (torch.bfloat16, NORMS, 185),
    "gradient_noise()": (torch.float32, NOISE, 237),
    "drop='microbatch'": (torch.float32, {"drop": "microbatch"}, 197),
    "drop='window'": (torch.float32, {"drop": "window"}, 216),
    "drop='microbatch', 16-bit parameters": (torch.bfloat16, {"drop": "microbatch"}, 246),
}


def loss(params, x, y, mask):
    return F.cross_entropy(forward(params, x).float(), y)


def events_of(step):
    for _ in range(3):
        step()
    with simulated.Events() as events:
        step()
    return events


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(features, "WIDTH", 96)
    monkeypatch.setattr(features, "CLASSES", 16)


@pytest.mark.parametrize("name", MOST)
@pytest.mark.usefixtures("wide")
def test_a_window_launches_so_many_kernels(name):
    dtype, options, most = MOST[name]
    events = events_of(accumulated(Problem("cuda", dtype=dtype), loss, **options))
    assert most - 3 <= events.launches <= most
    assert events.waits == 0


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("options", [NORMS, NOISE], ids=["norms", "noise"])
def test_observers_launch_nothing_for_each_leaf(options):
    beyond = []
    for layers in (4, 16):
        problem = Problem("cuda", layers=layers)
        observed, plain = accumulated(problem, loss, **options), accumulated(problem, loss)
        beyond.append(events_of(observed).launches - events_of(plain).launches)
    assert beyond[0] == beyond[1]


@pytest.mark.usefixtures("wide")
def test_what_may_be_dropped_is_chosen_without_memory_for_all_gradients():
    """Each gradient is freed as soon as it was chosen from."""
    peaks = []
    for options in ({}, {"drop": "microbatch"}):
        step = accumulated(Problem("cuda", layers=8), loss, **options)
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    size = 7 * 4 * 96 * 96
    assert peaks[1] < peaks[0] + 1.3 * size
