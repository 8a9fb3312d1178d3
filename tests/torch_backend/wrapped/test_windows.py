"""One window of a wrapped module after another: what is sent and how often memory is passed over."""

import pytest
import torch

import funcga
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, by_steps, difference, full, hsdp, made, mean_square
from torch_backend import module_value_and_grad

FOLDS = {"mean": funcga.mean(), "per_weight": funcga.per_weight(), "sum": funcga.sum(), "by_steps": by_steps()}
# The rows of every rank in each window: totals that are the last one's, and powers of two, or not
ROWS = [(8, 8), (8, 8), (6, 6), (6, 6), (4, 12), (3, 5), (8, 8)]


class Kernels(torch.utils._python_dispatch.TorchDispatchMode):
    """The collectives that are called, in order, and how many kernels multiply or divide several tensors."""

    def __init__(self):
        super().__init__()
        self.collectives, self.passes = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        if op.namespace == "c10d":
            self.collectives.append(name)
        self.passes += name in ("_foreach_mul_", "_foreach_div_") and len(args[0]) > 1
        return op(*args, **(kwargs or {}))


def batch_of(rank, rows, dtype):
    generator = torch.Generator().manual_seed(100 * rank + rows)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype) for width in (4, 3)]


def every_fold(group, wrapper):
    return {name: one_after_another(group, wrapper, name, torch.float64) for name in FOLDS}


def one_after_another(group, wrapper, name, dtype):
    """Of every window: how wrong it is, and how many kernels divide or multiply gradients."""
    module = {**WRAPPERS, "hsdp": hsdp}[wrapper](group, made(dtype))
    step = funcga.accumulate(module_value_and_grad(module, mean_square), n=2, fold=FOLDS[name])
    found = []
    for rows in ROWS:
        rows = rows * (group.size() // 2)
        with Kernels() as kernels:
            loss, grads = step(*batch_of(group.rank(), rows[group.rank()], dtype))
        batches = [batch_of(rank, count, dtype) for rank, count in enumerate(rows)]
        parts = [part for x, y in batches for part in zip(x.tensor_split(2), y.tensor_split(2), strict=True)]
        plain, value = made(dtype), 0
        total = {"mean": sum(rows), "per_weight": sum(rows), "by_steps": len(parts), "sum": 1}[name]
        for x, y in parts:
            part = mean_square(plain, x, y) * (len(x) if name in ("mean", "by_steps") else 1) / total
            part.backward()
            value = value + part.detach()
        grads = full(module, grads)
        wrong = max(abs(loss - value).item() / value.item(), difference(grads, [p.grad for p in plain.parameters()]))
        found.append((wrong, kernels.passes))
    return found


@pytest.mark.parametrize("wrapper", ["ddp_views", "fsdp1", "fsdp2"])
def test_one_pass_over_memory_divides_what_is_weighed(wrapper):
    for of_folds in processes().run(every_fold, wrapper, size=2):
        for name, found in of_folds.items():
            assert max(wrong for wrong, _ in found) <= 1e-13
            # a wrapper's average of sums is first made a sum
            assert max(passes for _, passes in found) == (2 if name == "per_weight" else 1)


def sent(group, wrapper):
    module = WRAPPERS[wrapper](group, made())
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 3)
    own = batch_of(group.rank(), 6, torch.float32)
    for _ in range(2):
        with Kernels() as kernels:
            step(*own)
    return kernels.collectives


@pytest.mark.parametrize("wrapper", ["ddp", "replicated"])
def test_the_loss_travels_in_the_header(wrapper):
    for collectives in processes().run(sent, wrapper, size=2):
        assert collectives == ["allgather_", "allreduce_"]  # the header with the loss, and the gradient


def several_numbers(group, count):
    """A dict of this many losses, and what it should be: a header has room for four."""
    module = WRAPPERS["ddp"](group, made(torch.float64))
    loss_fn = lambda module, x, y: (mean_square(module, x, y), {k: mean_square(module, x, y) * k for k in range(count)})
    step = funcga.accumulate(module_value_and_grad(module, loss_fn, has_aux=True), 2)
    found = []
    for rows in ((4, 4), (2, 7), (4, 4)):
        with Kernels() as kernels:
            (loss, aux), _ = step(*batch_of(group.rank(), rows[group.rank()], torch.float64))
        whole = [
            torch.cat(parts) for parts in zip(*(batch_of(r, k, torch.float64) for r, k in enumerate(rows)), strict=True)
        ]
        true = mean_square(made(torch.float64), *whole).item()
        found.append(max(abs(value.item() - k * true) for k, value in [(1, loss), *aux.items()]))
    return found, kernels.collectives.count("allreduce_")


@pytest.mark.parametrize("count", [3, 4])
def test_a_header_has_room_for_a_few_numbers(count):
    for found, reduced in processes().run(several_numbers, count, size=2):
        assert max(found) <= 1e-13
        assert reduced == (1 if count == 3 else 2)
