"""Gradient checkpointing inside of accumulation: less memory for each micro-batch, and the same gradients.

    python examples/checkpointing_jax.py

Accumulation holds the activations of one micro-batch at a time, and `jax.checkpoint` those between layers alone; the
rest is computed again in the backward pass. The temporary bytes are those of the program that XLA has compiled.
"""

import jax
import jax.numpy as jnp
import numpy as np

import funcga

WIDTH, LAYERS, ROWS = 32, 6, 64

random = np.random.default_rng(0)
x, y = (jnp.asarray(random.normal(size=(ROWS, WIDTH))) for _ in range(2))
params = jnp.asarray(random.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5)


def layer(x, w):
    """A layer that keeps several activations of its own."""
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x, None


def loss_fn(layer):
    """The loss of a network of such layers."""

    def loss(params, x, y):
        return ((jax.lax.scan(layer, x, params)[0] - y) ** 2).mean()

    return loss


def gradients(layer, n):
    """The gradients, and the temporary bytes of the program."""
    program = jax.jit(funcga.accumulate(jax.grad(loss_fn(layer)), n)).lower(params, x, y).compile()
    return program(params, x, y), program.memory_analysis().temp_size_in_bytes


def main():
    """Without both, with accumulation, and with checkpoints too."""
    whole, most = gradients(layer, 1)
    print(f"one batch: {most:,} temporary bytes")
    for text, kind in (("", layer), (" and jax.checkpoint", jax.checkpoint(layer))):
        grads, temporary = gradients(kind, 8)
        funcga.compare(grads, whole).assert_close()
        print(f"eight micro-batches{text}: {temporary:,} temporary bytes, the same gradients")


if __name__ == "__main__":
    main()
