"""What the torch backend promises beyond the shared properties: memory, graphs, compilation, devices."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, vmap

import funcga
import torch_backend
from benchmarks.torch_measure import Watch
from tests import problems, properties
from tests.kits import LIMITS, TORCH, counted, difference, needs_cuda, no_synchronisation


def deep(layers=8, width=64, rows=16):
    """Equal layers: P = layers * width**2 * 4 bytes, so one leaf is P / layers."""
    r = problems.rng(7)
    params = {f"w{i}": torch.from_numpy(r.normal(size=(width, width)).astype("float32") / 8) for i in range(layers)}

    def loss(params, x):
        for w in params.values():
            x = torch.tanh(x @ w)
        return (x**2).mean()

    return params, torch.from_numpy(r.normal(size=(rows, width)).astype("float32")), loss


def size(tree):
    return sum(p.nbytes for p in tree.values())


def grad_and_value_first(loss):
    transform = grad_and_value(loss)
    return lambda *args: transform(*args)[::-1]


@pytest.mark.parametrize("n", [2, 8])
def test_peak_memory_is_two_gradients_and_a_leaf(n):
    params, x, loss = deep(width=256, rows=8)
    step = funcga.accumulate(grad(loss), n)
    with Watch() as peak:
        step(params, x)
    activations = 8 * 256 * 4 * 32  # some 32 of them: small beside a leaf
    assert activations <= size(params) / len(params)
    assert peak.bytes <= 2 * size(params) + size(params) / len(params)


def test_peak_memory_with_weights_that_the_host_does_not_see(monkeypatch):
    """On a device the weight is never read: each leaf is masked on its way in, one at a time."""
    params, x, loss = deep(width=256, rows=8)
    monkeypatch.setattr(torch_backend.arrays, "scalar", lambda weight: weight)
    step = funcga.accumulate(grad(loss), 4, weight=lambda x: (x > 0).sum())
    step(params, x)
    with Watch() as peak:
        step(params, x)
    assert peak.bytes <= 2 * size(params) + 2 * size(params) / len(params) + 256  # the weight, as scalars


def test_memory_is_flat_in_n():
    params, x, loss = deep(rows=64)
    for p in params.values():
        p.requires_grad_()  # a graph of a micro-batch that outlived it would show
    peaks = []
    for rows in (4, 64):
        with Watch() as peak:
            funcga.accumulate(grad(loss), microbatch_size=2)(params, x[:rows])
        peaks.append(peak.bytes)
    assert peaks[1] <= 1.01 * peaks[0]


def test_a_float32_accumulator_of_a_16_bit_gradient_adds_no_copy_of_it():
    params, x, loss = deep(rows=8)
    params = {k: v.bfloat16() for k, v in params.items()}
    with Watch() as peak:
        funcga.accumulate(grad(loss), 4)(params, x.bfloat16())
    # accumulator 2 P, gradient P, and one leaf on its way
    assert peak.bytes <= 3 * size(params) + 2 * size(params) / len(params) + 8 * 64 * 4 * 40


def test_no_graph_outlives_its_microbatch():
    """Parameters that require grad: the arguments are detached, so that torch.func records no second graph."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    params = dict(module.named_parameters())
    _, (x, y), _ = problems.regression()
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    seen = []

    def loss(params, x, y):
        seen.append([p.requires_grad for p in params.values()])
        return ((functional_call(module, params, (x,)) - y) ** 2).mean()

    value, grads = funcga.accumulate(grad_and_value_first(loss), 5)(params, x, y)
    assert value.grad_fn is None
    assert not any(leaf.requires_grad for leaf in grads.values())
    assert all(p.requires_grad and p.grad is None for p in params.values())
    loss_value = ((module(x) - y) ** 2).mean()
    loss_value.backward()
    assert difference(TORCH, grads, {k: p.grad for k, p in params.items()}) <= LIMITS["float32"]


def test_a_gradient_function_that_uses_autograd_itself():
    params, batch, loss = problems.regression()
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)

    def gradient(params, x, y):
        leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
        value = loss(leaves, x, y)
        return value, dict(
            zip(leaves, torch.autograd.grad(value, list(leaves.values()), create_graph=True), strict=True)
        )

    out = funcga.accumulate(gradient, 5)(params, *batch)
    assert difference(TORCH, out, funcga.value_and_grad(loss)(params, *batch)) <= LIMITS["float32"]
    assert not out[0].requires_grad


