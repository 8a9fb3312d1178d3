"""A contrastive loss over a large batch without its matrix of similarities: the columns are folded over in tiles.

    python examples/contrastive_tiles_jax.py

InfoNCE compares each of B rows with all B columns. As one matrix, that is 256 MiB for 8,192 rows in float32, and the
backward pass holds several of that size. But all that the loss needs of a row is the similarity to its own match, and
the log of a sum over the columns. That sum is a fold: `funcga.logsumexp()` over tiles of columns. For the other
direction, from columns to rows, a tile has whole columns, so that their sums are only collected. `jax.checkpoint`
around the tile computes its similarities again in the backward pass: one tile exists at a time. The loss and its
gradient are exact.

With `python examples/contrastive_tiles_jax.py 8192 256`, for 8,192 rows of 256 features, XLA takes 83 MiB of temporary
memory with 16 tiles, and 792 MiB without.
"""

import sys

import jax
import jax.numpy as jnp

import funcga


def of_tile(a, b):
    """The logs of the sums of exp(similarity): of each row of a over these rows of b, and the other way round."""
    logits = a @ b.T
    return jax.nn.logsumexp(logits, axis=1), jax.nn.logsumexp(logits, axis=0)


def over_tiles(n):
    """The same of all rows of b, in n tiles."""
    # Without the checkpoint the similarities of all tiles would be kept for the backward pass.
    return funcga.accumulate(jax.checkpoint(of_tile), n, fold=(funcga.logsumexp(), funcga.concat()), in_axes=(None, 0))


def in_tiles(n):
    """The loss of embeddings {"a": [B, D], "b": [B, D]} whose rows match: the mean of both directions, as in CLIP."""
    log_sums = over_tiles(n)

    def loss_fn(params, s):
        a, b = jnp.exp(params["scale"]) * s["a"], s["b"]
        rows, columns = log_sums(a, b)
        return ((rows + columns) / 2 - (a * b).sum(1)).mean()

    return loss_fn


def at_once(params, s):
    """The same loss, with a matrix of all similarities."""
    logits = jnp.exp(params["scale"]) * s["a"] @ s["b"].T
    rows, columns = jax.nn.logsumexp(logits, axis=1), jax.nn.logsumexp(logits, axis=0)
    return ((rows + columns) / 2 - jnp.diagonal(logits)).mean()


def normalize(x):
    """The rows, each of length 1."""
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def summary_fn(params, x, y):
    """The embeddings."""
    return {"a": normalize(x @ params["a"]), "b": normalize(y @ params["b"])}


def gradients(loss_fn, params, x, y):
    """(loss, gradients), and the temporary bytes of the program."""
    step = funcga.coupled(summary_fn, loss_fn, n=8)
    program = jax.jit(step).lower(params, x, y).compile()
    return program(params, x, y), program.memory_analysis().temp_size_in_bytes


def problem(rows, features):
    """Parameters, and pairs that resemble each other."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, noise = (jax.random.normal(key, (rows, features)) for key in keys[:2])
    params = {
        name: jax.random.normal(key, (features, features)) / features**0.5
        for name, key in zip(("a", "b"), keys[2:], strict=True)
    }
    return {**params, "scale": jnp.array(2.0)}, x, x + noise


def main(rows=1024, features=32):
    """The loss with all similarities at once, and in 16 tiles."""
    params, x, y = problem(int(rows), int(features))
    (loss, grads), most = gradients(at_once, params, x, y)
    print(f"{rows} x {rows} similarities: loss {loss:.4f}, {most:,} temporary bytes")
    found, temporary = gradients(in_tiles(16), params, x, y)
    funcga.compare(found, (loss, grads)).assert_close()
    print(f"16 tiles of them: loss {found[0]:.4f}, {temporary:,} temporary bytes, the same gradients")


if __name__ == "__main__":
    main(*sys.argv[1:])
