"""`drop=` over processes: a replica leaves its own micro-batches out, and all of them have the same result."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import funcga
import torch_backend
from tests.call.test_drop import KINDS, PARTS, expected, loss_of, problem, spoilt_loss
from tests.kits import TORCH
from tests.processes import Failed, processes
from tests.torch_backend.reduce.test_replicas import counted
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, batches, count, full, made, mesh_of
from tests.torch_backend.wrapped.test_wrapped import loss_of as loss_of_tokens

OWN = [PARTS[:2], PARTS[2:]]  # the micro-batches of each of 2 ranks


def rows_of(parts):
    return [row for start, stop in parts for row in range(start, stop)]


def folded(group, how, drop, spoilt_parts, kind):
    """What a rank gets, where the loss or a gradient is spoilt in some micro-batches."""
    params, x, flags = problem(TORCH)
    for start, _ in spoilt_parts:
        flags[start, kind] = 1
    flags, own = TORCH.arrays(flags), OWN[dist.get_rank(group)]
    gradient = torch.func.grad_and_value(loss_of(torch)) if how == "any" else funcga.value_and_grad(loss_of(torch))
    step = funcga.stream(gradient, drop=drop, across=group)
    result = step(params, [(x[a:b], flags[a:b]) for a, b in own])
    return result[::-1] if how == "any" else result


def hidden_from_the_host():
    """Lets no host see a bool, as where it is on a CUDA device."""
    seen = torch_backend.arrays.scalar
    is_hidden = lambda weight: isinstance(weight, torch.Tensor) and weight.dtype == torch.bool
    return mock.patch("torch_backend.arrays.scalar", lambda weight: weight if is_hidden(weight) else seen(weight))


def every_case(group, how, drop):
    found = {}
    for kind in range(len(KINDS)):
        for part in PARTS:
            found[kind, part] = folded(group, how, drop, [part], kind)
    found["none"] = folded(group, how, drop, [], 0)
    found["a whole replica"] = folded(group, how, drop, OWN[1], 0)
    found["everything"] = folded(group, how, drop, PARTS, 0)
    if how == "engine":
        with hidden_from_the_host():
            found["hidden"] = folded(group, how, drop, [PARTS[2]], 3)
    return found


@pytest.mark.parametrize("how", ["engine", "any"])
@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_nan_and_inf_at_every_leaf_and_micro_batch_of_every_replica(how, drop):
    params, x, _ = problem(TORCH)
    for found in processes().run(every_case, how, drop, size=2):
        for case, (loss, grads) in found.items():
            dropped = {"none": [], "a whole replica": OWN[1], "everything": PARTS, "hidden": [PARTS[2]]}
            gone = dropped[case] if isinstance(case, str) else [case[1]]
            kept = [part for part in PARTS if part not in gone]
            if gone and drop == "window":
                kept = []
            wanted = expected(params, x, rows_of(kept))
            torch.testing.assert_close(loss, torch.as_tensor(wanted["loss"]), rtol=1e-12, atol=1e-14)
            for name, gradient in grads.items():
                wanted_gradient = torch.as_tensor(wanted["grads"][name])
                torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-14)


def without_rows(group, how, drop):
    """A replica has no micro-batch; then it has one, which the other drops."""
    params, x, flags = problem(TORCH)
    flags[4, 0] = 1
    flags, rank = TORCH.arrays(flags), dist.get_rank(group)
    gradient = funcga.value_and_grad(loss_of(torch)) if how == "engine" else torch.func.grad_and_value(loss_of(torch))
    step, found = funcga.stream(gradient, drop=drop, across=group), []
    with counted() as calls:
        for _ in range(2):
            calls.clear()
            found.append(step(params, [(x[a:b], flags[a:b]) for a, b in PARTS] if rank else []))
    return found, [name for name, _ in calls]


@pytest.mark.parametrize("how", ["engine", "any"])
def test_a_replica_without_a_micro_batch(how):
    params, x, _ = problem(TORCH)
    wanted = expected(params, x, rows_of([PARTS[0], *PARTS[2:]]))
    for drop in ("microbatch", "window"):
        for found, calls in processes().run(without_rows, how, drop, size=2):
            assert calls == ["allgather_", "allreduce_"]  # the header and the sums: the counts travel in the header
            for result in found:
                loss = result[0] if how == "engine" else result[1]
                scale = 1 if drop == "microbatch" else 0
                torch.testing.assert_close(loss, scale * torch.as_tensor(wanted["loss"]), rtol=1e-12, atol=1e-14)


def observed(group, drop):
    """Rank 0 has three micro-batches, of which it drops the second, and rank 1 has one, or none."""
    params, x, flags = problem(TORCH)
    flags[4, 0] = 1
    flags, rank, found = TORCH.arrays(flags), dist.get_rank(group), []
    observers = {"dropped": funcga.dropped(), "norms": funcga.gradient_norms()}
    step = funcga.stream(funcga.value_and_grad(loss_of(torch)), drop=drop, across=group, observe=observers)
    for parts in ([PARTS[:3], PARTS[3:]], [PARTS[:3], []]):
        found.append(step(params, [(x[a:b], flags[a:b]) for a, b in parts[rank]])[1])
    return found


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_observers_tell_what_all_replicas_have_dropped(drop):
    for found in processes().run(observed, drop, size=2):
        for each, n in zip(found, (4, 3), strict=True):
            bad = torch.arange(n) == 1 if drop == "microbatch" else torch.ones(n, dtype=torch.bool)
            assert int(each["dropped"]) == bad.sum()
            assert torch.equal(each["norms"].microbatches.isnan(), bad)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.norm(x))


def of_a_module(group):
    torch.manual_seed(0)
    module, rank = Normed().double(), dist.get_rank(group)
    x, flags = torch.ones(2, 4, 3).double().cumsum(1) ** (1 + rank), torch.zeros(2, 4).double()
    flags[1, 0] = rank  # rank 1 drops its second micro-batch
    gradient = torch_backend.module_value_and_grad(module, spoilt_loss)
    result = funcga.stream(gradient, drop="microbatch", across=group)([*zip(x, flags, strict=True)])
    return result, int(module.norm.num_batches_tracked)


def test_a_modules_own_gradients():
    (first, seen), (second, seen_there) = processes().run(of_a_module, size=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert (seen, seen_there) == (2, 1)
    torch.manual_seed(0)
    module = Normed().double()
    x = torch.ones(4, 3).double().cumsum(0)
    gradient = torch_backend.module_value_and_grad(module, spoilt_loss)
    wanted = funcga.stream(gradient)([(part, torch.zeros(4).double()) for part in (x, x, x**2)])
    torch.testing.assert_close(first, wanted, rtol=1e-13, atol=1e-14)


def of_dtensors(group, drop):
    """Each device has its rows of a micro-batch, and the replicas of a mesh leave it out together."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    params, x, flags = problem(TORCH, 12)
    flags[1, 1] = 1  # of the first of two micro-batches, on the first device
    mesh, found = mesh_of(group), []
    x, flags = (distribute_tensor(leaf, mesh, [Shard(0)]) for leaf in (x, TORCH.arrays(flags)))
    step = funcga.accumulate(funcga.value_and_grad(loss_of(torch)), 2, drop=drop)
    for placement in (Replicate(), Shard(0)):
        placed = {
            name: distribute_tensor(p, mesh, [placement if p.ndim else Replicate()]) for name, p in params.items()
        }
        loss, grads = step(placed, x, flags)
        assert all(grads[name].placements == p.placements for name, p in placed.items())
        found.append((loss.full_tensor(), {name: gradient.full_tensor() for name, gradient in grads.items()}))
    return found


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_dtensors(drop):
    params, x, _ = problem(TORCH, 12)
    # A micro-batch has as many rows of each device.
    wanted = expected(params, x, [3, 4, 5, 9, 10, 11] if drop == "microbatch" else [])
    wanted = torch.as_tensor(wanted["loss"]), {name: torch.as_tensor(g) for name, g in wanted["grads"].items()}
    for found in processes().run(of_dtensors, drop, size=2):
        for result in found:
            torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-14)


