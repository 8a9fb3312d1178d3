"""One update for every four micro-batches, and one for those that are left over at the end of an epoch.

    python examples/basic_jax.py

y = 2x is learned from 0: one step of SGD on eight rows gives 2.04, as one batch and as micro-batches of any sizes. Then
an epoch of eleven micro-batches is three updates, the last of them of three micro-batches, which are averaged by their
own rows; by hand they are divided by the four that were planned, and the update is a quarter too short.
"""

import jax
import jax.numpy as jnp
import optax

import funcga

tx = optax.sgd(0.02)
x = jnp.arange(1.0, 9.0)


def loss_fn(w, x, y):
    """The mean squared error."""
    return ((w * x - y) ** 2).mean()


@jax.jit
def updated(w, state, grads):
    """One step of the optimizer."""
    updates, state = tx.update(grads, state, w)
    return optax.apply_updates(w, updates), state


def weights(loader, n):
    """The weight after every update: one for every n micro-batches, and one for what is left."""
    step = funcga.stream(jax.value_and_grad(loss_fn))  # made once, compiled once for each shape of micro-batch
    w, found = jnp.zeros(()), []
    state = tx.init(w)
    for window in funcga.windows(loader, n):
        _loss, grads = step(w, window)
        w, state = updated(w, state, grads)
        found.append(w)
    return found


def split(x, rows):
    """A loader: micro-batches of so many rows, the last one of those that are left."""
    return [(x[i : i + rows], 2 * x[i : i + rows]) for i in range(0, len(x), rows)]


def main():
    """One update in three ways, and one epoch."""
    for text, rows, n in (("four micro-batches", 2, 4), ("one batch", 8, 1), ("micro-batches of 3, 3 and 2", 3, 3)):
        print(f"{text}: the weight is {weights(split(x, rows), n)[-1]:.5f}")
    epoch = weights(split(jnp.linspace(0, 5, 22), 2), 4)
    print("eleven micro-batches, four by four:", ", ".join(f"{w:.3f}" for w in epoch))


if __name__ == "__main__":
    main()
