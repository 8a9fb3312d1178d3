"""`pure_loss`: a module's loss as a pure function of its parameters, on the engine, in torch.func and compiled."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from tests.kits import LIMITS, TORCH, difference
from torch_backend import pure_loss


class Net(nn.Module):
    """Linear, tanh, BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


def net():
    torch.manual_seed(0)
    return Net()


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 3, generator=generator), torch.randn(12, 2, generator=generator)


def mse(module, x, y):
    return F.mse_loss(module(x), y)


def by_hand(module, x, y, n):
    """The loss and gradients by .backward() on a copy; and the copy, with its buffers updated."""
    module, total = copy.deepcopy(module), 0
    for rows, targets in zip(x.chunk(n), y.chunk(n), strict=True):
        loss = mse(module, rows, targets) / n
        loss.backward()
        total += loss.detach()
    return (total, {name: p.grad for name, p in module.named_parameters()}), module


class Untouched:
    """What a module holds, and that all of it is still the same afterwards."""

    def __init__(self, module):
        self.module, self.state = module, {k: (v, v.clone()) for k, v in module.state_dict(keep_vars=True).items()}

    def check(self):
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            held, value = self.state[name]
            assert tensor is held
            assert torch.equal(tensor, value)
            assert tensor.grad is None
        assert all(isinstance(p, nn.Parameter) for p in self.module.parameters())


def test_it_is_pure_in_torch_func():
    module, (x, y) = net(), batch()
    untouched, loss, params = Untouched(module), pure_loss(module, mse), dict(module.named_parameters())
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
    expected, after = by_hand(module, x, y, 4)
    assert difference(TORCH, (value, grads), expected) <= LIMITS["float32"]
    assert difference(TORCH, buffers, dict(after.named_buffers())) <= LIMITS["float32"]
    untouched.check()
    assert loss(params, x, y).requires_grad
    assert not loss({name: p.detach() for name, p in params.items()}, x, y).requires_grad


def test_some_buffers_and_aux_beside_them():
    """Those that are not given are the module's own, and left alone."""
    module, (x, y) = net(), batch()
    untouched = Untouched(module)
    loss = pure_loss(module, lambda module, x, y: (mse(module, x, y), {"rows": len(x)}), buffers=True)
    given = {"norm.num_batches_tracked": torch.tensor(5)}
    value, (aux, after) = loss(dict(module.named_parameters()), given, x, y)
    assert (aux, sorted(after), int(after["norm.num_batches_tracked"])) == ({"rows": 12}, [*given], 6)
    assert value.requires_grad
    untouched.check()


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


def test_a_thread_that_reads_the_parameters_and_uses_them_when_the_other_one_has_left():
    module, (x, y) = net(), batch()
    seen = {}

    def reads(module, x, y):  # what another thread would read meanwhile
        seen.update(module.named_parameters())
        return mse(module, x, y)

    params = dict(module.named_parameters())
    other = threading.Thread(target=funcga.accumulate(funcga.grad(pure_loss(module, reads)), 2), args=(params, x, y))
    other.start()
    other.join()
    step = funcga.accumulate(funcga.grad(pure_loss(module, mse)), 2)
    assert difference(TORCH, step(seen, x, y), step(params, x, y)) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True),
    ],
    ids=["LSTM", "weight_norm", "attention"],
)
def test_modules_that_hold_parameters_in_their_own_way(make):
    torch.manual_seed(0)
    module, x = make(), torch.randn(8, 5, 3)

    def loss(module, x):
        out = module(torch.ones(len(x), 2, 4), x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    grads = funcga.accumulate(funcga.grad(pure_loss(module, loss)), 4)(dict(module.named_parameters()), x)
    loss(module, x).backward()
    assert difference(TORCH, grads, {name: p.grad for name, p in module.named_parameters()}) <= LIMITS["float32"]


def test_the_mode_is_that_of_the_time_of_the_call():
    module, (x, y) = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), batch()
    loss, params = pure_loss(module, mse), dict(module.named_parameters())
    step = funcga.accumulate(funcga.value_and_grad(loss), 4)
    assert difference(TORCH, step(params, x, y), step(params, x, y)) > 0
    module.eval()
    assert difference(TORCH, step(params, x, y), funcga.value_and_grad(loss)(params, x, y)) <= LIMITS["float32"]