def communicates(group):
    def loss_fn(w, x):
        loss = (w * x).mean()
        dist.all_reduce(loss.detach().clone(), group=group)
        return loss

    return funcga.accumulate(funcga.grad(loss_fn), 2, drop="microbatch", across=group)(torch.ones(()), torch.ones(4))


def test_a_loss_that_communicates_is_refused():
    with pytest.raises(Failed) as failed:
        processes().run(communicates, size=2)
    assert all(kind == "FuncgaError" and "collectives of that group" in text for kind, text in failed.value.errors)


# -- wrapped modules: only the gradient of all replicas can be looked at, once a window


def wrapped_windows(group, wrapper, sync):
    module = WRAPPERS[wrapper](group, made(torch.float64))
    rank, found = dist.get_rank(group), []
    gradient = torch_backend.module_value_and_grad(module, loss_of_tokens, sync=sync)
    step = funcga.stream(gradient, weight=count, drop="window")
    for spoilt_at in [None, (0, 0), (1, 1), None, (0, 2), (1, 2), None]:
        own = batches(3, rank, torch.float64)
        if spoilt_at is not None and spoilt_at[0] == rank:
            own[spoilt_at[1]][0][0, 0, 0] = float("nan" if rank else "inf")
        loss, grads = step(own)
        found.append((spoilt_at, loss, full(module, grads)))
    return found, [p.grad for p in module.parameters() if p.grad is not None]


