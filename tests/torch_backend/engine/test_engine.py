"""The autograd engine: the same as the generic path, as lean as the hand-written loop, and pure from outside."""

import gc
import threading
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from benchmarks.torch_measure import Watch
from funcga._grad import GradientFunction
from tests import problems
from tests.kits import LIMITS, TORCH, difference, needs_cuda, no_synchronisation
from torch_backend.engine.window import Engine


def generic(loss, argnums=0, has_aux=False, value=True):
    """The same gradient as a callable of which funcga knows nothing."""
    transform = grad_and_value(loss, argnums=argnums, has_aux=has_aux)

    def gradient(*args, **kwargs):
        grads, found = transform(*args, **kwargs)
        if value:
            return found, grads
        return (grads, found[1]) if has_aux else grads

    return gradient


def windows_of(monkeypatch):
    """The list that gets True for every window on the engine, False for every other one."""
    found = []
    original = torch_backend.loop.window_of

    def window(program, backend):
        made = original(program, backend)
        found.append(isinstance(made, Engine))
        return made

    monkeypatch.setattr(torch_backend.loop, "window_of", window)
    return found


def both(loss, args, n=4, argnums=0, has_aux=False, value=True, **options):
    """The results of the engine and of the generic path."""
    made = (funcga.value_and_grad if value else funcga.grad)(loss, argnums, has_aux)
    assert isinstance(made, GradientFunction)
    engine = funcga.accumulate(made, n, **options)(*args)
    return engine, funcga.accumulate(generic(loss, argnums, has_aux, value), n, **options)(*args)


def assert_same(left, right):
    assert torch.utils._pytree.tree_structure(left) == torch.utils._pytree.tree_structure(right)
    for a, b in zip(tree_leaves(left), tree_leaves(right), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)
        assert not a.requires_grad


def regression(dtype="float32"):
    params, batch, _ = problems.regression(dtype)
    loss = lambda p, x, y: ((torch.tanh(x @ p["w"] + p["b"]) - y) ** 2).mean()
    return TORCH.arrays(params), TORCH.arrays(batch), loss


FOLDS = {
    **{name: fold for name, fold in problems.FOLDS.items() if name != "carry"},
    "by_steps": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps),
    "weighted sum": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.identity),
    "float64": funcga.mean(dtype="float64", out_dtype="float64"),
    "float16": funcga.sum(dtype="float16"),
    "prefix": {"w": funcga.moments(), "b": funcga.mean()},
    "two sums": {"w": funcga.sum(), "b": funcga.mean()},
}


# --- the choice, and that both paths agree


def test_funcga_s_own_gradients_run_on_the_engine_and_no_others(monkeypatch):
    params, batch, loss = regression()
    found = windows_of(monkeypatch)
    funcga.accumulate(funcga.value_and_grad(loss), 3)(params, *batch)
    funcga.accumulate(funcga.grad(loss), 3)(params, *batch)
    funcga.stream(funcga.grad(loss))(params, [batch])
    assert found == [True] * 3
    funcga.accumulate(generic(loss), 3)(params, *batch)
    torch.func.vmap(funcga.accumulate(funcga.grad(loss), 3), (None, 0, None))(params, batch[0][None], batch[1])
    assert found[3:] == [False] * 2


@pytest.mark.parametrize("n", range(1, 13))
def test_both_paths_agree_bit_for_bit(n):
    params, batch, loss = regression()
    assert_same(*both(loss, (params, *batch), n))
    assert_same(*both(loss, (params, *batch), n, value=False))


@pytest.mark.parametrize("weight", [None, lambda x, y: 2 ** int((x[0, 0] > 0) + 2 * (x[0, 1] > 0)), lambda x, y: 0.3])
@pytest.mark.parametrize("fold", FOLDS)
def test_every_fold_agrees_bit_for_bit(fold, weight):
    params, batch, loss = regression()
    for n in (4, 5):
        assert_same(*both(loss, (params, *batch), n, fold=(funcga.mean(), FOLDS[fold]), weight=weight))


def test_any_weights_agree_to_rounding():
    params, batch, loss = regression("float64")
    weight = lambda x, y: int(1000 * x[0, 0].abs()) + 1
    engine, other = both(loss, (params, *batch), 7, weight=weight)
    assert difference(TORCH, engine, other) <= LIMITS["float64"]


@pytest.mark.parametrize("seen", [True, False])
def test_a_masked_micro_batch_does_no_harm(seen, monkeypatch):
    """Weight 0 is left out of the gradients too, whether the host sees it or not; its mean is NaN."""
    if not seen:
        monkeypatch.setattr(torch_backend.arrays, "scalar", lambda weight: weight)
    params, (batch,), _ = problems.tokens(rows=6)
    batch["mask"][2:4] = 0
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)
    engine, other = both(problems.token_mean, (params, batch), 3, weight=problems.token_count)
    assert difference(TORCH, engine, other) <= LIMITS["float32"]
    full = funcga.value_and_grad(problems.token_mean)(params, batch)
    assert difference(TORCH, engine, full) <= LIMITS["float32"]


