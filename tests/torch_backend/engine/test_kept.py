"""What a step keeps between calls: nothing that grows, no tensor and no module; and threads share it."""

import copy
import gc
import os
import sys
import threading
import time
import types
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import funcga
from torch_backend import module_value_and_grad, pure_loss, trainable

SECONDS = 10 if "FUNCGA_FUZZ" in os.environ else 5
N = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()


def loss_fn(module, x):
    return module(x).square().mean()


KINDS = ("a module", "pure_loss", "functional_call")


def step_of(kind, module, loss_fn=loss_fn, n=N):
    """A function of the batch alone, which holds the module and the step."""
    if kind == "a module":
        return funcga.accumulate(module_value_and_grad(module, loss_fn), n)
    if kind == "pure_loss":
        gradient = funcga.value_and_grad(pure_loss(module, loss_fn))
    else:
        by_call = lambda params, x: loss_fn(lambda x: functional_call(module, params, (x,)), x)
        gradient = funcga.value_and_grad(by_call)
    step = funcga.accumulate(gradient, n)
    return lambda x: step(trainable(module), x)


# -- a first call is like any other


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, N])
def test_every_call_runs_the_loss_n_times(kind, n):
    """Calls, random numbers and the counters of BatchNorm are those of a loop: at first, later, with another structure."""
    module, calls = net(), []
    module[0].bias.requires_grad_(False)
    by_hand = copy.deepcopy(module)

    def counted(module, x):
        calls.append(len(x))
        return loss_fn(module, x)

    step = step_of(kind, module, counted, n)
    for seed, rows in enumerate((12, 12, 12, 16, 12)):
        x = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        by_hand.zero_grad()
        for part in x.tensor_split(n):
            loss_fn(by_hand, part).mul(len(part) / rows).backward()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        calls.clear()
        _, grads = step(x)
        assert calls == [len(part) for part in x.tensor_split(n)]
        assert torch.equal(torch.get_rng_state(), after)
        if kind != "pure_loss":  # which leaves the buffers of the module alone
            assert int(module[1].num_batches_tracked) == int(by_hand[1].num_batches_tracked) == n * (seed + 1)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, by_hand.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


# -- what is kept


def squares(params, x):
    return ((x @ params["w"]) ** 2).mean()


def size_of(step):
    """Bytes and number of the objects that can be reached from it, without what modules and classes hold."""
    beyond = {id(vars(module)) for module in [*sys.modules.values()] if isinstance(module, types.ModuleType)}
    seen, waiting = {}, [step]
    while waiting:
        for value in gc.get_referents(waiting.pop()):
            if id(value) not in seen and id(value) not in beyond and not isinstance(value, type | types.ModuleType):
                seen[id(value)] = sys.getsizeof(value)
                waiting.append(value)
    return sum(seen.values()), len(seen)


def test_thousands_of_batch_lengths_leave_bounded_memory():
    """In the step, and in whatever else there is."""
    step = funcga.accumulate(funcga.grad(squares), microbatch_size=4000)
    params, rows, sizes, counts = {"w": torch.randn(2)}, torch.randn(5000, 2), [], []
    for length in range(1, 5001):
        step(params, rows[:length])
        if length in (1000, 5000):
            sizes.append(size_of(step))
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert sizes[0][1] > 20  # something is seen at all
    assert sizes[1][0] - sizes[0][0] < 50_000  # a plan for each length would be some kilobytes
    assert counts[1] - counts[0] < 1000


@pytest.mark.parametrize("kind", ["tensors", *KINDS])
def test_a_step_keeps_no_argument_and_no_result_alive(kind):
    """While it lives, and after 200 structures."""
    references, dtype = [], torch.float32 if kind == "tensors" else torch.float64
    if kind == "tensors":
        of_tensors = funcga.accumulate(funcga.value_and_grad(squares), 2)
        step = lambda x: of_tensors(kept({"w": torch.randn(3)}), x)
    else:
        step = step_of(kind, net(), n=2)

    def kept(tree):
        references.extend(map(weakref.ref, tree.values()))
        return tree

    for rows in range(4, 204):
        x = torch.randn(rows, 3, dtype=dtype)
        value, grads = step(x)
        kept({"x": x, "value": value, **grads})
        del x, value, grads
    gc.collect()
    assert sum(reference() is not None for reference in references) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raises", [False, True])
