"""A language model with an auxiliary loss: a mean over tokens plus a mean over rows, exact in micro-batches.

    python examples/auxiliary_jax.py

The cross-entropy is divided by the number of tokens of the whole batch, the auxiliary loss by the number of rows: no
one weight of a micro-batch is right for both. `totals=` counts both before the first micro-batch, in the same program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import funcga

ROWS, LENGTH, WIDTH, PAD = 22, 24, 32, 0
AUXILIARY = 0.3


def text(rng):
    """Rows of 3 to 24 tokens that count upwards in steps of 1, 2 or 3; the auxiliary target is the step."""
    start, stride = rng.integers(1, 40, (ROWS, 1)), rng.integers(1, 4, (ROWS, 1))
    tokens = 1 + (start + stride * np.arange(LENGTH)) % 40
    lengths = rng.integers(3, LENGTH + 1, (ROWS, 1))
    tokens = np.where(np.arange(LENGTH) < lengths, tokens, PAD)
    return {"tokens": jnp.asarray(tokens), "stride": jnp.asarray(stride[:, 0] - 1)}


def terms(params, batch):
    """(the sum of the cross-entropies of the next tokens, that of the classification of the rows)."""
    tokens = batch["tokens"]
    x = jnp.concatenate([params["embed"][tokens[:, 1:-1]], params["embed"][tokens[:, :-2]]], axis=-1)
    hidden = jnp.tanh(x @ params["hidden"])
    targets = tokens[:, 2:]
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ params["out"], targets)
    of_rows = optax.softmax_cross_entropy_with_integer_labels(hidden[:, 0] @ params["row"], batch["stride"])
    return jnp.sum(losses, where=targets != PAD), of_rows.sum()


def count(batch):
    """What the two terms are divided by."""
    return {"tokens": (batch["tokens"][:, 2:] != PAD).sum(), "rows": len(batch["tokens"])}


def loss_fn(params, batch, *, totals):
    """The part that a micro-batch has in the loss of the whole batch."""
    of_tokens, of_rows = terms(params, batch)
    return of_tokens / jnp.maximum(totals["tokens"], 1) + AUXILIARY * of_rows / totals["rows"]


def loss_by_hand(params, batch):
    """The loss of one batch, as it stands in a loop over micro-batches."""
    return loss_fn(params, batch, totals=count(batch))


def distance(left, right):
    """How far two gradients are apart, relative to the second."""
    left, right = ravel_pytree(left)[0], ravel_pytree(right)[0]
    return float(jnp.linalg.norm(left - right) / jnp.linalg.norm(right))


def main(updates=60, n=4):
    """Prints how far each way is from the whole batch, and the loss of some updates."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (41, WIDTH), "hidden": (2 * WIDTH, 64), "out": (64, 41), "row": (64, 3)}
    params = {name: jnp.asarray(rng.normal(size=s) * s[0] ** -0.5, jnp.float32) for name, s in shapes.items()}
    step = funcga.accumulate(funcga.value_and_grad(loss_fn), n, fold=funcga.sum(), totals=count)

    batch = text(rng)
    whole = jax.grad(loss_by_hand)(params, batch)
    _, grads = step(params, batch)
    print(f"that of the whole batch: {distance(grads, whole) < 1e-6}")
    averaged = funcga.accumulate(jax.grad(loss_by_hand), n, weight=lambda batch: 1)
    print(f"averaged over the micro-batches it is off by {distance(averaged(params, batch), whole):.0%}")

    tx = optax.adam(1e-2)

    @jax.jit
    def update(params, state, batch):
        loss, grads = step(params, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    for i in range(updates):
        params, state, loss = update(params, state, text(rng))
        if i % 20 == 19:
            print(f"update {i + 1:2}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
