"""Claim: `across=` costs no more than DDP with `no_sync`, and sends the gradient's bytes once an update.

    python -m benchmarks.replicas_torch [--quick] [--ranks 2]

Two processes, joined by gloo. Every contender computes the loss and the gradients of one window of n micro-batches on
each rank, gradients averaged over the ranks, the same to rounding, which is asserted first. Time is a ratio of paired
runs in turn, with a barrier before each. The rivals are DDP as its documentation writes it: `no_sync` for all but the
last micro-batch, with the default buckets and with `gradient_as_bucket_view=True` and 4 MB buckets, and DDP that
synchronises every micro-batch. Funcga also merges the loss over the ranks, which DDP does not.
"""

import argparse
import contextlib
import functools
import gc
import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import funcga
from benchmarks.engine_torch import transformer, wide
from benchmarks.measure import ratio
from torch_backend import Replicas, pure_loss


def ours(module: nn.Module, loss_fn: Any, n: int, **options: Any) -> Callable[..., Any]:
    """What the README writes."""
    across = Replicas(dist.group.WORLD, **options)
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss_fn)), n, across=across)
    params = dict(module.named_parameters())
    return lambda batch: step(params, batch)


def bfloat16_wire(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """The same, and half of the bytes."""
    return ours(module, loss_fn, n, wire_dtype=torch.bfloat16)


def no_sync(module: nn.Module, loss_fn: Any, n: int, every: bool = False, **options: Any) -> Callable[..., Any]:
    """DDP that synchronises the last micro-batch."""
    wrapped = DistributedDataParallel(module, **options)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        chunks = batch.chunk(n)
        for i, rows in enumerate(chunks):
            with contextlib.nullcontext() if every or i + 1 == len(chunks) else wrapped.no_sync():
                loss = loss_fn(wrapped, rows) / n
                loss.backward()
            total = total + loss.detach()
        grads = {name: p.grad for name, p in module.named_parameters()}
        wrapped.zero_grad()
        return total, grads

    return step


def no_sync_views(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """The same with gradients that are views of 4 MB buckets."""
    return no_sync(module, loss_fn, n, gradient_as_bucket_view=True, bucket_cap_mb=4)


def every_microbatch(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """DDP without `no_sync`."""
    return no_sync(module, loss_fn, n, every=True)


def bytes_sent(step: Callable[[], Any]) -> tuple[int, int]:
    """(bytes, all_reduces) of the calls of torch.distributed.all_reduce."""
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *a, **k: (calls.append(tensor.nbytes), real(tensor, *a, **k))[1]
    try:
        step()
    finally:
        dist.all_reduce = real
    return sum(calls), len(calls)


def compare(name: str, made: tuple[Any, ...], mine: Any, rival: Any, n: int, runs: int) -> None:
    """Prints, on rank 0, the ratio of times with its quartiles, and what an update sends."""
    module, batch, loss_fn = made
    batch = batch.chunk(dist.get_world_size())[dist.get_rank()]
    steps = mine(module, loss_fn, n), rival(module, loss_fn, n)
    (_, ours), (_, theirs) = (step(batch) for step in steps)
    for key in ours:
        tolerance = {"rtol": 2e-2, "atol": 1e-3} if mine is bfloat16_wire else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(ours[key], theirs[key], **tolerance)
    low, median, high = ratio(*(functools.partial(_run, step, batch) for step in steps), runs=runs)
    size = sum(p.nbytes for p in module.parameters())
    sent, count = bytes_sent(lambda: steps[0](batch))
    if dist.get_rank() == 0:
        print(
            f"{name:12} {mine.__name__:14} against {rival.__name__:17} time {median:.3f} ({low:.3f} to {high:.3f})  "
            f"sent {sent / size:.4f} of the gradient in {count}",
            flush=True,
        )


def _run(step: Callable[..., Any], batch: torch.Tensor) -> None:
    dist.barrier()
    step(batch)


def work(rank: int, ranks: int, path: str, quick: bool) -> None:
    """One process: all comparisons."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    _compare_all(*((5, 4) if quick else (61, 8)))
    gc.collect()  # gloo may abort a process in which something still holds the group
    dist.destroy_process_group()


def _compare_all(runs: int, n: int) -> None:
    for name, problem in (("transformer", transformer), ("wide", wide)):
        torch.manual_seed(0)
        made = problem("cpu")
        for rival in (no_sync, no_sync_views, every_microbatch):
            compare(name, made, ours, rival, n, runs)
        compare(name, made, bfloat16_wire, no_sync, n, runs)


def main() -> None:
    """Starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few runs: does it work?")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, options.ranks, f"{folder}/store", options.quick) for rank in range(options.ranks)]
        processes = [context.Process(target=work, args=args) for args in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
