"""Modules of torch: as pure functions, and driven by their own parameters; both against a loop with `.backward()`.

At each of four calls of a step: at first, with other values, with another structure, and as at first.
"""

import copy
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from tests.kits import LIMITS, TORCH, difference

ROWS, N = 11, 4
# Tests of what guards notice that only look.
GUARDED = pytest.mark.skipif(os.environ.get("FUNCGA_GUARDS") == "off", reason="FUNCGA_GUARDS=off: no guard looks")


class Net(nn.Module):
    """Linear layers, BatchNorm, a frozen layer and a tied one; with `reenter` the middle is a checkpoint."""

    def __init__(self, reenter=None):
        super().__init__()
        self.first, self.middle, self.frozen = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.tied = self.middle
        self.reenter = reenter

    def forward(self, x):
        block = lambda x: torch.tanh(self.middle(x))
        x = self.frozen(torch.tanh(self.first(x)))
        x = block(x) if self.reenter is None else checkpoint(block, x, use_reentrant=self.reenter)
        return self.last(self.norm(self.tied(x)))


def net(**options):
    torch.manual_seed(0)
    return Net(**options)


def batch(seed=1, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def calls(module):
    """The batch of each call of a step; an update comes before the second one, and is undone before the last."""
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    yield batch()
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.2)
    yield batch(seed=2)
    yield batch(seed=3, rows=ROWS + 2)
    module.load_state_dict(before)
    yield batch()


def mse(module, x, y):
    return F.mse_loss(module(x), y)


def by_hand(module, x, y, loss=mse, n=N):
    """The mean over the rows by .backward() on a copy; and the copy, with its buffers as they are then."""
    hooks = [p._backward_hooks for p in module.parameters()]
    module, total = copy.deepcopy(module), 0
    for p, of_p in zip(module.parameters(), hooks, strict=True):
        for hook in (of_p or {}).values():
            p.register_hook(hook)
    sums = {name: torch.zeros_like(p) for name, p in module.named_parameters() if p.requires_grad}
    for rows, targets in zip(x.tensor_split(n), y.tensor_split(n), strict=True):
        module.zero_grad()
        value, share = loss(module, rows, targets), len(rows) / len(x)
        value.backward()
        total += value.detach() * share
        for name, p in module.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad * share
    return (total, sums), module


def functional(module, loss=mse, **options):
    step = funcga.accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, loss)), N, **options)
    return lambda x, y: step(torch_backend.trainable(module), x, y)


def streamed(module, loss=mse, **options):
    step = funcga.stream(funcga.value_and_grad(torch_backend.pure_loss(module, loss)), **options)
    cut = lambda x, y: list(zip(x.tensor_split(N), y.tensor_split(N), strict=True))
    return lambda x, y: step(torch_backend.trainable(module), cut(x, y))


def driven(module, loss=mse, **options):
    return funcga.accumulate(torch_backend.module_value_and_grad(module, loss), N, **options)


@pytest.fixture(params=[functional, streamed, driven], ids=lambda way: way.__name__)
def way(request):
    return request.param


class Untouched:
    """What a module holds, and that all of it is the same afterwards; its buffers too, unless it is driven."""

    def __init__(self, module, way=None):
        self.module, self.has_buffers = module, way is not driven
        self.state = {name: (leaf, leaf.clone(), leaf.grad) for name, leaf in self.leaves()}
        self.hooks = {name: len(leaf._backward_hooks or ()) for name, leaf in self.leaves()}
        self.kinds = [type(p) for p in module.parameters()]

    def leaves(self):
        buffers = dict(self.module.named_buffers()) if self.has_buffers else {}
        return [*dict(self.module.named_parameters()).items(), *buffers.items()]

    def check(self):
        assert {name for name, _ in self.leaves()} == {*self.state}
        for name, leaf in self.leaves():
            same, value, grad = self.state[name]
            assert leaf is same
            assert torch.equal(leaf, value)
            assert leaf.grad is grad
            assert len(leaf._backward_hooks or ()) == self.hooks[name]
            assert not leaf._post_accumulate_grad_hooks
        assert [type(p) for p in self.module.parameters()] == self.kinds


@pytest.mark.parametrize("reenter", [None, False, True])
def test_it_is_the_hand_written_loop_and_touches_nothing(way, reenter):
    module = net(reenter=reenter)
    step = way(module)
    for x, y in calls(module):
        untouched = Untouched(module, way)
        expected, after = by_hand(module, x, y)
        found = step(x, y)
        assert difference(TORCH, found, expected) <= LIMITS["float32"]
        assert not any(leaf.requires_grad for leaf in (found[0], *found[1].values()))
        if way is driven:
            assert difference(TORCH, dict(module.named_buffers()), dict(after.named_buffers())) <= LIMITS["float32"]
        untouched.check()


