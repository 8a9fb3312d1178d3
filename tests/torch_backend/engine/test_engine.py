"""The autograd engine: the same bits as the generic path, as lean as the hand-written loop, and pure from outside."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad_and_value
from torch.utils._pytree import tree_leaves, tree_map

import funcga
import torch_backend
from benchmarks.torch_measure import Watch
from tests import oracle, problems
from tests.kits import LIMITS, TORCH, Unseen, difference


def generic(loss):
    """The same gradient as a callable of which funcga knows nothing."""
    transform = grad_and_value(loss)
    return lambda *args: transform(*args)[::-1]


def both(loss, args, n=4, **options):
    """The results of the engine and of the generic path."""
    engine = funcga.accumulate(funcga.value_and_grad(loss), n, **options)(*args)
    return engine, funcga.accumulate(generic(loss), n, **options)(*args)


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


# --- both paths


@pytest.mark.parametrize("fold", FOLDS)
def test_both_paths_agree_bit_for_bit(fold):
    params, batch, loss = regression()
    powers = lambda x, y: 2 ** int((x[0, 0] > 0) + 2 * (x[0, 1] > 0))
    for n, weight in ((1, None), (4, None), (5, powers), (12, powers), (5, lambda x, y: 0.3)):
        assert_same(*both(loss, (params, *batch), n, fold=(funcga.mean(), FOLDS[fold]), weight=weight))


@pytest.mark.parametrize("way", [funcga.value_and_grad, generic], ids=["engine", "generic"])
@pytest.mark.parametrize("fold", ["mean", "per_weight", "sum", "max", "moments"])
@pytest.mark.parametrize("weights", [(2, 0, 3, 1), (0, 1, 1, 1), (1, 1, 1, 0)], ids=str)
def test_weights_that_only_the_device_knows(fold, weights, way):
    """What weighs 0 has a loss of NaN, where its fold leaves it out, and its gradient too."""
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(size, generator=generator, dtype=torch.float64) for size in (3, (8, 3)))
    each = torch.tensor(weights, dtype=torch.float64).repeat_interleave(2)
    is_left_out = fold in ("mean", "moments")
    loss = lambda w, x, each: torch.tanh(x @ w).mean() * (each[0] / each[0] if is_left_out else 1)
    chosen = getattr(funcga, fold)()
    step = funcga.accumulate(
        way(loss), 4, fold=chosen, weight=lambda x, each: each[0].as_subclass(Unseen), in_axes=(None, 0, 0)
    )
    found = step(w, x, each)
    pieces = [*zip(x.split(2), each.split(2), strict=True)]
    outputs = [funcga.value_and_grad(loss)(w, *piece) for piece in pieces]
    for index in range(2):
        values = [output[index].numpy() for output in outputs]
        values = [
            np.zeros_like(v) if is_left_out and not weight else v for v, weight in zip(values, weights, strict=True)
        ]
        expected = oracle.fold(fold, values, weights)
        for leaf, wanted in zip(tree_leaves(found[index]), expected if fold == "moments" else [expected], strict=True):
            np.testing.assert_allclose(leaf.numpy(), wanted, rtol=1e-12, atol=1e-15)


def leaves_of(kind):
    """params and a loss of rows x [8, 3] that uses them; other kinds are in tests/core/test_modules.py."""
    torch.manual_seed(0)
    w, linear = torch.randn(3, 2), lambda p, x: ((x @ p["w"]) ** 2).mean()
    image = lambda p, x: (F.conv2d(x[:, :, None, None].expand(-1, -1, 4, 4), p["w"]) ** 2).mean()
    return {
        "nothing used": ({"w": w}, lambda p, x: x.mean() * 0),
        "a constant": ({"w": w}, lambda p, x: torch.tensor(0.0)),
        "channels last": ({"w": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)}, image),
        "bfloat16": ({"w": w.bfloat16()}, lambda p, x: linear(p, x.bfloat16())),
        "float16": ({"w": w.half()}, lambda p, x: linear(p, x.half())),
    }[kind]


@pytest.mark.parametrize("kind", ["nothing used", "a constant", "channels last", "bfloat16", "float16"])
def test_leaves(kind):
    params, loss = leaves_of(kind)
    for fold in ("mean", "sum", "moments"):
        assert_same(*both(loss, (params, torch.randn(8, 3)), 4, fold=(funcga.mean(), getattr(funcga, fold)())))


# --- purity


@pytest.mark.parametrize("kept", [torch.ones(3), np.ones(3, "float32")], ids=["torch", "NumPy"])
def test_memory_that_a_backward_pass_hands_out_is_not_added_into(kept):
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, x):
            return (p * x.sum()).sum()

        @staticmethod
        def backward(ctx, grad):
            return torch.as_tensor(kept), None

    for fold in (None, funcga.mean(), funcga.sum(), funcga.max(), funcga.concat(), funcga.moments()):
        gradient = funcga.grad(Keeps.apply)
        step = gradient if fold is None else funcga.accumulate(gradient, 3, fold=fold)
        out = step(torch.zeros(3), torch.ones(6))
        assert kept.tolist() == [1, 1, 1]
        assert torch.as_tensor(kept).data_ptr() not in {leaf.data_ptr() for leaf in tree_leaves(out)}
        if fold == funcga.sum():
            assert out.tolist() == [3, 3, 3]


@pytest.mark.parametrize("kind", ["pure_loss", "module"])
def test_nothing_of_a_window_waits_for_the_garbage_collector(kind):
    """What waited would keep the memory of the parameters, which a pure update replaces."""
    module, x = nn.Linear(3, 1), torch.randn(8, 3)
    loss = lambda module, x: module(x).square().mean()
    gradient = {
        "pure_loss": lambda: funcga.value_and_grad(torch_backend.pure_loss(module, loss)),
        "module": lambda: torch_backend.module_value_and_grad(module, loss),
        "function": lambda: funcga.value_and_grad(lambda p, x: (x @ p["weight"].T + p["bias"]).square().mean()),
    }[kind]()
    params = {name: p.detach() for name, p in module.named_parameters()}
    for fold in (funcga.mean(), funcga.sum(), funcga.max()):
        step = funcga.accumulate(gradient, 4, fold=fold)
        call = lambda step=step: step(x) if kind == "module" else step(params, x)
        call()
        gc.collect()
        gc.disable()
        try:
            out = call()
            watch = [weakref.ref(leaf.untyped_storage()) for leaf in tree_leaves(out)]
            del out
            assert all(ref() is None for ref in watch)
            # A value that is checked leaf by leaf is flattened by torch, which leaves a cycle without tensors.
            assert not gc.collect() or fold == funcga.max()
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


def test_in_inference_mode():
    params, batch, loss = regression()
    step = funcga.accumulate(funcga.value_and_grad(loss), 5)
    expected = step(params, *batch)
    with torch.inference_mode():
        assert_same(step(params, *batch), expected)
        made = tree_map(torch.clone, (params, batch))
        assert_same(step(made[0], *made[1]), expected)
    assert_same(step(made[0], *made[1]), expected)
    streamed = funcga.stream(funcga.value_and_grad(loss))(made[0], [made[1]])
    assert_same(streamed, funcga.accumulate(funcga.value_and_grad(loss), 1)(params, *batch))


# --- what autograd can do


def layers(params, x):
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return (x**2).mean()


def three_layers():
    torch.manual_seed(0)
    return {name: torch.randn(4, 4) for name in "abc"}, torch.randn(8, 4)


def test_saved_tensors_on_the_host_and_hooks():
    params, x = three_layers()
    expected, packed = funcga.accumulate(funcga.value_and_grad(layers), 4)(params, x), []

    def hooked(p, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(1), t)[1], lambda t: t):
            return layers(p, x)

    def offloaded(p, x):
        with torch.autograd.graph.save_on_cpu():
            return layers(p, x)

    for loss in (hooked, offloaded):
        assert_same(funcga.accumulate(funcga.value_and_grad(loss), 4)(params, x), expected)
    assert packed


def test_autocast_is_bitwise_that_of_the_loop():
    """Inside of the loss and around the step, whose casts of parameters are not kept for others."""
    params, x = three_layers()

    def cast(p, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layers(p, x)

    leaves = tree_map(lambda p: p.clone().requires_grad_(), params)
    for rows in x.chunk(4):
        (cast(leaves, rows) / 4).backward()
    inside = funcga.accumulate(funcga.grad(cast), 4)(params, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = funcga.accumulate(funcga.grad(layers), 4)(params, x)
        others = funcga.accumulate(funcga.grad(layers), 4)(tree_map(lambda p: p + 1, params), x)
    assert not torch.equal(around["a"], others["a"])
    for name, leaf in leaves.items():
        assert torch.equal(inside[name], leaf.grad)
        assert torch.equal(around[name], leaf.grad)


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


# --- refusals


@pytest.mark.parametrize("leaf", ["number", "string"])
def test_frameworks_refuse_parameters_that_have_no_gradient(kit, leaf):
    x = kit.arrays(problems.regression()[1][0])
    params = {"w": x[0], "step": "adam" if leaf == "string" else kit.cast(x[0, 0], "int32")}
    gradient = funcga.grad(lambda params, x: (params["w"] * x).sum())
    for step in (gradient, funcga.accumulate(gradient, 2)):
        with pytest.raises((TypeError, RuntimeError)):
            step(params, x)


def test_losses_without_a_gradient_are_refused(kit):
    x = kit.arrays(problems.regression()[1][0])
    cases = [
        (
            lambda params, x: (params["w"] * x).sum(1),
            {"w": x[0]},
            {},
            r"the loss is float32\[\d+\], and a gradient is",
        ),
        (lambda params, x: ((params["w"] * x).sum(), 1), {"w": x[0]}, {}, "of type tuple.*has_aux=True"),
        (
            lambda params, x: (params["w"] * x).sum(),
            {"w": x[0]},
            {"has_aux": True},
            "asks for a pair: return loss, aux",
        ),
        (
            lambda params, x: kit.cast((params["w"] * x).sum(), "complex64"),
            {"w": x[0]},
            {},
            "is that of a scalar, a real number",
        ),
        (lambda params, x: "loss", {"w": x[0]}, {}, "the loss is of type str, and a gradient is that of a scalar"),
        (lambda params, x: (params["w"] * x).sum(), {"w": x[0]}, {"argnums": 2}, "argnums is 2, and the call has 2"),
        (lambda params, x: (params["w"] * x).sum(), {"w": x[0]}, {"argnums": (0, -2)}, "name each once"),
    ]
    for loss, given, options, match in cases:
        gradient = funcga.value_and_grad(loss, **options)
        for call in (gradient, funcga.accumulate(gradient, 4)):
            with pytest.raises(funcga.FuncgaError, match=match):
                call(given, x)


def test_a_module_instead_of_its_parameters_is_refused():
    module = nn.Linear(3, 2)
    for given in (module, module.parameters()):
        with pytest.raises(TypeError, match=r"of a module take torch_backend.trainable\(module\)"):
            funcga.accumulate(funcga.grad(lambda params, x: x.sum()), 2)(given, torch.ones(4, 3))


def changing(first, later):
    """A loss whose output has another structure or dtype from the second micro-batch on."""
    calls = []
    return lambda p, x: (calls.append(1), (first if len(calls) < 2 else later)(p, x))[1]


def clears(p, x):
    p.grad = None
    return (p * x).sum()


def clears_in_the_backward_pass(p, x):
    value = (p * x).sum()
    value.register_hook(lambda _: setattr(p, "grad", None))
    return value


def runs_backward(p, x):
    value = (p * x).sum()
    value.backward(retain_graph=True)
    return value


TOTAL = lambda p, x: (p * x).sum()
REFUSED = {
    "another structure of aux": (
        changing(lambda p, x: (TOTAL(p, x), {"a": x.sum()}), lambda p, x: (TOTAL(p, x), {"b": x.sum()})),
        {"has_aux": True}, 2, r"missing `output\[0\]\[1\]\['a'\]`, new `output\[0\]\[1\]\['b'\]`",
    ),
    "another dtype": (
        changing(TOTAL, lambda p, x: TOTAL(p, x).double()),
        {}, 2, r"output\[0\] as float64\[\] for micro-batch 2 and as float32\[\]",
    ),
    "a number": (lambda p, x: TOTAL(p, x).item(), {}, 2, "the loss is of type float"),
    "a gradient that is cleared": (clears, {}, 2, r"loss_fn called \.backward\(\), or cleared or replaced the \.grad of a parameter, with zero_grad\(\)"),
    "a gradient that is cleared in the last pass": (
        lambda p, x: (clears_in_the_backward_pass if x[0] else TOTAL)(p, x),
        {}, 2, r"loss_fn called \.backward\(\), or cleared or replaced the \.grad of a parameter, with zero_grad\(\)",
    ),
    "backward in the only micro-batch": (runs_backward, {}, 1, r"loss_fn called \.backward\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind):
    loss, options, n, match = REFUSED[kind]
    parameter = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(funcga.FuncgaError, match=match):
        funcga.accumulate(funcga.value_and_grad(loss, **options), n)(parameter, torch.arange(4.0) // 2)
    assert parameter.grad is None


# --- the cotangent, which is the weight


@pytest.mark.parametrize(("value", "weights"), [(2000.0, (1, 100)), (1e-5, (4096, 1))])
def test_float16_neither_overflows_nor_underflows_by_its_weight(value, weights):
    w = torch.ones(2).half()
    loss = lambda w, x: (w * value).sum().float() * 1.0
    step = funcga.accumulate(
        funcga.grad(loss), 2, weight=lambda x: weights[int(x[0])], fold=funcga.mean(out_dtype="float32")
    )
    expected = torch.full((2,), float(torch.tensor(value).half()))
    torch.testing.assert_close(step(w, torch.arange(2)), expected)


@pytest.mark.parametrize(("ratio", "light"), [(3000, 0), (100_000, 2)])
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


@pytest.mark.parametrize("weights", [(1e-300, 1.0), (1e300, 1e-300)])
def test_weights_that_are_far_apart(weights):
    loss = lambda w, x: (w * x).sum()
    for gradient in (funcga.grad(loss), torch.func.grad(loss)):
        step = funcga.accumulate(gradient, 2, weight=lambda x: weights[int(x[0])])
        mean = weights[1] / (weights[0] + weights[1])
        assert float(step(torch.tensor(1.0), torch.arange(2.0))) == pytest.approx(mean)


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


@pytest.mark.parametrize("fold", ["mean", "sum", "max"])
def test_peak_memory_is_one_gradient_and_a_layer(fold):
    params, x, loss = deep()
    size = sum(p.nbytes for p in params.values())
    chosen = (funcga.mean(), getattr(funcga, fold)())
    ours = peak(funcga.accumulate(funcga.value_and_grad(loss), 8, fold=chosen), params, x)
    activations = 4 * 8 * 2 * 256 * 4
    # A gradient whose fold is no sum is taken whole after its pass; a maximum is a new tensor, a leaf at a time.
    folded = 2 + 1 / 8 if fold == "max" else 1 + 1 / 8
    assert ours <= folded * size + activations
    if fold != "max":
        assert ours <= 1.01 * peak(hand_written(loss, 8), params, x)


def test_memory_is_flat_in_n():
    params, x, loss = deep(rows=128, width=64)
    step = funcga.accumulate(funcga.value_and_grad(loss), microbatch_size=1)
    assert peak(step, params, x) <= 1.01 * peak(step, params, x[:2])


def test_weights_of_a_device_cost_one_leaf_more():
    params, x, loss = deep()
    size = sum(p.nbytes for p in params.values())
    weight = lambda x: (x > 0).sum().as_subclass(Unseen)
    assert peak(funcga.accumulate(funcga.value_and_grad(loss), 8, weight=weight), params, x) <= (1 + 3 / 8) * size


# --- CUDA


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


@pytest.mark.parametrize(("rows", "dtype"), [(8, torch.float32), (6, torch.float16)], ids=str)
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


def test_a_constant_loss_whose_weight_changes_the_unit():
    """70 rows in micro-batches of 18, 18, 17 and 17: the sums are multiplied before the third."""
    params, x = {"w": torch.randn(3, dtype=torch.float64)}, torch.randn(70, 3, dtype=torch.float64)
    x[36:53] = 0
    loss = lambda p, x: ((x @ p["w"]) ** 2).mean() if x.any() else torch.zeros((), dtype=x.dtype)
    value, grads = funcga.accumulate(funcga.value_and_grad(loss), 4)(params, x)
    w = params["w"].clone().requires_grad_()
    expected = ((x @ w) ** 2).mean()
    expected.backward()
    torch.testing.assert_close((value, grads["w"]), (expected.detach(), w.grad))


def rows_in(mode, x):
    """A loader whose body enters a mode, which is the caller's then until the loader ends."""
    with mode():
        for rows in x.split(4):
            yield rows.clone()


