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


@pytest.mark.parametrize("where", ["between calls", "in the loss"])
@pytest.mark.parametrize("how", HOW)
def test_a_critic_that_is_trained_by_turns(how, where, module, x):
    torch.manual_seed(2)
    critic, is_frozen = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), []

    def freeze(is_on):
        is_frozen.append(is_on)
        if where == "between calls":
            critic.requires_grad_(not is_on)

    def loss(f, x):
        if where == "in the loss":
            critic.requires_grad_(not is_frozen[-1])
        return critic(f(x)).square().mean()

    check_each_call(how, module, loss, [*critic.parameters()], freeze, x)


@pytest.mark.parametrize("how", HOW)
def test_one_in_the_place_of_a_constant(how, module, x):
    """The graph has as many nodes as before."""
    scale, constant = (
        nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64)),
        torch.full((3,), 3.0, dtype=torch.float64),
    )
    uses = []
    loss = lambda f, x: (f(x) * (scale if uses[-1] else constant)).square().mean()
    check_each_call(how, module, loss, [scale], uses.append, x)


def test_a_step_in_the_window_of_another(module, x):
    """That window's sums are the `.grad`s of what the loss of this step runs through."""
    torch.manual_seed(2)
    critic = nn.Linear(3, 3).double()
    of_module = funcga.accumulate(module_value_and_grad(module, lambda module, x: critic(module(x)).square().mean()), 2)
    for trains in (True, False):
        critic.requires_grad_(trains)
        of_module(x)
    critic.requires_grad_(True)

    def items():
        for piece in x.split(2):
            yield (piece,)
            of_module(x)

    twin = copy.deepcopy(critic)
    twin(x).square().mean().backward()
    _, grads = funcga.stream(module_value_and_grad(critic, lambda critic, x: critic(x).square().mean()))(items())
    torch.testing.assert_close(grads, {name: p.grad for name, p in twin.named_parameters()})


@pytest.mark.filterwarnings("ignore:requires_grad=False")
def test_one_that_alone_is_left_by_the_loss(x):
    scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    w = torch.ones(3, dtype=torch.float64)
    gradient = funcga.grad(lambda w, x: (w.requires_grad_(False) * x * scale).sum())
    for step in (gradient, funcga.accumulate(gradient, 2)):
        with pytest.raises(funcga.FuncgaError, match="requires_grad_"):
            step(w, x)
        assert scale.grad is None


def test_a_micro_batch_of_weight_0_need_not_lead_to_an_argument_that_is_split():
    other, w, x = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(4, 3)
    x[:2] = 0
    loss = lambda w, x: torch.zeros(()) if x.any() else (other * 1).sum()
    folds = (funcga.mean(), funcga.concat())
    gradient = funcga.grad(loss, argnums=(0, 1))
    step = funcga.accumulate(gradient, 2, in_axes=(None, 0), weight=lambda x: (x != 0).sum(), fold=folds)
    of_w, of_x = step(w, x)
    assert not of_w.any()
    assert not of_x.any()
    assert other.grad is None
