"""Train a small causal language model with an optax optimizer that sees one gradient for every eight micro-batches.

    python examples/multi_steps_jax.py

Micro-batches have different numbers of tokens, and every token of a window counts the same: each gradient is that of a
mean, and comes with its tokens. An epoch does not divide by eight, so that its last window is flushed. (In
optax.MultiSteps all micro-batches of a window count the same, and what is left goes into the next epoch.) It is trained
twice: with `update`, in place of the optimizer's own, and with `accumulate` and `flush` jitted apart, which is faster.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcga

WIDTH, PAD = 32, 0


def epoch(rng, batches=20, rows=8):
    """Micro-batches of rows that count upwards in steps of 1, 2 or 3, 4 to 24 tokens long and padded at the end."""
    for _ in range(batches):
        start, stride = rng.integers(1, 40, (rows, 1)), rng.integers(1, 4, (rows, 1))
        tokens = 1 + (start + stride * np.arange(24)) % 40
        yield np.where(np.arange(24) < rng.integers(4, 25, (rows, 1)), tokens, PAD)


def count_tokens(tokens):
    """How many targets there are: the weight of a micro-batch."""
    return (tokens[:, 2:] != PAD).sum()


def loss_fn(params, tokens):
    """The mean cross-entropy of the next tokens, from the two before."""
    x = jnp.concatenate([params["embed"][tokens[:, 1:-1]], params["embed"][tokens[:, :-2]]], axis=-1)
    scores = jax.nn.log_softmax(jnp.tanh(x @ params["hidden"]) @ params["out"])
    found = jnp.take_along_axis(scores, tokens[:, 2:, None], -1)[..., 0]
    return -jnp.mean(found, where=tokens[:, 2:] != PAD)


def main(epochs=20):
    """Prints the loss on the way, how many updates there were, and how far the two ways end from one another."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (41, WIDTH), "hidden": (2 * WIDTH, 64), "out": (64, 41)}
    start = {name: jnp.asarray(rng.normal(size=s) * s[0] ** -0.5, jnp.float32) for name, s in shapes.items()}
    schedule = optax.cosine_decay_schedule(3e-2, 3 * epochs)  # it counts updates
    tx = funcga.multi_steps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), 8)

    @jax.jit
    def step(params, state, tokens):
        grads = jax.grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params, weight=count_tokens(tokens))
        return optax.apply_updates(params, updates), state

    @jax.jit
    def accumulate(params, state, tokens):
        return tx.accumulate(jax.grad(loss_fn)(params, tokens), state, weight=count_tokens(tokens))

    @jax.jit
    def flush(params, state):
        updates, state = tx.flush(state, params)
        return optax.apply_updates(params, updates), state

    params, state, rng = start, tx.init(start), np.random.default_rng(1)
    for i in range(epochs):
        for tokens in epoch(rng):
            params, state = step(params, state, tokens)
        params, state = flush(params, state)  # the last four
        if i % 5 == 4:
            print(f"epoch {i + 1:2}  updates {state.updates}  loss {loss_fn(params, tokens):.3f}")

    joined, params, state, rng = params, start, tx.init(start), np.random.default_rng(1)
    for _ in range(epochs):
        for window in funcga.windows(epoch(rng), 8):
            for tokens in window:
                state = accumulate(params, state, tokens)
            params, state = flush(params, state)
    apart = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (joined, params)), strict=True))
    print(f"in two halves: updates {state.updates}, the same params to 1e-4: {apart < 1e-4}")


if __name__ == "__main__":
    main()
