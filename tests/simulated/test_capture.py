"""What a CUDA graph may contain, counted from the second window on: nothing is captured here, see test_engine.py for that.

While a graph is captured the host may not wait for the device, copy to it from its own memory, or read and set the states
of generators. And what a replay computes is in memory that the window before has used.
"""

import pytest
import torch

import funcga
import torch_backend
from tests.simulated import Events
from tests.simulated.features import FEATURES, WINDOWS, Problem, averaged, forward, gradients

pytestmark = pytest.mark.simulated


def events_of(step):
    for _ in range(3):
        result = step()
    with Events() as events:
        result = step()  # noqa: F841  # the memory of the last result is not free yet
    return events


def obstacles(events):
    """What of a window cannot be captured."""
    found = {"waits": events.waits, "copies": events.copied.total(), "generators": events.generator.total()}
    return {name for name, count in found.items() if count}


def coupled(problem):
    params, *batch = problem.drawn()
    summary = lambda params, x, y, mask: forward(params, x)
    step = funcga.coupled(summary, lambda params, all_of_it: all_of_it.square().mean(), problem.n)
    return lambda: step(params, *batch)


def from_the_host(problem):
    """A stream whose micro-batches are on the host."""
    step, (params, *batch) = funcga.stream(funcga.value_and_grad(averaged), device="cuda"), problem.drawn()
    on_host = [[leaf.cpu() for leaf in microbatch] for microbatch in problem.microbatches(*batch)]
    return lambda: step(params, on_host)


def update(problem):
    params, (grads,) = gradients(problem)
    tx = torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1, capturable=True)
    state = tx.init(params)
    return lambda: funcga.transforms.apply(tx, grads, state, params)


# The host reads the weights of a window when it begins.
WEIGHED_ON_DEVICE = (
    "`weight=` on the device, `mean()`", "`weight=` on the device, `per_weight()`", "`drop=`, `weight=` on the device"
)  # fmt: skip
CAN = {name: feature.step for name, feature in FEATURES.items() if name not in WEIGHED_ON_DEVICE} | {
    "an update": update
}
CANNOT = {
    **{name: (FEATURES[name].step, {"waits", "copies"}) for name in WEIGHED_ON_DEVICE},
    "coupled": (coupled, {"generators"}),
    "a stream from the host": (from_the_host, {"copies"}),
    **{name: (made, {"waits"}) for name, made in WINDOWS.items() if name != "`multi_steps(tx, n)`"},
}


def test_what_can_be_captured():
    for name, made in CAN.items():
        dtype = FEATURES[name].dtype if name in FEATURES else torch.float32
        events = events_of(made(Problem("cuda", dtype=dtype)))
        assert (obstacles(events), events.reserved) == (set(), 0), name


def test_what_cannot_be_captured():
    for name, (made, obstacle) in CANNOT.items():
        assert obstacles(events_of(made(Problem("cuda")))) == obstacle, name
