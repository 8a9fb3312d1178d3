"""`pure_loss`: a module's loss as a pure function of its parameters, on the engine, in torch.func and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from tests.core.test_modules import Untouched, batch, by_hand, mse, net
from tests.kits import LIMITS, TORCH, difference
from torch_backend import pure_loss


def test_it_is_pure_in_torch_func():
    module, (x, y) = net(), batch()
    untouched, loss, params = Untouched(module), pure_loss(module, mse), torch_backend.trainable(module)
    engine = funcga.accumulate(funcga.value_and_grad(loss), 4)(params, x, y)
    generic = funcga.accumulate(lambda *args: grad_and_value(loss)(*args)[::-1], 4)(params, x, y)
    assert difference(TORCH, engine, generic) == 0
    stacked = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in params.items()}
    module.eval()  # vmap takes no BatchNorm that updates its statistics
    each = torch.func.vmap(loss, (0, None, None))(stacked, x, y)
    torch.testing.assert_close(each[1], loss({name: 2 * p for name, p in params.items()}, x, y))
    module.train()
    threaded = pure_loss(module, mse, buffers=True)
    gradient = lambda *args: grad_and_value(threaded, has_aux=True)(*args)[::-1]
    fold, axes = ((funcga.mean(), funcga.carry()), funcga.mean()), (None, funcga.CARRY, 0, 0)
    step = funcga.accumulate(gradient, 4, fold=fold, in_axes=axes)
    (value, buffers), grads = step(params, dict(module.named_buffers()), x, y)
    expected, after = by_hand(module, x, y)
    assert difference(TORCH, (value, grads), expected) <= LIMITS["float32"]
    assert difference(TORCH, buffers, dict(after.named_buffers())) <= LIMITS["float32"]
    untouched.check()
    assert loss(params, x, y).requires_grad
    assert not loss({name: p.detach() for name, p in params.items()}, x, y).requires_grad


@pytest.mark.parametrize("reenter", [True, False])
def test_statistics_inside_of_a_checkpoint_are_those_of_the_forward_pass(reenter):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module, (x, y) = nn.ModuleDict({"inner": inner, "last": nn.Linear(4, 2)}), batch()
    zero = lambda m: 0 * m["last"].weight.sum()  # a checkpoint that reenters asks for an input that requires grad
    apply = lambda m, x: m["last"](checkpoint(m["inner"], x + zero(m), use_reentrant=reenter))
    loss = pure_loss(module, lambda m, x, y: F.mse_loss(apply(m, x), y), buffers=True)
    step = funcga.accumulate(
        funcga.grad(loss, has_aux=True), 3, in_axes=(None, funcga.CARRY, 0, 0), fold=(funcga.mean(), funcga.carry())
    )
    _, buffers = step(dict(module.named_parameters()), dict(module.named_buffers()), x, y)
    assert int(buffers["inner.1.num_batches_tracked"]) == 3


def test_refusals():
    module, (x, y) = net(), batch()
    loss, params = pure_loss(module, mse), torch_backend.trainable(module)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    both = {"0.weight": tied[0].weight, "1.weight": tied[0].weight}
    cleared = pure_loss(module, lambda module, x, y: (module.zero_grad(), mse(module, x, y))[1])
    cases = [
        (lambda: pure_loss(tied, mse)(both, x, x), r"`1.weight` and another .* are one tensor in the module, tied"),
        (lambda: funcga.accumulate(funcga.grad(cleared), 4)(params, x, y), r"zero_grad\(\) for instance"),
        (
            lambda: loss({"last.wieght": x}, x, y),
            r"`last.wieght` is .* among the parameters of the module it is None \(`last.weight`\?\)",
        ),
        (
            lambda: loss({"last.weight": x}, x, y),
            r"`last.weight` is float32\[11, 3\], and among the parameters of the module it is float32\[2, 4\]\. Give",
        ),
        (
            lambda: pure_loss(module, mse, buffers=True)(params, {"mean": x}, x, y),
            "`mean` is .* among the buffers of the module it is None",
        ),
    ]
    for call, match in cases:
        with pytest.raises(funcga.FuncgaError, match=match):
            call()
    Untouched(module).check()


def replace(module):
    module[0].weight = nn.Parameter(torch.randn(4, 3))


def tie(module):
    module[0].bias = module[2].bias = nn.Parameter(torch.randn(4))


@pytest.mark.parametrize(("change", "whose"), [(replace, "pure_loss"), (tie, "module")])
def test_a_module_that_changes_between_windows(change, whose):
    """What is known of it from the last window is no longer so."""
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 3)
    loss = lambda module, x: module(x).square().mean()
    gradients = {
        "pure_loss": funcga.value_and_grad(pure_loss(module, loss)),
        "module": torch_backend.module_value_and_grad(module, loss),
    }
    step = funcga.accumulate(gradients[whose], 4)
    # First two windows, the second of which is known already.
    for changes in (None, None, change, None):
        if changes is not None:
            changes(module)
        params = torch_backend.trainable(module)
        found = step(x) if whose == "module" else step(params, x)
        whole = loss(module, x)
        expected = dict(zip(params, torch.autograd.grad(whole, [*params.values()]), strict=True))
        torch.testing.assert_close(found, (whole.detach(), expected))


@pytest.mark.parametrize("made", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_a_norm_are_refused(made):
    """Their forward pass writes to the parameters."""
    module = nn.Sequential(made(4, 2, max_norm=1.0), nn.Linear(2, 1))
    text = r"`0` of the module is an embedding with max_norm=1.0: .* embedding.weight.renorm_\(2.0, 0, 1.0\). Or use"
    with pytest.raises(funcga.FuncgaError, match=text):
        pure_loss(module, lambda m, i: m(i).square().mean())