def test_refusals():
    module, (x, y) = net(), batch()
    loss, params = pure_loss(module, mse), dict(module.named_parameters())
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    both = {"0.weight": tied[0].weight, "1.weight": tied[0].weight}
    cleared = pure_loss(module, lambda module, x, y: (module.zero_grad(), mse(module, x, y))[1])
    cases = [
        (lambda: pure_loss(tied, mse)(both, x, x), r"`0.weight` and `1.weight` are one tensor in the module, tied"),
        (lambda: funcga.accumulate(funcga.grad(cleared), 4)(params, x, y), r"zero_grad\(\) for instance"),
        (lambda: pure_loss(mse, module), "pure_loss was given function as its module"),
        (lambda: pure_loss(module, 1.0), "loss_fn is 1.0, which is no function"),
        (lambda: loss({"last.wieght": x}, x, y), r"has no `last.wieght` \(`last.weight`\?\) among its parameters"),
        (lambda: loss(list(params), x, y), "the parameters of a pure_loss are of type list"),
        (lambda: loss({"last.weight": x}, x, y), r"`last.weight` is float32\[12, 3\], and the module's own is"),
        (lambda: pure_loss(module, mse, buffers=True)(params, {"mean": x}, x, y), "has no `mean` among its buffers"),
    ]
    for call, match in cases:
        with pytest.raises(funcga.FuncgaError, match=match):
            call()
    Untouched(module).check()


@pytest.mark.parametrize("choice", [{}, {"statistics": True}, {"buffers": True}])
def test_batch_norm_in_inference_mode(choice):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    loss = pure_loss(module, lambda m, x: m(x).sum(), **choice)
    state = [dict(module.named_buffers())] if "buffers" in choice else []
    call = lambda: loss(dict(module.named_parameters()), *state, torch.arange(12.0).reshape(4, 3))
    expected = call()
    with torch.inference_mode():
        found = call()
    assert all(map(torch.equal, tree_leaves(found), tree_leaves(expected)))


def test_a_buffer_that_two_layers_hold_is_one():
    class Held(nn.Module):
        def __init__(self, t):
            super().__init__()
            self.register_buffer("t", t)

    t = torch.zeros(1)
    module = nn.Module()
    module.a, module.b, module.w = Held(t), Held(t), nn.Parameter(torch.ones(1))

    def loss_fn(module, x):
        module.a.t.add_(x.sum())
        return (module.w * module.b.t).sum()

    loss = pure_loss(module, loss_fn)
    step = funcga.accumulate(funcga.value_and_grad(loss), 2, fold=funcga.sum())
    assert loss(dict(module.named_parameters()), torch.ones(2)) == 2
    assert step(dict(module.named_parameters()), torch.ones(4))[0] == 4
    assert t == 0


# --- buffers that no counter tells of


class Codebook(nn.Module):
    """Its output depends on buffers that `write(module, x)` writes to."""

    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("ema", torch.zeros(3))
        self.register_buffer("tail", self.ema[1:])  # a view
        self.register_buffer("turned", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("conjugate", self.turned.conj())
        self.write = write

    def forward(self, x):
        seen = self.ema.sum() + self.tail.sum() + self.turned.imag.sum() + 2 * self.conjugate.imag.sum()
        y = self.weight * (x.mean() + seen.detach().clone())
        self.write(self, x.mean().detach())
        return y + self.weight * (self.ema.clone().sum() + 2 * self.tail.clone().sum() + self.conjugate.imag.sum())


WRITES = {
    "data": lambda m, x: m.ema.data.add_(x),
    "numpy": lambda m, x: m.ema.numpy().__iadd__(1.0),
    "detach": lambda m, x: m.ema.detach().data[1:].add_(x),
    "in place": lambda m, x: m.ema.add_(x),
    "through the view": lambda m, x: m.tail.data.add_(x),
    "another tensor": lambda m, x: setattr(m.ema, "data", x.expand(3).clone()),
    "a complex one": lambda m, x: m.turned.data.add_(x * 1j),
    "nothing": lambda m, x: None,
}


@pytest.mark.parametrize(
    ("write", "how"), [*((w, "engine") for w in WRITES), ("data", "torch.func"), ("a complex one", "torch.func")]
)
def test_what_a_micro_batch_writes_to_a_buffer_does_not_reach_the_next(write, how):
    module, x = Codebook(WRITES[write]), torch.arange(1.0, 9.0)
    untouched, loss = Untouched(module), pure_loss(module, lambda module, x: module(x))
    gradient = funcga.value_and_grad(loss) if how == "engine" else lambda *a: grad_and_value(loss)(*a)[::-1]
    value, grads = funcga.accumulate(gradient, 4)({"weight": module.weight}, x)
    untouched.check()
    expected = [float(Codebook(WRITES[write])(rows).detach()) for rows in x.chunk(4)]
    assert float(value) == float(grads["weight"]) == sum(expected) / 4
    assert module.tail.data_ptr() == module.ema[1:].data_ptr()


def test_views_among_threaded_buffers_stay_views():
    module, x = Codebook(lambda m, x: m.tail.add_(1)), torch.zeros(4)
    loss = pure_loss(module, lambda module, x: module(x), buffers=True)
    buffers = dict(module.named_buffers())
    for ema, expected in ((torch.zeros(3), [0.0, 1.0, 1.0]), (torch.ones(3), [1.0, 2.0, 2.0])):
        given = {**buffers, "ema": ema, "tail": ema[1:].clone()}
        _, after = loss({"weight": module.weight}, given, x)
        assert after["ema"].tolist() == expected
        assert after["tail"].tolist() == expected[1:]
    assert module.ema.tolist() == [0.0, 0.0, 0.0]


# --- what runs between two micro-batches


@pytest.mark.parametrize(("how", "statistics"), [("weight", True), ("generator", False)])
def test_between_micro_batches_the_module_has_its_own_parameters(how, statistics):
    module, (x, y) = net(), batch()
    untouched, seen = Untouched(module), []
    doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}

    def look(*args):
        seen.append(all(p is untouched.state[name][0] for name, p in module.named_parameters()))
        seen.append(all(b is untouched.state[name][0] for name, b in module.named_buffers()))
        seen.append(module.norm.momentum == 0.1)
        return len(args[0]) if args else 0

    loss = pure_loss(module, mse, statistics=statistics)
    fold = ((funcga.mean(), funcga.pooled()), funcga.mean()) if statistics else funcga.mean()
    gradient = funcga.value_and_grad(loss, has_aux=statistics)
    if how == "weight":
        funcga.accumulate(gradient, 4, weight=look, fold=fold)(doubled, x, y)
    else:
        items = ((look(), a, b)[1:] for a, b in zip(x.chunk(4), y.chunk(4), strict=True))
        funcga.stream(gradient, fold=fold)(doubled, items)
    assert seen == [True] * 12
    untouched.check()


