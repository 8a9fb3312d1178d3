"""As few micro-batches as fit into memory, found by trying; and as many as make a batch of the size that is wanted.

    python examples/adaptive_jax.py

When XLA has no memory for a batch, it is replayed with more micro-batches; the gradients are those of the whole batch,
whatever fits. That memory runs out is played here, by a loss that raises XLA's error when it is traced for more rows
than there is room for. A TargetWeight ends a window when it has the rows that are wanted, whatever the micro-batches
have. By hand it is 24 // 10 micro-batches of 10 for 24 rows, and so 20.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcga

random = np.random.default_rng(0)
x, y, start = (jnp.asarray(random.normal(size=shape)) for shape in ((64, 3), (64, 2), (3, 2)))


def loss_fn(w, x, y):
    """The mean squared error."""
    return ((x @ w - y) ** 2).mean()


def with_room_for(rows, sizes):
    """The same loss, where only so many rows fit; `sizes` takes down what did."""

    def loss(w, x, y):
        if len(x) > rows:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory (played: {len(x)} rows)")
        sizes.append(len(x))
        return loss_fn(w, x, y)

    return loss


def target_batches(loader, rows):
    """The weights after updates of at least so many rows, and the number of updates."""
    tx = funcga.multi_steps(optax.sgd(0.1), funcga.transforms.TargetWeight(rows))

    @jax.jit
    def step(w, state, x, y):
        updates, state = tx.update(jax.grad(loss_fn)(w, x, y), state, w, weight=len(x))
        return optax.apply_updates(w, updates), state

    w, state = start, tx.init(start)
    for micro in loader:
        w, state = step(w, state, *micro)
    updates, state = jax.jit(tx.flush)(state, w)  # of what is left
    return optax.apply_updates(w, updates), state.updates


def main():
    """Gradients where 20 rows fit; and updates of 24 rows from micro-batches of 10."""
    sizes = []
    step = funcga.accumulate(jax.grad(with_room_for(20, sizes)), n="auto")
    funcga.compare(step(start, x, y), jax.jit(jax.grad(loss_fn))(start, x, y)).assert_close()
    print(f"room for 20 of 64 rows: the gradients of the whole batch, in micro-batches of {sizes[-1]}")

    loader = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 60, 10)]
    print(f"six micro-batches of 10 rows, 24 to an update: {target_batches(loader, 24)[1]} updates")


if __name__ == "__main__":
    main()
