"""Losses that recompute in their backward pass, with every fold, shared layers and hooks: as loops by hand."""

import itertools
import threading
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import funcga
from tests import oracle
from tests.torch_backend.engine.functions import Doubled, Recompute
from torch_backend import module_value_and_grad, pure_loss, trainable

# --- losses of one module, layer by layer, each applied in a way of its own


def in_a_thread(function, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(Recompute.apply(function, x)))
    thread.start()
    thread.join()
    return found[0]


APPLIED = {
    "plain": lambda f, x: f(x),
    "non-reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "recompute": Recompute.apply,
    "in a thread": in_a_thread,
    "doubled": lambda f, x: Doubled.apply(f(x)),
}
HOOKS = {
    "no hook": (),
    "hooks": (lambda g: g * 3, lambda g: g.clamp(-0.01, 0.01), lambda g: None, lambda g: g / (1 + g.abs().sum())),
}
FOLDS = ("mean", "sum", "per_weight", "max", "min", "logsumexp", "moments", "concat")


def loss_of(way, foreign):
    """Two layers, the first of them twice, and one of somebody else's; some micro-batches apply them in this way."""

    def loss(module, x, weights):
        is_so, h = bool(x[0, 0] > 0), x.clone().requires_grad_()
        for layer in (module[0], module[1], foreign, module[0]):
            h = APPLIED[way if is_so else "plain"](lambda h, layer=layer: torch.tanh(layer(h)), h)
        return (h.square().sum(1) * weights).sum() / weights.sum().clamp(min=1)

    return loss


