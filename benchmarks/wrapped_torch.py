"""Claim: a module wrapped in DDP or FSDP2 and driven by funcga costs what the same loop written by hand costs.

    python -m benchmarks.wrapped_torch [--quick] [--n 8]

Two processes on gloo, one thread each. Contender and rival compute the token-weighted mean loss and gradients of one
window of n micro-batches over both replicas, the same to rounding, which is asserted first. By hand: `no_sync()` around
all but the last micro-batch (`set_requires_gradient_sync` and `set_is_last_backward` for FSDP2), one all-reduce of the
loss and the tokens, one division of the gradients. Time is a ratio of paired runs in turn, which the two processes
begin together.
"""

import argparse
import gc
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import funcga
from benchmarks.measure import ratio
from torch_backend import module_value_and_grad


def transformer(width: int, layers: int) -> nn.Module:
    """A small transformer over 64 tokens."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(256, width),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(width, 256),
    )


def sum_of_losses(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The sum over the tokens that are predicted; 0 is padding."""
    logits = module(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0, reduction="sum")


def count(tokens: torch.Tensor) -> torch.Tensor:
    """How many these are."""
    return (tokens[:, 1:] != 0).sum()


def ours(module: nn.Module, n: int) -> Callable[..., Any]:
    """What the README writes."""
    f = module_value_and_grad(module, sum_of_losses)
    return funcga.accumulate(f, n, fold=funcga.per_weight(), weight=count)


def by_hand(module: nn.Module, n: int) -> Callable[..., Any]:
    """The loop that everybody writes, and gets right."""
    sharded = hasattr(module, "set_requires_gradient_sync")

    def step(batch: torch.Tensor) -> Any:
        summed = torch.zeros(2)
        chunks = batch.chunk(n)
        for i, tokens in enumerate(chunks):
            last = i + 1 == n
            if sharded:
                module.set_requires_gradient_sync(last)
                module.set_is_last_backward(last)
            with nullcontext() if sharded or last else module.no_sync():
                loss = sum_of_losses(module, tokens)
                loss.backward()
            summed += torch.stack([loss.detach(), count(tokens)])
        dist.all_reduce(summed)
        grads = {name: p.grad for name, p in module.named_parameters()}
        own = [getattr(g, "_local_tensor", g) for g in grads.values()]
        torch._foreach_mul_(own, dist.get_world_size() / summed[1].item())
        module.zero_grad()
        return summed[0] / summed[1], grads

    return step


def wrapped(how: str, module: nn.Module) -> nn.Module:
    """The module in one of the wrappers."""
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(module)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module[1].layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _together(step: Any, batch: Any) -> None:
    step(batch)
    dist.barrier()


def measure(rank: int, path: str, n: int, runs: int) -> None:
    """Prints one line a workload and wrapper."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of every loop over a module that returns a view
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    _compare(rank, n, runs)
    gc.collect()  # gloo may abort a process in which something still holds the group
    dist.destroy_process_group()


def _compare(rank: int, n: int, runs: int) -> None:
    for width, layers, rows in ((128, 4, 4 * n), (32, 2, n)):
        for how in ("DDP", "FSDP2"):
            module = wrapped(how, transformer(width, layers))
            batch = torch.randint(0, 256, (rows, 65), generator=torch.Generator().manual_seed(rank))
            steps = ours(module, n), by_hand(module, n)
            (loss, grads), (expected, rival) = (step(batch) for step in steps)
            torch.testing.assert_close(loss, expected)
            for name, gradient in grads.items():
                torch.testing.assert_close(*(getattr(g, "_local_tensor", g) for g in (gradient, rival[name])))
            low, median, high = ratio(*(partial(_together, step, batch) for step in steps), runs=runs)
            if rank == 0:
                print(f"width {width:4} {how:6} {median:8.3f} ({low:.3f}-{high:.3f})", flush=True)
    dist.barrier()


def main() -> None:
    """Starts the two processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, 2 processes on gloo, n={options.n}: time ratio (quartiles)")
    with tempfile.TemporaryDirectory() as folder:
        args = str(Path(folder) / "store"), options.n, 5 if options.quick else 41
        multiprocessing.spawn(measure, args=args, nprocs=2)


if __name__ == "__main__":
    main()
