"""Modules of many kinds, with frozen parts, ties and buffers that are written to, held against a loop by hand on copies."""

import copy

import pytest
import torch
from torch import nn
from torch.func import grad_and_value
from torch.nn.utils import parametrizations

import funcga
import torch_backend
from tests.core.test_modules import Untouched

WIDTH, N = 3, 4


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


def linear():
    return nn.Linear(WIDTH, WIDTH)


def twins():
    first, second = linear(), linear()
    second.weight = first.weight
    return Residual(first, second)


def twice(part):
    return Residual(part, part)


KINDS = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH, affine=False),
    "cumulative batch norm": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "eval": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "frozen": lambda: linear().requires_grad_(False),
    "prelu": nn.PReLU,
    "rows": Rows,
    "twins": twins,
    "twice": lambda: twice(nn.Sequential(nn.BatchNorm1d(WIDTH), linear())),
    **{way: lambda way=way: twice(Writes(way)) for way in Writes.WAYS},
}
NO_BUFFERS_TO_THREAD = ("registered", "data assigned", "assigned")  # or no longer views


def loss_of(module, x, y):
    return (module(x) - y).square().mean()


def by_hand(module, params, rows, threaded):
    """(value, gradients, buffers) of a loop: `.backward()` on a copy for each micro-batch, or on one if `threaded`."""
    value, sums, one = 0.0, dict.fromkeys(params, 0.0), copy.deepcopy(module)
    total = sum(len(x) for x, _ in rows)
    for x, y in rows:
        copied = one if threaded else copy.deepcopy(module)
        with torch.no_grad():
            for name, tensor in params.items():
                copied.get_parameter(name).copy_(tensor)
        copied.zero_grad()
        loss = loss_of(copied, x, y)
        loss.backward()
        value += len(x) * float(loss.detach()) / total
        sums = {name: sums[name] + len(x) * copied.get_parameter(name).grad / total for name in params}
    return value, sums, dict(one.named_buffers())


def check_close(found, expected):
    value, grads = found
    torch.testing.assert_close(float(value), expected[0], rtol=1e-9, atol=1e-11)
    assert grads.keys() == expected[1].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[1][name], rtol=1e-8, atol=1e-10, msg=name)


def case(kind):
    """A module, parameters with values of their own, and the batch in micro-batches of at least 2 rows."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # rather than module.double(), which takes views among the buffers apart
    try:
        module = nn.Sequential(linear(), nn.Tanh(), KINDS[kind](), linear())
    finally:
        torch.set_default_dtype(torch.float32)
    x, y = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    params = {name: p.detach() * 1.1 for name, p in torch_backend.trainable(module).items()}
    return module, params, x, y, [*zip(x.tensor_split(N), y.tensor_split(N), strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pure_loss_is_the_loop_by_hand(kind):
    module, params, x, y, rows = case(kind)
    tensors = lambda: [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
    expected, untouched, before, between = by_hand(module, params, rows, False), Untouched(module), tensors(), []
    loss = torch_backend.pure_loss(module, loss_of)
    gradient = funcga.value_and_grad(loss)
    weight = lambda a, b: (between.append(tensors()), len(a))[1]
    found = [
        funcga.accumulate(gradient, N)(params, x, y),
        funcga.accumulate(gradient, N, weight=weight)(params, x, y),
        funcga.stream(gradient)(params, (part for part in rows if between.append(tensors()) is None)),
    ]
    if kind != "numpy":
        found.append(funcga.accumulate(lambda *args: grad_and_value(loss)(*args)[::-1], N)(params, x, y))
    untouched.check()
    assert between == [before] * 2 * N
    for each in found:
        check_close(each, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NO_BUFFERS_TO_THREAD])
def test_threaded_buffers_are_the_loop_by_hand(kind):
    module, params, x, y, rows = case(kind)
    value, grads, after = by_hand(module, params, rows, True)
    untouched = Untouched(module)
    step = funcga.accumulate(
        funcga.value_and_grad(torch_backend.pure_loss(module, loss_of, buffers=True), has_aux=True), N,
        in_axes=(None, funcga.CARRY, 0, 0), fold=((funcga.mean(), funcga.carry()), funcga.mean()),
    )  # fmt: skip
    (found, buffers), gradients = step(params, dict(module.named_buffers()), x, y)
    untouched.check()
    check_close((found, gradients), (value, grads))
    assert buffers.keys() == after.keys()
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, after[name], rtol=1e-9, atol=1e-11)
