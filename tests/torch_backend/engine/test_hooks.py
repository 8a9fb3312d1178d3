"""Hooks on parameters: called for the gradient of every micro-batch, whichever way the gradient is taken."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import funcga
from tests.core.test_modules import by_hand
from torch_backend import module_value_and_grad, pure_loss

MASK = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double(), torch.randn(7, 3, dtype=torch.float64)


def mse(module, x):
    return module(x).square().mean()


def params_of(module):
    return dict(module.named_parameters())


def steps(module, n):
    """The gradients by every way that takes a module's parameters."""
    pure, functional = pure_loss(module, mse), lambda p, x: functional_call(module, p, (x,)).square().mean()
    return {
        "pure_loss": lambda x: funcga.accumulate(funcga.grad(pure), n)(params_of(module), x),
        "functional_call": lambda x: funcga.accumulate(funcga.grad(functional), n)(params_of(module), x),
        "stream": lambda x: funcga.stream(funcga.grad(pure))(params_of(module), x.tensor_split(n)),
        "moments": lambda x: {
            name: moments.mean
            for name, moments in funcga.accumulate(funcga.grad(pure), n, fold=funcga.moments())(
                params_of(module), x
            ).items()
        },
        "one call": lambda x: average([funcga.grad(pure)(params_of(module), rows) for rows in x.tensor_split(n)], x, n),
        "value and grad": lambda x: average(
            [funcga.value_and_grad(functional)(params_of(module), rows)[1] for rows in x.tensor_split(n)], x, n
        ),
    }


def average(grads, x, n):
    rows = [len(piece) / len(x) for piece in x.tensor_split(n)]
    return {name: sum(share * g[name] for share, g in zip(rows, grads, strict=True)) for name in grads[0]}


HOOKS = {
    "linear": lambda g: g * MASK,
    "not linear": lambda g: g.clamp(-0.05, 0.05),
    "two": lambda g: g / (1 + g.norm()),
    "none": lambda g: None,
}


@pytest.mark.parametrize(("hook", "n"), [("linear", 1), ("not linear", 3), ("two", 7), ("none", 2)])
def test_every_way_calls_them_for_every_micro_batch(hook, n):
    """Ragged ones too: a hook that is not linear sees the gradient of the micro-batch, not a share of it."""
    module, x = net()
    calls = []
    module[0].weight.register_hook(lambda g: (calls.append(1), HOOKS[hook](g))[1])
    module[2].bias.register_hook(lambda g: g * 2)
    module[0].weight.register_hook(lambda g: g + 1e-3)
    (_, expected), _ = by_hand(module, x, x, lambda module, x, y: mse(module, x), n)
    for way, step in steps(module, n).items():
        calls.clear()
        grads = step(x)
        for name, gradient in expected.items():
            torch.testing.assert_close(grads[name], gradient, rtol=1e-12, atol=1e-15, msg=f"{way} {name}")
        assert len(calls) == n, way
        assert all(p.grad is None for p in module.parameters())


def test_hooks_that_act_on_grad_are_refused():
    module, x = net()
    handle = module[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    ways = steps(module, 2)
    match = (
        r"a parameter, float\d\d\[\d, \d\], has a hook of register_post_accumulate_grad_hook, which acts on the \.grad that "
        r"\.backward\(\) leaves, and here gradients are returned, not left in \.grad\. Remove it with handle\.remove\(\)"
    )
    for step in ways.values():
        with pytest.raises(funcga.FuncgaError, match=match):
            step(x)
    handle.remove()
    for step in ways.values():
        step(x)


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "goes"])
@pytest.mark.parametrize("way", ["own", "given"])
def test_hooks_that_come_or_go_in_the_middle_of_a_window_are_refused(way, comes):
    """They would see a part of it."""
    module, x = net()
    weight, runs, handles = module[0].weight, [], []

    def loss(module, x):
        runs.append(1)
        if len(runs) == 2:
            if comes:
                handles.append(weight.register_hook(lambda g: g))
            else:
                handles.pop().remove()
        return mse(module, x)

    if not comes:
        handles.append(weight.register_hook(lambda g: g))
    gradient = module_value_and_grad(module, loss) if way == "own" else funcga.grad(pure_loss(module, loss))
    step = funcga.accumulate(gradient, 3)
    args = (x,) if way == "own" else (params_of(module), x)
    with pytest.raises(funcga.FuncgaError, match="a parameter got a hook of register_hook during the window, or lost"):
        step(*args)
    assert all(p.grad is None for p in module.parameters())
    step(*args)


