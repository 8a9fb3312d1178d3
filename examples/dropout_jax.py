"""Dropout in JAX: a key for each micro-batch, threaded, or one for each example, so that n does not matter.

    python examples/dropout_jax.py

A key that is threaded is split in each micro-batch, and the new one is carried to the next: other noise in each, all
of it reproducible from the first key, but of course other for another n. Keys of the examples are made of a key, the
epoch and their indices, and split with the batch; each example draws with its own: four micro-batches of 4 are dropped
out as one of 16. Without the epoch an example would be dropped out alike in every epoch.

What the usual loop gets wrong: one key, passed whole, drops the same units in every micro-batch of a window.
`funcga.verify` calls that "randomness".
"""

import jax
import jax.numpy as jnp
import numpy as np

import funcga
import jax_backend

ROWS, RATE = 16, 0.5

one, two, three, four = jax.random.split(jax.random.key(1), 4)
params = {"in": jax.random.normal(one, (5, 32)), "out": jax.random.normal(two, (32, 1))}
x, y = jax.random.normal(three, (ROWS, 5)), jax.random.normal(four, (ROWS, 1))


def loss_fn(params, kept, x, y):
    """The mean square, where the hidden units in `kept` are."""
    hidden = jax.nn.relu(x @ params["in"])
    return jnp.square(jnp.where(kept, hidden / (1 - RATE), 0) @ params["out"] - y).mean()


def threaded(params, key, x, y):
    """The gradient with noise for the whole micro-batch, what that keeps, and the key for the next."""
    key, own = jax.random.split(key)
    kept = jax.random.uniform(own, (len(x), 32)) >= RATE
    return jax.grad(loss_fn)(params, kept, x, y), kept, key


def by_example(params, keys, x, y):
    """The gradient with noise that every example has a key for."""
    kept = jax_backend.sampled(jax.random.uniform, keys, (32,)) >= RATE
    return jax.grad(loss_fn)(params, kept, x, y)


def keys_of(indices, epoch):
    """A key for each example, another one in each epoch."""
    return jax_backend.example_keys(jax_backend.example_keys(jax.random.key(0), epoch), indices)


def with_threads(n):
    """The gradients, masks and next key of a window, as a function of (params, key, x, y)."""
    fold = funcga.mean(), funcga.concat(), funcga.carry()
    return funcga.accumulate(threaded, n, in_axes=(None, funcga.CARRY, 0, 0), fold=fold)


def microbatches(indices, epoch):
    """A loader that yields the keys of its examples, here four at a time."""
    for i in jnp.split(indices, 4):
        yield keys_of(i, epoch), x[i], y[i]


def main():
    """Prints what stays the same, and what does not."""
    key = jax.random.key(0)
    window = with_threads(4)
    split, masks, _next = window(params, key, x, y)
    print("threaded: the same in two runs:", jnp.array_equal(split["in"], window(params, key, x, y)[0]["in"]))
    print(f"threaded: {len({mask.tobytes() for mask in np.split(masks, 4)})} masks in 4 micro-batches")
    print(f"threaded: 4 micro-batches are {_apart(split, with_threads(1)(params, key, x, y)[0]):.2f} from one")

    whole = jax.jit(by_example)(params, keys_of(jnp.arange(ROWS), 0), x, y)
    step = funcga.stream(by_example, weight=lambda keys, x, y: len(x))  # keys are one argument of a weight more
    in_order, backwards = jnp.arange(ROWS), jnp.arange(ROWS)[::-1]
    print(f"by example: 4 micro-batches are {_apart(step(params, microbatches(in_order, 0)), whole):.0e} from one")
    print(f"by example: 4 in another order are {_apart(step(params, microbatches(backwards, 0)), whole):.0e} from one")
    print(f"by example: another epoch is {_apart(step(params, microbatches(in_order, 1)), whole):.2f} away")


def _apart(left, right):
    return jnp.linalg.norm(left["in"] - right["in"]) / jnp.linalg.norm(right["in"])


if __name__ == "__main__":
    main()
