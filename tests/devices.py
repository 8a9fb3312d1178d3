"""Which tests run on which device: `python -m pytest --device simulated`, or `--device cuda` on a machine with a GPU.

With either option only tests of devices run: those marked, and those of the fixture `kit` in torch, whose arrays are then
on the device.
"""

import pytest
import torch

from tests import simulated

MARKERS = {
    "cuda": "needs a CUDA device, a real or a simulated one",
    "gpu": "needs a GPU: CUDA graphs, streams that run at once, NCCL",
    "simulated": "counts what happens on a device: python -m pytest --device simulated",
}


def pytest_configure(config):
    host = "reads on the host what a device would be waited for, or makes arrays of its own there"
    for name, meaning in {**MARKERS, "host": host}.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_collection_modifyitems(config, items):
    if config.option.device is not None:
        config.hook.pytest_deselected(items=[item for item in items if not is_for_devices(item)])
        items[:] = [item for item in items if is_for_devices(item)]
    reasons = missing(config.option.device)
    for item in items:
        for name in markers_of(item):
            if name in reasons:
                item.add_marker(pytest.mark.skip(reason=reasons[name]))


def markers_of(item):
    return [name for name in MARKERS if item.get_closest_marker(name)]


def is_for_devices(item):
    kit = getattr(item, "callspec", None) and item.callspec.params.get("kit")
    is_in_torch = kit is not None and kit.name == "torch" and not item.get_closest_marker("host")
    return bool(markers_of(item)) or is_in_torch


def missing(device):
    """What this run does not have, by the marker of the tests that need it, and why."""
    if simulated.is_installed():
        return {"gpu": "needs a GPU, and this device is simulated"}
    if device == "simulated":
        return dict.fromkeys(MARKERS, "the simulated device needs a C++ compiler, and this machine has none")
    reasons = {"simulated": MARKERS["simulated"]}
    if not torch.cuda.is_available():
        reasons |= dict.fromkeys(("cuda", "gpu"), "needs a CUDA device, and this machine has none")
    return reasons