def rows_in_later(mode, x):
    yield x[:4]
    yield from rows_in(mode, x[4:])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loader", [rows_in, rows_in_later])
@pytest.mark.parametrize("way", ["module", "params"])
def test_a_loader_that_enters_a_mode(way, loader, mode):
    module, x = nn.Linear(3, 1).double(), torch.randn(12, 3, dtype=torch.float64)
    loss = lambda module, x: module(x).square().mean()
    step = funcga.stream(torch_backend.module_value_and_grad(module, loss))
    if way == "params":
        of_params = funcga.stream(funcga.value_and_grad(torch_backend.pure_loss(module, loss)))
        step = lambda items: of_params(torch_backend.trainable(module), items)
    expected = torch.autograd.grad(loss(module, x), [*module.parameters()])
    for _ in range(2):
        _, grads = step(loader(mode, x))
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        torch.testing.assert_close([*grads.values()], [*expected])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loader_runs_in_the_mode_of_the_caller(mode):
    module, seen = nn.Linear(3, 1), []

    def loader():
        for rows in torch.ones(6, 3).split(2):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            yield rows

    step = funcga.stream(torch_backend.module_value_and_grad(module, lambda m, x: m(x).mean()), weight=lambda x: 0)
    with mode():
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        _, grads = step(loader())
    assert seen == [expected] * 3
    assert not any(grad.is_inference() for grad in grads.values())


