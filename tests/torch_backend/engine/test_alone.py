"""A gradient function that is called by itself: on autograd where no argument is part of a graph, else with one."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


X = torch.tensor(np.random.default_rng(0).normal(size=(5, 3)))


def square(module, x):
    return (module(x) ** 2).mean()


def by_hand(module, params, x, second=None):
    """(loss, gradients) by torch.autograd, and what `second(loss, gradients)` has for derivatives."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    loss = (functional_call(module, leaves, (x,)) ** 2).mean()
    grads = dict(zip(leaves, torch.autograd.grad(loss, leaves.values(), create_graph=True), strict=True))
    return leaves, loss, grads


def others(module):
    """Parameters with other values than the module's own."""
    torch.manual_seed(1)
    return {name: torch.randn_like(p) for name, p in module.named_parameters()}


@pytest.fixture
def no_func(monkeypatch):
    """Without torch.func."""

    def refuse(*args, **kwargs):
        raise AssertionError("torch.func runs")

    monkeypatch.setattr(torch.func, "grad_and_value", refuse)


LOSSES = {
    "pure_loss": lambda m: torch_backend.pure_loss(m, square),
    "functional_call": lambda m: lambda params, x: (functional_call(m, params, (x,)) ** 2).mean(),
}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("pure_loss", "detached"), ("functional_call", "no_grad"), ("pure_loss", "inference_mode"),
        ("functional_call", "made in inference mode"), ("functional_call", "detached"),
    ],
)  # fmt: skip
def test_it_is_one_backward_pass(kind, where, no_func):
    module = net()
    params = others(module)
    _, loss, grads = by_hand(module, params, X)
    gradient = funcga.value_and_grad(LOSSES[kind](module))
    if where == "detached":
        got = gradient(params, X)
    elif where in ("no_grad", "inference_mode"):
        with torch.no_grad() if where == "no_grad" else torch.inference_mode():
            got = gradient({name: p.requires_grad_() for name, p in params.items()}, X)
    else:
        with torch.inference_mode():
            made = {name: p.clone() for name, p in params.items()}, X.clone()
        got = gradient(*made)
    torch.testing.assert_close(
        got, (loss.detach(), {name: g.detach() for name, g in grads.items()}), rtol=0, atol=1e-14
    )
    assert not got[0].requires_grad
    assert not any(g.requires_grad for g in got[1].values())
    assert all(p.grad is None for p in (*params.values(), *module.parameters()))


def penalty(grads):
    return sum((g**2).sum() for g in grads.values())


@pytest.mark.parametrize("kind", LOSSES)
def test_second_order_terms_of_parameters_that_require_grad(kind):
    module = net()
    params = {name: p.requires_grad_() for name, p in others(module).items()}
    leaves, loss, grads = by_hand(module, params, X)
    expected = torch.autograd.grad(loss + penalty(grads), leaves.values())
    value, got = funcga.value_and_grad(LOSSES[kind](module))(params, X)
    torch.testing.assert_close(torch.autograd.grad(value + penalty(got), params.values()), expected)
    # A graph that comes from elsewhere: the parameters are no leaves.
    for p in params.values():
        p.grad = None
    value, got = funcga.value_and_grad(LOSSES[kind](module))({name: 1 * p for name, p in params.items()}, X)
    (value + penalty(got)).backward()
    torch.testing.assert_close(tuple(p.grad for p in params.values()), expected)


CONSTANT = torch.tensor(2.0, dtype=torch.float64)