def test_under_no_grad_and_inference_mode():
    params, batch, loss = problems.regression()
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)
    full = funcga.value_and_grad(loss)(params, *batch)
    step = funcga.accumulate(funcga.value_and_grad(loss), 5)
    with torch.no_grad():
        assert difference(TORCH, step(params, *batch), full) <= LIMITS["float32"]
    with torch.inference_mode():
        plain = funcga.accumulate(loss, 5)(params, *batch)
    assert difference(TORCH, plain, full[0]) <= LIMITS["float32"]


def test_gradients_of_expanded_and_transposed_memory():
    """A gradient may be a view of one number, or of the parameters: neither is added into."""
    w = torch.arange(6.0).reshape(2, 3)
    x = torch.ones(4, 3)
    step = funcga.accumulate(lambda w, x: (w.sum().expand(5), w.T, x.sum() * w), 4)
    for _ in range(2):
        expanded, transposed, scaled = step(w, x)
        torch.testing.assert_close(expanded, torch.full((5,), 15.0))
        torch.testing.assert_close(transposed, w.T)
        torch.testing.assert_close(scaled, 3 * w)
    torch.testing.assert_close(w, torch.arange(6.0).reshape(2, 3))


def test_per_example_gradients_within():
    params, batch, loss = problems.regression()
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)
    each = vmap(grad(lambda p, x, y: loss(p, x[None], y[None])), (None, 0, 0))
    step = funcga.accumulate(each, 5, fold=funcga.concat())
    assert difference(TORCH, step(params, *batch), each(params, *batch)) <= LIMITS["float32"]


@pytest.mark.parametrize(
    ("fold", "rows"), [("mean", 12), ("mean", 11), ("per_weight", 11), ("sum", 11), ("max", 11), ("moments", 11)]
)
def test_compiles_to_one_graph(fold, rows):
    """Of three micro-batches, the first two of which are as large as each other, and in all but one case larger than the last."""
    params, batch, loss = problems.regression(rows=rows)
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)
    step = funcga.accumulate(grad_and_value(loss), 3, fold=getattr(funcga, fold)(), weight=lambda x, y: (x > 0).sum())
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert difference(TORCH, compiled(params, *batch), step(params, *batch)) <= 4 * LIMITS["float32"]
    assert difference(TORCH, compiled(params, *batch), step(params, *batch)) <= 4 * LIMITS["float32"]
    assert len(graphs) == 1


def test_compiles_for_another_batch_size():
    params, batch, loss = problems.regression()
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)
    for options in ({}, {"weight": lambda x, y: len(x)}, {"weight": lambda x, y: x.shape[0] * 2.0}):
        torch._dynamo.reset()
        step = funcga.accumulate(grad_and_value(loss), 3, **options)
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        for rows in (12, 9, 10, 11) if not options else (12, 10):
            part = [a[:rows] for a in batch]
            assert difference(TORCH, compiled(params, *part), step(params, *part)) <= LIMITS["float32"]


def test_compiles_trees_of_folds_state_and_outputs():
    x = torch.arange(8.0)

    def gradient(p, s, x, *, scale):
        return {"g": p * x.mean() * scale, "rows": x * 2}, {"k": s["k"] + x.sum()}

    step = funcga.accumulate(
        gradient,
        3,
        in_axes=(None, funcga.CARRY, 0),
        fold=({"rows": funcga.concat(), "g": funcga.mean()}, funcga.carry()),
    )
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    args = torch.tensor(2.0), {"k": torch.tensor(1.0)}, x
    assert difference(TORCH, compiled(*args, scale=3), step(*args, scale=3)) <= LIMITS["float32"]


def test_compiled_transforms_of_a_step():
    """torch.compile around grad and vmap of accumulate: the accumulators are not written to there either."""
    params, batch, loss = problems.regression()
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)
    step = funcga.accumulate(grad(loss), 5)
    norm = grad(lambda p: sum((g**2).sum() for g in step(p, *batch).values()))
    torch._dynamo.reset()
    assert difference(TORCH, torch.compile(norm, backend="eager")(params), norm(params)) <= LIMITS["float32"]
    each = vmap(step, (None, 0, None))
    pair = torch.stack([batch[0], batch[0] + 1])
    compiled = torch.compile(each, backend="eager")(params, pair, batch[1])
    assert difference(TORCH, compiled, each(params, pair, batch[1])) <= LIMITS["float32"]


