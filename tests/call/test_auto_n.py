"""`n="auto"`: what runs out of memory is replayed, and the result is exact wherever it ran out."""

import gc

import jax
import numpy as np
import pytest
import torch

import funcga
from funcga.tools.plan.search import smallest
from tests import problems
from tests.kits import LIMITS, TORCH, difference, needs_cuda


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """The search collects garbage whenever memory runs out, which takes long among all that other tests have made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Full(Exception):
    pass


def fails(error):
    return isinstance(error, Full)


@pytest.mark.parametrize(("most", "known"), [(1, None), (40, None), (40, 3), (7, 7)])
def test_the_smallest_is_found(most, known, monkeypatch):
    monkeypatch.setattr("funcga.tools.plan.search.gc.collect", lambda: 0)  # takes a tenth of a second
    for limit in range(known or 1, most + 1):  # what once fitted is not tried below
        tried = []

        def run(n, limit=limit, tried=tried):
            tried.append(n)
            if n < limit:
                raise Full
            return f"of {n}"

        assert smallest(run, most, fails, known) == (limit, f"of {limit}")
        assert len(tried) <= 2 * most.bit_length() + 3
        assert known != limit or tried == [known]  # what is remembered is tried first


def test_what_is_raised():
    """When one row does not fit the error with a note, and other errors at once."""
    for error in (Full("too large"), KeyError("mine")):

        def run(n, error=error):
            raise error

        with pytest.raises(type(error)) as caught:
            smallest(run, 5, fails)
        assert getattr(caught.value, "__notes__", [""])[0].count("one row a micro-batch") == (type(error) is Full)


def exhausted(kit):
    if kit.name == "torch":
        return torch.OutOfMemoryError("CUDA out of memory. (injected)")
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory (injected)")


@pytest.mark.parametrize("limit", [5, 1])
def test_the_largest_microbatch_that_fits(kit, limit):
    params, batch, loss = problems.regression(rows=12)
    params, batch = kit.arrays(params), kit.arrays(batch)
    sizes = []

    def bounded(params, x, y):
        sizes.append(len(x))
        if len(x) > limit:
            raise exhausted(kit)
        return loss(params, x, y)

    step = funcga.accumulate(funcga.value_and_grad(bounded), "auto")
    full = funcga.value_and_grad(loss)(params, *batch)
    assert difference(kit, step(params, *batch), full) <= LIMITS["float32"]
    n = -(-12 // limit)
    if kit.name == "torch":
        sizes.clear()
        assert difference(kit, step(params, *batch), full) <= LIMITS["float32"]
        assert (len(sizes), max(sizes)) == (n, -(-12 // n))
    # another shape starts anew
    half = [a[:6] for a in batch]
    assert difference(kit, step(params, *half), funcga.value_and_grad(loss)(params, *half)) <= LIMITS["float32"]


class FailsInBackward(torch.autograd.Function):
    """The identity, whose k-th backward pass runs out of memory once."""

    @staticmethod
    def forward(ctx, x, passes, k):
        ctx.passes, ctx.k = passes, k
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.passes.append(1)
        if len(ctx.passes) == ctx.k:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return grad, None, None


@pytest.mark.parametrize(("fold", "at"), [("mean", 1), ("mean", 12), ("per_weight", 5), ("moments", 7), ("max", 2)])
def test_a_failure_in_any_layer_of_any_backward_pass(at, fold):
    """Of three layers some have added their gradients when another fails: nothing is counted twice."""
    torch.manual_seed(0)
    params, x, passes = {name: torch.randn(3, 3) for name in "abc"}, torch.randn(8, 3), []

    def loss(params, x, *, fails_at):
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        for weight in params.values():
            x = FailsInBackward.apply(torch.tanh(x @ weight), passes, fails_at)
        return (x**2).mean()

    step = funcga.accumulate(funcga.value_and_grad(loss), "auto", fold=(funcga.mean(), getattr(funcga, fold)()))
    before = step(params, x, fails_at=0)  # finds n=4, so that 12 layers are passed
    passes.clear()
    result = step(params, x, fails_at=at)
    assert len(passes) > 12
    passes.clear()
    again = step(params, x, fails_at=0)  # with the n that was found, and nothing that fails
    leaves = torch.utils._pytree.tree_leaves
    assert all(map(torch.equal, leaves(result), leaves(again)))
    assert all(p.grad is None for p in params.values())
    if fold == "mean":
        assert difference(TORCH, result, before) <= LIMITS["float32"]


def test_state_starts_anew_when_a_window_is_replayed(kit):
    def gradient(state, x):
        if len(x) > 2:
            raise exhausted(kit)
        return x.sum(), {"s": 2 * state["s"] + x.sum()}

    fold, axes = (funcga.sum(), funcga.carry()), (funcga.CARRY, 0)
    state, x = {"s": kit.arrays(np.float32(1))}, kit.arrays(np.arange(8, dtype="float32"))
    result = funcga.accumulate(gradient, "auto", fold=fold, in_axes=axes)(state, x)
    assert difference(kit, result, funcga.accumulate(gradient, 4, fold=fold, in_axes=axes)(state, x)) == 0


def test_inside_a_compiled_program_it_is_refused():
    step = funcga.accumulate(funcga.grad(lambda p, x: (p * x).sum()), "auto")
    x = np.arange(4, dtype="float32")
    with pytest.raises(funcga.FuncgaError, match="tries sizes out when it is called"):
        jax.jit(step)(jax.numpy.float32(1), jax.numpy.asarray(x))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="tries sizes out when it is called"):
        compiled(torch.tensor(1.0), torch.from_numpy(x))


@needs_cuda
def test_a_device_that_is_really_full():
    """Activations of the whole batch do not fit into what is left; those of a part do."""
    rows, width = 64, 1024
    x = torch.ones(rows, width, device="cuda")
    large = max(1, int(torch.cuda.mem_get_info()[0] * 0.5 / (rows * width * 4)))

    def loss(w, x):
        return (x[:, None, :] * w[None, :, None]).square().mean()  # rows * large * width floats, twice

    w = torch.ones(large, device="cuda")
    value, grads = funcga.accumulate(funcga.value_and_grad(loss), "auto")(w, x)
    assert float(value) == pytest.approx(1.0)
    torch.testing.assert_close(grads, torch.full_like(w, 2 / large), rtol=1e-4, atol=0)