def test_tensors_that_are_no_parameters_and_trees():
    w, x = torch.ones(3, dtype=torch.float64, requires_grad=True), torch.randn(6, 3, dtype=torch.float64)
    w.register_hook(lambda g: g * 3)
    loss = lambda tree, x: (x @ tree["deep"][1]).square().mean()
    tree = {"deep": (None, w), "number": 1.0}
    for step in (funcga.accumulate(funcga.grad(loss), 3), funcga.grad(loss)):
        grads = step({"deep": (None, w)}, x)
        expected = 3 * torch.func.grad(lambda w: loss({"deep": (None, w)}, x))(w.detach())
        torch.testing.assert_close(grads["deep"][1], expected)
        assert torch.equal(step(tree, x)["deep"][1], grads["deep"][1])


def test_a_transform_of_torch_func_is_refused_where_it_would_not_call_them():
    """As they are gone from what it differentiates: the module's own parameters are not seen there."""
    module, x = net()
    loss = pure_loss(module, mse)
    plain = torch.func.grad(loss)(params_of(module), x)
    handle = module[0].weight.register_hook(lambda g: g * 2)
    for gradient in (torch.func.grad(loss), torch.func.jacrev(loss), funcga.accumulate(torch.func.grad(loss), 2)):
        with pytest.raises(funcga.FuncgaError) as error:
            gradient(params_of(module), x)
        assert str(error.value) == (
            "`0.weight` has a hook of register_hook, which a transform of torch.func does not call. Take the gradient "
            "with funcga.grad or funcga.value_and_grad, which do; or remove it with handle.remove()."
        )
    torch.func.vmap(lambda row: loss(params_of(module), row))(x)  # no gradient, no hook

    def adapted(params, x):
        """What is computed from a parameter, in an inner step, has no hook, and needs none."""
        return loss({name: p * 2 for name, p in params.items()}, x)

    torch.func.grad(adapted)(params_of(module), x)
    handle.remove()
    assert torch.equal(torch.func.grad(loss)(params_of(module), x)["0.weight"], plain["0.weight"])


@pytest.mark.parametrize("n", [None, 1, 4])
def test_hooks_that_the_loss_puts_on_its_parameters_see_whole_gradients(n):
    """Those of the first micro-batch are there for all."""
    seen, w, x = [], torch.ones(3), torch.arange(12.0).reshape(4, 3)

    def loss(w, x):
        if not seen:
            w.register_hook(lambda gradient: seen.append(gradient.clone()))
        return (x @ w).mean()

    gradient = funcga.value_and_grad(loss)
    step = gradient if n is None else funcga.accumulate(gradient, n)
    _, grads = step(w, x)
    torch.testing.assert_close(grads, x.mean(0))
    for found, rows in zip(seen, x.chunk(n or 1), strict=True):
        torch.testing.assert_close(found, rows.mean(0))


def test_a_hook_that_moves_from_the_batch_to_a_parameter_is_called():
    w, x = torch.randn(3, requires_grad=True), torch.randn(8, 3, requires_grad=True)
    step, seen = funcga.accumulate(funcga.grad(lambda w, x: (x @ w).square().mean()), 4), []
    handle = x.register_hook(seen.append)
    expected = step(w, x)
    handle.remove()
    w.register_hook(seen.append)
    grads = step(w, x)
    assert len(seen) == 4
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)
    torch.testing.assert_close(sum(seen) / 4, expected)


def test_a_hook_of_the_loss_may_write_to_its_gradient():
    module, x = net()

    def loss_fn(module, x):
        loss = mse(module, x)
        loss.register_hook(lambda gradient: gradient.mul_(3))
        return loss

    _, grads = funcga.accumulate(module_value_and_grad(module, loss_fn), 7)(x)
    (3 * mse(module, x)).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)