@pytest.mark.parametrize("value", [True, False])
def test_argnums_and_aux(value):
    params, (x, y), loss = regression()
    with_aux = lambda p, x, y: (loss(p, x, y), {"predictions": x @ p["w"], "largest": x.max()})
    aux = {"predictions": funcga.concat(), "largest": funcga.max()}
    fold = ((funcga.mean(), aux), funcga.mean()) if value else (funcga.mean(), aux)
    assert_same(*both(with_aux, (params, x, y), 5, has_aux=True, value=value, fold=fold))
    of_rows = (funcga.mean(), funcga.concat()) if value else funcga.concat()
    for argnums in (1, -2):
        assert_same(*both(loss, (params, x, y), 5, argnums, value=value, fold=of_rows))
    pair = (funcga.mean(), funcga.concat())
    assert_same(*both(loss, (params, x, y), 5, (0, 1), value=value, fold=(funcga.mean(), pair) if value else pair))
    whole = (funcga.mean(), (funcga.sum(), funcga.max())) if value else (funcga.sum(), funcga.max())
    two = lambda p, q, x: loss({"w": p, "b": q}, x, 0)
    assert_same(*both(two, (params["w"], params["b"], x), 5, (0, 1), value=value, fold=whole, in_axes=(None, None, 0)))


def test_keyword_arguments_and_carried_state():
    params, (x, _), _ = regression()

    def loss(p, state, x, *, scale):
        return (x @ p["w"]).square().mean() * scale * state["k"], {"k": state["k"] + 1}

    state = {"k": torch.tensor(1.0)}
    fold, axes = ((funcga.mean(), funcga.carry()), funcga.mean()), (None, funcga.CARRY, 0)
    options = {"fold": fold, "in_axes": axes}
    engine = funcga.accumulate(funcga.value_and_grad(loss, has_aux=True), 5, **options)(params, state, x, scale=2.0)
    other = funcga.accumulate(generic(loss, has_aux=True), 5, **options)(params, state, x, scale=2.0)
    assert_same(engine, other)
    assert float(engine[0][1]["k"]) == 6


def test_gradients_that_are_carried():
    """The gradient of one micro-batch as the state of the next."""
    loss = lambda p, m, x: (p * x * (1 + m)).sum()
    options = {"fold": (funcga.mean(), funcga.carry()), "in_axes": (None, funcga.CARRY, 0)}
    assert_same(*both(loss, (torch.tensor(2.0), torch.tensor(0.5), torch.arange(5.0)), 3, **options))


def test_another_structure_of_aux_is_refused():
    calls = []

    def loss(p, x):
        calls.append(1)
        return (p * x).sum(), {"a": x.sum()} if len(calls) < 2 else {"b": x.sum()}

    with pytest.raises(funcga.FuncgaError, match=r"missing `output\[0\]\[1\]\['a'\]`, new `output\[0\]\[1\]\['b'\]`"):
        funcga.accumulate(funcga.value_and_grad(loss, has_aux=True), 2)(torch.tensor(1.0), torch.ones(4))


def test_another_dtype_of_the_loss_is_refused():
    calls = []

    def loss(p, x):
        calls.append(1)
        return (p * x).sum().to(torch.float32 if len(calls) < 2 else torch.float64)

    with pytest.raises(funcga.FuncgaError, match=r"output\[0\] as float64\[\] for micro-batch 2 and as float32\[\]"):
        funcga.accumulate(funcga.value_and_grad(loss), 2)(torch.tensor(1.0), torch.ones(4))


def test_a_second_call_with_other_shapes_and_dtypes():
    """What is remembered between calls is used only where it fits."""
    step = funcga.accumulate(funcga.value_and_grad(lambda p, x: ((p["w"] * x[:, None]) ** 2).mean()), 3)
    x = torch.arange(6.0)
    for w in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(2)):
        for params in ({"w": w}, {"w": w, "b": None}, {"w": w, "u": w.to(torch.bfloat16)}):
            value, grads = step(params, x)
            expected = funcga.value_and_grad(lambda p, x: ((p["w"] * x[:, None]) ** 2).mean())(params, x)
            assert difference(TORCH, (value, grads["w"]), (expected[0], expected[1]["w"])) <= LIMITS["float32"]
            assert {k: getattr(g, "dtype", None) for k, g in grads.items()} == {
                k: getattr(p, "dtype", None) for k, p in params.items()
            }


# --- every kind of leaf


def leaves_of(kind):
    """params and a loss of rows x [8, 3] that uses them."""
    torch.manual_seed(0)
    w, linear = torch.randn(3, 2), lambda p, x: ((x @ p["w"]) ** 2).mean()
    image = lambda p, x: (F.conv2d(x[:, :, None, None].expand(-1, -1, 4, 4), p["w"]) ** 2).mean()
    complexes = lambda p, x: ((x.to(p["w"].dtype) @ p["w"]).abs() ** 2).mean()
    return {
        "unused": ({"w": w, "unused": torch.ones(5)}, linear),
        "nothing used": ({"w": w}, lambda p, x: x.mean() * 0),
        "a constant": ({"w": w}, lambda p, x: torch.tensor(0.0)),
        "tied": ({"w": w, "again": w}, lambda p, x: linear(p, x) + p["again"].sum() * x.sum()),
        "a view": ({"w": torch.randn(10, 4)[:3, :2]}, linear),
        "transposed": ({"w": torch.randn(2, 3).T}, linear),
        "expanded": ({"w": torch.randn(3, 1).expand(3, 2)}, linear),
        "channels last": ({"w": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)}, image),
        "complex": ({"w": torch.randn(3, 2, dtype=torch.complex64)}, complexes),
        "empty": ({"w": w, "none": torch.ones(0)}, linear),
        "a scalar": ({"w": torch.tensor(2.0)}, lambda p, x: (p["w"] * x).square().mean()),
        "requires grad": ({"w": w.clone().requires_grad_()}, linear),
        "not a leaf": ({"w": w.clone().requires_grad_() * 2}, linear),
        "float64": ({"w": w.double()}, lambda p, x: linear(p, x.double())),
        "bfloat16": ({"w": w.bfloat16()}, lambda p, x: linear(p, x.bfloat16())),
        "float16": ({"w": w.half()}, lambda p, x: linear(p, x.half())),
        "mixed": ({"w": w, "h": torch.ones(2).bfloat16()}, lambda p, x: linear(p, x) + (p["h"].float() * x.sum()).sum()),
    }[kind]  # fmt: skip