def test_a_step_is_no_cycle_that_keeps_a_module_alive(kind, raises):
    """Nor its parameters: all of it goes with the last reference, without the collector of cycles; after errors, too."""
    module, calls = net(), []

    def loss(module, x):
        calls.append(1)
        if raises and len(calls) > 8:
            raise KeyError("mine")
        return loss_fn(module, x)

    references = [weakref.ref(module), *map(weakref.ref, module.parameters())]
    step, is_enabled = step_of(kind, module, loss), gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            try:
                step(torch.randn(12, 3, dtype=torch.float64))
            except KeyError:
                assert raises
        del module, step
        assert sum(reference() is not None for reference in references) == 0
    finally:
        if is_enabled:
            gc.enable()


# -- threads


def two_batches():
    params = [torch.randn(3, dtype=torch.float64) for _ in range(2)]
    return [(params, torch.randn(rows, 3, dtype=torch.float64)) for rows in (8, 64)]


def two_trees():
    x = torch.randn(8, 3, dtype=torch.float64)
    shapes = [[(3,)] * 5, [(3, 2)] * 3]
    return [([torch.randn(shape, dtype=torch.float64) for shape in tree], x) for tree in shapes]


def products(params, x):
    return sum(((x @ w) ** 2).mean() for w in params)


@pytest.fixture
def switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


THREADS = (
    "what a step keeps of its last call is read and written by two threads: another batch's rows, another's layout"
)


@pytest.mark.parametrize(("jobs", "cut"), [(two_batches, {"microbatch_size": 4}), (two_trees, {"n": 2})])
def test_threads_share_a_step_of_two_structures(jobs, cut, switching_often):
    """New steps again and again, so that first calls are among those that meet."""
    torch.manual_seed(0)
    jobs, stop = jobs(), time.monotonic() + SECONDS / 2
    expected = [torch.func.grad(products)(*args) for args in jobs]
    wrong, rounds = [], 0

    def run(step, barrier, args, wanted):
        barrier.wait()
        for _ in range(8):
            try:
                found = step(*args)
            except Exception as error:
                wrong.append(repr(error))
                continue
            if len(found) != len(wanted) or not all(
                a.shape == b.shape and torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, wanted, strict=True)
            ):
                wrong.append(f"another gradient of {len(args[1])} rows")

    while time.monotonic() < stop and not wrong:
        step, barrier = funcga.accumulate(funcga.grad(products), **cut), threading.Barrier(len(jobs))
        threads = [threading.Thread(target=run, args=(step, barrier, *job)) for job in zip(jobs, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rounds += 1
    assert wrong == []
    assert rounds > 10


def test_a_grad_that_does_not_fit_takes_no_other_with_it():
    """A parameter was given other data of another shape. The other `.grad`s come back, and other threads may go on."""
    module = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1)).double()
    step, x = step_of("a module", module, n=2), torch.randn(4, 5, dtype=torch.float64)
    module(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    module[0].weight.data = torch.randn(2, 5, dtype=torch.float64)
    kept, met = module[1].weight.grad, []
    with pytest.raises(RuntimeError, match=r"assign a gradient of size '\[2, 3\]' to a tensor of size '\[2, 5\]'"):
        step(x)
    assert module[1].weight.grad is kept
    module.zero_grad()
    thread = threading.Thread(target=lambda: met.append(step(x)))
    thread.start()
    thread.join()
    torch.testing.assert_close(met[0][0], module(x).square().mean().detach())


def test_a_module_that_is_cast_between_two_calls():
    """Its parameters are the same objects: in bfloat16 the sum of 512 ones would stay at 256."""
    module, x = nn.Linear(1, 1, bias=False), torch.ones(512, 1)
    loss_fn = lambda module, x: module(x.to(module.weight.dtype)).float().sum()
    step = funcga.accumulate(module_value_and_grad(module, loss_fn), 512, fold=funcga.sum())
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype)
        _, grads = step(x)
        assert grads["weight"].dtype == dtype
        assert grads["weight"].item() == 512
