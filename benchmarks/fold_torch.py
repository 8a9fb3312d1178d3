"""Claim: over any torch.func gradient, `accumulate` costs what the best hand-written functional loop costs.

    python -m benchmarks.fold_torch

The rival keeps one accumulator, adds with torch._foreach_add_ under no_grad, lets each micro-batch's gradient go before
the next is computed and divides once, in place. Time is a ratio of paired runs; memory counts bytes of storages.
"""

import functools

import torch
from torch.func import functional_call, grad_and_value
from torch.utils import _pytree

import funcga
from benchmarks.measure import PeakBytes, ratio


def transformer(layers: int = 4, width: int = 128, length: int = 64, batch: int = 32):
    """A small causal transformer, its parameters, a batch of token ids and its loss, a mean over tokens."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, width), torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        torch.nn.Linear(width, 256),
    )  # fmt: skip
    tokens = torch.randint(0, 256, (batch, length + 1))
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, tokens):
        logits = functional_call(model, params, (tokens[:, :-1],))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return params, (tokens,), loss


def wide_mlp(layers: int = 8, width: int = 512, batch: int = 64):
    """Equal wide layers: adding gradients is a large part of the work, and P is layers * width**2 floats."""
    params = {f"w{i}": torch.randn(width, width) / width**0.5 for i in range(layers)}
    x = torch.randn(batch, width)

    def loss(params, x):
        for w in params.values():
            x = torch.tanh(x @ w)
        return (x**2).mean()

    return params, (x,), loss


def tiny_mlp(layers: int = 12, width: int = 64, batch: int = 64):
    """Twelve layers of Linear(64) and tanh, 8 rows a micro-batch: bound by dispatch."""
    model = torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.Tanh())])
    params = {name: p.detach() for name, p in model.named_parameters()}
    return params, (torch.randn(batch, width),), lambda p, x: (functional_call(model, p, (x,)) ** 2).mean()


def hand_written(gradient, n):
    """The best functional loop by hand: rows must divide by n, weights are equal."""

    def step(params, batch):
        accumulators = structure = None
        for micro in batch.chunk(n):
            with torch.no_grad():
                leaves, structure = _pytree.tree_flatten(gradient(params, micro))
                if accumulators is None:
                    accumulators = [leaf.clone() for leaf in leaves]
                else:
                    torch._foreach_add_(accumulators, leaves)
                del leaves
        torch._foreach_div_(accumulators, n)
        return _pytree.tree_unflatten(accumulators, structure)

    return step


def main(n: int = 8) -> None:
    """Prints one line a workload."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, n={n}")
    print(f"{'workload':12} {'time ratio (quartiles)':>28} {'peak/P ours':>12} {'peak/P theirs':>14}")
    for make in (transformer, wide_mlp, tiny_mlp):
        print(f"{make.__name__:12} {compare(*make(), n)}")


def compare(params, batch, loss, n):
    """The time ratio with its quartiles, and both peaks as multiples of the parameters' bytes."""
    gradient = grad_and_value(loss)
    steps = funcga.accumulate(gradient, n), hand_written(gradient, n)
    for a, b in zip(*(_pytree.tree_leaves(step(params, *batch)) for step in steps), strict=True):
        torch.testing.assert_close(a, b)
    low, median, high = ratio(*(functools.partial(step, params, *batch) for step in steps), runs=61)
    size = sum(p.nbytes for p in params.values())
    peaks = []
    for step in steps:
        with PeakBytes() as peak:
            step(params, *batch)
        peaks.append(peak.bytes / size)
    return f"{median:12.3f} ({low:.3f}-{high:.3f}) {peaks[0]:12.2f} {peaks[1]:14.2f}"


if __name__ == "__main__":
    main()