def test_compiles_as_the_first_call_of_a_process_and_never_again():
    """What is imported later, JAX too, is nothing that the graph depends on; nor is it in the way of another graph."""
    program = """
import sys, torch, funcga
step = funcga.accumulate(torch.func.grad(lambda p, x: (p * x).sum()), 2)
compiled = torch.compile(step, fullgraph=True, backend="eager")
print(float(compiled(torch.tensor(3.0), torch.arange(4.0))))
with torch.compiler.set_stance("fail_on_recompile"):
    for name in ("another", "jax"):
        sys.modules[name] = sys
        compiled(torch.tensor(3.0), torch.arange(4.0))
del sys.modules["jax"]
import jax
print(float(compiled(torch.tensor(3.0), torch.arange(6.0))))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["3.0", "7.5"], 0), done.stderr


def test_a_compiled_loss():
    params, batch, loss = problems.regression()
    params, batch = TORCH.arrays(params), TORCH.arrays(batch)
    gradient = torch.compile(grad_and_value(loss), backend="eager")
    out = funcga.accumulate(gradient, 4)(params, *batch)
    assert difference(TORCH, out, grad_and_value(loss)(params, *batch)) <= LIMITS["float32"]


def test_buffers_threaded_as_carry():
    """BatchNorm's running statistics: a pure function of buffers, threaded from one micro-batch to the next."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    reference = copy.deepcopy(module)
    x = torch.from_numpy(problems.rng(8).normal(size=(12, 3)).astype("float32"))

    def loss(params, buffers, x):
        buffers = {k: v.clone() for k, v in buffers.items()}
        return (functional_call(module, (params, buffers), (x,)) ** 2).mean(), buffers

    step = funcga.accumulate(
        grad(loss, has_aux=True), 3, in_axes=(None, funcga.CARRY, 0), fold=(funcga.mean(), funcga.carry())
    )
    before = {k: v.clone() for k, v in module.named_buffers()}
    grads, buffers = step(dict(module.named_parameters()), dict(module.named_buffers()), x)
    for chunk in x.chunk(3):
        ((reference(chunk) ** 2).mean() / 3).backward()
    assert difference(TORCH, grads, {k: p.grad for k, p in reference.named_parameters()}) <= LIMITS["float32"]
    for name, value in reference.named_buffers():
        torch.testing.assert_close(buffers[name], value)
        torch.testing.assert_close(before[name], dict(module.named_buffers())[name])
    assert int(buffers["1.num_batches_tracked"]) == 3


