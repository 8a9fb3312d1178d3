"""The gradient of a window is clipped, and the schedule counts updates: both are inside of `multi_steps`.

    python examples/clip_and_schedule_jax.py

What a transform of optax does it does to what it is given, so the order is seen. The other way round,
`chain(clip, multi_steps(sgd, n))`, each micro-batch is clipped, and an average of clipped gradients is another update.
The weights have to be those of an optimizer without accumulation that sees the windows as batches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcga

N, EPOCHS = 4, 3
clip = optax.clip_by_global_norm(1.0)
sgd = optax.sgd(optax.cosine_decay_schedule(0.5, decay_steps=9))  # of three updates an epoch

random = np.random.default_rng(0)
x = jnp.asarray(random.normal(size=(20, 3)) * np.linspace(0.25, 5, 20)[:, None])  # later rows have larger gradients
y, start = jnp.asarray(random.normal(size=(20, 2))), jnp.asarray(random.normal(size=(3, 2)))


def loss_fn(params, x, y):
    """The mean squared error."""
    return ((x @ params - y) ** 2).mean()


def trained(tx):
    """The parameters, ten micro-batches an epoch, the last update of an epoch of two of them; and the state."""

    @jax.jit
    def step(params, state, x, y):
        updates, state = tx.update(jax.grad(loss_fn)(params, x, y), state, params, weight=len(x))
        return optax.apply_updates(params, updates), state

    flush, state, params = jax.jit(tx.flush), tx.init(start), start
    for _ in range(EPOCHS):
        for i in range(0, 20, 2):
            params, state = step(params, state, x[i : i + 2], y[i : i + 2])
        updates, state = flush(state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def whole(tx):
    """The parameters of an optimizer that sees each window as one batch."""

    @jax.jit
    def step(params, state, x, y):
        updates, state = tx.update(jax.grad(loss_fn)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params, state = start, tx.init(start)
    for _ in range(EPOCHS):
        for i in range(0, 20, 2 * N):
            params, state = step(params, state, x[i : i + 2 * N], y[i : i + 2 * N])
    return params


def main():
    """Clipped after accumulation, as in whole batches."""
    params, state = trained(funcga.multi_steps(optax.chain(clip, sgd), N))
    funcga.compare(params, whole(optax.chain(clip, sgd))).assert_close()
    print(f"updates {state.updates}: the parameters are those of whole batches")


if __name__ == "__main__":
    main()
