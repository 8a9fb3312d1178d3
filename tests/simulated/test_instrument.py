"""The simulated device itself: it counts what it should, and refuses what a GPU would refuse."""

import pytest
import torch

from tests import simulated
from tests.kits import no_synchronisation

pytestmark = pytest.mark.simulated


def test_kernels_are_counted_and_views_are_not():
    x = torch.ones(4, 3, device="cuda")
    with simulated.Events() as events:
        y = (x.T.reshape(3, 2, 2)[0] * 2).relu_()
    assert events.launched == {"aten::mul.out": 1, "aten::relu_": 1}
    assert events.waits == 0
    assert y.tolist() == [[2, 2], [2, 2]]


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "cpu": lambda x: x.cpu(),
    "copy to the host": lambda x: torch.empty(4).copy_(x, non_blocking=True),  # its memory is not pinned
    "copy from the host": lambda x: x.copy_(torch.ones(4)),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "synchronize": lambda x: torch.cuda.synchronize(),
    "event": lambda x: torch.cuda.Event().synchronize(),
}


def test_the_host_waits():
    for case, wait in WAITING.items():
        x = torch.ones(4, device="cuda")
        with simulated.Events() as events:
            wait(x)
        assert (events.waits, len(events.sites)) == (1, 1), case
        with no_synchronisation(), pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            wait(x)
    # a copy that does not block
    with simulated.Events() as events:
        torch.ones(4).to("cuda", non_blocking=True)
    assert events.waits == 0
    assert events.copied == {"to the device": 1}


def test_devices_do_not_mix():
    x, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    for other in (there, torch.ones(3), there.sum()):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + other
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a number of the host
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())


def test_lists_take_the_fast_route_if_they_are_alike():
    alike = [torch.ones(3, device="cuda") for _ in range(70)]
    mixed = [*alike[:4], torch.ones(2, device="cuda").bfloat16()]
    with simulated.Events() as events:
        torch._foreach_add_(alike, alike)  # 64 pairs at once
    assert events.launches == 2
    with simulated.Events() as events:
        torch._foreach_mul_(mixed, 2)
    assert events.launches == 5
    with simulated.Events() as events:
        torch._foreach_copy_([each.double() for each in alike[:4]], alike[:4])
    assert events.launched["aten::_foreach_copy_"] == 1


def test_generators_belong_to_devices():
    torch.manual_seed(0)
    first, host = torch.rand(3, device="cuda"), torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), host)
    with simulated.Events() as events:
        state = torch.cuda.get_rng_state()
        again = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
    assert torch.equal(again, first)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    assert events.generator == {"get_state": 1, "set_state": 1}


def test_memory_is_kept_and_limited():
    held = torch.ones(1000, device="cuda:1")
    with simulated.Events() as events:
        del held
        torch.empty(1000, device="cuda:1")
    assert events.reserved == 0
    before = torch.cuda.memory_allocated("cuda:1")
    with simulated.limit(before + 10_000, device=1):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10_000, device="cuda:1")
        torch.empty(2000, device="cuda:1")
    assert torch.cuda.memory_allocated("cuda:1") == before
    assert torch.cuda.max_memory_allocated("cuda:1") >= before + 8000


def test_autograd_and_autocast():
    w = torch.ones(3, 3, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        product = w @ w
    assert product.dtype == torch.float16
    product.sum().backward()
    assert w.grad.is_cuda
    assert w.grad.tolist() == [[6.0] * 3] * 3
