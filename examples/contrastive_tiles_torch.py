"""A contrastive loss over a large batch without its matrix of similarities: the columns are folded over in tiles.

    python examples/contrastive_tiles_torch.py

InfoNCE compares each of B rows with all B columns. As one matrix, that is 256 MiB for 8,192 rows in float32, and
autograd holds several of that size. But all that the loss needs of a row is the similarity to its own match, and the
log of a sum over the columns. That sum is a fold: `funcga.logsumexp()` over tiles of columns. For the other direction,
from columns to rows, a tile has whole columns, so that their sums are only collected. A checkpoint around the tile
computes its similarities again in the backward pass: one tile exists at a time. The loss and its gradient are exact.

`funcga.coupled` differentiates the loss here. `.backward()` on it would be wrong: a step that is called by itself
returns tensors without a graph.

With `python examples/contrastive_tiles_torch.py 8192 256`, for 8,192 rows of 256 features, the peak is 129 MiB with 16
tiles, and 1,054 MiB without.
"""

import sys

import torch
from checkpointing_torch import Peak
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

import funcga


def of_tile(a, b):
    """The logs of the sums of exp(similarity): of each row of a over these rows of b, and the other way round."""
    logits = a @ b.T
    return logits.logsumexp(1), logits.logsumexp(0)


def over_tiles(n):
    """The same of all rows of b, in n tiles."""
    # Without the checkpoint autograd would hold the similarities of all tiles.
    recomputed = lambda a, b: checkpoint(of_tile, a, b, use_reentrant=False)
    return funcga.accumulate(recomputed, n, fold=(funcga.logsumexp(), funcga.concat()), in_axes=(None, 0))


def in_tiles(n):
    """The loss of embeddings {"a": [B, D], "b": [B, D]} whose rows match: the mean of both directions, as in CLIP."""
    log_sums = over_tiles(n)

    def loss_fn(params, s):
        a, b = params["scale"].exp() * s["a"], s["b"]
        rows, columns = log_sums(a, b)
        return ((rows + columns) / 2 - (a * b).sum(1)).mean()

    return loss_fn


def at_once(params, s):
    """The same loss, with a matrix of all similarities."""
    logits = params["scale"].exp() * s["a"] @ s["b"].T
    labels = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def summary_fn(params, x, y):
    """The embeddings."""
    return {"a": normalize(x @ params["a"]), "b": normalize(y @ params["b"])}


def gradients(loss_fn, params, x, y):
    """(loss, gradients), and the bytes that it took to get them."""
    step = funcga.coupled(summary_fn, loss_fn, n=8)
    with Peak([*params.values(), x, y]) as peak:
        return step(params, x, y), peak.bytes


def problem(rows, features):
    """Parameters, and pairs that resemble each other."""
    x = torch.randn(rows, features)
    params = {name: torch.randn(features, features) / features**0.5 for name in ("a", "b")}
    return {**params, "scale": torch.tensor(2.0)}, x, x + torch.randn(rows, features)


def main(rows=1024, features=32):
    """The loss with all similarities at once, and in 16 tiles."""
    torch.manual_seed(0)
    params, x, y = problem(int(rows), int(features))
    (loss, grads), most = gradients(at_once, params, x, y)
    print(f"{rows} x {rows} similarities: loss {loss:.4f}, {most:,} bytes")
    found, peak = gradients(in_tiles(16), params, x, y)
    funcga.compare(found, (loss, grads)).assert_close()
    print(f"16 tiles of them: loss {found[0]:.4f}, {peak:,} bytes, the same gradients")


if __name__ == "__main__":
    main(*sys.argv[1:])