KINDS = [
    "unused", "nothing used", "a constant", "tied", "a view", "transposed", "expanded", "channels last", "complex", "empty",
    "a scalar", "requires grad", "not a leaf", "float64", "bfloat16", "float16", "mixed",
]  # fmt: skip


@pytest.mark.parametrize("fold", ["mean", "sum", "moments"])
@pytest.mark.parametrize("kind", KINDS)
def test_leaves(kind, fold):
    params, loss = leaves_of(kind)
    if kind == "complex" and fold == "moments":
        pytest.skip("moments are of real numbers, and are refused for others")
    x = torch.randn(8, 3)
    assert_same(*both(loss, (params, x), 4, fold=(funcga.mean(), getattr(funcga, fold)())))


@pytest.mark.parametrize("fold", ["mean", "sum", "moments"])
def test_sparse_gradients_become_dense(fold):
    table, rows = torch.randn(7, 2), torch.randint(0, 7, (8, 3))
    sparse = lambda p, i: (F.embedding(i, p, sparse=True) ** 2).mean()
    dense = lambda p, i: (F.embedding(i, p) ** 2).mean()
    chosen = (funcga.mean(), getattr(funcga, fold)())
    expected = funcga.accumulate(funcga.value_and_grad(dense), 4, fold=chosen)(table, rows)
    for result in both(sparse, (table, rows), 4, fold=chosen):
        assert all(leaf.layout is torch.strided for leaf in tree_leaves(result))
        assert difference(TORCH, result, expected) <= LIMITS["float32"]


def test_none_and_numbers_among_the_parameters():
    loss = lambda p, x: (p["w"] * x * p["scale"]).sum() if p["bias"] is None else None
    params = {"w": torch.tensor(2.0), "scale": 3.0, "bias": None}
    step = funcga.accumulate(funcga.grad(loss), 2, fold=funcga.sum())
    for gradient in (step, funcga.grad(loss)):
        grads = gradient(params, torch.arange(4.0))
        assert (float(grads["w"]), float(grads["scale"]), grads["bias"]) == (18.0, 12.0, None)


def test_sixteen_bit_gradients_are_summed_in_float32():
    """512 gradients that a sum in bfloat16 would lose after 256."""
    params = {"w": torch.ones(4).bfloat16()}
    step = funcga.accumulate(funcga.grad(lambda p, x: (p["w"] * x).sum()), 512, fold=funcga.sum(out_dtype="float32"))
    torch.testing.assert_close(step(params, torch.ones(512).bfloat16())["w"], torch.full((4,), 512.0))


def test_the_weight_is_not_rounded_to_the_dtype_of_the_loss():
    """1001 tokens are 1000 in bfloat16: a weight that the loss cannot hold is applied in the accumulator."""
    params, x = torch.ones(()).bfloat16(), torch.tensor([1.0, 3.0]).bfloat16()
    step = funcga.accumulate(
        funcga.grad(lambda p, x: (p * x).sum()), 2, weight=lambda x: 1001 if x[0] > 2 else 513,
        fold=funcga.mean(out_dtype="float32"),
    )  # fmt: skip
    assert float(step(params, x)) == pytest.approx((513 + 3 * 1001) / 1514, rel=1e-6)


# --- purity


def test_nothing_is_touched_and_nothing_is_shared():
    params, batch, loss = regression()
    params = {k: torch.nn.Parameter(v) for k, v in params.items()}
    params["w"].grad = torch.ones_like(params["w"])
    before = tree_map(lambda a: a.detach().clone(), (params, batch))
    step = funcga.accumulate(funcga.value_and_grad(loss), 5)
    first, second = step(params, *batch), step(params, *batch)
    assert_same(first, second)
    places = [{t.untyped_storage().data_ptr() for t in tree_leaves(tree)} for tree in (first, second, (params, batch))]
    assert not (places[0] & places[1]) | (places[0] & places[2])
    for a, b in zip(tree_leaves((params, batch)), tree_leaves(before), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(params["w"].grad, torch.ones_like(params["w"]))
    assert params["b"].grad is None
    assert all(p.requires_grad for p in params.values())


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_pass_through_and_leave_nothing_behind(at, where):
    params, batch, loss = regression()
    params = {k: torch.nn.Parameter(v) for k, v in params.items()}
    passes = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            passes.append("forward")
            if where == "forward" and passes.count("forward") == at:
                raise KeyError("mine")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            passes.append("backward")
            if where == "backward" and passes.count("backward") == at:
                raise KeyError("mine")
            return grad

    step = funcga.accumulate(funcga.value_and_grad(lambda p, x, y: loss({**p, "w": Fails.apply(p["w"])}, x, y)), 4)
    with pytest.raises(KeyError, match="mine"):
        step(params, *batch)
    assert all(p.grad is None for p in params.values())
    passes[:] = ["forward", "backward"] * 10
    assert difference(TORCH, step(params, *batch), funcga.value_and_grad(loss)(params, *batch)) <= LIMITS["float32"]


def test_a_function_that_keeps_what_it_returns():
    """A custom backward that hands out memory of its own: it is not added into."""
    kept = torch.ones(3)

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, x):
            return (p * x.sum()).sum()

        @staticmethod
        def backward(ctx, grad):
            return kept, None

    for fold in (funcga.mean(), funcga.max(), funcga.concat(), funcga.moments()):
        step = funcga.accumulate(funcga.grad(Keeps.apply), 3, fold=fold)
        out = step(torch.zeros(3), torch.ones(6))
        assert torch.equal(kept, torch.ones(3))
        assert kept.data_ptr() not in {leaf.data_ptr() for leaf in tree_leaves(out)}


