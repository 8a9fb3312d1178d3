"""Steps inside of losses: an outer gradient sees the derivative of an inner one, against torch.autograd by hand."""

import numpy as np
import optax
import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from tests.kits import TORCH, difference
from tests.test_errors import check_refused

RATE = 0.5


def loss(w, x, y):
    """Of operators alone, so that both frameworks run it."""
    h = x @ w
    return ((h / (1 + h**2) - y) ** 2).mean()


def data(rows, seed):
    r = np.random.default_rng(seed)
    return r.normal(size=(rows, 3)), r.normal(size=rows)


W = np.random.default_rng(0).normal(size=3)
SUPPORT, QUERY = data(4, 1), data(7, 2)


def by_hand(second=True):
    """The gradient of the loss after one step, with or without the derivative of that step."""
    w = torch.tensor(W, requires_grad=True)
    (x, y), (qx, qy) = ([torch.tensor(a) for a in pair] for pair in (SUPPORT, QUERY))
    (g,) = torch.autograd.grad(loss(w, x, y), w, create_graph=second)
    return torch.autograd.grad(loss(w - RATE * g, qx, qy), w)[0]


def streamed(gradient):
    step = funcga.stream(gradient)
    return lambda w, x, y: step(w, [(x[:3], y[:3]), (x[3:], y[3:])])


def through_multi_steps(donate):
    tx = funcga.multi_steps((lambda params: None, lambda grads, state, params: (grads, state)), 2, donate=donate)

    def step(w, x, y):
        state = tx.init(w)
        for rows in (slice(0, 3), slice(3, None)):
            updates, state = tx.update(funcga.grad(loss)(w, x[rows], y[rows]), state, w, weight=len(x[rows]))
        return updates

    return step


def through_an_accumulator(w, x, y):
    accumulator = funcga.Accumulator(funcga.mean())
    state = accumulator.init(w)
    for rows in (slice(0, 3), slice(3, None)):
        state = accumulator.update(state, funcga.grad(loss)(w, x[rows], y[rows]), len(x[rows]))
    return accumulator.finalize(state)


INNER = {
    "accumulate": funcga.accumulate(funcga.grad(loss), 2),
    "stream": streamed(funcga.grad(loss)),
    "value": lambda w, x, y: funcga.accumulate(funcga.value_and_grad(loss), 2)(w, x, y)[1],
    "aux": lambda w, x, y: funcga.accumulate(
        funcga.grad(lambda w, x, y: (loss(w, x, y), {"rows": x.sum()}), has_aux=True), 2
    )(w, x, y)[0],
    "closed over": lambda w, x, y: funcga.accumulate(funcga.grad(lambda d, x, y: loss(w + d, x, y)), 2)(0 * w, x, y),
    "by keyword": lambda w, x, y: funcga.accumulate(funcga.grad(lambda d, x, y, w: loss(w + d, x, y)), 2)(
        0 * w, x, y, w=w
    ),
    "Accumulator": through_an_accumulator,
    "multi_steps": through_multi_steps(donate=False),
}
TORCH_INNER = {
    "torch.func": funcga.accumulate(torch.func.grad(loss), 2),
    "donated": through_multi_steps(donate=True),
}
OUTER = {
    "grad": funcga.grad,
    "accumulate": lambda f: funcga.accumulate(funcga.grad(f), 3),
    "stream": lambda f: streamed(funcga.grad(f)),
    "value": lambda f: lambda *args: funcga.accumulate(funcga.value_and_grad(f), 1)(*args)[1],
}


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        *((inner, "accumulate") for inner in ("stream", "aux", "closed over", "by keyword")),
        *((inner, "value") for inner in ("value", "Accumulator", "multi_steps", "torch.func", "donated")),
        *(("accumulate", outer) for outer in ("grad", "stream")),
    ],
)
def test_second_order_in_torch(inner, outer):
    step = {**INNER, **TORCH_INNER}[inner]
    w, support, query = TORCH.arrays((W, SUPPORT, QUERY))
    got = OUTER[outer](lambda w, x, y: loss(w - RATE * step(w, *support), x, y))(w, *query)
    assert difference(TORCH, got, by_hand()) <= 1e-13
    assert difference(TORCH, got, by_hand(second=False)) > 1e-2
    assert not got.requires_grad


def test_first_order_where_one_asks_for_it_and_no_graph_at_the_top():
    w, support, query = TORCH.arrays((W, SUPPORT, QUERY))
    step = funcga.accumulate(funcga.grad(loss), 2)

    def without_grad(w):
        with torch.no_grad():
            return step(w, *support)

    for inner in (without_grad, lambda w: step(w.detach(), *support)):
        outer = lambda w, x, y, inner=inner: loss(w - RATE * inner(w), x, y)
        got = funcga.accumulate(funcga.grad(outer), 3)(w, *query)
        assert difference(TORCH, got, by_hand(second=False)) <= 1e-13
    with pytest.raises(ZeroDivisionError):
        funcga.accumulate(funcga.grad(lambda w, x, y: step(w, *support).sum() / 0 + 1 / 0), 1)(w, *query)
    assert not step(nn.Parameter(w), *support).requires_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch itself calls for a jvp
@pytest.mark.parametrize("step", ["accumulate", "closed over", "multi_steps"])
def test_forward_mode(step):
    step = {**INNER, **TORCH_INNER}[step]
    tangent = torch.tensor(np.random.default_rng(3).normal(size=3))
    w, query = TORCH.arrays((W, QUERY))
    with fw.dual_level():
        got = fw.unpack_dual(step(fw.make_dual(w, tangent), *query)).tangent
    hessian = torch.autograd.functional.hessian(lambda w: loss(w, *query), w)
    assert difference(TORCH, got, hessian @ tangent) <= 1e-13