@pytest.mark.parametrize("way", ["split", "keyword"])
def test_second_order_terms_of_what_is_not_differentiated(way):
    """A tensor that requires grad and is no parameter: the gradient's derivative by it, against autograd's."""
    module = net()
    params = {name: p.detach() for name, p in module.named_parameters()}
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def loss(params, x, a):
        return (functional_call(module, params, (x * a,)) ** 2).mean()

    gradient = funcga.value_and_grad(loss)
    got = gradient(params, X, a) if way == "split" else gradient(params, X, a=a)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    value = loss(leaves, X, a)
    grads = dict(zip(leaves, torch.autograd.grad(value, leaves.values(), create_graph=True), strict=True))
    (expected,) = torch.autograd.grad(value + penalty(grads), a)
    torch.testing.assert_close(torch.autograd.grad(got[0] + penalty(got[1]), a)[0], expected)
    with torch.no_grad():
        value, grads = gradient(params, X, a)
    assert not any(tensor.requires_grad for tensor in (value, *grads.values()))


@pytest.mark.parametrize("way", ["closed over", "left out of functional_call", "sometimes closed over"])
def test_there_is_no_graph_of_what_a_loss_closes_over(way):
    """The results are right, and as `.backward()` leaves them; nothing comes to what is closed over."""
    module = net()
    params = {name: p.detach() for name, p in module.named_parameters()}
    a = factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss = lambda params, x: (functional_call(module, params, (x * factor,)) ** 2).mean()
    gradient = funcga.value_and_grad(loss)
    if way == "left out of functional_call":
        factor = a.detach()
        params.pop("2.bias")
    elif way == "sometimes closed over":
        factor = a.detach()
        gradient(params, X)
        factor = a
    value, grads = gradient(params, X)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = loss(leaves, X)
    torch.testing.assert_close(value, expected.detach())
    of_leaves = torch.autograd.grad(expected, leaves.values())
    torch.testing.assert_close(tuple(grads.values()), of_leaves)
    assert not any(tensor.requires_grad for tensor in (value, *grads.values()))
    assert all(tensor.grad is None for tensor in (a, *module.parameters()))


def test_aux_has_no_graph():
    module = net()
    params = {name: p.detach() for name, p in module.named_parameters()}
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def loss(params, x):
        out = functional_call(module, params, (x,))
        return (out**2).mean(), {"own": out, "foreign": out.sum() * a, "text": "any", "none": None}

    (value, aux), grads = funcga.value_and_grad(loss, has_aux=True)(params, X)
    assert not any(tensor.requires_grad for tensor in (value, aux["own"], aux["foreign"], *grads.values()))
    assert (aux["text"], aux["none"]) == ("any", None)
    torch.testing.assert_close(aux["foreign"], 2 * functional_call(module, params, (X,)).sum())