def test_what_changes_in_the_module_between_micro_batches_is_kept():
    module, (x, y) = net(), batch()
    given, own = {name: p.detach().clone() for name, p in module.named_parameters()}, nn.Parameter(torch.zeros(2))

    def weight(x, y):
        module.norm.running_mean.fill_(5)
        module.last.bias = own
        return 1

    loss = pure_loss(module, mse)
    expected = funcga.accumulate(funcga.value_and_grad(loss), 4, weight=lambda x, y: 1)(given, x, y)
    assert (
        difference(TORCH, funcga.accumulate(funcga.value_and_grad(loss), 4, weight=weight)(given, x, y), expected) == 0
    )
    assert module.last.bias is own
    assert module.norm.running_mean.tolist() == [5.0] * 4


# --- what changes in the module between windows


def freeze(module):
    module[0].weight.requires_grad_(False)


def replace(module):
    module[0].weight = nn.Parameter(torch.randn(4, 3))


def exchange(module):
    module[2] = nn.Linear(4, 2)


def tie(module):
    module[0].bias = module[2].bias = nn.Parameter(torch.randn(4))


def rename(module):
    del module[1]


@pytest.mark.parametrize("change", [freeze, replace, exchange, tie, rename])
@pytest.mark.parametrize("whose", ["pure_loss", "module"])
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


# --- embeddings that shorten their rows


EMBEDDINGS = {
    "Embedding": lambda: nn.Embedding(4, 2, max_norm=1.0),
    "EmbeddingBag": lambda: nn.EmbeddingBag(4, 2, max_norm=1.0, mode="sum"),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [("Embedding", "engine"), ("EmbeddingBag", "torch.func"), ("EmbeddingBag", "called"), ("Embedding", "compiled")],
)
def test_embeddings_with_a_norm_are_refused(kind, how):
    """Their forward pass writes to the parameters."""
    module, indices = nn.Sequential(EMBEDDINGS[kind](), nn.Linear(2, 1)), torch.tensor([[0, 1], [1, 0]])
    loss = pure_loss(module, lambda m, i: m(i).square().mean())
    step = funcga.accumulate(funcga.value_and_grad(loss), 2)
    torch._dynamo.reset()
    gradient = {
        "engine": step,
        "torch.func": funcga.accumulate(lambda *args: grad_and_value(loss)(*args)[::-1], 2),
        "called": funcga.value_and_grad(loss),
        "compiled": torch.compile(step, backend="eager", fullgraph=True),
    }[how]
    untouched = Untouched(module)
    text = r"the embedding `0` has max_norm=1.0, .* embedding.weight.renorm_\(2.0, 0, 1.0\). Or use"
    with pytest.raises(Exception, match=text) as caught:
        gradient(dict(module.named_parameters()), indices)
    assert how == "compiled" or caught.type is funcga.FuncgaError
    untouched.check()