def test_what_a_call_made_is_freed_with_it():
    """No cycle keeps accumulators alive until the garbage collector runs."""
    params, batch, loss = regression()
    gc.collect()
    gc.disable()
    try:
        for fold in (funcga.mean(), funcga.max()):
            out = funcga.accumulate(funcga.grad(loss), 4, fold=fold)(params, *batch)
            watch = [weakref.ref(leaf.untyped_storage()) for leaf in tree_leaves(out)]
            del out
            assert all(ref() is None for ref in watch)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["pure_loss", "module", "function"])
def test_nothing_of_a_window_waits_for_the_garbage_collector(kind):
    """What waited would keep the memory of the parameters, which a pure update replaces."""
    module, x = nn.Linear(3, 1), torch.randn(8, 3)
    loss = lambda module, x: module(x).square().mean()
    gradient = {
        "pure_loss": lambda: funcga.value_and_grad(torch_backend.pure_loss(module, loss)),
        "module": lambda: torch_backend.module_value_and_grad(module, loss),
        "function": lambda: funcga.value_and_grad(lambda p, x: (x @ p["weight"].T + p["bias"]).square().mean()),
    }[kind]()
    step, params = funcga.accumulate(gradient, 4), {name: p.detach() for name, p in module.named_parameters()}
    call = lambda: step(x) if kind == "module" else step(params, x)
    call()
    gc.collect()
    gc.disable()
    try:
        call()
        assert not gc.collect()
    finally:
        gc.enable()


def test_it_nests_and_runs_in_threads():
    params, batch, loss = regression()
    inner = funcga.accumulate(funcga.grad(loss), 3)

    def outer_loss(p, x, y):
        inner_grads = inner(p, x, y)
        return loss(p, x, y) + sum((g.detach() ** 2).sum() for g in inner_grads.values())

    outer = funcga.accumulate(funcga.value_and_grad(outer_loss), 2)
    expected, results = outer(params, *batch), {}

    def run(i):
        for _ in range(5):
            results[i] = outer(params, *batch)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(results) == [0, 1, 2, 3]
    for result in results.values():
        assert_same(result, expected)


def test_under_no_grad_and_inference_mode():
    params, batch, loss = regression()
    step = funcga.accumulate(funcga.value_and_grad(loss), 5)
    expected = step(params, *batch)
    with torch.no_grad():
        assert_same(step(params, *batch), expected)
    with torch.inference_mode():
        assert_same(step(params, *batch), expected)
        made = tree_map(torch.clone, (params, batch))
        assert_same(step(made[0], *made[1]), expected)
    assert_same(step(made[0], *made[1]), expected)
    assert_same(
        funcga.stream(funcga.value_and_grad(loss))(made[0], [made[1]]),
        funcga.accumulate(funcga.value_and_grad(loss), 1)(params, *batch),
    )


# --- what autograd can do


def blocks():
    """Parameters of three layers, rows, and the loss by a function that applies each block."""
    torch.manual_seed(0)
    params = {name: torch.randn(4, 4) for name in "abc"}

    def loss_by(apply):
        def loss(params, x):
            for weight in params.values():
                x = apply(lambda x, weight: torch.tanh(x @ weight), x, weight)
            return (x**2).mean()

        return loss

    return params, torch.randn(8, 4), loss_by


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    params, x, loss_by = blocks()
    expected = funcga.accumulate(funcga.value_and_grad(loss_by(lambda f, *args: f(*args))), 4)(params, x)
    runs = []

    def counted(f):
        return lambda *args: (runs.append(1), f(*args))[1]

    loss = loss_by(lambda f, *args: checkpoint(counted(f), *args, use_reentrant=reentrant))
    result = funcga.accumulate(funcga.value_and_grad(loss), 4)(params, x)
    assert_same(result, expected)
    assert len(runs) >= 4 * 3 * 2  # every block forwards and again backwards


def test_tensors_of_somebody_else_s_get_no_gradient():
    params, batch, loss = regression()
    teacher = torch.nn.Linear(3, 2)
    step = funcga.accumulate(funcga.value_and_grad(lambda p, x, y: loss(p, x, teacher(x))), 4)
    value, _ = step(params, *batch)
    assert not value.requires_grad
    assert all(p.grad is None for p in teacher.parameters())