# Modules

MODULE_X = TORCH.arrays((data(4, 4)[0], data(6, 5)[0]))


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def square(net, x):
    return ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()


def checkpointed(net, x):
    return square(lambda x: checkpoint(net, x, use_reentrant=False), x)


def module_by_hand(net, names):
    support, query = MODULE_X
    params = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    apply = lambda p, x: ((functional_call(net, p, (x,)) - x.sum(1, keepdim=True)) ** 2).mean()
    grads = torch.autograd.grad(apply(params, support), [params[name] for name in names], create_graph=True)
    fast = {**params, **{name: params[name] - RATE * g for name, g in zip(names, grads, strict=True)}}
    return dict(zip(params, torch.autograd.grad(apply(fast, query), list(params.values())), strict=True))


@pytest.mark.parametrize(
    ("names", "inner_loss", "outer"),
    [
        ("all", square, OUTER["accumulate"]),
        ("head", checkpointed, OUTER["accumulate"]),
        ("head", square, torch.func.grad),
    ],
)
def test_a_pure_loss_in_a_pure_loss_of_the_same_module(names, inner_loss, outer):
    net = module()
    chosen = [name for name, _ in net.named_parameters() if names == "all" or name.startswith("2.")]
    inner = funcga.accumulate(funcga.grad(torch_backend.pure_loss(net, inner_loss)), 2)
    support, query = MODULE_X

    def adapted(net, x):
        params = {name: p for name, p in net.named_parameters() if name in chosen}
        g = inner(params, support)
        fast = {name: p - RATE * g[name] for name, p in params.items()}
        return torch_backend.pure_loss(net, square)(fast, x)

    got = outer(torch_backend.pure_loss(net, adapted))(dict(net.named_parameters()), query)
    assert difference(TORCH, got, module_by_hand(net, chosen)) <= 1e-12
    assert all(p.grad is None for p in net.parameters())


def test_checkpoints():
    w, support, query = TORCH.arrays((W, SUPPORT, QUERY))
    step = funcga.accumulate(funcga.grad(loss), 2)
    outer = lambda w, x, y: loss(w - RATE * step(w, *support), x, y)
    for reentrant in (False, True):
        again = lambda w, x, y, reentrant=reentrant: checkpoint(outer, w, x, y, use_reentrant=reentrant)
        got = funcga.accumulate(funcga.grad(again), 3)(w, *query)
        assert difference(TORCH, got, by_hand()) <= 1e-13
    # in the inner loss torch refuses one that reenters
    step = funcga.accumulate(funcga.grad(lambda w, x, y: checkpoint(loss, w, x, y, use_reentrant=True)), 2)
    outer = lambda w, x, y: loss(w - RATE * step(w, *support), x, y)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        funcga.accumulate(funcga.grad(outer), 3)(w, *query)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch's own compiler looks at
def test_a_compiled_loss_with_a_step_in_it():
    torch._dynamo.reset()
    w, support, query = TORCH.arrays((W, SUPPORT, QUERY))
    step = funcga.accumulate(funcga.grad(loss), 2)
    outer = lambda w, x, y: loss(w - RATE * step(w, *support), x, y)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="funcga accumulates here; compile the loss"):
        torch.compile(outer, backend="aot_eager", fullgraph=True)(w, *query)
    compiled = torch.compile(outer, backend="aot_eager")
    compiled(w, *query)  # outside of a gradient first, which must not be what is remembered
    got = funcga.accumulate(funcga.grad(compiled), 3)(w, *query)
    assert difference(TORCH, got, by_hand()) <= 1e-13
    torch._dynamo.reset()


# What has no derivative

TRANSFORMS = {
    "an optimizer of torch": torch_backend.from_optimizer(torch.optim.SGD, lr=RATE),
    "clipping": torch_backend.clip_grad_norm(1.0),
    "a transform of optax": torch_backend.from_optax(optax.sgd(RATE)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_updates_without_a_derivative_are_refused(name):
    outer = torch.func.grad if name == "clipping" else lambda f: funcga.accumulate(funcga.grad(f), 1)
    tx = TRANSFORMS[name]
    w, support, query = TORCH.arrays((W, SUPPORT, QUERY))
    state = tx.init(w)
    step = funcga.grad(loss)

    def adapted(w, x, y):
        updates, _ = tx.update(step(w, *support), state, w)
        return loss(torch_backend.apply_updates(w, updates), x, y)

    text = (
        f"{name} is used inside of a loss that is being differentiated, and its updates carry no derivative. Write the "
        f"update as a function of tensors, such as `p - lr * g`. If it is a constant for that loss, compute it under "
        f"torch.no_grad()."
    )
    assert check_refused(text, outer(adapted), w, *query) == text


def test_a_merge_over_replicas_is_refused():
    w, support, query = TORCH.arrays((W, SUPPORT, QUERY))
    step = funcga.accumulate(funcga.grad(loss), 2, across="a group")
    outer = lambda w, x, y: loss(w - RATE * step(w, *support), x, y)
    text = (
        "across= was given inside of a torch.func transform, or of a loss that is being differentiated, where replicas "
        "cannot be merged: the merge has no derivative. Take the transform on each replica, inside of grad_fn; or run the "
        "step under torch.no_grad(), if it is a constant there."
    )
    assert check_refused(text, funcga.accumulate(funcga.grad(outer), 1), w, *query) == text
    # updates of one's own are applied with their derivative
    step = funcga.accumulate(funcga.grad(loss), 2)
    adapted = lambda w, x, y: loss(torch_backend.apply_updates(w, -RATE * step(w, *support)), x, y)
    assert difference(TORCH, funcga.accumulate(funcga.grad(adapted), 3)(w, *query), by_hand()) <= 1e-13
