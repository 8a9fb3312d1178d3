"""Wrapped modules are driven as they want to be, and what comes out is the gradient of the whole batch on one device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcga
from tests.processes import processes
from torch_backend import module_value_and_grad

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-13}
# for each rank the micro-batches of one window, as (rows, tokens that count in each row); ragged in every way
WINDOWS = {
    1: [[(3, 5)], [(2, 1)], [(1, 4)], [(5, 2)]],
    2: [[(3, 5), (1, 2)], [(2, 1), (4, 3)], [(1, 4), (2, 2)], [(5, 2), (1, 1)]],
    3: [[(3, 5), (1, 2), (2, 4)], [(2, 1), (4, 3), (1, 5)], [(1, 4), (2, 2), (2, 1)], [(5, 2), (1, 1), (3, 3)]],
}


def made(dtype=torch.float32):
    """The same module everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 3), nn.Tanh()
    ).to(dtype)


def ddp(group, module, **options):
    return nn.parallel.DistributedDataParallel(module, process_group=group, **options)


def ddp_views(group, module):
    return ddp(group, module, gradient_as_bucket_view=True)


def ddp_unused(group, module):
    return ddp(group, module, find_unused_parameters=True)


def fsdp1(group, module, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        module, process_group=group, device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **{"use_orig_params": True, **options}
    )  # fmt: skip


def fsdp1_flat(group, module):
    return fsdp1(group, module, use_orig_params=False)


def mesh_of(group, shape=None):
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.tensor(dist.get_process_group_ranks(group))
    return DeviceMesh.from_group(group, "cpu") if shape is None else DeviceMesh("cpu", ranks.reshape(shape))


def fsdp2(group, module, mesh=None, **options):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(group) if mesh is None else mesh
    fully_shard(module[2], mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def replicated(group, module):
    from torch.distributed._composable.replicate import replicate

    return replicate(module, process_group=group)


def replicated_by_fsdp(group, module):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=mesh_of(group))


WRAPPERS = {
    f.__name__: f for f in (ddp, ddp_views, ddp_unused, fsdp1, fsdp1_flat, fsdp2, replicated, replicated_by_fsdp)
}


def batches(window, rank, dtype):
    """The micro-batches of a rank: x, y and a mask of the tokens that count."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for rows, tokens in WINDOWS[window][rank]:
        x = torch.randn(rows, 5, 4, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randn(rows, 5, 3, generator=generator, dtype=torch.float64).to(dtype)
        found.append((x, y, (torch.arange(5) < tokens).expand(rows, 5)))
    return found


def loss_of(module, x, y, mask):
    """The mean over the tokens that count."""
    return ((module(x) - y) ** 2).mean(-1)[mask].mean()


def count(x, y, mask):
    return mask.sum()


def whole(window, dtype, size, loss_fn=loss_of):
    """The value and gradients of all ranks' batches at once, on one device."""
    module = made(dtype)
    x, y, mask = (
        torch.cat(parts) for parts in zip(*[b for r in range(size) for b in batches(window, r, dtype)], strict=True)
    )
    loss = loss_fn(module, x, y, mask)
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


@torch.no_grad()
def full(module, grads):
    """The gradients as they are on one device, in the order of the module's parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(module, FullyShardedDataParallel):
        return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads.values()]
    own = dict(module.named_parameters())
    before = {name: p.clone() for name, p in own.items()}
    for name, p in own.items():
        p.copy_(grads[name])
    with FullyShardedDataParallel.summon_full_params(module):
        found = [p.clone() for p in module.parameters()]
    for name, p in own.items():
        p.copy_(before[name])
    return found


def difference(left, right):
    scale = max(r.abs().max().item() for r in right)
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True)) / scale


def equal_to_the_whole_batch(group, wrapper, dtype, sync="last"):
    module = WRAPPERS[wrapper](group, made(dtype))
    f = module_value_and_grad(module, loss_of, sync=sync)
    found = []
    for window in WINDOWS:
        own = batches(window, group.rank(), dtype)
        value, expected = whole(window, dtype, group.size())
        results = [funcga.stream(f, weight=count)(own)]
        found += [(value, expected, r) for r in results]
    return [
        (abs(r[0] - value).item() / value.item(), difference(full(module, r[1]), expected))
        for value, expected, r in found
    ], [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_equal_to_the_whole_batch(wrapper, dtype):
    for errors, grads in processes().run(equal_to_the_whole_batch, wrapper, dtype, size=2):
        assert max(max(pair) for pair in errors) <= LIMITS[dtype]
        assert not grads