def test_buffers_that_grad_fn_updates_in_place():
    """The caller's buffers are copied on entry, so that the same call gives the same result twice."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    x = torch.from_numpy(problems.rng(8).normal(size=(12, 3)).astype("float32"))
    buffers = {k: v.clone() for k, v in module.named_buffers()}
    before = {k: v.clone() for k, v in buffers.items()}

    def outputs(params, buffers, x):
        return functional_call(module, (params, buffers), (x,)).mean(), buffers

    fold = (funcga.mean(), funcga.carry())
    split = funcga.accumulate(outputs, 3, in_axes=(None, funcga.CARRY, 0), fold=fold)
    streamed = funcga.stream(outputs, in_axes=(None, funcga.CARRY, 0), fold=fold)
    for batch, step in ((x, split), (x.chunk(3), lambda p, b, x: streamed(p, b, list(x)))):
        first, second = (step(dict(module.named_parameters()), buffers, batch)[1] for _ in range(2))
        for name, value in buffers.items():
            torch.testing.assert_close(value, before[name])
            torch.testing.assert_close(first[name], second[name])
        assert int(first["1.num_batches_tracked"]) == 3


def test_python_state_can_be_carried():
    step = funcga.accumulate(lambda s, x: (x.sum(), {"k": s["k"] + 1, "name": s["name"]}), 3,
                             in_axes=(funcga.CARRY, 0), fold=(funcga.sum(), funcga.carry()))  # fmt: skip
    assert step({"k": 0, "name": "a"}, torch.ones(6))[1] == {"k": 3, "name": "a"}


def test_carry_is_matched_by_key_not_by_order():
    def step(state, x):
        return x.sum(), {"b": state["b"] * 2, "a": state["a"] + 1}

    _, state = funcga.accumulate(step, 3, in_axes=(funcga.CARRY, 0), fold=(funcga.sum(), funcga.carry()))(
        {"a": torch.tensor(0.0), "b": torch.tensor(1.0)}, torch.ones(3)
    )
    assert (float(state["a"]), float(state["b"])) == (3, 8)


def test_folds_of_dicts_are_matched_by_key_not_by_order():
    out = funcga.accumulate(
        lambda x: {"a": x.sum(), "b": x.sum()}, 2, in_axes=0, fold={"b": funcga.sum(), "a": funcga.max()}
    )(torch.tensor([1.0, 2.0]))
    assert (float(out["a"]), float(out["b"])) == (2, 3)


def test_float8():
    x = torch.ones(64).to(torch.float8_e4m3fn)
    out = funcga.accumulate(lambda x: x, 64, in_axes=0, fold=funcga.sum())(x)
    assert (out.dtype, float(out[0])) == (torch.float8_e4m3fn, 64.0)


def test_carry_and_folds_survive_copies():
    assert copy.deepcopy(funcga.CARRY) is funcga.CARRY
    assert pickle.loads(pickle.dumps(funcga.CARRY)) is funcga.CARRY
    assert repr(funcga.CARRY) == "funcga.CARRY"
    assert funcga.mean() == funcga.mean()


def test_weights_are_taken_on_the_host_without_a_device():
    calls = []
    original = torch.Tensor.item
    gradient, seen = counted(lambda x: x.sum())
    step = funcga.accumulate(gradient, 4, in_axes=0, weight=lambda x: (x > 0).sum())
    try:
        torch.Tensor.item = lambda self: (calls.append(self.device.type), original(self))[1]
        step(torch.ones(8))
    finally:
        torch.Tensor.item = original
    assert (calls, len(seen)) == (["cpu"] * 4, 4)


def test_a_step_on_the_meta_device():
    """No value is ever looked at, so that a fold can be planned without data."""
    params, batch, loss = problems.regression()
    meta = lambda tree: torch.utils._pytree.tree_map(lambda a: torch.from_numpy(a).to("meta"), tree)
    for weight in (None, lambda x, y: (x > 0).sum()):
        value, grads = funcga.accumulate(funcga.value_and_grad(loss), 5, weight=weight)(meta(params), *meta(batch))
        assert (value.shape, grads["w"].shape, grads["w"].device.type) == ((), (3, 2), "meta")


@pytest.mark.parametrize("holds", properties.WITHOUT_PARAMETERS, ids=lambda f: f.__name__)
def test_properties_with_weights_that_the_host_does_not_see(holds, monkeypatch):
    monkeypatch.setattr(torch_backend.arrays, "scalar", lambda weight: weight)
    holds(TORCH, funcga.accumulate)


def test_state_that_comes_back_as_it_went_in_is_a_copy():
    state = torch.ones(3)
    step = funcga.accumulate(
        lambda s, x: (x.sum(), s), 2, in_axes=(funcga.CARRY, 0), fold=(funcga.sum(), funcga.carry())
    )
    step(state, torch.ones(4))[1].add_(1)
    torch.testing.assert_close(state, torch.ones(3))


def test_outputs_in_a_buffer_that_grad_fn_reuses():
    """As a captured CUDA graph does: what is collected and what is carried must not be overwritten."""
    buffer = torch.zeros(2)
    step = funcga.accumulate(lambda x: (buffer.copy_(x), x.sum()), 3, in_axes=0, fold=(funcga.concat(), funcga.sum()))
    torch.testing.assert_close(step(torch.arange(6.0))[0], torch.arange(6.0))


@needs_cuda
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_waits_for_the_device(weighted):
    params, batch, loss = problems.regression()
    params, batch = ({k: v.cuda() for k, v in TORCH.arrays(params).items()}, [a.cuda() for a in TORCH.arrays(batch)])
    step = funcga.accumulate(grad_and_value(loss), 5, weight=(lambda x, y: (x > 0).sum()) if weighted else None)
    expected = step(params, *batch)
    with no_synchronisation():
        out = step(params, *batch)
    assert difference(TORCH, out, expected) == 0
    on_host = funcga.accumulate(grad_and_value(loss), 5, weight=(lambda x, y: (x > 0).sum()) if weighted else None)(
        {k: v.cpu() for k, v in params.items()}, *(a.cpu() for a in batch)
    )
    assert difference(TORCH, out, on_host) <= 1e-5


@needs_cuda
def test_a_batch_of_a_nan_on_the_device_with_weight_zero():
    x = torch.tensor([float("nan"), 1.0, 2.0, 3.0], device="cuda")
    step = funcga.accumulate(lambda x: x.sum(), 4, in_axes=0, weight=lambda x: (~x.isnan()).sum())
    assert float(step(x)) == 2.0


def test_a_weight_that_stays_on_the_device_masks_nan():
    """Under vmap no weight is seen on the host; a micro-batch of weight 0 is still left out, NaN or not."""
    x = torch.tensor([[float("nan"), 1.0, 2.0], [4.0, float("nan"), 6.0]])
    step = funcga.accumulate(lambda x: x.sum(), 3, in_axes=0, weight=lambda x: (~x.isnan()).sum())
    np.testing.assert_array_equal(vmap(step)(x), [1.5, 5.0])
