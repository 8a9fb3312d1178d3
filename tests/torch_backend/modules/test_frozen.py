"""Frozen parameters: the three ways to a gradient agree that they have none, and an optimizer leaves them alone."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value

import funcga
import torch_backend
from tests.kits import LIMITS, TORCH, difference
from tests.test_errors import check_refused


class LoRA(nn.Module):
    """A frozen linear layer, and a trained difference of low rank; its head is tied."""

    def __init__(self):
        super().__init__()
        self.base, self.down = nn.Linear(3, 4), nn.Linear(3, 2, bias=False)
        self.up, self.head = nn.Linear(2, 4, bias=False), nn.Linear(4, 2)
        self.base.requires_grad_(False)
        self.again = self.head  # tied

    def forward(self, x):
        return self.again(torch.tanh(self.base(x) + self.up(self.down(x))))


TRAINED = ["down.weight", "up.weight", "head.weight", "head.bias"]


def problem():
    torch.manual_seed(0)
    return LoRA(), torch.randn(12, 3), torch.randn(12, 2)


def mse(module, x, y):
    return F.mse_loss(module(x), y)


NOTHING = (
    "no parameter of the Linear requires grad, so there is nothing to train. Unfreeze what is to be trained: "
    "module.requires_grad_(True), or parameter.requires_grad_(True)."
)


def test_a_module_that_is_frozen_as_a_whole():
    module, x, y = nn.Linear(3, 2).requires_grad_(False), torch.randn(12, 3), torch.randn(12, 2)
    gradient = torch_backend.module_value_and_grad(module, mse)
    check_refused(NOTHING, gradient, x, y)
    check_refused(NOTHING, funcga.accumulate(gradient, 4), x, y)
    check_refused(NOTHING, funcga.stream(gradient), [(x, y)])
    # It may be unfrozen at any time: every window looks anew.
    module.bias.requires_grad_(True)
    assert list(funcga.accumulate(gradient, 4)(x, y)[1]) == ["bias"]


def test_trainable():
    module, *_ = problem()
    found = torch_backend.trainable(module)
    assert list(found) == TRAINED
    assert all(found[name] is p for name, p in module.named_parameters() if p.requires_grad)
    check_refused(NOTHING, torch_backend.trainable, module.base)


def test_trainable_names_are_those_of_the_module_that_is_given():
    """A DDP and a compiled module put a prefix before each name; gradients, optimizer and module agree on it."""
    module, x, y = problem()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(module)
        params = torch_backend.trainable(wrapped)
        loss, grads = funcga.accumulate(torch_backend.module_value_and_grad(wrapped, mse), 4)(x, y)
        torch_backend.assign_grads(wrapped, grads)
    finally:
        dist.destroy_process_group()
    assert list(params) == list(grads) == [f"module.{name}" for name in TRAINED]
    assert all(torch.equal(params[name].grad, grads[name]) for name in params)

    compiled = torch.compile(module, backend="eager")
    params = torch_backend.trainable(compiled)
    assert list(params) == [f"_orig_mod.{name}" for name in TRAINED]
    pure = torch_backend.pure_loss(compiled, mse)
    found = funcga.accumulate(funcga.value_and_grad(pure), 4)(params, x, y)
    expected = {f"_orig_mod.{name.removeprefix('module.')}": grad for name, grad in grads.items()}
    assert difference(TORCH, found, (loss, expected)) <= 2 * LIMITS["float32"]


def ways(module):
    """Functions of (params, x, y) to (value, grads), each another way."""
    pure = torch_backend.pure_loss(module, mse)
    plain = lambda params, x, y: F.mse_loss(functional_call(module, params, (x,)), y)
    return {
        "pure_loss": funcga.accumulate(funcga.value_and_grad(pure), 4),
        "pure_loss in torch.func": funcga.accumulate(lambda *args: grad_and_value(pure)(*args)[::-1], 4),
        "pure_loss, called": funcga.value_and_grad(pure),
        "pure_loss, streamed": lambda p, x, y: funcga.stream(funcga.value_and_grad(pure))(p, [(x[:5], y[:5]), (x[5:], y[5:])]),
        "functional_call": funcga.accumulate(funcga.value_and_grad(plain), 4),
        "functional_call, called": funcga.value_and_grad(plain),
    }  # fmt: skip


def test_a_gradient_of_a_frozen_parameter_is_refused():
    text = (
        r"base.weight.*is frozen, requires_grad=False, and a gradient was asked for: an optimizer would move it. Give the "
        r"parameters that are trained: torch_backend.trainable\(module\). Or unfreeze it: parameter.requires_grad_\(True\)."
    )  # fmt: skip
    module, x, y = problem()
    for way, step in ways(module).items():
        with pytest.raises(funcga.FuncgaError, match=text):
            step(dict(module.named_parameters()), x, y)
        if way.startswith("pure_loss"):  # which knows its module
            with pytest.raises(funcga.FuncgaError, match=text):
                step({k: p.detach() for k, p in module.named_parameters()}, x, y)
    assert not any(p.grad is not None for p in module.parameters())
    # Also one that is frozen when the step has been called with it.
    module.requires_grad_(True)
    for way, step in ways(module).items():
        # torch.func itself fails in a third functional_call of a module with tied layers
        calls = () if way == "functional_call, called" else (False, False, True, False)
        for is_frozen in calls:
            module.base.requires_grad_(not is_frozen)
            with pytest.raises(funcga.FuncgaError, match=text) if is_frozen else nullcontext():
                step(dict(module.named_parameters()), x, y)


def test_a_module_that_is_a_mere_frame_freezes_nothing():
    """All of its parameters come from elsewhere."""
    module, x, y = problem()
    module.requires_grad_(False)
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    expected = copy.deepcopy(module).requires_grad_(True)
    mse(expected, x, y).backward()
    wanted = {name: p.grad for name, p in expected.named_parameters()}
    for way, step in ways(module).items():
        assert difference(TORCH, step(params, x, y)[1], wanted) <= LIMITS["float32"], way
