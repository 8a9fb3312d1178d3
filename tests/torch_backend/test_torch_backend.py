"""What the torch backend promises of any grad_fn, beyond the shared properties: memory, graphs, compilation, devices."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.func import grad, grad_and_value, vmap

import funcga
from benchmarks.torch_measure import Watch
from tests import problems
from tests.kits import LIMITS, TORCH, difference, needs_cuda, no_synchronisation
from tests.torch_backend.engine.test_engine import Unseen


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


def regression():
    params, batch, loss = problems.regression()
    return TORCH.arrays(params), TORCH.arrays(batch), loss


def peak(gradient, n, params, x, **options):
    step = funcga.accumulate(gradient, n, **options)
    step(params, x)
    with Watch() as found:
        step(params, x)
    return found.bytes


def test_peak_memory_is_two_gradients_and_a_leaf():
    """And one more where the host does not see the weight: each leaf is masked on its way in, one at a time."""
    params, x, loss = deep(width=256, rows=8)
    leaf = size(params) // len(params)
    activations = 8 * 256 * 4 * 32  # some 32 of them: small beside a leaf
    assert activations <= leaf
    assert peak(grad(loss), 8, params, x) <= 2 * size(params) + leaf
    weight = lambda x: (x > 0).sum().as_subclass(Unseen)
    assert peak(grad(loss), 4, params, x, weight=weight) <= 2 * size(params) + 2 * leaf + 256  # the weight, as scalars


def test_a_float32_accumulator_of_a_16_bit_gradient_adds_no_copy_of_it():
    params, x, loss = deep(rows=8)
    params = {k: v.bfloat16() for k, v in params.items()}
    # accumulator 2 P, gradient P, and one leaf on its way
    limit = 3 * size(params) + 2 * size(params) / len(params) + 8 * 64 * 4 * 40
    assert peak(grad(loss), 4, params, x.bfloat16()) <= limit


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


def test_a_gradient_function_that_uses_autograd_itself():
    params, batch, loss = regression()

    def gradient(params, x, y):
        leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
        value = loss(leaves, x, y)
        return value, dict(
            zip(leaves, torch.autograd.grad(value, list(leaves.values()), create_graph=True), strict=True)
        )

    out = funcga.accumulate(gradient, 5)(params, *batch)
    assert difference(TORCH, out, funcga.value_and_grad(loss)(params, *batch)) <= LIMITS["float32"]
    assert not out[0].requires_grad


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


@pytest.mark.parametrize("weight", [None, lambda x, y: len(x)], ids=["", "weighed"])
def test_compiles_for_another_batch_size(weight):
    params, batch, loss = regression()
    torch._dynamo.reset()
    step = funcga.accumulate(grad_and_value(loss), 3, weight=weight)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for rows in (12, 9, 10, 11) if weight is None else (12, 10):
        part = [a[:rows] for a in batch]
        assert difference(TORCH, compiled(params, *part), step(params, *part)) <= LIMITS["float32"]


def test_compiled_transforms_of_a_step():
    """torch.compile around grad and vmap of accumulate: the accumulators are not written to there either."""
    params, batch, loss = regression()
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


def test_state_that_is_written_in_place_is_a_copy():
    """The caller's state is copied on entry, and what is returned is the caller's own."""
    state, x = {"seen": torch.ones(3), "same": torch.ones(3)}, torch.ones(6)

    def outputs(state, x):
        state["seen"] += len(x)
        return x.sum(), state

    options = {"in_axes": (funcga.CARRY, 0), "fold": (funcga.sum(), funcga.carry())}
    streamed = funcga.stream(outputs, **options)
    for step in (funcga.accumulate(outputs, 3, **options), lambda s, x: streamed(s, [*x.split(2)])):
        for _ in range(2):
            after = step(state, x)[1]
            assert after["seen"].tolist() == [7] * 3
            after["same"].add_(1)
            assert all(leaf.tolist() == [1] * 3 for leaf in state.values())


def test_state_may_be_anything_and_is_matched_by_key():
    step = funcga.accumulate(
        lambda s, x: (x.sum(), {"b": s["b"] * 2, "a": s["a"] + 1, "name": s["name"]}), 3,
        in_axes=(funcga.CARRY, 0), fold=(funcga.sum(), funcga.carry()),
    )  # fmt: skip
    _, state = step({"a": 0, "b": torch.tensor(1.0), "name": "any"}, torch.ones(6))
    assert state == {"a": 3, "b": 8, "name": "any"}


def test_float8():
    x = torch.ones(64).to(torch.float8_e4m3fn)
    out = funcga.accumulate(lambda x: x, 64, in_axes=0, fold=funcga.sum())(x)
    assert (out.dtype, float(out[0])) == (torch.float8_e4m3fn, 64.0)


def test_carry_and_folds_survive_copies():
    assert copy.deepcopy(funcga.CARRY) is funcga.CARRY
    assert pickle.loads(pickle.dumps(funcga.CARRY)) is funcga.CARRY
    assert repr(funcga.CARRY) == "funcga.CARRY"
    assert funcga.mean() == funcga.mean()


def test_a_step_on_the_meta_device():
    """No value is ever looked at, so that a fold can be planned without data."""
    params, batch, loss = problems.regression()
    meta = lambda tree: torch.utils._pytree.tree_map(lambda a: torch.from_numpy(a).to("meta"), tree)
    for weight in (None, lambda x, y: (x > 0).sum()):
        value, grads = funcga.accumulate(funcga.value_and_grad(loss), 5, weight=weight)(meta(params), *meta(batch))
        assert (value.shape, grads["w"].shape, grads["w"].device.type) == ((), (3, 2), "meta")


def test_a_weight_that_stays_on_the_device_masks_nan():
    """Under vmap no weight is seen on the host; a micro-batch of weight 0 is still left out, NaN or not."""
    x = torch.tensor([[float("nan"), 1.0, 2.0], [4.0, float("nan"), 6.0]])
    step = funcga.accumulate(lambda x: x.sum(), 3, in_axes=0, weight=lambda x: (~x.isnan()).sum())
    np.testing.assert_array_equal(vmap(step)(x), [1.5, 5.0])


@needs_cuda
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_waits_for_the_device(weighted):
    params, batch, loss = regression()
    params, batch = {k: v.cuda() for k, v in params.items()}, [a.cuda() for a in batch]
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
