"""coupled in torch: modules, autocast, and what a call leaves behind. Held against one graph by hand."""

import contextlib
import copy
import gc
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcga
from benchmarks.torch_measure import Watch
from funcga import CARRY
from tests.coupled.losses import bounds
from tests.kits import TORCH, counted, difference
from torch_backend import module_value_and_grad, pure_loss, trainable

LIMIT = 1e-12
ROWS, FEATURES, WIDTH = 11, 5, 4


def batch(rows=ROWS, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    return x.to(dtype), (x + torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)).to(dtype)


class Towers(nn.Module):
    """A tower for both views, and a temperature that the loss alone uses."""

    def __init__(self, *layers, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(*layers) if layers else nn.Linear(FEATURES, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.to(dtype)

    def forward(self, x):
        return F.normalize(self.tower(x), dim=1)


def mlp(*between, **options):
    return Towers(nn.Linear(FEATURES, 8), *between, nn.Tanh(), nn.Linear(8, WIDTH), **options)


def summary_of(module, x, y):
    return {"a": module(x), "b": module(y)}


def infonce(scale, s):
    logits = s["a"] @ s["b"].T * scale.exp()
    own = torch.arange(len(logits))
    return F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)


def loss_of(module, s):
    return infonce(module.scale, s)


def joined(summaries):
    return {name: torch.cat([summary[name] for summary in summaries]) for name in summaries[0]}


def one_graph(module, loss_fn, x, y, *edges, summary_fn=summary_of):
    """(loss, gradients) of a loop over the micro-batches that keeps all graphs; it runs on a copy of the module."""
    module = copy.deepcopy(module)
    s = joined([summary_fn(module, x[start:end], y[start:end]) for start, end in pairwise(edges)])
    loss = loss_fn(module, s)
    params = trainable(module)
    grads = torch.autograd.grad(loss, [*params.values()], allow_unused=True)
    pairs = zip(params.items(), grads, strict=True)
    grads = {name: torch.zeros_like(p) if grad is None else grad for (name, p), grad in pairs}
    return loss.detach(), grads, module


def check(result, expected, limit=LIMIT):
    assert abs(result[0] - expected[0]) <= limit * abs(expected[0])
    assert result[1].keys() == expected[1].keys()
    assert difference(TORCH, result[1], expected[1]) <= limit


class Named:
    """What loss_fn reads of a module, in a dict of its parameters."""

    def __init__(self, params):
        self.scale = params["scale"]


def of_pure_loss(module, loss_fn=loss_of, n=3, summary_fn=summary_of, **options):
    step = funcga.coupled(
        pure_loss(module, summary_fn), lambda params, s: loss_fn(Named(params), s), n, **options
    )  # fmt: skip
    return lambda *args: step(trainable(module), *args)


def of_module(module, loss_fn=loss_of, n=3, summary_fn=summary_of, **options):
    return funcga.coupled(module_value_and_grad(module, summary_fn), loss_fn, n, **options)


WAYS = {"pure_loss": of_pure_loss, "module": of_module}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


# --- what a module has


def test_threaded_buffers_are_those_of_one_loop():
    module, (x, y) = mlp(nn.BatchNorm1d(8)), batch()
    expected = one_graph(module, loss_of, x, y, *bounds(ROWS, 3))
    seen = []

    def loss_fn(params, s):
        seen.append(s[1])
        return infonce(params["scale"], s[0])

    step = funcga.coupled(
        pure_loss(module, summary_of, buffers=True), loss_fn, 3, in_axes=(None, CARRY, 0, 0),
        fold=(funcga.concat(), funcga.carry()),
    )  # fmt: skip
    check(step(trainable(module), dict(module.named_buffers()), x, y), expected)
    for name, buffer in expected[2].named_buffers():
        assert torch.equal(seen[-1][name], buffer)


@pytest.mark.parametrize(("way", "use_reentrant"), [(of_pure_loss, False), (of_module, True)])
def test_checkpoints(way, use_reentrant):
    class Checkpointed(Towers):
        def forward(self, x):
            if use_reentrant:
                x = x.detach().requires_grad_()  # a reentrant checkpoint needs an input that requires grad
            return F.normalize(checkpoint(self.tower, x, use_reentrant=use_reentrant), dim=1)

    module, (x, y) = Checkpointed(nn.Linear(FEATURES, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, WIDTH)), batch()
    torch.manual_seed(3)
    plain = Towers(nn.Linear(FEATURES, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, WIDTH))
    plain.load_state_dict(module.state_dict())
    torch.manual_seed(3)
    expected = one_graph(plain, loss_of, x, y, *bounds(ROWS, 3))
    torch.manual_seed(3)
    check(way(module)(x, y), expected)


# --- numbers of few bits


@pytest.mark.parametrize(("way", "where"), [(of_pure_loss, "around"), (of_module, "inside")])
def test_autocast_loses_no_gradient(way, where):
    n, module, (x, y) = 3, mlp(dtype=torch.float32), batch(dtype=torch.float32)
    autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    summary_fn = summary_of
    if where == "inside":

        def summary_fn(module, x, y):
            with autocast():
                return summary_of(module, x, y)

    with autocast() if where == "around" else contextlib.nullcontext():
        expected = one_graph(module, loss_of, x, y, *bounds(ROWS, n), summary_fn=summary_fn)
        result = way(module, n=n, summary_fn=summary_fn)(x, y)
    assert all(grad.abs().max() > 0 for grad in result[1].values())
    assert {grad.dtype for grad in result[1].values()} == {torch.float32}
    # Gradients of micro-batches are rounded to 8 bits each.
    check(result, expected, 2e-2)


# --- rows that depend on the data


def test_summaries_of_any_number_of_rows():
    module, (x, y) = mlp(), batch()
    chosen = lambda module, x, y: {"a": module(x)[y[:, 0] > 0], "b": module(y)[x[:, 1] > -0.5]}
    loss_fn = lambda module, s: (s["a"] @ s["b"].T * module.scale).exp().sum().log() / len(s["a"])
    expected = one_graph(module, loss_fn, x, y, 0, ROWS, summary_fn=chosen)
    for n, each in ((1, of_pure_loss), (3, of_pure_loss), (ROWS, of_module)):
        check(each(module, loss_fn, n, summary_fn=chosen)(x, y), expected)


# --- what a call costs, and leaves behind


@pytest.mark.parametrize("n", [1, 3])
def test_a_single_micro_batch_takes_one_pass_and_several_take_two(way, n):
    module, (x, y) = mlp(), batch()
    summary_fn, calls = counted(summary_of)
    check(way(module, n=n, summary_fn=summary_fn)(x, y), one_graph(module, loss_of, x, y, 0, ROWS))
    assert len(calls) == (1 if n == 1 else 2 * n)


@pytest.mark.parametrize(
    ("way", "grad_mode"),
    [(of_pure_loss, torch.enable_grad), (of_module, torch.no_grad), (of_pure_loss, torch.inference_mode)],
)
def test_nothing_outside_is_changed(way, grad_mode):
    module, (x, y) = mlp(nn.Dropout(0.1)), batch()
    x.requires_grad_()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    torch.manual_seed(3)
    expected = one_graph(module, loss_of, x, y, *bounds(ROWS, 3))
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(3)
    with grad_mode():
        result = way(module)(x, y)
        assert torch.is_grad_enabled() == (grad_mode is torch.enable_grad)
    check(result, expected)
    assert x.grad is None
    assert not any(leaf.requires_grad for leaf in (result[0], *result[1].values()))
    for name, p in module.named_parameters():
        assert torch.equal(p.grad, torch.ones_like(p))
        assert torch.equal(p, before[name])
        assert p.requires_grad
        assert result[1][name].data_ptr() not in (p.data_ptr(), p.grad.data_ptr())


def test_bytes_of_one_micro_batch_and_of_the_summaries():
    width, rows, n = 64, 256, 16
    module = nn.Sequential(nn.Linear(width, 16 * width), nn.Tanh(), nn.Linear(16 * width, 8))
    x = torch.randn(rows, width)
    loss_fn = lambda module, s: (s.mean(0) ** 2).sum() + s.var()
    summary_fn = lambda module, x: module(x)
    loop = funcga.accumulate(module_value_and_grad(module, lambda module, x: loss_fn(module, module(x))), n)
    step = funcga.coupled(module_value_and_grad(module, summary_fn), loss_fn, n)
    peaks = []
    for each in (loop, step):
        each(x)
        with Watch() as seen:
            each(x)
        peaks.append(seen.bytes)
    summaries = rows * 8 * 4
    assert 2 * summaries < 0.05 * peaks[0]
    assert peaks[1] <= peaks[0] + 2 * summaries


def test_a_call_leaves_nothing_that_waits_for_the_garbage_collector():
    module, (x, y) = mlp(), batch()
    step = of_pure_loss(module)
    step(x, y)
    gc.collect()
    gc.disable()
    try:
        before = bytes_of_tensors()
        for _ in range(3):
            step(x, y)
        assert bytes_of_tensors() == before
    finally:
        gc.enable()


def bytes_of_tensors():
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Stopped(Exception):
    pass


def test_a_module_is_differentiated_by_coupled():
    """Of module_value_and_grad it takes the module alone."""
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    loss_fn, summary_fn = (lambda module, s: s.mean()), (lambda module, x: module(x))
    steps = [
        funcga.coupled(module_value_and_grad(module, summary_fn, has_aux=has_aux), loss_fn, 2)
        for has_aux in (False, True)
    ]
    check(steps[1](x), steps[0](x))
    scaled = funcga.coupled(module_value_and_grad(module, summary_fn, scaled=True), loss_fn, 2)
    with pytest.raises(funcga.FuncgaError, match="loss_scale"):
        scaled(x)


@pytest.mark.parametrize("n", [1, 3])
def test_a_checkpoint_runs_again_with_the_parameters_that_are_given(n):
    class Checkpointed(Towers):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    module, other, (x, y) = Checkpointed(), Checkpointed(), batch()
    for p in other.parameters():
        p.data.mul_(1.5)
    step = funcga.coupled(pure_loss(module, summary_of), lambda params, s: infonce(params["scale"], s), n)
    found = step(trainable(other), x, y)
    check(found, one_graph(other, loss_of, x, y, *bounds(ROWS, n)))


@pytest.mark.parametrize("n", [1, 2])
def test_parameters_are_looked_at_before_the_first_pass(n):
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    of_own = funcga.coupled(module_value_and_grad(module, lambda module, x: module(x)), lambda module, s: s.mean(), n)
    with pytest.raises(funcga.FuncgaError, match="the split arguments have different numbers of rows"):
        of_own(trainable(module), x)
    of_params = funcga.coupled(lambda params, x: x @ params["w"], lambda params, s: s.mean(), n)
    with pytest.raises(RuntimeError, match="only Tensors of floating point dtype can require gradients"):
        of_params({"w": torch.ones(3, dtype=torch.int64)}, x)


def test_a_step_inside_of_a_loss_is_refused_with_what_folds_the_summaries_there():
    module, (x, y) = mlp(), batch()
    params, summary_fn = trainable(module), pure_loss(module, summary_of)
    loss_fn = lambda params, s: infonce(params["scale"], s)
    step = funcga.coupled(summary_fn, loss_fn, 3)
    with pytest.raises(funcga.FuncgaError, match=r"loss_fn\(params, funcga.accumulate\(summary_fn, n, fold="):
        torch.func.grad(lambda params: step(params, x, y)[0])(params)
    with pytest.raises(funcga.FuncgaError, match="or of a loss that is differentiated"):
        funcga.grad(lambda params: step(params, x, y)[0])(params)
    fold = funcga.accumulate(summary_fn, 3, fold=funcga.concat())
    found = funcga.value_and_grad(lambda params: loss_fn(params, fold(params, x, y)))(params)
    check(found, step(params, x, y))
