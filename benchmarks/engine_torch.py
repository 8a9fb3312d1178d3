"""Claim: over funcga's own gradients, `accumulate` costs what a hand-written `.backward()` loop costs, and is pure.

    python -m benchmarks.engine_torch [--device cuda] [--quick]

Every contender computes the loss and the gradients of one window of n micro-batches, the same to rounding, which is
asserted first. Time is a ratio of paired runs in turn; memory counts the bytes of storages that a call creates. The
rivals, each as its documentation writes it: the `.backward()` loop, eager and with the loss compiled; the best
torch.func loop (one accumulator, `torch._foreach_add_`) and the naive one (`tree_map`); Accelerate; Lightning Fabric. A
rival that is not installed is left out, and said so.
"""

import argparse
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.utils import _pytree

import funcga
from benchmarks.fold_torch import hand_written as best_functional
from benchmarks.measure import PeakBytes, ratio
from torch_backend import pure_loss


def transformer(device: str) -> tuple[Any, ...]:
    """Four layers of width 128, 64 tokens, 32 rows: a mean over tokens."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    module = nn.Sequential(
        nn.Embedding(256, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 256)
    )

    def loss_fn(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = module(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return module.to(device), torch.randint(0, 256, (32, 65), device=device), loss_fn


def tiny(device: str) -> tuple[Any, ...]:
    """Twelve layers of Linear(64) and tanh, 64 rows: bound by dispatch."""
    module = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(64, 64), nn.Tanh())])
    return module.to(device), torch.randn(64, 64, device=device), mean_square


def wide(device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Eight equal layers of width 512, 64 rows: P is 8 MB in float32."""
    module = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(512, 512, bias=False), nn.Tanh())])
    return module.to(device, dtype), torch.randn(64, 512, device=device, dtype=dtype), mean_square


