"""Streams of a device that micro-batches are copied in: how many, and how far the host runs ahead in them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import funcga

pytestmark = pytest.mark.simulated


@pytest.fixture
def made(monkeypatch):
    """The device of each stream that is made, and what happens in order to events of what is computed."""
    seen, stream_of = {"streams": [], "events": []}, torch.Stream

    def stream(device):
        seen["streams"].append(device)
        return stream_of(device)

    class Computing:
        """The stream of what is computed, so far behind that no event of it has come."""

        def __init__(self, device):
            self.device = torch.device("cuda", torch.device(device).index or 0)

        def record_event(self):
            return Event(seen["events"])

        def wait_stream(self, other):
            pass

    monkeypatch.setattr(torch, "Stream", stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", Computing)
    return seen


class Event:
    def __init__(self, events):
        self.events, self.number = events, sum(kind == "recorded" for kind, _ in events)
        events.append(("recorded", self.number))

    def query(self):
        return False

    def synchronize(self):
        self.events.append(("waited", self.number))


def window(device="cuda", count=4):
    """One window of a step that is new, with parameters on a device and micro-batches on the host."""
    step = funcga.stream(funcga.value_and_grad(lambda w, x: (w * x).mean()), device=device)
    items = [(torch.randn(8, 4),) for _ in range(count)]
    params = torch.ones(4, device=device)
    _, grads = step(params, items)
    torch.testing.assert_close(grads.cpu(), torch.cat([x for (x,) in items]).mean(0) / 4)


def test_a_thread_copies_to_a_device_in_one_stream(made):
    """CUDA has 32, which take turns; what is freed in one of them is of no use to the others."""
    threads = [ThreadPoolExecutor(1) for _ in range(2)]  # nothing was copied in them yet
    for thread in threads:
        for device in ("cuda", "cuda:0", "cuda:1") * 4:
            thread.submit(window, device).result()
    assert sorted(map(str, made["streams"])) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    for thread in threads:
        thread.shutdown()


def test_the_host_is_one_micro_batch_ahead(made):
    """Before the third one is copied it waits until the first one was computed with; and so on, over windows."""
    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            thread.submit(window, count=2).result()
    waited = [("recorded", 0), *[step for k in range(5) for step in (("waited", k), ("recorded", k + 1))]]
    assert made["events"] == waited
