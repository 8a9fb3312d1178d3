"""Losses that recompute in their backward pass, generated, with every fold, shared layers and hooks: as loops by hand.

`FUNCGA_FUZZ=2000` runs that many cases; a case that fails is named by its seed, and `FUNCGA_FUZZ_SEED=17` runs it alone.
"""

import os
import random
import threading
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import funcga
from torch_backend import pure_loss

CASES = int(os.environ.get("FUNCGA_FUZZ", "60"))
ONLY = os.environ.get("FUNCGA_FUZZ_SEED")
CHUNKS = 2  # tests that the cases are spread over


# --- losses of one module, layer by layer, each applied in a way of its own


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


def in_a_thread(function, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(Recompute.apply(function, x)))
    thread.start()
    thread.join()
    return found[0]


class Doubled(torch.autograd.Function):
    """A function that only has a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


APPLIED = {
    "plain": lambda f, x: f(x),
    "non-reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "recompute": Recompute.apply,
    "in a thread": in_a_thread,
    "doubled": lambda f, x: Doubled.apply(f(x)),
}
HOOKS = (lambda g: g * 3, lambda g: g.clamp(-0.01, 0.01), lambda g: None, lambda g: g / (1 + g.abs().sum()))
FOLDS = ("mean", "sum", "per_weight", "max", "min", "logsumexp", "moments", "concat")


@dataclass
class Program:
    """A drawn loss: which layer comes when, how it is applied, and in which micro-batches it is applied so."""

    layers: list[int]
    ways: list[str]
    always: list[bool]
    leafy: bool  # whether the input is made a leaf inside of the loss
    foreign: nn.Module | None  # a module of somebody else's
    switch: float
    holder: dict = field(default_factory=dict)

    def __call__(self, module, x, weights):
        active = bool(x[0, 0] > self.switch)
        h = x.clone().requires_grad_() if self.leafy else x
        for layer, way, always in zip(self.layers, self.ways, self.always, strict=True):
            own = module[layer] if layer < len(module) else self.foreign
            h = APPLIED[way if always or active else "plain"](lambda h, own=own: torch.tanh(own(h)), h)
        per_row = h.square().sum(1)
        return (per_row * weights).sum() / weights.sum().clamp(min=1)


def drawn_program(dice):
    count = dice.randint(1, 3)
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)]).double()
    foreign = nn.Linear(3, 3).double() if dice.random() < 0.3 else None
    depth = dice.randint(1, 4)
    layers = [dice.randrange(count + (foreign is not None)) for _ in range(depth)]
    ways = [dice.choice([*APPLIED]) for _ in layers]
    always = [dice.random() < 0.5 for _ in layers]
    switch = dice.choice([-9.0, 0.0, 0.0, 9.0])
    return module, Program(layers, ways, always, dice.random() < 0.6, foreign, switch)


def hooked(module, dice):
    for p in module.parameters() if dice.random() < 0.4 else ():
        for _ in range(dice.choice([0, 0, 1, 2])):
            p.register_hook(dice.choice(HOOKS))


def gradients_by_hand(module, loss, pieces):
    """What .backward() of each micro-batch leaves in the module's own parameters, None where it leaves nothing."""
    found = []
    for piece in pieces:
        module.zero_grad()
        value = loss(module, *piece)
        if value.requires_grad:
            value.backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    module.zero_grad()
    return found


