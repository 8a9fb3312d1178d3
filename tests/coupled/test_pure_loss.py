"""coupled over a pure_loss, in torch: by the module's parameters and by other arguments, and what is left of a call."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import funcga
import torch_backend


def summary_of(module, scale, x):
    return scale * normalize(module(x), dim=-1)


def loss_fn(params, *more):
    *_, s = more
    return (params["bias"].exp().sum() * s @ s.T).logsumexp(1).mean()


@pytest.fixture
def problem():
    torch.manual_seed(0)
    module = nn.Linear(3, 4).double()
    return module, torch.tensor(2.0, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)


def expected(module, scale, x):
    leaves = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
    scale = scale.clone().requires_grad_()
    summary = scale * normalize(torch.func.functional_call(module, leaves, x), dim=-1)
    loss = loss_fn(leaves, summary)
    *grads, of_scale = torch.autograd.grad(loss, (*leaves.values(), scale))
    return loss, dict(zip(leaves, grads, strict=True)), of_scale


@pytest.mark.parametrize("argnums", [1, (1, 0)], ids=str)
def test_by_which_arguments(problem, argnums):
    module, scale, x = problem
    loss, of_params, of_scale = expected(*problem)
    indices = argnums if isinstance(argnums, tuple) else (argnums,)
    of_these = lambda *args: loss_fn(dict(zip(indices, args, strict=False)).get(0, params), *args)
    params = dict(module.named_parameters())
    step = funcga.coupled(
        torch_backend.pure_loss(module, summary_of), of_these, n=3, argnums=argnums, in_axes=(None, None, 0)
    )
    found, grads = step(params, scale, x)
    truth = [(of_params, of_scale)[index] for index in indices]
    torch.testing.assert_close((found, grads), (loss, tuple(truth) if isinstance(argnums, tuple) else truth[0]))


def test_a_call_leaves_nothing_that_waits_for_the_garbage_collector(problem):
    module, scale, x = problem
    step = funcga.coupled(torch_backend.pure_loss(module, summary_of), loss_fn, n=3, in_axes=(None, None, 0))
    params = dict(module.named_parameters())
    step(params, scale, x)
    gc.collect()
    gc.disable()
    try:
        before = _bytes()
        for _ in range(3):
            step(params, scale, x)
        assert _bytes() == before
    finally:
        gc.enable()


def _bytes():
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_a_loss_may_use_the_module_or_the_parameters():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 2, dtype=torch.float64)
            self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    module, x = Scaled(), torch.randn(7, 3, dtype=torch.float64)
    scaled = lambda rows, scale: (rows @ rows.T * scale.exp()).logsumexp(1).mean()
    summary_fn = torch_backend.pure_loss(module, lambda module, x: module(x))
    expected = torch.autograd.grad(scaled(module(x), module.scale), list(module.parameters()))
    for loss_fn in (lambda params, s: scaled(s, params["scale"]), lambda params, s: scaled(s, module.scale)):
        _, grads = funcga.coupled(summary_fn, loss_fn, 3)(torch_backend.trainable(module), x)
        names = [name for name, _ in module.named_parameters()]
        torch.testing.assert_close([grads[name] for name in names], [*expected], rtol=1e-12, atol=1e-12)
