"""Losses that would silently not be reduced over the replicas are refused."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import funcga
from torch_backend import pure_loss


@pytest.fixture(scope="module", autouse=True)
def one_replica(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ddp():
    return nn.parallel.DistributedDataParallel(nn.Linear(3, 2))


def sharded():
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(3, 2))
    fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
    return module


def inside():
    return nn.Sequential(nn.Tanh(), ddp())


WRAPPED = {"DistributedDataParallel": ddp, "fully_shard": sharded, "`1` of it": inside}
X, Y = torch.ones(4, 3), torch.ones(4, 2)
MODULE = None


@pytest.mark.parametrize("named", WRAPPED)
def test_pure_loss_refuses_a_wrapped_module(named):
    with pytest.raises(funcga.FuncgaError, match=rf"{named}.*module_value_and_grad\(module, loss_fn\).*across=group"):
        pure_loss(WRAPPED[named](), lambda module, x, y: F.mse_loss(module(x), y))


CLOSED_OVER = [
    *(("DistributedDataParallel", way) for way in ("closure", "default", "partial", "global", "nested", "list")),
    ("fully_shard", "closure"), ("`1` of it", "list"),
]  # fmt: skip


@pytest.mark.parametrize(("named", "way"), CLOSED_OVER)
def test_a_loss_that_closes_over_a_wrapped_module_is_refused(named, way, monkeypatch):
    module = WRAPPED[named]()
    call = lambda module, params, x, y: F.mse_loss(functional_call(module, params, (x,)), y)
    if way == "closure":
        loss = lambda params, x, y: call(module, params, x, y)
    elif way == "default":
        loss = lambda params, x, y, module=module: call(module, params, x, y)
    elif way == "partial":
        loss = functools.partial(call, module)
    elif way == "global":
        monkeypatch.setitem(globals(), "MODULE", module)
        loss = lambda params, x, y: call(MODULE, params, x, y)
    elif way == "nested":
        inner = lambda params, x: functional_call(module, params, (x,))
        loss = lambda params, x, y: F.mse_loss(inner(params, x), y)
    else:
        modules = [module]
        loss = lambda params, x, y: call(modules[0], params, x, y)
    params = {name: p.detach() for name, p in module.named_parameters()}
    for gradient in (funcga.value_and_grad(loss), torch.func.grad(loss)):
        for step in (funcga.accumulate(gradient, 2), lambda p, x, y, g=gradient: funcga.stream(g)(p, [(x, y)])):
            with pytest.raises(funcga.FuncgaError, match=f"the loss uses a module of type .*{named}"):
                step(params, X, Y)
