"""Claim: in torch, `multi_steps` costs what `optimizer.step()` every eighth micro-batch costs.

    python -m benchmarks.multi_steps_torch

Both sides take the gradients of a micro-batch from `.backward()`. The rival lets them add up in `.grad` and steps every
eighth time; the contender hands them to `multi_steps(from_optimizer(AdamW), 8)` and adds its updates to the parameters.
`joined` calls `update` for every micro-batch, `split` calls `accumulate` and, at the end, `flush`; both give their
state away (donate=True). `pure` is `update` where every state stays as it was. Bytes are the peak of the storages that
the optimizer's side makes in one window, without gradients, in parameter-sized trees: the rival's is torch's own.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import funcga
import torch_backend
from benchmarks.measure import PeakBytes, ratio

N = 8


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four layers of width 128, micro-batches of 8 rows of 64."""
    layer = lambda: nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*(layer() for _ in range(4))), torch.randn(N, 8, 64, 128)


def mlp(layers: int, width: int, rows: int) -> tuple[nn.Module, torch.Tensor]:
    """Equal layers with tanh."""
    made = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*made), torch.randn(N, rows, width)


def loss(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The mean of squares."""
    return (module(rows) ** 2).mean()


def by_hand(module: nn.Module, batch: torch.Tensor, options: dict[str, Any]) -> Callable[[], None]:
    """A window of the rival."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, **options)

    def window() -> None:
        for rows in batch:
            (loss(module, rows) / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return window


def ours(module: nn.Module, batch: torch.Tensor, options: dict[str, Any], way: str) -> Callable[[], None]:
    """A window of the contender."""
    tx = funcga.multi_steps(
        torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3, **options), N, donate=way != "pure"
    )
    params = dict(module.named_parameters())
    state = tx.init(params)

    def window() -> None:
        nonlocal state
        updates: Any = None
        for rows in batch:
            loss(module, rows).backward()
            grads = {name: parameter.grad for name, parameter in params.items()}
            if way == "split":
                state = tx.accumulate(grads, state)
            else:
                updates, state = tx.update(grads, state, params)
            module.zero_grad()
        if way == "split":
            updates, state = tx.flush(state, params)
        with torch.no_grad():
            for name, parameter in params.items():
                parameter.add_(updates[name])

    return window


def transform_alone(module: nn.Module, options: dict[str, Any], donate: bool) -> float:
    """The peak of what the transform makes in a window, in trees of the parameters' size."""
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3, **options), N, donate=donate)
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    grads = {name: torch.ones_like(parameter) for name, parameter in params.items()}
    state = tx.init(params)
    for _ in range(N):
        updates, state = tx.update(grads, state, params)
    for _ in range(N - 1):
        updates, state = tx.update(grads, state, params)
    del updates
    with PeakBytes() as peak:
        tx.update(grads, state, params)
    return peak.bytes / sum(parameter.nbytes for parameter in params.values())


def main(runs: int = 41) -> None:
    """Prints one line a workload and variant of AdamW."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, n={N}")
    print(f"{'workload':12} {'AdamW':8} {'joined':>21} {'split':>21} {'pure':>21} {'bytes, update that emits':>26}")
    for name, make in {
        "transformer": transformer,
        "wide mlp": lambda: mlp(8, 512, 64),
        "tiny mlp": lambda: mlp(12, 64, 16),
    }.items():
        for variant in ("fused", "foreach"):
            torch.manual_seed(0)
            module, batch = make()
            options = {variant: True}
            figures = []
            for way in ("joined", "split", "pure"):
                rival, contender = copy.deepcopy(module), copy.deepcopy(module)
                a, b = ours(contender, batch, options, way), by_hand(rival, batch, options)
                low, median, high = ratio(a, b, runs)
                for p, q in zip(contender.parameters(), rival.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)
                figures.append(f"{median:7.3f} ({low:.3f}-{high:.3f})")
            peaks = " ".join(f"{transform_alone(module, options, donate):.2f}" for donate in (True, False))
            print(f"{name:12} {variant:8} {figures[0]:>21} {figures[1]:>21} {figures[2]:>21} {peaks:>26}", flush=True)


if __name__ == "__main__":
    main()