def mean_square(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The mean of the squared outputs."""
    return (module(x) ** 2).mean()


# Every contender is made of (module, loss_fn, n) and is a function of the batch that returns (loss, gradients).


def ours(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """What the README writes."""
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss_fn)), n)
    params = dict(module.named_parameters())
    return lambda batch: step(params, batch)


def ours_compiled(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """The same, compiled as a whole."""
    step = torch.compile(funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss_fn)), n), fullgraph=True)
    params = {name: p.detach() for name, p in module.named_parameters()}
    return lambda batch: step(params, batch)


def backward_loop(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """The loop that everybody writes."""

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        for rows in batch.chunk(n):
            loss = loss_fn(module, rows) / n
            loss.backward()
            total = total + loss.detach()
        return total, _taken(module)

    return step


def _taken(module: nn.Module) -> dict[str, Any]:
    """The gradients, which leave the module, as after an optimizer's step: so every contender's are freed alike."""
    grads = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return grads


def backward_loop_compiled(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """The same with the loss, forward and backward, compiled."""
    return backward_loop(module, torch.compile(loss_fn, fullgraph=True), n)


def functional_loop(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """The best torch.func loop: one accumulator, added to in place, and one gradient at a time."""
    step = best_functional(grad_and_value(_functional(module, loss_fn)), n)
    params = {name: p.detach() for name, p in module.named_parameters()}
    return lambda batch: step(params, batch)[::-1]


def naive_functional_loop(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """The torch.func loop of the tutorials; gradients of less than 32 bits are cast before they are added."""
    gradient, params = (
        grad_and_value(_functional(module, loss_fn)),
        {name: p.detach() for name, p in module.named_parameters()},
    )

    def step(batch: torch.Tensor) -> Any:
        total = None
        for rows in batch.chunk(n):
            value = _pytree.tree_map(torch.Tensor.float, gradient(params, rows))
            total = value if total is None else _pytree.tree_map(torch.add, total, value)
        grads, loss = _pytree.tree_map(lambda t: t / n, total)
        return loss, {name: g.to(params[name].dtype) for name, g in grads.items()}

    return step


def _functional(module: nn.Module, loss_fn: Any) -> Callable[..., Any]:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *batch: Any) -> Any:
            return loss_fn(self.module, *batch)

    whole = Whole()
    return lambda p, *batch: functional_call(whole, {f"module.{name}": t for name, t in p.items()}, batch)


def accelerate(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """Accelerate's `accumulate`, which divides the loss by n itself."""
    device = next(module.parameters()).device
    accelerator = importlib.import_module("accelerate").Accelerator(
        gradient_accumulation_steps=n, cpu=device.type == "cpu"
    )
    prepared = accelerator.prepare(module)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        for rows in batch.chunk(n):
            with accelerator.accumulate(prepared):
                loss = loss_fn(prepared, rows)
                accelerator.backward(loss)
                total = total + loss.detach()
        return total / n, _taken(module)

    return step


def fabric(module: nn.Module, loss_fn: Any, n: int) -> Callable[..., Any]:
    """Lightning Fabric's `no_backward_sync`."""
    device = next(module.parameters()).device
    made = importlib.import_module("lightning_fabric").Fabric(
        accelerator="cpu" if device.type == "cpu" else "cuda", devices=1
    )
    prepared = made.setup(module)

    def step(batch: torch.Tensor) -> Any:
        total: Any = 0
        chunks = batch.chunk(n)
        for i, rows in enumerate(chunks):
            with made.no_backward_sync(prepared, enabled=i + 1 < len(chunks)):
                loss = loss_fn(prepared, rows) / n
                made.backward(loss)
            total = total + loss.detach()
        return total, _taken(module)

    return step


RIVALS = (backward_loop, functional_loop, naive_functional_loop, accelerate, fabric)


def compare(name: str, made: tuple[Any, ...], rival: Any, n: int, runs: int, mine: Any = ours) -> None:
    """Prints one line: the ratio of times with its quartiles, and both peaks as multiples of P."""
    module, batch, loss_fn = made
    try:
        theirs = rival(module, loss_fn, n)
    except ModuleNotFoundError as error:
        print(f"{name:18} {rival.__name__:24} left out: {error.name} is not installed")
        return
    steps = mine(module, loss_fn, n), theirs
    results = [_pytree.tree_map(torch.clone, step(batch)) for step in steps]
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if batch.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    for a, b in zip(*map(_pytree.tree_leaves, results), strict=True):
        torch.testing.assert_close(a, b, check_dtype=False, **tolerance)
    finish = torch.cuda.synchronize if batch.is_cuda else lambda: None
    low, median, high = ratio(*(functools.partial(_run, step, batch, finish) for step in steps), runs=runs)
    size = sum(p.nbytes for p in module.parameters())
    peaks = ["   -", "   -"] if mine is ours_compiled else [f"{_peak(step, batch) / size:.3f}" for step in steps]
    print(f"{name:18} {rival.__name__:24} {median:8.3f} ({low:.3f}-{high:.3f}) {peaks[0]:>8} {peaks[1]:>8}", flush=True)


def _run(step: Any, batch: Any, finish: Any) -> None:
    step(batch)
    finish()


def _peak(step: Any, batch: Any) -> int:
    with PeakBytes() as peak:
        step(batch)
    return peak.bytes


def growth(device: str) -> None:
    """Prints how time and memory of one micro-batch of 8 rows grow with n."""
    module, _, loss_fn = tiny(device)
    step = funcga.accumulate(funcga.value_and_grad(pure_loss(module, loss_fn)), microbatch_size=8)
    params = dict(module.named_parameters())
    small, large = (torch.randn(8 * n, 64, device=device) for n in (2, 1024))
    finish = torch.cuda.synchronize if small.is_cuda else lambda: None
    many = functools.partial(_run, lambda x: step(params, x), large, finish)
    pairs = lambda: [_run(lambda x: step(params, x), small, finish) for _ in range(512)]
    peaks = [_peak(lambda x: step(params, x), x) for x in (large, small)]
    low, median, high = ratio(many, pairs, runs=5, warm=1)
    print(f"n = 1024 against 512 x n = 2, a micro-batch: time {median:.3f} ({low:.3f}-{high:.3f}), "
          f"peak bytes {peaks[0] / peaks[1]:.4f}")  # fmt: skip


def main() -> None:
    """Prints one line a workload and rival."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few repetitions, and nothing compiled")
    options = parser.parse_args()
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {options.device}, {where}, n={options.n}")
    print(f"{'workload':18} {'rival':24} {'time ratio (quartiles)':>23} {'peak/P':>11} {'theirs':>8}")
    for make, runs in ((transformer, 41), (tiny, 201), (wide, 61)):
        for rival in RIVALS:
            made = make(options.device)
            compare(make.__name__, made, rival, options.n, 5 if options.quick else runs)
    for rival in (functional_loop, naive_functional_loop):
        made = wide(options.device, torch.bfloat16)
        compare("wide, bfloat16", made, rival, options.n, 5 if options.quick else 21)
    growth(options.device)
    if not options.quick:
        compare("transformer", transformer(options.device), backward_loop_compiled, options.n, 41, ours_compiled)


if __name__ == "__main__":
    main()
