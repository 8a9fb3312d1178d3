"""Private names of modules, DDP and FSDP: each is taken away, and the numbers are right still, or an error says so."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import funcga
from funcga.tools.fsdp1 import private_in_torch
from tests.processes import Failed, processes
from tests.torch_backend.wrapped.test_wrapped import (
    WRAPPERS,
    BreaksBackward,
    Broken,
    made,
    mean_square,
    rows_of,
)
from torch_backend import module_value_and_grad


def failed_without_reshard(group):
    """Two windows, of which the first fails in its backward pass, and parameters cannot be sharded again."""
    net, own = made(), rows_of(group.rank(), torch.float32)
    hook = net[1].register_forward_hook(lambda layer, args, out: BreaksBackward.apply(out))
    module, reset = WRAPPERS["fsdp1"](group, net), private_in_torch.reset_fsdp1
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 2)

    def without_reshard(roots, modules):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(roots[0]._handle), "reshard", lambda *args: None)
            reset(roots, modules)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_in_torch, "reset_fsdp1", without_reshard)
        with pytest.raises(Broken):
            step(*own)
    hook.remove()
    with pytest.raises(funcga.FuncgaError, match="an error in an earlier pass has left its parameters unsharded, so"):
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