def gradients_by_hand(module, loss, pieces):
    """What .backward() of each micro-batch leaves in the module's own parameters."""
    found = []
    for piece in pieces:
        module.zero_grad()
        loss(module, *piece).backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    module.zero_grad()
    return found


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("way", APPLIED)
def test_every_way_and_fold_is_the_loop_by_hand(way, hooks):
    """Ragged micro-batches, of which one weighs nothing; one parameter is not given; a `.grad` of a foreign one stays."""
    torch.manual_seed(0)
    module, foreign = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), nn.Linear(3, 3).double()
    x, weights = (
        torch.randn(11, 3, dtype=torch.float64),
        torch.tensor([1.0, 2, 7, 0, 0, 0, 300, 1, 0, 1, 2], dtype=torch.float64),
    )
    x[:, 0] = x[:, 0].abs() * torch.tensor([1, 1, 1, 1, 1, 1, -1, -1, -1, 1, 1])
    for hook in HOOKS[hooks]:
        module[0].weight.register_hook(hook)
    loss, pieces = loss_of(way, foreign), [*zip(x.split(3), weights.split(3), strict=True)]
    found = gradients_by_hand(module, loss, pieces)
    for p in foreign.parameters():
        p.grad = torch.ones_like(p)
    params = {name: p for name, p in module.named_parameters() if name != "1.bias"}
    gradient = funcga.grad(pure_loss(module, loss))
    for fold, weigh in itertools.product(FOLDS, (None, lambda x, w: float(w.sum()))):
        numbers = [len(rows) if weigh is None else weigh(rows, own) for rows, own in pieces]
        options = {"fold": getattr(funcga, fold)(), "weight": weigh}
        for result in (
            funcga.accumulate(gradient, microbatch_size=3, **options)(params, x, weights),
            funcga.stream(gradient, **options)(params, pieces),
        ):
            assert result.keys() == params.keys()
            for name, value in result.items():
                expected = oracle.fold(fold, [gradients[name] for gradients in found], numbers)
                for leaf, wanted in zip(tree_leaves(value), tree_leaves(expected), strict=True):
                    torch.testing.assert_close(
                        leaf, torch.as_tensor(wanted), rtol=1e-9, atol=1e-12, msg=f"{fold} {name}"
                    )
    assert all(p.grad is None for p in module.parameters())
    assert all(p.grad.eq(1).all() for p in foreign.parameters())


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
    "loss_fn runs a module again in the backward pass, as a checkpoint does, and then with the module's own parameters instead "
    "of those that loss_fn is given: functional_call has taken them out by then. Use torch_backend.pure_loss"
)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("way", ["reentrant", "recompute", "non-reentrant"])
def test_gradients_that_functional_call_loses_are_refused(way, own, x):
    module = Applies(way).double()
    params = {name: p if own else p.detach().clone() for name, p in module.named_parameters()}
    names, given = [*params], [*params.values()]
    gradient = funcga.grad(lambda leaves, x: functional_call(module, dict(zip(names, leaves, strict=True)), (x,)))
    if not own or way != "non-reentrant":
        for step in (funcga.accumulate(gradient, 2), *([] if own else [gradient])):
            for _ in range(3):
                with pytest.raises(funcga.FuncgaError, match=LOST):
                    step(given, x)
    else:  # what runs again has the same memory
        (expected,) = gradients_by_hand(module, lambda module, x: module(x), [(x,)])
        torch.testing.assert_close(funcga.accumulate(gradient, 2)(given, x), [*expected.values()])
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("way", "padding"), [("a window", 0), ("a gradient alone", 0), ("a window", 1), ("a gradient alone", 1)]
)
def test_a_function_that_comes_with_a_later_call(way, padding):
    """Around the first of two uses of a weight. The padding makes the graph one of as many nodes as before."""
    w, x = torch.tensor(0.7, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    applied = []

    def loss(w, x):
        layer, h = lambda h: (h * w).tanh(), x.clone().requires_grad_() * 1.0
        h = Recompute.apply(layer, h) if applied else layer(h)
        for _ in range(padding if applied else 0):
            h = h * 1.0
        return layer(h).mean()

    gradient = funcga.grad(loss)
    step = funcga.accumulate(gradient, 2) if way == "a window" else gradient
    inner = (x * w).tanh()
    wanted = ((1 - (inner * w).tanh() ** 2) * (inner + w * x * (1 - inner**2))).mean()
    for call in range(4):
        applied[:] = [1] * (call == 2)
        # A gradient alone leads to the leaf that the loss makes, which is refused.
        with suppress(funcga.FuncgaError) if applied and (padding or step is gradient) else nullcontext():
            torch.testing.assert_close(step(w, x), wanted)


def test_a_function_that_adds_to_what_the_loss_closes_over():
    """To the tensor that it is given as a parameter: from a third call on."""
    w, calls = nn.Parameter(torch.ones(3)), []

    def loss(params, x):
        calls.append(1)
        x, multiply = x.clone().requires_grad_(), lambda x: x * w
        x = Recompute.apply(multiply, x) * 1.0 if len(calls) > 4 else multiply(x)
        return (x * params["w"]).sum()

    step = funcga.accumulate(funcga.grad(loss), 2)
    for _ in range(2):
        step({"w": w}, torch.ones(4, 3))
    with pytest.raises(funcga.FuncgaError, match=LOST):
        step({"w": w}, torch.ones(4, 3))
    assert w.grad is None


class Branch(nn.Module):
    """A layer under a checkpoint that runs from the second call on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.runs = False

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=False) if self.runs else x


def as_before(module, teacher):
    pass


def with_other_memory(module, teacher):
    for layer in (module.second, teacher):
        layer.load_state_dict({name: 2 * p for name, p in layer.state_dict().items()}, assign=True)
        layer.requires_grad_(False)


@pytest.mark.parametrize("way", ["module", "pure_loss"])
@pytest.mark.parametrize("change", [as_before, with_other_memory])
@pytest.mark.parametrize("runs_first", [True, False])
def test_frozen_layers_that_run_or_move_later(change, way, runs_first):
    """In the module, and beside it."""
    module, teacher = Branch().double(), nn.Linear(4, 4).double().requires_grad_(False)
    x = torch.randn(6, 4, dtype=torch.float64)

    def loss(module, x):
        h = module(x)
        return (checkpoint(teacher, h, use_reentrant=False) if module.runs else h).square().mean()

    if way == "module":
        step = funcga.accumulate(module_value_and_grad(module, loss), 2)
    else:
        of_params = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss)), 2)
        step = lambda x: of_params(trainable(module), x)
    module.runs = runs_first
    step(x)
    module.runs = True
    change(module, teacher)
    (expected,) = gradients_by_hand(module, loss, [(x,)])
    torch.testing.assert_close([*step(x)[1].values()], [g for g in expected.values() if g is not None])


def test_a_batch_that_comes_out_of_a_graph():
    """No pass goes on into it, though it is not restricted to the leaves."""
    w, source, seen = torch.ones(3), torch.ones(4, 3, requires_grad=True), []
    x = source * 2
    x.register_hook(seen.append)
    step = funcga.accumulate(funcga.grad(lambda w, x: Recompute.apply(torch.tanh, x * w).sum()), 2)
    for _ in range(3):
        step(w, x)
    assert (seen, source.grad) == ([], None)


@pytest.mark.parametrize("alive", ["in aux", "kept by somebody"])
def test_a_function_that_is_alive_beside_the_loss(alive):
    """Of two branches one is checkpointed: now that of the loss, now that of a metric, by graphs of as many nodes."""
    params, x, kept = (
        {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)},
        torch.ones(4, 3, dtype=torch.float64),
        [],
    )

    def loss(params, x, swapped):
        h = x.clone().requires_grad_()
        plain, checkpointed = (
            (h * params["w"]).sum(),
            checkpoint(lambda h: h * params["w"], h, use_reentrant=True).sum(),
        )
        value, metric = (checkpointed, plain) if swapped else (plain, checkpointed)
        kept[:] = [metric] if alive == "kept by somebody" else []
        return value, {"metric": metric}

    calls = []

    def swapped_in_between(params, x):
        calls.append(len(calls) % 4 > 1)
        return loss(params, x, calls[-1])

    step = funcga.accumulate(funcga.grad(loss, has_aux=True), 2, in_axes=(None, 0, None))
    for swapped in (False, True, False, True):
        torch.testing.assert_close(step(params, x, swapped)[0]["w"], torch.full((3,), 2.0, dtype=torch.float64))
    in_a_window = funcga.accumulate(funcga.grad(swapped_in_between, has_aux=True), 4)
    for _ in range(3):
        torch.testing.assert_close(in_a_window(params, x)[0]["w"], torch.ones(3, dtype=torch.float64))
