"""Functions that run backward passes of their own: reentrant checkpoints, and whatever recomputes in its backward.

`tests/torch_backend/test_fuzz_torch.py` draws losses of them, with every fold, shared layers and modules of others.
"""

import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import funcga
from torch_backend import pure_loss


class Recompute(torch.autograd.Function):
    """What reversible nets and offloaded checkpoints are, with a name that nobody knows."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x).detach()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(x), gradient)
        return None, x.grad


RECOMPUTES = {
    "reentrant": lambda function, x: checkpoint(function, x, use_reentrant=True),
    "own": Recompute.apply,
    "other": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "plain": lambda function, x: function(x),
}


@pytest.fixture(params=["reentrant", "own"])
def recompute(request):
    return RECOMPUTES[request.param]


class Net(nn.Module):
    """Three layers, the second of which is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def loss(self, x, apply=RECOMPUTES["plain"]):
        hidden = apply(lambda h: torch.tanh(self.shared(h)), torch.tanh(self.first(x)))
        hidden = apply(lambda h: torch.tanh(self.shared(h)), hidden)
        return self.last(hidden).square().mean()


def net(seed=0):
    torch.manual_seed(seed)
    return Net().double(), torch.randn(7, 3, dtype=torch.float64)


def params_of(module):
    return dict(module.named_parameters())


def by_hand(module, loss, pieces):
    """The gradients of each micro-batch, each a loop's own."""
    found = []
    for rows in pieces:
        module.zero_grad()
        loss(module, rows).backward()
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params_of(module).items()})
    module.zero_grad()
    return found


def mean_by_hand(module, loss, x, n):
    """The gradient of the whole, weighed by rows."""
    pieces = x.tensor_split(n)
    found = by_hand(module, loss, pieces)
    return {name: sum(len(p) * g[name] for p, g in zip(pieces, found, strict=True)) / len(x) for name in found[0]}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-12, atol=1e-14, msg=name)
        assert not gradient.requires_grad


def assert_without_grads(*modules):
    assert all(p.grad is None for module in modules for p in module.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch's own compiler looks at
def test_where_a_function_is_applied_makes_no_difference():
    """In another thread, and after a break of a compiled graph."""
    module, x = net()

    def elsewhere(function, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(Recompute.apply(function, x)))
        thread.start()
        thread.join()
        return found[0]

    @torch.compile(backend="eager")
    def broken(module, x):
        return module.loss(x, torch.compiler.disable(Recompute.apply))

    torch._dynamo.reset()
    for loss in (broken, lambda module, x: module.loss(x, elsewhere)):
        step = funcga.accumulate(funcga.grad(pure_loss(module, loss)), 3)
        assert_equal(step(params_of(module), x), mean_by_hand(module, Net.loss, x, 3))
        assert_without_grads(module)


def test_an_exception_in_it_leaves_every_grad_as_it_was(recompute):
    module, x = net()
    other, calls = Net().double(), []

    def fails(h):
        calls.append(1)
        if len(calls) == 4:
            raise KeyError("inside")
        return other.shared(h)

    step = funcga.accumulate(funcga.grad(pure_loss(module, lambda m, x: recompute(fails, m.first(x)).sum())), 2)
    with pytest.raises(KeyError):
        step(params_of(module), x)
    assert_without_grads(module, other)


def functional(module, apply):
    """A loss by functional_call, which has put the module's own parameters back when it runs again."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module.loss(x, apply)

    whole = Loss()
    return lambda params, x: functional_call(whole, {f"module.{name}": p for name, p in params.items()}, (x,))


LOST = (
    r"loss_fn runs a module again in the backward pass, as a checkpoint with use_reentrant=True does, and then with the "
    r"module's own parameters instead of those that loss_fn is given: functional_call has taken them out by then\. Use "
    r"torch_backend\.pure_loss\(module, loss_fn\), or use_reentrant=False\."
)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
def test_gradients_that_functional_call_loses_are_refused(recompute, own, as_list):
    module, x = net()
    names, loss = [*params_of(module)], functional(module, recompute)
    params = {name: p if own else p.detach().clone() for name, p in params_of(module).items()}
    given = [*params.values()] if as_list else params
    listed = lambda params, x: loss(dict(zip(names, params, strict=True)) if as_list else params, x)
    for step in (funcga.accumulate(funcga.grad(listed), 2), *([] if own else [funcga.grad(listed)])):
        with pytest.raises(funcga.FuncgaError, match=LOST):
            step(given, x)
    assert_without_grads(module)
    plain = functional(module, RECOMPUTES["other"])
    grads = funcga.accumulate(funcga.grad(plain), 2)(params, x)
    assert_equal(grads, mean_by_hand(module, lambda m, x: m.loss(x), x, 2))