def test_saved_tensors_on_the_host_and_hooks():
    params, x, loss_by = blocks()
    plain = loss_by(lambda f, *args: f(*args))
    expected = funcga.accumulate(funcga.value_and_grad(plain), 4)(params, x)
    packed = []

    def hooked(p, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t)[1], lambda t: t):
            return plain(p, x)

    def offloaded(p, x):
        with torch.autograd.graph.save_on_cpu():
            return plain(p, x)

    for loss in (hooked, offloaded):
        assert_same(funcga.accumulate(funcga.value_and_grad(loss), 4)(params, x), expected)
    assert packed


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    params, x, loss_by = blocks()
    plain = loss_by(lambda f, *args: f(*args))

    def cast(p, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(p, x)

    leaves = tree_map(lambda p: p.clone().requires_grad_(), params)
    for rows in x.chunk(4):
        (cast(leaves, rows) / 4).backward()
    if inside:
        out = funcga.accumulate(funcga.grad(cast), 4)(params, x)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = funcga.accumulate(funcga.grad(plain), 4)(params, x)
            again = funcga.accumulate(funcga.grad(plain), 4)(tree_map(lambda p: p + 1, params), x)
        assert not torch.equal(out["a"], again["a"])
    for name, leaf in leaves.items():
        assert torch.equal(out[name], leaf.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
def test_transforms_inside_of_the_loss():
    params, (x, y), loss = regression()
    losses = {
        "vmap": lambda p, x, y: torch.func.vmap(lambda x, y: loss(p, x, y))(x, y).mean(),
        "jvp": lambda p, x, y: torch.func.jvp(lambda w: loss({**p, "w": w}, x, y), (p["w"],), (p["w"],))[1],
        "grad": lambda p, x, y: (torch.func.grad(lambda x: loss(p, x, y))(x) ** 2).sum(),
    }
    for made in losses.values():
        assert_same(*both(made, (params, x, y), 4))

    def penalty(p, x, y):
        grads = torch.autograd.grad(loss(p, x, y), [*p.values()], create_graph=True)
        return sum((g**2).sum() for g in grads)

    by_hand = lambda p, x, y: sum((g**2).sum() for g in torch.func.grad(loss)(p, x, y).values())
    result = funcga.accumulate(funcga.value_and_grad(penalty), 4)(params, x, y)
    assert difference(TORCH, result, funcga.accumulate(generic(by_hand), 4)(params, x, y)) <= LIMITS["float32"]


def test_a_compiled_loss_is_compiled_once():
    params, batch, loss = regression()
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(loss, backend=backend)
    step = funcga.accumulate(funcga.value_and_grad(compiled), 4)
    for _ in range(3):
        result = step(params, *batch)
    assert_same(result, funcga.accumulate(funcga.value_and_grad(loss), 4)(params, *batch))
    assert len(graphs) == 1


# --- refusals


def refused(loss, match, params=None):
    given, batch, _ = regression()
    given = {k: torch.nn.Parameter(v) for k, v in given.items()} if params is None else params
    with pytest.raises(funcga.FuncgaError, match=match):
        funcga.accumulate(funcga.value_and_grad(loss), 4)(given, *batch)
    assert all(p.grad is None for p in given.values() if isinstance(p, torch.nn.Parameter))


def test_a_parameter_that_the_loss_writes_to_is_refused():
    _, _, loss = regression()

    def writes(p, x, y):
        value = loss(p, x, y)
        with torch.no_grad():
            p["b"].add_(0)
        return value

    refused(writes, "a parameter was changed in place during the window")


@pytest.mark.parametrize("fold", ["mean", "max"])
def test_a_backward_pass_inside_of_the_loss_is_refused(fold):
    params, batch, loss = regression()

    def runs(p, x, y):
        value = loss(p, x, y)
        value.backward(retain_graph=True)
        return value

    step = funcga.accumulate(funcga.value_and_grad(runs), 4, fold=(funcga.mean(), getattr(funcga, fold)()))
    with pytest.raises(funcga.FuncgaError, match=r"loss_fn called \.backward\(\)"):
        step(params, *batch)


def test_a_backward_pass_on_the_parameters_themselves_is_refused():
    params, batch, loss = regression()
    params = {k: torch.nn.Parameter(v) for k, v in params.items()}

    def runs(p, x, y):
        loss(params, x, y).backward()
        return loss(p, x, y)

    step = funcga.accumulate(funcga.value_and_grad(runs), 4)
    with pytest.raises(funcga.FuncgaError, match=r"a parameter's \.grad changed during the call"):
        step(params, *batch)
    assert all(p.grad is None for p in params.values())  # put right again


def test_losses_and_parameters_without_a_gradient_are_refused(kit):
    x = kit.arrays(problems.regression()[1][0])
    params = {"w": x[0], "step": kit.cast(x[0, 0], "int32")}
    spelled = r"`params\['step'\]` is int32\[\], and a gradient is taken with respect to `params`"
    cases = [
        (
            lambda params, x: (params["w"] * x).sum(1),
            {"w": x[0]},
            {},
            r"loss_fn returned float32\[\d+\], and a gradient is",
        ),
        (lambda params, x: ((params["w"] * x).sum(), 1), {"w": x[0]}, {}, "a tuple of 2.*has_aux=True"),
        (
            lambda params, x: (params["w"] * x).sum(),
            {"w": x[0]},
            {"has_aux": True},
            "asks for a pair: return loss, aux",
        ),
        (lambda params, x: kit.cast((params["w"] * x).sum(), "complex64"), {"w": x[0]}, {}, "is that of a real number"),
        (lambda params, x: (params["w"] * x).sum(), params, {}, spelled),
        (lambda params, x: "loss", {"w": x[0]}, {}, "what loss_fn returned is of type str, which has no gradient"),
        (lambda params, x: (params["w"] * x).sum(), {"w": x[0]}, {"argnums": 2}, "argnums is 2, and the call has 2"),
        (lambda params, x: (params["w"] * x).sum(), {"w": x[0]}, {"argnums": (0, -2)}, "names an argument twice"),
    ]
    for loss, given, options, match in cases:
        gradient = funcga.value_and_grad(loss, **options)
        for call in (gradient, funcga.accumulate(gradient, 4)):
            with pytest.raises(funcga.FuncgaError, match=match):
                call(given, x)


# --- what a second reader found


class Unseen(torch.Tensor):
    """A weight that the host does not see, as one on a device."""


@pytest.mark.parametrize("fold", ["sum", "per_weight", "mean", "moments", "max"])
@pytest.mark.parametrize("weights", ["unseen", "zero first", "zero last", "uneven"])
def test_folds_and_weights_of_every_kind(fold, weights):
    params, (x, y), loss = regression("float64")

    def weight(x, y):
        number = {
            "unseen": 2,
            "zero first": x[0, 0] != first,
            "zero last": x[0, 0] == first,
            "uneven": 3 + x[0, 1] ** 2,
        }
        found = torch.as_tensor(number[weights], dtype=torch.float64)
        return found.as_subclass(Unseen) if weights == "unseen" else found

    first = x[0, 0].clone()
    engine, other = both(loss, (params, x, y), 4, fold=(funcga.mean(), getattr(funcga, fold)()), weight=weight)
    assert difference(TORCH, engine, other) <= LIMITS["float64"]
    assert any(leaf.abs().sum() > 0 for leaf in tree_leaves(engine[1]))


class Clamps(torch.autograd.Function):
    """The identity, whose backward pass is not linear."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 12])
def test_the_cotangent_is_one_for_micro_batches_that_weigh_the_same(n):
    torch.manual_seed(0)
    w, x = torch.randn(3), torch.randn(12, 3)
    loss = lambda w, x: (Clamps.apply(x @ w) ** 2).sum()
    total = torch.zeros(3)
    for rows in x.chunk(n):
        leaf = w.clone().requires_grad_()
        loss(leaf, rows).backward()
        total += leaf.grad
    torch.testing.assert_close(funcga.accumulate(funcga.grad(loss), n)(w, x), total / n)


@pytest.mark.parametrize(("value", "weights"), [(2000.0, (1, 100)), (1e-5, (4096, 1))])
def test_float16_neither_overflows_nor_underflows_by_its_weight(value, weights):
    w = torch.ones(2).half()
    loss = lambda w, x: (w * value).sum().float() * 1.0
    step = funcga.accumulate(
        funcga.grad(loss), 2, weight=lambda x: weights[int(x[0])], fold=funcga.mean(out_dtype="float32")
    )
    expected = torch.full((2,), float(torch.tensor(value).half()))
    torch.testing.assert_close(step(w, torch.arange(2)), expected)


@pytest.mark.parametrize("ratio", [10, 3000, 100_000])
@pytest.mark.parametrize("light", [0, 1, 2])
def test_a_light_micro_batch_makes_no_float16_inside_of_the_loss_overflow(ratio, light):
    """The cotangent is at most 1, as that of a loop is its share of the whole: w / W."""
    torch.manual_seed(0)
    w, x, weights = torch.randn(64, 64), torch.randn(12, 64), torch.full((12,), ratio)
    weights[4 * light : 4 * light + 4] = 1

    def loss(w, x, _):
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = torch.relu(x @ w) @ w
        return (hidden.float() ** 2).mean()

    step = funcga.accumulate(funcga.grad(loss), 3, weight=lambda x, weights: int(weights.sum()))
    leaf = w.clone().requires_grad_()
    for rows, own in zip(x.chunk(3), weights.chunk(3), strict=True):
        (loss(leaf, rows, own) * float(own.sum() / weights.sum())).backward()
    assert leaf.grad.isfinite().all()
    torch.testing.assert_close(step(w, x, weights), leaf.grad, atol=2e-3 * float(leaf.grad.abs().max()), rtol=0)


@pytest.mark.parametrize("weights", [(1e-44, 1.0), (1e-300, 1.0), (1.0, 1e300), (1e300, 1e-300)])
def test_weights_that_are_far_apart(weights):
    step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).sum()), 2, weight=lambda x: weights[int(x[0])])
    for gradient in (
        step,
        funcga.accumulate(torch.func.grad(lambda w, x: (w * x).sum()), 2, weight=lambda x: weights[int(x[0])]),
    ):
        mean = (weights[1] * 1.0) / (weights[0] + weights[1])
        assert float(gradient(torch.tensor(1.0), torch.arange(2.0))) == pytest.approx(mean)


@pytest.mark.parametrize("fold", ["mean", "concat", "moments", "max"])
def test_checkpoints_that_reenter_with_every_fold_and_state(fold):
    params, x, loss_by = blocks()
    reenters = loss_by(lambda f, *args: checkpoint(f, *args, use_reentrant=True))
    plain = loss_by(lambda f, *args: f(*args))

    def counted(loss):
        def with_state(p, state, x):
            state["seen"] += len(x)  # in place, as BatchNorm
            return loss(p, x) + p["a"].square().sum(), state

        return with_state

    options = {"fold": ((funcga.mean(), funcga.carry()), getattr(funcga, fold)()), "in_axes": (None, funcga.CARRY, 0)}
    results = []
    for loss in (reenters, plain):
        step = funcga.accumulate(funcga.value_and_grad(counted(loss), has_aux=True), 4, **options)
        results += [step(params, {"seen": torch.tensor(0)}, x) for _ in range(2)]
    for result in results:
        assert int(result[0][1]["seen"]) == 8
        assert_same(result, results[-1])


def test_clearing_the_gradients_inside_of_the_loss_is_refused():
    _, _, loss = regression()

    def clears(p, x, y):
        for leaf in p.values():
            leaf.grad = None
        return loss(p, x, y)

    refused(clears, r"loss_fn cleared or replaced the \.grad of a parameter")


def test_a_backward_pass_in_the_only_micro_batch_is_refused():
    params, batch, loss = regression()

    def runs(p, x, y):
        value = loss(p, x, y)
        value.backward(retain_graph=True)
        return value

    for gradient in (runs, lambda p, x, y: (value := loss(p, x, y), value.backward())[0]):
        with pytest.raises(funcga.FuncgaError, match=r"loss_fn called \.backward\(\)"):
            funcga.accumulate(funcga.grad(gradient), 1)(params, *batch)


def test_negative_argnums_are_watched_too():
    w = torch.nn.Parameter(torch.ones(3))

    def runs(x, p):
        (w * x).sum().backward()
        return (p * x).sum()

    with pytest.raises(funcga.FuncgaError, match=r"a parameter's \.grad changed"):
        funcga.accumulate(funcga.grad(runs, argnums=-1), 2, in_axes=(0, None))(torch.ones(4, 3), w)
    assert w.grad is None


def test_memory_that_is_not_torch_s_is_not_added_into():
    cached = np.ones(3, dtype="float32")

    class Hands(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, x):
            return (p * x.sum()).sum()

        @staticmethod
        def backward(ctx, grad):
            return torch.from_numpy(cached), None

    out = funcga.accumulate(funcga.grad(Hands.apply), 4, fold=funcga.sum())(torch.zeros(3), torch.ones(8))
    torch.testing.assert_close(out, torch.full((3,), 4.0))
    assert cached.tolist() == [1, 1, 1]


def test_inference_tensors_as_keywords_and_state():
    with torch.inference_mode():
        p, scale, state, x = torch.tensor(2.0), torch.tensor(3.0), {"k": torch.tensor(1.0)}, torch.arange(4.0)
        loss = lambda p, s, x, *, scale: ((p * x * s["k"] * scale).sum(), {"k": s["k"] + 1})
        step = funcga.accumulate(
            funcga.grad(loss, has_aux=True), 2, in_axes=(None, funcga.CARRY, 0), fold=(funcga.sum(), funcga.carry())
        )
        grads, after = step(p, state, x, scale=scale)
    assert (float(grads), float(after["k"])) == (3 * (1 + 2 * 5), 3)


def test_aux_that_is_no_tensor(kit):
    loss = lambda p, x: ((p * x).sum(), {"none": None, "rows": len(x), "mean": x.mean(), "share": 0.5})
    one, x = kit.arrays(np.float32(2)), kit.arrays(np.arange(4, dtype="float32"))
    (value, aux), grads = funcga.value_and_grad(loss, has_aux=True)(one, x)
    assert (float(value), aux["none"], int(aux["rows"]), float(aux["mean"]), float(grads)) == (12, None, 4, 1.5, 6)
    fold = (
        (funcga.sum(), {"none": funcga.sum(), "rows": funcga.sum(), "mean": funcga.mean(), "share": funcga.sum()}),
        funcga.sum(),
    )
    (value, aux), grads = funcga.accumulate(funcga.value_and_grad(loss, has_aux=True), 2, fold=fold)(one, x)
    assert (float(value), aux["none"], int(aux["rows"]), float(aux["mean"]), float(grads)) == (12, None, 4, 1.5, 6)


def test_a_module_instead_of_its_parameters_is_refused():
    module = torch.nn.Linear(3, 2)
    for given in (module, module.parameters()):
        with pytest.raises(funcga.FuncgaError, match=r"by name: torch_backend.trainable\(module\)"):
            funcga.accumulate(funcga.grad(lambda params, x: x.sum()), 2)(given, torch.ones(4, 3))


def test_a_loss_that_was_taken_out_of_its_array_is_refused():
    with pytest.raises(funcga.FuncgaError, match="not a number that was taken out of one"):
        funcga.accumulate(funcga.grad(lambda p, x: (p * x).sum().item()), 2)(torch.tensor(1.0), torch.ones(4))


# --- memory


def deep(layers=8, width=256, rows=16, dtype=torch.float32):
    torch.manual_seed(0)
    params = {f"w{i}": (torch.randn(width, width) / width**0.5).to(dtype) for i in range(layers)}

    def loss(params, x):
        for w in params.values():
            x = torch.tanh(x @ w)
        return (x**2).mean()

    return params, torch.randn(rows, width).to(dtype), loss


def peak(step, *args):
    step(*args)
    with Watch() as found:
        step(*args)
    return found.bytes


def hand_written(loss, n):
    def step(params, x):
        leaves = tree_map(lambda p: p.detach().requires_grad_(), params)
        total = 0
        for rows in x.chunk(n):
            value = loss(leaves, rows) / n
            value.backward()
            total = total + value.detach()
        return total, tree_map(lambda p: p.grad, leaves)

    return step


@pytest.mark.parametrize("fold", ["mean", "per_weight", "sum", "max"])
def test_peak_memory_is_one_gradient_and_a_layer(fold):
    params, x, loss = deep()
    size = sum(p.nbytes for p in params.values())
    chosen = (funcga.mean(), getattr(funcga, fold)())
    ours = peak(funcga.accumulate(funcga.value_and_grad(loss), 8, fold=chosen), params, x)
    activations = 4 * 8 * 2 * 256 * 4
    folded = 2 if fold == "max" else 1  # the maximum is a new tensor, one leaf at a time
    assert ours <= (1 + folded / 8) * size + activations
    if fold != "max":
        assert ours <= 1.01 * peak(hand_written(loss, 8), params, x)


def test_peak_memory_of_16_bit_parameters():
    params, x, loss = deep(dtype=torch.bfloat16)
    size = sum(p.nbytes for p in params.values())
    for fold in (funcga.mean(), funcga.per_weight()):
        assert peak(funcga.accumulate(funcga.value_and_grad(loss), 8, fold=fold), params, x) <= 2.2 * size


def test_memory_is_flat_in_n():
    params, x, loss = deep(rows=1024, width=64)
    step = funcga.accumulate(funcga.value_and_grad(loss), microbatch_size=1)
    assert peak(step, params, x) <= 1.01 * peak(step, params, x[:2])


def test_weights_of_a_device_cost_one_leaf_more(monkeypatch):
    params, x, loss = deep()
    size = sum(p.nbytes for p in params.values())
    monkeypatch.setattr(torch_backend.arrays, "scalar", lambda weight: weight)
    step = funcga.accumulate(funcga.value_and_grad(loss), 8, weight=lambda x: (x > 0).sum())
    assert peak(step, params, x) <= (1 + 3 / 8) * size


# --- CUDA


@needs_cuda
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_waits_for_the_device(weighted):
    params, batch, loss = regression()
    params, batch = tree_map(torch.Tensor.cuda, (params, tuple(batch)))
    weight = (lambda x, y: (x > 0).sum()) if weighted else None
    step = funcga.accumulate(funcga.value_and_grad(loss), 5, weight=weight)
    expected = step(params, *batch)
    with no_synchronisation():
        result = step(params, *batch)
    assert_same(result, expected)
    on_host = funcga.accumulate(funcga.value_and_grad(loss), 5, weight=weight)(
        *tree_map(torch.Tensor.cpu, (params, *batch))
    )
    assert difference(TORCH, result, on_host) <= 1e-5


@pytest.mark.gpu
def test_a_captured_cuda_graph_replays_right():
    params, batch, loss = regression()
    params, batch = tree_map(torch.Tensor.cuda, (params, tuple(batch)))
    step = funcga.accumulate(funcga.value_and_grad(loss), 4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(params, *batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(params, *batch)
    for scale in (1.0, 2.0, 3.0):
        batch[0].copy_(batch[0] * scale)
        graph.replay()
        torch.cuda.synchronize()
        assert difference(TORCH, captured, step(params, *batch)) <= LIMITS["float32"]


@needs_cuda
def test_several_devices_in_one_tree():
    devices = ["cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cpu"]
    params = {"a": torch.randn(3, 3, device=devices[0]), "b": torch.randn(3, 2, device=devices[1])}
    loss = lambda p, x: ((x.to(devices[0]) @ p["a"]).to(devices[1]) @ p["b"]).square().mean()
    x = torch.randn(8, 3)
    for weight in (None, lambda x: (x.to(devices[0]) > 0).sum()):
        value, grads = funcga.accumulate(funcga.value_and_grad(loss), 4, weight=weight)(params, x)
        assert [str(g.device) for g in grads.values()] == devices
        assert value.isfinite()


@pytest.mark.parametrize("rows", [8, 7])
def test_the_last_division_is_that_of_a_number_to_the_bit(rows):
    torch.manual_seed(0)
    w, x = {"a": torch.randn(64), "b": torch.randn(())}, torch.randn(rows, 64) * 1e-20
    gradient = funcga.grad(lambda w, x: (torch.tanh(w["a"] * 1e-20) * x).sum() * w["b"])
    mean = funcga.accumulate(gradient, rows, fold=funcga.per_weight())(w, x)
    total = funcga.accumulate(gradient, rows, fold=funcga.sum())(w, x)
    assert all(torch.equal(mean[key], total[key] / rows) for key in w)
    assert mean["a"].any()
    assert (mean["a"].abs() < torch.finfo(torch.float32).tiny).any()


@pytest.mark.parametrize("rows", [8, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_where_new_tensors_lie_by_default_makes_no_difference(rows, dtype):
    """As under set_default_device, here the device without data, from which a wrong number would come silently."""
    torch.manual_seed(0)
    w, x = torch.randn(4), torch.randn(rows, 4)
    loss = lambda w, x: torch.tanh(x.to(dtype) @ w.to(dtype)).mean()
    step = funcga.accumulate(funcga.value_and_grad(loss), rows // 2, weight=lambda x: 3 * len(x) + (x > 0).sum())
    expected = step(w, x)
    with torch.device("meta"):
        found = step(w, x)
    assert_same(found, expected)


class Extent(NamedTuple):
    """The sum of an element, and how often it was positive."""

    total: torch.Tensor
    count: torch.Tensor


def test_a_fold_of_each_element_may_have_several_arrays_as_its_result():
    """Of long leaves, which are folded in pieces, and of short ones."""
    torch.manual_seed(0)
    module, rows = torch.nn.Sequential(torch.nn.Linear(280, 280), torch.nn.LayerNorm(280)), torch.randn(6, 280)
    both = funcga.Monoid(
        lambda xp, like: tuple([xp.zeros_like(part) for part in like]), lambda xp, a, b: (a[0] + b[0], a[1] + b[1])
    )
    results = []
    for per_element in (True, False):
        fold = funcga.Fold(
            funcga.Reducer(lambda xp, v, w: (v * w, (v > 0) * 1), both, kinds=("float",), per_element=per_element),
            funcga.normalizers.Normalizer(
                lambda xp, sums, tally: Extent(sums[0], sums[1] * 1.0), per_element=per_element
            ),
        )
        loss_fn = torch_backend.pure_loss(module, lambda module, x: module(x).sin().mean())
        results.append(funcga.accumulate(funcga.grad(loss_fn), 3, fold=fold)(dict(module.named_parameters()), rows))
    for name, extent in results[0].items():
        assert type(extent) is Extent
        for part, expected in zip(extent, results[1][name], strict=True):
            assert torch.equal(part, expected)
            assert part.untyped_storage().nbytes() == part.nbytes