def folded_by_hand(fold, values, weights):
    """The fold of the values of all micro-batches, as its definition has it."""
    stacked, total = torch.stack(values), sum(weights)
    shares = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * (stacked.ndim - 1)) / (total or 1)
    # what weighs nothing is left out, whatever it is
    weighed = lambda stacked: torch.where(shares != 0, shares * stacked, 0).sum(0)
    if fold == "mean":
        return weighed(stacked)
    if fold == "moments":
        mean = weighed(stacked)
        return torch.stack([mean, weighed((stacked - mean) ** 2)])
    if fold == "concat":
        return torch.cat(values)
    if fold == "logsumexp":
        return stacked.logsumexp(0)
    if fold == "per_weight":
        return stacked.sum(0) / total if total else torch.zeros_like(values[0])
    return {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[fold](0)


def recomputing_losses(dice):
    """Checkpoints of both kinds, functions that recompute, shared layers, hooks, ragged micro-batches, every fold."""
    module, loss = drawn_program(dice)
    rows, fold = dice.randint(1, 9), dice.choice(FOLDS)
    n = dice.randint(1, rows)
    x = torch.randn(rows, 3, dtype=torch.float64)
    weights = torch.tensor([dice.choice([0, 1, 1, 2, 7, 300]) for _ in range(rows)], dtype=torch.float64)
    hooked(module, dice)
    weigh = (lambda x, w: float(w.sum())) if dice.random() < 0.6 else None

    pieces = [*zip(x.tensor_split(n), weights.tensor_split(n), strict=True)]
    found = gradients_by_hand(module, loss, pieces)
    numbers = [len(rows) if weigh is None else weigh(rows, own) for rows, own in pieces]
    foreign = [] if loss.foreign is None else [*loss.foreign.parameters()]
    for p in foreign:
        p.grad = torch.ones_like(p) if dice.random() < 0.5 else None
    before = [(p.grad, None if p.grad is None else p.grad.clone()) for p in foreign]

    params = dict(module.named_parameters())
    given = dict(dice.sample([*params.items()], dice.randint(1, len(params)))) if dice.random() < 0.3 else params
    gradient = funcga.grad(pure_loss(module, loss))
    options = {"fold": getattr(funcga, fold)(), "weight": weigh}
    reached = any(g[k] is not None for g, number in zip(found, numbers, strict=True) for k in given if number)
    try:
        if dice.random() < 0.5:
            result = funcga.accumulate(gradient, n, **options)(given, x, weights)
        else:
            result = funcga.stream(gradient, **options)(given, pieces)
    except funcga.FuncgaError as error:
        if reached or "the loss does not depend on `params`" not in str(error):
            raise
        return

    assert result.keys() == given.keys()
    for name, value in result.items():
        gradients = [torch.zeros_like(params[name]) if g[name] is None else g[name] for g in found]
        expected = folded_by_hand(fold, gradients, numbers)
        own = torch.stack([*value]) if fold == "moments" else value
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-12, msg=lambda text, k=name: f"{k}: {text}")
    assert all(p.grad is None for p in module.parameters())
    for p, (grad, copy) in zip(foreign, before, strict=True):
        assert p.grad is grad
        assert grad is None or torch.equal(grad, copy)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_generated(chunk):
    for seed in [int(ONLY)] if ONLY else range(chunk, CASES, CHUNKS):
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # by hand as well
                recomputing_losses(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"this fails with FUNCGA_FUZZ_SEED={seed}") from error


# --- what goes wrong inside of it


class Applies(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.way = nn.Linear(3, 3), nn.Linear(3, 3), way

    def forward(self, x):
        return APPLIED[self.way](lambda h: torch.tanh(self.second(h)), torch.tanh(self.first(x))).square().mean()


@pytest.fixture
def x():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch's own compiler looks at
def test_after_a_break_of_a_compiled_graph(x):
    module = Applies("plain").double()

    @torch.compile(backend="eager")
    def broken(module, x):
        apply = torch.compiler.disable(Recompute.apply)
        return apply(lambda h: torch.tanh(module.second(h)), torch.tanh(module.first(x))).square().mean()

    torch._dynamo.reset()
    grads = funcga.accumulate(funcga.grad(pure_loss(module, broken)), 2)(dict(module.named_parameters()), x)
    (expected,) = gradients_by_hand(module, lambda module, x: module(x), [(x,)])
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["reentrant", "recompute"])
def test_an_exception_leaves_every_grad_as_it_was(way, x):
    module, other, calls = Applies(way).double(), nn.Linear(3, 3).double(), []

    def fails(h):
        calls.append(1)
        if len(calls) == 4:
            raise KeyError("inside")
        return other(h)

    step = funcga.accumulate(funcga.grad(pure_loss(module, lambda m, x: APPLIED[way](fails, m.first(x)).sum())), 2)
    with pytest.raises(KeyError):
        step(dict(module.named_parameters()), x)
    assert all(p.grad is None for p in (*module.parameters(), *other.parameters()))


LOST = (
    r"loss_fn runs a module again in the backward pass, as a checkpoint with use_reentrant=True does, and then with the "
    r"module's own parameters instead of those that loss_fn is given: functional_call has taken them out by then\. Use "
    r"torch_backend\.pure_loss\(module, loss_fn\), or use_reentrant=False\."
)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("way", ["reentrant", "recompute", "non-reentrant"])
def test_gradients_that_functional_call_loses_are_refused(way, own, x):
    module = Applies(way).double()
    params = {name: p if own else p.detach().clone() for name, p in module.named_parameters()}
    names, given = [*params], [*params.values()]
    gradient = funcga.grad(lambda leaves, x: functional_call(module, dict(zip(names, leaves, strict=True)), (x,)))
    if way != "non-reentrant":
        for step in (funcga.accumulate(gradient, 2), *([] if own else [gradient])):
            with pytest.raises(funcga.FuncgaError, match=LOST):
                step(given, x)
    else:
        (expected,) = gradients_by_hand(module, lambda module, x: module(x), [(x,)])
        torch.testing.assert_close(funcga.accumulate(gradient, 2)(given, x), [*expected.values()])
    assert all(p.grad is None for p in module.parameters())
