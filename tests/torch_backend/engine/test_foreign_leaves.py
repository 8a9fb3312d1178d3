"""Leaves of others that a loss uses: their `.grad`s stay, whichever call it is that comes to use them."""

import copy
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import funcga
from torch_backend import module_value_and_grad, pure_loss

HOW = ["module", "pure_loss", "functional_call"]


def step_of(how, module, loss):
    """A step of the batch, which closes over the parameters where it takes them as an argument."""
    if how == "module":
        return funcga.accumulate(module_value_and_grad(module, loss), 2)
    params = {name: p.detach() * 1 for name, p in module.named_parameters()}
    if how == "pure_loss":
        step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss)), 2)
    else:
        call = lambda params, x: loss(lambda x: functional_call(module, params, (x,)), x)
        step = funcga.accumulate(funcga.value_and_grad(call), 2)
    return lambda x: step(params, x)


@pytest.fixture
def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()


@pytest.fixture
def x():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(module, loss, others, x):
    """The value and the gradients of the loop by hand, which leaves the others as they were."""
    twin, before = copy.deepcopy(module), [p.grad for p in others]
    for p in others:
        p.grad = None
    value = sum(loss(twin, piece) for piece in x.split(2)) / 2
    value.backward()
    for p, gradient in zip(others, before, strict=True):
        p.grad = gradient
    return value.detach(), [p.grad for p in twin.parameters()]


def check_each_call(how, module, loss, others, switch, x, may_refuse=False):
    """Two calls, two more after `switch`, and two of the first kind: each is the loop by hand, and leaves all others."""
    step, before = step_of(how, module, loss), [p.grad for p in others]
    for call, is_on in enumerate([False, False, True, True, False, False]):
        switch(is_on)
        value, expected = by_hand(module, loss, others, x)
        with suppress(funcga.FuncgaError) if may_refuse and is_on else nullcontext():
            found_value, found = step(x)
            torch.testing.assert_close(found_value, value)
            for gradient, wanted in zip(found.values(), expected, strict=True):
                torch.testing.assert_close(gradient, wanted)
        for p, gradient in zip(others, before, strict=True):
            assert p.grad is gradient, f"call {call}"
            assert gradient is None or gradient.eq(7).all()


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_one_that_is_used_later(how, has_grad, module, x):
    scale, uses = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)), []
    scale.grad = torch.full_like(scale, 7) if has_grad else None

    def loss(f, x):
        out = f(x)
        return (out * scale if uses[-1] else out).square().mean()

    check_each_call(how, module, loss, [scale], uses.append, x)


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_one_that_is_unfrozen_later(how, has_grad, module, x):
    """The graph has as many nodes as before."""
    target = nn.Parameter(torch.full((2, 3), 2.0, dtype=torch.float64), requires_grad=False)
    target.grad = torch.full_like(target, 7) if has_grad else None
    loss = lambda f, x: nn.functional.mse_loss(f(x), target)
    check_each_call(how, module, loss, [target], target.requires_grad_, x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_layers_of_others_that_a_checkpoint_runs_later(how, reentrant, module, x):
    torch.manual_seed(2)
    head, uses = nn.Linear(3, 3).double(), []

    def loss(f, x):
        out = f(x)
        return (checkpoint(head, out, use_reentrant=reentrant) if uses[-1] else out).square().mean()

    # The parameters that functional_call gives are gone in the backward pass, and the head was not seen there.
    may_refuse = how == "functional_call"
    check_each_call(how, module, loss, [*head.parameters()], uses.append, x, may_refuse)


@pytest.mark.parametrize("how", HOW)
def test_by_turns(how, module, x):
    torch.manual_seed(2)
    heads = [nn.Linear(3, 3).double() for _ in range(2)]
    uses = []
    loss = lambda f, x: heads[uses[-1]](f(x)).square().mean()
    others = [p for head in heads for p in head.parameters()]
    check_each_call(how, module, loss, others, uses.append, x)