def test_other_folds_of_a_module_leave_no_hook(way):
    module = net()
    names = torch_backend.trainable(module)
    folds = dict.fromkeys(names, funcga.mean()) | {"first.bias": funcga.moments(), "last.weight": funcga.max()}
    step = way(module, fold=(funcga.mean(), folds))
    for x, y in calls(module):
        untouched, (expected, _) = Untouched(module, way), by_hand(module, x, y)
        _, grads = step(x, y)
        for name in names:
            found = grads[name].mean if name == "first.bias" else grads[name]
            if name != "last.weight":
                assert difference(TORCH, found, expected[1][name]) <= 1e-5
        untouched.check()


def test_gradients_that_were_there_before_stay(way):
    module = net()
    step = way(module)
    for x, y in calls(module):
        for p in module.parameters():
            p.grad = torch.full_like(p, 7.0)
        untouched, expected = Untouched(module, way), by_hand(module, x, y)[0]
        assert difference(TORCH, step(x, y), expected) <= LIMITS["float32"]
        untouched.check()
        assert all((p.grad == 7).all() for p in module.parameters())


def test_other_parameters_than_the_module_s_own():
    """Also where a checkpoint runs the module again in the backward pass."""
    for reenter in (None, False, True):
        module = net(reenter=reenter)
        by_call = lambda params, x, y, module=module: F.mse_loss(torch.func.functional_call(module, params, (x,)), y)
        # A reentrant checkpoint is a function of the module's own parameters: only pure_loss puts others there.
        for loss in (torch_backend.pure_loss(module, mse), *([] if reenter else [by_call])):
            step = funcga.accumulate(funcga.value_and_grad(loss), N)
            for factor, (x, y) in zip((1.5, 0.5, 2, 1.5), calls(module), strict=True):
                untouched, other = Untouched(module), copy.deepcopy(module)
                with torch.no_grad():
                    for p in other.parameters():
                        p.mul_(factor)
                other.frozen.load_state_dict(module.frozen.state_dict())  # which is not given
                expected, after = by_hand(other, x, y)
                assert difference(TORCH, step(torch_backend.trainable(other), x, y), expected) <= 5e-6
                if loss is by_call:
                    assert difference(TORCH, dict(module.named_buffers()), dict(after.named_buffers())) <= 5e-6
                else:
                    untouched.check()


def test_buffers_are_threaded():
    module = net()
    gradient = torch_backend.pure_loss(module, mse, buffers=True)
    step = funcga.accumulate(
        funcga.value_and_grad(gradient, has_aux=True), N, in_axes=(None, funcga.CARRY, 0, 0),
        fold=((funcga.mean(), funcga.carry()), funcga.mean()),
    )  # fmt: skip
    for x, y in calls(module):
        untouched, (expected, after) = Untouched(module), by_hand(module, x, y)
        (value, buffers), grads = step(torch_backend.trainable(module), dict(module.named_buffers()), x, y)
        assert difference(TORCH, (value, grads), expected) <= LIMITS["float32"]
        assert difference(TORCH, buffers, dict(after.named_buffers())) <= LIMITS["float32"]
        untouched.check()


