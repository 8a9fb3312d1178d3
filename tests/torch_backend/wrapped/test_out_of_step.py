"""Replicas of a wrapped module that fail alone, or have other numbers of micro-batches: exact, or an error everywhere."""

import pytest
import torch
from torch import nn

import funcga
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, difference, full, made
from torch_backend import module_value_and_grad

LIMIT = 1e-12


class Broken(Exception):
    pass


def with_buffers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 6)), nn.Linear(6, 3))


def rows(seed, count):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda width: torch.randn(count, width, generator=generator, dtype=torch.float64)
    return draw(4), draw(3)


def loss_of(module, x, y):
    return ((module(x) - y) ** 2).mean()


def whole(module, parts):
    """The loss and the gradients of all rows on one device."""
    x, y = map(torch.cat, zip(*parts, strict=True))
    loss = loss_of(module, x, y)
    return loss.item(), torch.autograd.grad(loss, [*module.parameters()])


def after_an_error(group, wrapper, where, failing, at, sync):
    """What each of four windows came to on this rank, where one rank fails in micro-batch `at` of the second."""
    rank, size = group.rank(), group.size()
    module = WRAPPERS[wrapper](group, made(torch.float64))
    calls = {"window": 0, "loss": 0, "weight": 0}

    def fails(what):
        calls[what] += 1
        return (what, rank, calls["window"], calls[what]) == (where, failing, 1, at)

    def loss_fn(module, x, y):
        output = module(x)
        if fails("loss"):
            raise Broken
        return ((output - y) ** 2).mean()

    def weight(x, y):
        if fails("weight"):
            raise Broken
        return len(x)

    step = funcga.accumulate(module_value_and_grad(module, loss_fn, sync=sync), 3, weight=weight)
    found = []
    for window in range(4):
        calls.update(window=window, loss=0, weight=0)
        parts = [rows(10 * window + other, 6) for other in range(size)]
        x, y = parts[rank]
        if where == "split" and (rank, window) == (failing, 1):
            y = y[:-1]
        expected = whole(made(torch.float64), parts)
        try:
            value, grads = step(x, y)
            found.append(max(abs(value.item() - expected[0]), difference(full(module, grads), expected[1])))
        except (Broken, funcga.FuncgaError) as error:
            found.append(str(error) if isinstance(error, funcga.FuncgaError) else "Broken")
    return found


PLACES = [("split", 1, 0), ("weight", 1, 1), ("weight", 3, 0), ("loss", 2, 1), ("loss", 3, 0)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_error_of_one_rank_ends_the_window_everywhere(wrapper):
    cases = [(*place, "last") for place in PLACES]
    cases += [(where, at, 1 - failing, "every") for where, at, failing in PLACES if wrapper == "ddp"]
    for where, at, failing, sync in cases:
        found = processes(2).run(after_an_error, wrapper, where, failing, at, sync)
        for rank, (first, second, *later) in enumerate(found):
            assert max(first, *later) <= LIMIT
            if rank != failing:
                assert f"rank {failing} has raised an error in this window" in second
            else:
                assert second == "Broken" or "different numbers of rows" in second


def with_batch_norm(group, failing):
    """DDP broadcasts buffers in the first forward pass of a window."""
    module = nn.parallel.DistributedDataParallel(with_buffers().double(), process_group=group)
    found = []

    def weight(x, y):
        if len(found) == 1 and group.rank() == failing:
            raise Broken
        return len(x)

    step = funcga.accumulate(module_value_and_grad(module, loss_of), 2, weight=weight)
    for window in range(3):
        try:
            value, _ = step(*rows(window, 8))
            found.append(value.isfinite().item())
        except (Broken, funcga.FuncgaError) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize("failing", [0, 1])
def test_buffers_are_not_broadcast_to_another_window(failing):
    found = processes(2).run(with_batch_norm, failing)
    assert found[failing] == [True, "Broken", True]
    assert found[1 - failing] == [True, "FuncgaError", True]


def uneven(group, wrapper, spelling, sync):
    """Windows in which the ranks have other numbers of micro-batches, also ones that no rank could know before."""
    rank, size = group.rank(), group.size()
    module = WRAPPERS[wrapper](group, made(torch.float64))
    gradient, found = module_value_and_grad(module, loss_of, sync=sync), []
    for window, counts in enumerate(((3, 1, 2), (1, 4, 2), (2, 2, 2), (1, 1, 5))):
        parts = [rows(10 * window + other, 2 * counts[other]) for other in range(size)]
        if spelling == "stream":
            result = funcga.stream(gradient)([*zip(*(part.split(2) for part in parts[rank]), strict=True)])
        else:
            result = funcga.accumulate(gradient, microbatch_size=2)(*parts[rank])
        expected = whole(made(torch.float64), parts)
        found.append(abs(result[0].item() - expected[0]))
        found.append(difference(full(module, result[1]), expected[1]))
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_any_number_of_micro_batches_on_each_rank(wrapper):
    for spelling, sync in (("stream", "last"), ("microbatch_size", "every")):
        for found in processes(3).run(uneven, wrapper, spelling, sync):
            assert max(found) <= LIMIT