def test_what_a_pure_loss_leaves_out_is_a_constant(no_func):
    module = net()
    params = {"0.weight": module[0].weight.detach()}
    value, grads = funcga.value_and_grad(torch_backend.pure_loss(module, square))(params, X)
    loss = square(module, X)
    torch.testing.assert_close(value, loss.detach())
    torch.testing.assert_close(grads["0.weight"], torch.autograd.grad(loss, module[0].weight)[0])
    assert not any(tensor.requires_grad for tensor in (value, *grads.values()))
    assert all(p.grad is None for p in module.parameters())


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.first, self.second = reentrant, nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x):
        return checkpoint(lambda h: self.second(torch.tanh(h)), self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_graph_is_refused(reentrant):
    """A second derivative would run the checkpoint again, when the module has its own parameters back."""
    module, a = Checkpointed(reentrant), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    gradient = funcga.grad(torch_backend.pure_loss(module, lambda m, x, a: a * square(m, x)))
    with pytest.raises(RuntimeError, match=r"torch\.func|functorch"):
        gradient(others(module), X, a)
    with torch.no_grad():
        assert not any(g.requires_grad for g in gradient(others(module), X, a).values())
    closing = funcga.grad(torch_backend.pure_loss(module, lambda m, x: a * square(m, x)))
    torch.testing.assert_close(closing(others(module), X), gradient(others(module), X, a.detach()))
    module(X)  # no hook is left
    assert all(tensor.grad is None for tensor in (a, *module.parameters()))


def test_arguments_of_every_kind(no_func):
    z, w = torch.randn(3, dtype=torch.complex128), torch.randn(3, dtype=torch.float64)
    loss = lambda a, x, b: (a["z"] * x).abs().pow(2).sum() + b[0].sum() * 3 + a["n"]
    grads, aux = funcga.grad(lambda *args: (loss(*args), 7), argnums=(-1, 0), has_aux=True)(
        {"z": z, "none": None, "n": 2.0, "unused": w}, w, (w, None)
    )
    assert (aux, grads[0][1], grads[1]["none"]) == (7, None, None)
    torch.testing.assert_close(grads[0][0], torch.full_like(w, 3))
    torch.testing.assert_close(grads[1]["z"], 2 * z * w**2)
    assert grads[1]["n"] == 1
    assert grads[1]["unused"].eq(0).all()
    # The same tensor twice has a gradient for each place, in memory of its own.
    first, second = funcga.grad(lambda p, q: (p + q).sum(), argnums=(0, 1))(w, w)
    assert first.data_ptr() != second.data_ptr()
    assert first.is_contiguous()
    assert (first.tolist(), second.tolist()) == ([1, 1, 1], [1, 1, 1])


def test_a_loss_that_is_a_parameter(no_func):
    """Its value is no view of it."""
    w, x = torch.tensor(2.0), torch.tensor(3.0)
    for _ in range(3):
        value, (of_w, of_x) = funcga.value_and_grad(lambda w, x: w, argnums=(0, 1))(w, x)
        assert len({each.data_ptr() for each in (w, x, value, of_w, of_x)}) == 5
        assert (float(value), float(of_w), float(of_x)) == (2, 1, 0)


def test_dtypes_and_layouts(no_func):
    """Each gradient is as autograd leaves it: nothing is summed, so nothing is widened or made dense."""
    p = torch.randn(4, dtype=torch.bfloat16)
    assert funcga.grad(lambda p: (p * p).sum())(p).dtype == torch.bfloat16
    weight = torch.randn(10, 3)
    loss = lambda w, i: nn.functional.embedding(i, w, sparse=True).sum()
    got = funcga.grad(loss)(weight, torch.tensor([1, 2, 2]))
    assert got.layout is torch.sparse_coo
    assert got.to_dense().sum(1).tolist() == [0, 3, 6, *[0] * 7]


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda w, x: CONSTANT * 1, "does not depend on `w`"),
        (lambda w, x: torch.ones(2, requires_grad=True).sum(), "does not depend on `w`"),
        (lambda w, x: w * x, "a gradient is that of a scalar"),
        (lambda w, x: w.requires_grad_(False).sum(), "loss_fn calls requires_grad_()"),
        (lambda w, x: (w.sum().backward(), w.sum())[1], "loss_fn called .backward()"),
        (lambda w, x: (w.detach().mul_(1), w.sum())[1], "was changed in place"),
    ],
)
@pytest.mark.filterwarnings("ignore:requires_grad=False")
def test_errors(loss, says):
    w = torch.ones(2, dtype=torch.float64)
    with pytest.raises(funcga.FuncgaError, match=says.replace("(", r"\(").replace(")", r"\)")):
        funcga.grad(loss)(w, w)


def test_a_compiled_function_traces_it():
    w = torch.tensor([1.0, 2.0])
    gradient = funcga.value_and_grad(lambda w, x: ((w * x) ** 2).sum())
    compiled = torch.compile(lambda w, x: gradient(w, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(w, w), gradient(w, w))


def test_the_aux_of_a_module_comes_as_it_is():
    module, x = nn.Linear(3, 1), torch.ones(4, 3)
    loss_fn = lambda module, x: (module(x).square().mean(), {"rows": len(x), "name": "a", "out": module(x)})
    (_, aux), _ = torch_backend.module_value_and_grad(module, loss_fn, has_aux=True)(x)
    assert (aux["rows"], aux["name"], aux["out"].requires_grad) == (4, "a", False)
    torch.testing.assert_close(aux["out"], module(x).detach(), rtol=0, atol=0)
