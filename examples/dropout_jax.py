"""Dropout in JAX: a key for each micro-batch, threaded, or one for each example, so that n does not matter.

    python examples/dropout_jax.py

A key that is threaded is split in each micro-batch, and the new one is carried to the next: other noise in each, all
of it reproducible from the first key, but of course other for another n. Keys of the examples, `example_keys(key,
indices)`, are split with the batch, and each example draws with its own: four micro-batches of 4 are dropped out as
one of 16.

What the usual loop gets wrong: one key, passed whole, drops the same units in every micro-batch of a window.
`funcga.verify` calls that "randomness".
"""

import jax
import jax.numpy as jnp

import funcga
import jax_backend

ROWS, RATE = 16, 0.5


def loss_fn(params, kept, x, y):
    """The mean square, where the hidden units in `kept` are."""
    hidden = jax.nn.relu(x @ params["in"])
    return jnp.square(jnp.where(kept, hidden / (1 - RATE), 0) @ params["out"] - y).mean()


def threaded(params, key, x, y):
    """The gradient with noise for the whole micro-batch, and the key for the next."""
    key, own = jax.random.split(key)
    kept = jax.random.uniform(own, (len(x), 32)) >= RATE
    return jax.grad(loss_fn)(params, kept, x, y), key


def by_example(params, keys, x, y):
    """The gradient with noise that every example has a key for."""
    kept = jax_backend.sampled(jax.random.uniform, keys, (32,)) >= RATE
    return jax.grad(loss_fn)(params, kept, x, y)


def gradients(n, seed=0):
    """The two gradients of the first layer, of 16 examples in n micro-batches."""
    one, two, three, four = jax.random.split(jax.random.key(1), 4)
    params = {"in": jax.random.normal(one, (5, 32)), "out": jax.random.normal(two, (32, 1))}
    x, y = jax.random.normal(three, (ROWS, 5)), jax.random.normal(four, (ROWS, 1))
    key = jax.random.key(seed)
    step = funcga.accumulate(threaded, n, in_axes=(None, funcga.CARRY, 0, 0), fold=(funcga.mean(), funcga.carry()))
    grads, _key = step(params, key, x, y)
    keys = jax_backend.example_keys(key, jnp.arange(ROWS))
    return grads["in"], funcga.accumulate(by_example, n)(params, keys, x, y)["in"]


def main():
    """Prints what stays the same, and what does not."""
    whole, split, again, other = gradients(1), gradients(4), gradients(4), gradients(4, seed=1)
    print("threaded: the same in two runs:", jnp.array_equal(split[0], again[0]))
    print(f"threaded: 4 micro-batches are {_apart(split[0], whole[0]):.2f} from one")
    print(f"by example: 4 micro-batches are {_apart(split[1], whole[1]):.0e} from one")
    print(f"by example: another seed is {_apart(split[1], other[1]):.2f} away")


def _apart(left, right):
    return jnp.linalg.norm(left - right) / jnp.linalg.norm(right)


if __name__ == "__main__":
    main()