def whole_of():
    """The loss and gradients of all micro-batches of both ranks, on one device."""
    module = made(torch.float64)
    parts = [microbatch for rank in range(2) for microbatch in batches(3, rank, torch.float64)]
    x, y, mask = (torch.cat(each) for each in zip(*parts, strict=True))
    loss = loss_of_tokens(module, x, y, mask)
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


@pytest.mark.parametrize("wrapper", ["ddp_views", "fsdp1", "fsdp2", "replicated"])
def test_wrapped_modules_drop_a_window_of_all_replicas(wrapper):
    sync, wanted = "every" if wrapper == "fsdp1" else "last", whole_of()
    for found, left in processes().run(wrapped_windows, wrapper, sync, size=2):
        assert not left
        for spoilt_at, loss, grads in found:
            if spoilt_at is not None:
                assert loss == 0
                assert not any(gradient.any() for gradient in grads)
                continue
            torch.testing.assert_close((loss, grads), wanted, rtol=1e-12, atol=1e-14)


def overflows(group):
    """The loss is finite, and the gradient is not; then running statistics are as before the window."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
    module = torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    before = [buffer.clone() for buffer in net.buffers()]
    loss_fn = lambda module, x: (0 * module(x).abs().sum()).sqrt() + 1
    loss, grads = funcga.accumulate(torch_backend.module_value_and_grad(module, loss_fn), 2, drop="window")(
        torch.ones(4, 3, dtype=torch.float64)
    )
    return loss.item(), all(not grad.any() for grad in grads.values()), [*map(torch.equal, before, net.buffers())]


def test_a_gradient_that_is_not_finite_drops_the_window():
    assert processes().run(overflows, size=2) == [(0.0, True, [True] * 3)] * 2


def refused_drop(group, options):
    module = WRAPPERS["ddp"](group, made())
    gradient = torch_backend.module_value_and_grad(module, lambda module, x: module(x).mean())
    return funcga.accumulate(gradient, 2, **options)(torch.ones(4, 4))


@pytest.mark.parametrize("options", [{"drop": "microbatch"}, {"drop": "window", "drop_if": bool}], ids=str)
def test_what_needs_single_micro_batches_is_refused_for_wrapped_modules(options):
    with pytest.raises(Failed) as failed:
        processes().run(refused_drop, options, size=2)
    what = "drop_if= was given" if "drop_if" in options else 'drop="microbatch" was given'
    for kind, text in failed.value.errors:
        assert kind == "FuncgaError"
        assert text.startswith(what)
        assert 'Write drop="window"' in text
