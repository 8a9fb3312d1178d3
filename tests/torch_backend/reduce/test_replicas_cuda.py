"""Replicas on CUDA devices, as many as there are, joined by NCCL or by what stands in for it."""

import pytest
import torch
import torch.distributed as dist

import funcga
from tests import simulated
from tests.processes import processes
from tests.torch_backend.reduce.test_replicas import counted, deep, difference, layers, problem, summed
from torch_backend import Replicas

pytestmark = pytest.mark.cuda


def on_devices(function, *args):
    return processes(torch.cuda.device_count(), "simulated" if simulated.is_installed() else "nccl").run(
        function, *args
    )


def same(group, device_weights):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    params, *batch = problem(torch.float64)
    params = {k: v.cuda() for k, v in params.items()}
    weight = (lambda x, y, t: t.sum()) if device_weights else (lambda x, y, t: int(t.sum()))
    step = funcga.accumulate(funcga.value_and_grad(summed), 2, fold=funcga.per_weight(), weight=weight, across=group)
    own = [x.cuda()[24 * rank // size : 24 * (rank + 1) // size] for x in batch]
    step(params, *own)
    result = step(params, *own)
    expected = funcga.accumulate(funcga.value_and_grad(summed), 1, fold=funcga.per_weight(), weight=weight)
    return difference(result, expected(params, *(x.cuda() for x in batch)))


@pytest.mark.parametrize("device_weights", [False, True])
def test_the_same_global_batch(device_weights):
    assert max(on_devices(same, device_weights)) <= 1e-13


def without_waiting(group):
    """The second window, in which whatever makes the host wait for the device is an error: weights that the host knows."""
    params = [{k: v.cuda() for k, v in layer.items()} for layer in layers(12)]
    x = torch.ones(8, 64, device="cuda")
    step = funcga.accumulate(
        funcga.value_and_grad(deep), 4, weight=lambda x: x.numel(), across=Replicas(group, bucket_bytes=2**16)
    )
    step(params, x)
    direct = getattr(group, "collectives", [])  # those of a group that no operator calls
    direct.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with counted() as calls:
            step(params, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return [name for name, _ in calls] + direct


def test_the_host_never_waits():
    for calls in on_devices(without_waiting):
        assert set(calls) == {"allgather_", "allreduce_"}  # the header is on the host
        assert calls.count("allgather_") == 1
        assert len(calls) > 4
