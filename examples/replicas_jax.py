"""Data-parallel training of a small causal language model on four devices, with one reduction an update.

    python examples/replicas_jax.py

The parameters are the same on every device, the batch is cut over them, and each device folds its rows in n
micro-batches. Rows have different numbers of tokens; every token of the whole batch counts the same. In the mean of the
devices' means, a `jax.lax.pmean` by hand, those of a device with few tokens count more.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend

ROWS, LENGTH, WIDTH, PAD = 32, 24, 32, 0


def text(rng):
    """Rows of 4 to 24 tokens that count upwards in steps of 1, 2 or 3, padded at the end."""
    start, stride = rng.integers(1, 40, (ROWS, 1)), rng.integers(1, 4, (ROWS, 1))
    tokens = 1 + (start + stride * np.arange(LENGTH)) % 40
    return {"tokens": np.where(np.arange(LENGTH) < rng.integers(4, LENGTH + 1, (ROWS, 1)), tokens, PAD)}


def loss_fn(params, batch):
    """The sum of the cross-entropies of the next tokens, from the two before."""
    tokens = batch["tokens"]
    x = jnp.concatenate([params["embed"][tokens[:, 1:-1]], params["embed"][tokens[:, :-2]]], axis=-1)
    scores = jax.nn.log_softmax(jnp.tanh(x @ params["hidden"]) @ params["out"])
    targets = tokens[:, 2:]
    return -jnp.sum(jnp.take_along_axis(scores, targets[..., None], -1)[..., 0], where=targets != PAD)


def count_tokens(batch):
    """How many targets there are: what the sum is divided by, over all micro-batches of all devices."""
    return (batch["tokens"][:, 2:] != PAD).sum()


def main(updates=60, n=4):
    """Prints the loss of some updates, and what the devices say to each other in one."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (41, WIDTH), "hidden": (2 * WIDTH, 64), "out": (64, 41)}
    params = {name: jnp.asarray(rng.normal(size=s) * s[0] ** -0.5, jnp.float32) for name, s in shapes.items()}
    tx = optax.adam(1e-2)

    mesh = jax.make_mesh((4,), ("data",))
    fold = funcga.accumulate(
        funcga.value_and_grad(loss_fn), n, fold=funcga.per_weight(), weight=count_tokens, across="data"
    )
    step = jax_backend.replicated(fold, mesh)

    @jax.jit
    def update(params, state, batch):
        loss, grads = step(params, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params, state = jax.device_put((params, tx.init(params)), NamedSharding(mesh, P()))
    for i in range(updates):
        batch = jax.device_put(text(rng), NamedSharding(mesh, P("data")))
        params, state, loss = update(params, state, batch)
        if i % 10 == 9:
            print(f"update {i + 1:3}  loss {loss:.3f}")
    funcga.check_replicas(params, "data")
    for found in jax_backend.collectives(update, params, state, batch):
        print(f"each update: one {found.kind} of {found.bytes:,} bytes, in {found.depth} loops")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # on a machine without four accelerators
    main()