class Counts(nn.Module):
    """Its output depends on a buffer that it writes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor(1.0))

    def forward(self, x):
        out = (x * self.weight * self.seen.clone()).sum()
        self.seen.add_(1)
        return out


def test_every_micro_batch_of_a_pure_loss_sees_the_module_s_own_buffers():
    module = Counts()
    untouched, loss = Untouched(module), torch_backend.pure_loss(module, lambda module, x: module(x))
    for n in (1, 2, 4):
        step = funcga.accumulate(funcga.value_and_grad(loss), n, fold=funcga.sum())
        for weight, rows in ((2, 4), (3, 4), (2, 6), (2, 4)):
            value, grads = step({"weight": torch.tensor(float(weight))}, torch.arange(float(rows)))
            assert (float(value), float(grads["weight"])) == (weight * sum(range(rows)), sum(range(rows)))
    untouched.check()


def test_hooks_of_the_user_see_every_gradient_whole(way):
    """A hook that is not linear sees the gradient of a micro-batch, not a share of it."""
    module, kept = net(), []
    uneven = lambda x, y: len(x)
    steps = [way(module), way(module, weight=uneven)]
    for _ in range(2):  # the steps know the module without hooks
        steps[1](*batch())
    module.first.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
    module.last.bias.register_hook(lambda grad: 2 * grad)
    expected = [by_hand(module, x, y)[0] for x, y in calls(module)]
    module.middle.bias.register_hook(lambda grad: kept.append((grad.data, grad.clone())))
    for (x, y), wanted in zip(calls(module), expected, strict=True):
        untouched = Untouched(module, way)
        for step in steps:
            assert difference(TORCH, step(x, y), wanted) <= LIMITS["float32"]
        untouched.check()
    assert len(kept) == 2 * 4 * N
    assert all(torch.equal(*pair) for pair in kept)  # nothing is added to what a hook has kept


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("which", [2, 2 * N + 2], ids=["first call", "third call"])
def test_an_error_leaves_everything_as_it_was(way, where, which):
    module, (x, y), runs = net(), batch(), []

    def fails(module, x, y):
        out = module(x)
        runs.append(1)
        if len(runs) == which and where == "forward":
            raise KeyError("mine")
        if len(runs) == which:
            out.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("mine")))
        return F.mse_loss(out, y)

    step = way(module, fails)
    for _ in range(which // N // 2 * 2):
        step(x, y)
    untouched = Untouched(module, way)
    with pytest.raises(KeyError, match="mine"):
        step(x, y)
    untouched.check()
    for x, y in calls(module):
        assert difference(TORCH, step(x, y), by_hand(module, x, y)[0]) <= LIMITS["float32"]


@GUARDED
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("which", [1, 2])
def test_a_loss_that_runs_backward_itself_is_refused(way, which, call):
    module, (x, y), runs = net(), batch(), []

    def loss(module, x, y):
        runs.append(1)
        if len(runs) == which + N * (call - 1):
            mse(module, x, y).backward()
        return mse(module, x, y)

    step = way(module, loss)
    for _ in range(call - 1):
        step(x, y)
    untouched = Untouched(module, way)
    with pytest.raises(funcga.FuncgaError, match=r"loss_fn called .backward\(\)"):
        step(x, y)
    untouched.check()
    assert difference(TORCH, step(x, y), by_hand(module, x, y)[0]) <= LIMITS["float32"]


def running_backward(w, call):
    """A step before this call, from which on its loss runs a backward pass into w itself."""
    runs = []

    def loss(params, x):
        runs.append(1)
        if len(runs) > 2 * (call - 1):
            (w * x).sum().backward()
        return (params["w"] * x).sum()

    step = funcga.accumulate(funcga.grad(loss), 2)
    for _ in range(call - 1):
        step({"w": w}, torch.ones(4, 3))
    return step


@GUARDED
@pytest.mark.parametrize("call", [1, 3])
def test_a_backward_pass_into_the_parameters_themselves_is_refused_and_undone(call):
    w = nn.Parameter(torch.ones(3))
    step = running_backward(w, call)
    with pytest.raises(funcga.FuncgaError, match=r"a parameter's .grad changed during the call"):
        step({"w": w}, torch.ones(4, 3))
    assert w.grad is None


@GUARDED
@pytest.mark.parametrize("call", [1, 3])
def test_a_pure_loss_that_runs_backward_on_parameters_that_were_given_is_refused(call):
    module, (x, y), runs = net(), batch(), []
    params = torch_backend.trainable(module)
    bias = params["last.bias"]

    def loss(module, x, y):
        runs.append(1)
        if len(runs) > N * (call - 1):
            bias.sum().backward()
        return mse(module, x, y)

    step = funcga.accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, loss)), N)
    for _ in range(call - 1):
        step(params, x, y)
    untouched = Untouched(module)
    with pytest.raises(funcga.FuncgaError, match=r"a parameter's .grad changed during the call"):
        step(params, x, y)
    untouched.check()


@GUARDED
@pytest.mark.parametrize("call", [1, 3])
def test_a_backward_pass_that_adds_to_earlier_gradients_is_refused(call):
    w = nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    step = running_backward(w, call)
    with pytest.raises(funcga.FuncgaError, match=r"a parameter's .grad changed during the call"):
        step({"w": w}, torch.ones(4, 3))


@GUARDED
@pytest.mark.parametrize("call", [1, 3])
def test_parameters_that_are_written_during_a_window_are_refused(call):
    module, (x, y), runs = net(), batch(), []

    def writes(module, x, y):
        value = mse(module, x, y)
        runs.append(1)
        with torch.no_grad():
            if len(runs) > N * (call - 1):
                module.last.bias.add_(0)
        return value

    step = functional(module, writes)
    for _ in range(call - 1):
        step(x, y)
    with pytest.raises(funcga.FuncgaError, match="a parameter was changed in place during the window"):
        step(x, y)


def test_uneven_weights_and_autocast(way):
    """The value is that of the loop, also where forward passes run in another dtype."""
    module, seen = net().eval(), []

    def loss(module, x, y):
        out = module(x)
        out.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
        return F.mse_loss(out, y)

    steps = [way(module, loss), way(module, loss, weight=lambda x, y: 3.0 * len(x))]
    for step in steps[:1]:  # which knows what is not under autocast, when it is called under it
        for _ in range(2):
            step(*batch())
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        for x, y in calls(module):
            expected = by_hand(module, x, y)[0]
            for step in steps:
                found = step(x, y)
                assert all(leaf.dtype is torch.float32 for leaf in found[1].values())
                assert difference(TORCH, found, expected) <= 1e-2  # in bfloat16, a half of their last place
    assert seen
    assert not any(seen)  # it is for the forward pass


def test_the_grad_mode_does_not_matter(way):
    module = net().eval()
    step = way(module)
    for x, y in calls(module):
        expected = by_hand(module, x, y)[0]
        with torch.no_grad():
            assert difference(TORCH, step(x, y), expected) <= LIMITS["float32"]


def test_dropout_is_that_of_one_loop(way):
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    step = way(module)
    for seed, (x, y) in enumerate(calls(module)):
        torch.manual_seed(seed)
        expected = by_hand(module, x, y)[0]
        torch.manual_seed(seed)
        assert difference(TORCH, step(x, y), expected) <= LIMITS["float32"]


def test_frozen_and_unfrozen_between_calls(way):
    module, (x, y) = net().eval(), batch()
    step = way(module)
    for trained in (False, True, False, True):
        module.frozen.requires_grad_(trained)
        found = step(x, y)
        assert difference(TORCH, found, by_hand(module, x, y)[0]) <= LIMITS["float32"]
        assert ("frozen.weight" in found[1]) is trained


def test_gradients_go_to_an_optimizer():
    module, (x, y) = net(), batch()
    _, grads = driven(module)(x, y)
    torch_backend.assign_grads(module, grads)
    assert all(
        p.grad is not None and torch.equal(p.grad, grads[name])
        for name, p in module.named_parameters()
        if name in grads
    )
    assert module.frozen.weight.grad is None


# -- leaves of every kind, by the function of parameters


def leaves_of(kind):
    """params, and a loss of rows [8, 3] that uses them."""
    torch.manual_seed(0)
    w, linear = torch.randn(3, 2), lambda p, x: ((x @ p["w"]) ** 2).mean()
    complexes = lambda p, x: ((x.to(p["w"].dtype) @ p["w"]).abs() ** 2).mean()
    return {
        "unused": ({"w": w, "unused": torch.ones(5)}, linear),
        "tied": ({"w": w, "again": w}, lambda p, x: linear(p, x) + p["again"].sum() * x.sum(1).mean()),
        "a view": ({"w": torch.randn(10, 4)[:3, :2]}, linear),
        "transposed": ({"w": torch.randn(2, 3).T}, linear),
        "expanded": ({"w": torch.randn(3, 1).expand(3, 2)}, linear),
        "the gradient is expanded": ({"w": w}, lambda p, x: p["w"].sum() * x.sum(1).mean()),
        "two have one gradient": ({"v": w, "w": w.clone()}, lambda p, x: (p["v"] + p["w"]).sum() * x.sum(1).mean()),
        "complex": ({"w": torch.randn(3, 2, dtype=torch.complex64)}, complexes),
        "empty": ({"w": w, "none": torch.ones(0)}, linear),
        "a scalar": ({"w": torch.tensor(2.0)}, lambda p, x: (p["w"] * x).square().mean()),
        "requires grad": ({"w": w.clone().requires_grad_()}, linear),
        "not a leaf": ({"w": w.clone().requires_grad_() * 2}, linear),
        "float64": ({"w": w.double()}, lambda p, x: linear(p, x.double())),
        "mixed": ({"h": torch.ones(2).double(), "w": w}, lambda p, x: linear(p, x) + (p["h"].float() * x.mean()).sum()),
        "none": ({"w": w, "bias": None}, linear),
    }[kind]  # fmt: skip


KINDS = [
    "unused", "tied", "a view", "transposed", "expanded", "the gradient is expanded", "two have one gradient", "complex",
    "empty", "a scalar", "requires grad", "not a leaf", "float64", "mixed", "none",
]  # fmt: skip


@pytest.mark.parametrize("fold", ["mean", "sum", "by_steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_leaves(kind, fold):
    params, loss = leaves_of(kind)
    by_steps = funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)
    chosen = {"mean": funcga.mean(), "sum": funcga.sum(), "by_steps": by_steps}[fold]
    step, first = funcga.accumulate(funcga.value_and_grad(loss), 4, fold=chosen), torch.randn(8, 3)
    for x in (first, torch.randn(8, 3), torch.randn(12, 3), first):
        value, grads = step(params, x)
        copies = {k: None if p is None else p.detach().clone().requires_grad_() for k, p in params.items()}
        whole = loss(copies, x) * (4 if fold == "sum" else 1)  # of equal micro-batches
        whole.backward()
        expected = {
            k: None if p is None else torch.zeros_like(p) if p.grad is None else p.grad for k, p in copies.items()
        }
        for name, wanted in expected.items():
            if wanted is None:
                assert grads[name] is None
            else:
                assert (grads[name].dtype, grads[name].shape) == (wanted.dtype, wanted.shape)
                torch.testing.assert_close(grads[name], wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(value, whole.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fold", [funcga.mean(), funcga.sum(), funcga.moments()], ids=["mean", "sum", "moments"])
def test_sparse_gradients_stay_sparse_in_sums(fold):
    torch.manual_seed(0)
    loss = lambda p, i, sparse: (F.embedding(i, p, sparse=sparse) ** 2).mean()
    steps = [
        funcga.accumulate(funcga.value_and_grad(partial(loss, sparse=sparse)), 4, fold=(funcga.mean(), fold))
        for sparse in (True, False)
    ]
    for words, count in ((7, 8), (7, 8), (5, 12), (7, 8)):
        table, rows = torch.randn(words, 2), torch.randint(0, words, (count, 3))
        found = [step(table, rows) for step in steps]
        (value, grads), dense = found
        leaves = TORCH.backend.trees.flatten(grads)[0]
        wanted = torch.strided if "moments" in fold.name else torch.sparse_coo
        assert {leaf.layout for leaf in leaves} == {wanted}
        grads = grads.to_dense() if wanted is torch.sparse_coo else grads
        assert difference(TORCH, (value, grads), dense) <= LIMITS["float32"]


def test_sixteen_bit_gradients_are_summed_in_float32_by_exact_weights():
    """512 gradients that a sum in bfloat16 would lose after 256; 1001 tokens, which are 1000 in bfloat16."""
    step = funcga.accumulate(
        funcga.grad(lambda p, x: (p["w"] * x.sum()).sum()), 512, fold=funcga.sum(out_dtype="float32")
    )
    for factor, rows, width in ((1, 512, 4), (2, 512, 4), (1, 1024, 3), (1, 512, 4)):
        params = {"w": torch.ones(width).bfloat16()}
        found = step(params, torch.full((rows,), float(factor)).bfloat16())["w"]
        torch.testing.assert_close(found, torch.full((width,), float(factor * rows)))
    step = funcga.accumulate(
        funcga.grad(lambda p, x: (p * x[..., 0]).mean()), 2, weight=lambda x: 1001 if x[0, 0] > 2 else 513,
        fold=funcga.mean(out_dtype="float32"),
    )  # fmt: skip
    for low, high, rows in ((1, 3, 2), (2, 4, 2), (1, 3, 4), (1, 3, 2)):
        x = torch.tensor([low, high]).bfloat16().repeat_interleave(rows // 2)[:, None]
        expected = (513 * low + 1001 * high) / 1514
        assert float(step(torch.ones(()).bfloat16(), x)) == pytest.approx(expected, rel=1e-6)


def test_float16_gradients_do_not_overflow_by_their_weight():
    step = funcga.accumulate(funcga.grad(lambda p, x: (p * x).mean()), 2, weight=lambda x: 1000 if x[0] > 150 else 3000)
    for low, rows in ((100, 2), (120, 2), (100, 4), (100, 2)):
        x = torch.tensor([low, 200], dtype=torch.float16).repeat_interleave(rows // 2)
        found = step(torch.ones((), dtype=torch.float16), x)
        assert float(found) == pytest.approx((3 * low + 200) / 4, rel=1e-3)
