"""Generated modules, with frozen parts, ties and buffers of many kinds, held against a loop by hand on copies of them.

Each case is a seed. `FUNCGA_FUZZ=5000 pytest tests/torch_backend/modules/test_fuzz_modules.py` runs more of them.
"""

import copy
import os
import random

import pytest
import torch
from torch import nn
from torch.func import grad_and_value
from torch.nn.utils import parametrizations

import funcga
import torch_backend

CASES = int(os.environ.get("FUNCGA_FUZZ", "30"))
WIDTH = 3


class Writes(nn.Module):
    """Its output depends on buffers that it writes to, in one of many ways; `tail` is a view of `state`."""

    WAYS = ("nothing", "data", "in place", "numpy", "view", "assigned", "registered", "data assigned", "scaled")

    def __init__(self, way):
        super().__init__()
        self.way, self.gain = way, nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("state", torch.zeros(WIDTH + 1))
        self.register_buffer("tail", self.state[1:], persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        y = x * self.gain + self.state.detach().clone()[1:] + 2 * self.tail.detach().clone()
        mean, way = x.detach().mean(), self.way
        if "late" in self._buffers:
            y = y + self.late
        if way == "data":
            self.state.data.add_(mean)
        elif way == "in place":
            self.state.add_(mean)
        elif way == "numpy" and type(mean) is torch.Tensor:
            self.state.detach().numpy()[:] += 1.5
        elif way == "view":
            self.tail[1:].add_(0.5)
        elif way == "assigned":
            self.state = self.state + 1
        elif way == "registered":
            self.register_buffer("late", torch.full((), 0.5, dtype=x.dtype))
        elif way == "data assigned":
            self.nothing = self.tail.data * 2
        elif way == "scaled":
            self.state.mul_(2).add_(0.1)
        return y + self.tail.detach().clone() - 3 * self.state.detach().clone()[1:]


class Rows(nn.Module):
    """An embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        with torch.no_grad():
            self.table.weight.mul_(0.01)

    def forward(self, x):
        return x + self.table((x.detach().sum(-1).abs() * 10).long() % 4)


class Residual(nn.Module):
    """A part that is used twice, or two parts with one weight."""

    def __init__(self, inner, other):
        super().__init__()
        self.inner, self.other = inner, other

    def forward(self, x):
        return x + 0.5 * self.other(torch.tanh(self.inner(x)))


def linear(r):
    return nn.Linear(WIDTH, WIDTH, bias=r.random() < 0.7)


def twins(r):
    first, second = linear(r), linear(r)
    second.weight = first.weight
    return Residual(first, second)


def twice(r):
    part = layer(r, 1)
    return Residual(part, part)


LAYERS = {
    "linear": linear,
    "tanh": lambda r: nn.Tanh(),
    "batch norm": lambda r: nn.BatchNorm1d(WIDTH, affine=r.random() < 0.7, momentum=r.choice([0.1, None])),
    "layer norm": lambda r: nn.LayerNorm(WIDTH),
    "weight norm": lambda r: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda r: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda r: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "prelu": lambda r: nn.PReLU(),
    "rows": lambda r: Rows(),
    "writes": lambda r: Writes(r.choice(Writes.WAYS)),
    "twins": twins,
    "twice": twice,
    "nested": lambda r: nn.Sequential(*[layer(r, 1) for _ in range(r.randint(1, 2))]),
}


def layer(r, depth=0):
    names = [name for name in LAYERS if depth == 0 or name not in ("twins", "twice", "nested")]
    return LAYERS[r.choice(names)](r)


def made(r):
    """A module, some of its parameters frozen, some of its parts in eval mode."""
    module = nn.Sequential(linear(r), *[layer(r) for _ in range(r.randint(1, 4))], linear(r))
    names = [*dict(module.named_parameters())]
    for name in r.sample(names, r.choice([0, 0, r.randint(0, len(names) - 1)])):
        module.get_parameter(name).requires_grad_(False)
    for part in module:
        part.train(r.random() < 0.8)
    return module


def loss_of(module, x, y):
    return (module(x) - y).square().mean()


class Untouched:
    """Everything that a module holds, and where; `check` finds out whether it still does."""

    def __init__(self, module):
        self.module = module
        self.before = self.look()
        self.values = [t.detach().clone() for t in self.before.values() if t is not None]

    def look(self):
        return {
            (name, kind, key): tensor
            for name, part in self.module.named_modules(remove_duplicate=False)
            for kind in ("_parameters", "_buffers")
            for key, tensor in part.__dict__[kind].items()
        }

    def same(self):
        now = self.look()
        return [*now] == [*self.before] and all(now[k] is t for k, t in self.before.items())

    def check(self):
        assert self.same()
        assert all(map(torch.equal, [t for t in self.before.values() if t is not None], self.values))
        assert all(p.grad is None for p in self.module.parameters())
        assert not any("forward" in part.__dict__ for part in self.module.modules())


def by_hand(module, params, rows, weights, threaded):
    """(value, gradients, buffers) of a loop: `.backward()` on a copy for each micro-batch, or on one if `threaded`."""
    total, value, sums, one = sum(weights), 0.0, dict.fromkeys(params, 0.0), copy.deepcopy(module)
    for (x, y), weight in zip(rows, weights, strict=True):
        copied = one if threaded else copy.deepcopy(module)
        with torch.no_grad():
            for name, tensor in params.items():
                copied.get_parameter(name).copy_(tensor)
        copied.zero_grad()
        loss = loss_of(copied, x, y)
        loss.backward()
        value += weight * float(loss.detach()) / total
        for name in params:
            grad = copied.get_parameter(name).grad
            sums[name] = sums[name] + weight * (torch.zeros_like(params[name]) if grad is None else grad) / total
    return value, sums, dict(one.named_buffers())


def check_close(found, expected):
    value, grads = found
    torch.testing.assert_close(float(value), expected[0], rtol=1e-9, atol=1e-11)
    assert grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][name].expand_as(grad), rtol=1e-8, atol=1e-10, msg=name)


def cut(x, y, r):
    """The batch in micro-batches of at least 2 rows, as BatchNorm asks, and how to ask for them."""
    n = r.randint(1, 4)
    return n, [*zip(x.tensor_split(n), y.tensor_split(n), strict=True)]


def case(seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)  # rather than module.double(), which takes views among the buffers apart
    try:
        module = made(r)
    finally:
        torch.set_default_dtype(torch.float32)
    x, y = torch.randn(9, WIDTH, dtype=torch.float64), torch.randn(9, WIDTH, dtype=torch.float64)
    params = torch_backend.trainable(module)
    if r.random() < 0.5:
        params = {name: p.detach() * 1.1 for name, p in params.items()}
    return r, module, params, x, y


@pytest.mark.parametrize("seed", range(CASES))
def test_a_pure_loss_is_the_loop_by_hand(seed):
    r, module, params, x, y = case(seed)
    n, rows = cut(x, y, r)
    weights = [len(a) for a, _ in rows]
    expected, untouched, between = by_hand(module, params, rows, weights, False), Untouched(module), []
    loss = torch_backend.pure_loss(module, loss_of)
    numpy = any(isinstance(part, Writes) and part.way == "numpy" for part in module.modules())
    how = r.choice(["accumulate", "accumulate", "stream", "torch.func" if not numpy else "stream", "weight"])
    gradient = funcga.value_and_grad(loss)
    if how == "torch.func":
        gradient = lambda *args: grad_and_value(loss)(*args)[::-1]
    weight = lambda a, b: (between.append(untouched.same()), len(a))[1]
    if how == "stream":
        items = ((a, b) for a, b in rows if between.append(untouched.same()) is None)
        found = funcga.stream(gradient)(params, items)
    else:
        found = funcga.accumulate(gradient, n, weight=weight if how == "weight" else None)(params, x, y)
    untouched.check()
    assert all(between)
    check_close(found, expected)


@pytest.mark.parametrize("seed", range(CASES, CASES + CASES // 3))
def test_threaded_buffers_are_the_loop_by_hand(seed):
    r, module, params, x, y = case(seed)
    for part in module.modules():
        if isinstance(part, Writes) and part.way in ("registered", "data assigned", "assigned"):
            part.way = "data"  # those are no buffers that one could thread, or no longer views
    n, rows = cut(x, y, r)
    value, grads, after = by_hand(module, params, rows, [len(a) for a, _ in rows], True)
    untouched = Untouched(module)
    step = funcga.accumulate(
        funcga.value_and_grad(torch_backend.pure_loss(module, loss_of, buffers=True), has_aux=True), n,
        in_axes=(None, funcga.CARRY, 0, 0), fold=((funcga.mean(), funcga.carry()), funcga.mean()),
    )  # fmt: skip
    (found, buffers), gradients = step(params, dict(module.named_buffers()), x, y)
    untouched.check()
    check_close((found, gradients), (value, grads))
    assert buffers.keys() == after.keys()
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, after[name], rtol=1e-9, atol=1e-11)
