"""Private names of modules, DDP and FSDP: each is taken away, and the numbers are right still, or an error says so."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import funcga
from tests.processes import Failed, processes
from tests.torch_backend.wrapped.test_wrapped import (
    WRAPPERS,
    BreaksBackward,
    Broken,
    errors,
    made,
    mean_square,
    rows_of,
    whole_rows,
)
from torch_backend import _private, module_value_and_grad, pure_loss, running_buffers


def hidden(function):
    """A function of a DDP which sees a reducer without any private name, as DDP itself needs them."""
    seen = lambda ddp: SimpleNamespace(reducer=None, find_unused_parameters=ddp.find_unused_parameters)
    return lambda ddp, *args: function(seen(ddp), *args)


def step_without(group, wrapper):
    """The errors of two windows, between which a loss raises an error in the first of its micro-batches."""
    module = WRAPPERS[wrapper](group, made())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_finished", "reset_ddp"):
            patch.setattr(_private, name, hidden(getattr(_private, name)))
        own = rows_of(group.rank(), torch.float32)
        step = funcga.accumulate(module_value_and_grad(module, mean_square), 2)
        first = step(*own)
        with pytest.raises(ZeroDivisionError):
            funcga.accumulate(module_value_and_grad(module, lambda module, x, y: 1 / 0), 2)(*own)
        expected = whole_rows(group.size(), torch.float32)
        return [max(errors(module, result, *expected)) for result in (first, step(*own))]


@pytest.mark.parametrize("wrapper", ["ddp_unused", "replicated"])
def test_the_reducer_of_ddp(wrapper):
    for found in processes(2).run(step_without, wrapper):
        assert max(found) <= 1e-6


def failed_without_reshard(group):
    """Two windows, of which the first fails in its backward pass, and parameters cannot be sharded again."""
    net, own = made(), rows_of(group.rank(), torch.float32)
    hook = net[1].register_forward_hook(lambda layer, args, out: BreaksBackward.apply(out))
    module, reset = WRAPPERS["fsdp1"](group, net), _private.reset_fsdp1
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 2)

    def without_reshard(roots, modules):
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(type(roots[0]._handle), "reshard")
            reset(roots, modules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_private, "reset_fsdp1", without_reshard)
        with pytest.raises(Broken):
            step(*own)
    hook.remove()
    with pytest.raises(funcga.FuncgaError, match="an error in an earlier pass has left its parameters unsharded"):
        step(*own)


def test_what_shards_fsdp1_again():
    processes(2).run(failed_without_reshard)


def refused_without(group, wrapper, owner, name):
    module = WRAPPERS[wrapper](group, made())
    with pytest.MonkeyPatch.context() as patch:
        if owner is None:
            for part in module.modules():
                part.__dict__.pop(name, None)
        else:
            patch.delattr(owner, name)
        module_value_and_grad(module, mean_square)


@pytest.mark.parametrize(
    ("wrapper", "owner", "name", "label"),
    [
        ("fsdp1", None, "_handle", "FullyShardedDataParallel"),
        ("fsdp2", FSDPModule, "_get_fsdp_state", "fully_shard"),
    ],
)
def test_what_fsdp_is_not_told_about_is_refused(wrapper, owner, name, label):
    with pytest.raises(Failed) as failed:
        processes(2).run(refused_without, wrapper, owner, name)
    for kind, text in failed.value.errors:
        assert (kind, text) == (
            "FuncgaError",
            f"{label} of torch {torch.__version__} has no `{name}`, without which its gradients cannot be summed over "
            f"a window. Use torch 2.13 to 2.15; or let funcga reduce: accumulate(funcga.value_and_grad("
            f"torch_backend.pure_loss(module, loss_fn)), n, across=group), with the module that was wrapped.",
        )


@pytest.fixture
def reloaded(monkeypatch):
    """Loads the file of private names again, without one of them."""

    def reload(owner, name):
        with monkeypatch.context() as taken:
            taken.delattr(owner, name)
            importlib.reload(_private)

    yield reload
    importlib.reload(_private)


def statistics():
    torch.manual_seed(0)
    module, x, y = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        torch.randn(12, 3),
        torch.ones(12, 2),
    )
    gradient = funcga.value_and_grad(pure_loss(module, mean_square, statistics=True), has_aux=True)
    fold = ((funcga.mean(), funcga.pooled()), funcga.mean())
    result = funcga.accumulate(gradient, 3, fold=fold)(dict(module.named_parameters()), x, y)
    return result, running_buffers(module, result[0][1])


def test_what_all_batch_norms_are(reloaded, monkeypatch):
    want = statistics()
    base = nn.modules.batchnorm._BatchNorm
    reloaded(nn.modules.batchnorm, "_BatchNorm")
    assert _private.BatchNorm is not base
    funcga.compare(want, statistics(), rtol=0, atol=0).assert_close()