def test_casts_of_autocast_from_before_an_update():
    module, x = nn.Linear(4, 1), torch.randn(8, 4)
    loss = lambda module, x: module(x).float().square().mean()
    step = funcga.accumulate(torch_backend.module_value_and_grad(module, loss), 2)
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
        with torch.no_grad():
            module.weight.mul_(3)
        value, _ = step(x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(value, loss(module, x).detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("with_value", [False, True])
def test_many_micro_batches_of_uneven_weights(with_value):
    """Shares that are no powers of two keep the unit of the sums."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, generator=generator, dtype=torch.float64)
    pieces = [torch.randn(3 + 2 * (i % 2), 3, generator=generator, dtype=torch.float64) for i in range(160)]
    leaf = w.clone().requires_grad_()
    expected = (torch.cat(pieces) @ leaf).square().mean()
    (gradient,) = torch.autograd.grad(expected, leaf)
    loss = lambda w, x: (x @ w).square().mean()
    narrow = [(piece.float(),) for piece in pieces]
    if with_value:
        value, found = funcga.stream(funcga.value_and_grad(loss))(w.float(), narrow)
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=0)
    else:
        found = funcga.stream(funcga.grad(loss))(w.float(), narrow)
    torch.testing.assert_close(found.double(), gradient, rtol=1e-5, atol=1e-6)
