"""Mixed precision in JAX: float16 with a dynamic loss scale that a window shares, in one jitted step.

    python examples/mixed_precision_jax.py

optax has no loss scale. `funcga.transforms.loss_scaled` is one as a transform: the state has the scale, losses are
multiplied by it, gradients divided, and a window that overflows is skipped as a whole and halves the scale. Parameters
are in float32 and cast in the loss; sums over micro-batches are in float32. As the scale is an array of the state,
nothing is compiled anew when it changes.

What the usual loop gets wrong: it looks at every micro-batch for itself, and drops some of a window, or it gives the
optimizer zeros instead of skipping it, so that its moments decay. Float16 without a scale loses what is below 6e-8:
here most of the gradient.
"""

import jax
import jax.numpy as jnp
import optax

import funcga

N = 4


def loss_fn(params, x, y):
    """The mean square, in float16, of outputs that are far smaller than one."""
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    hidden = jax.nn.relu(x.astype(jnp.float16) @ half["in"])
    return jnp.square((hidden @ half["out"]).astype(jnp.float32) * 1e-4 - y).mean()


def batches(count=12):
    """Batches of 16 rows; the sixth holds an infinity."""
    for i, key in enumerate(jax.random.split(jax.random.key(0), count)):
        x = jax.random.normal(key, (16, 6))
        yield x.at[0, 0].set(jnp.inf) if i == 5 else x, 1e-4 * x[:, :1]


def main():
    """Prints the scale after every window, and how much of the gradient survives with and without it."""
    tx = funcga.transforms.loss_scaled(optax.adamw(1e-2), growth_interval=3)
    step = funcga.accumulate(funcga.value_and_grad(loss_fn, scaled=True), N)

    @jax.jit
    def train_step(params, state, x, y):
        loss, grads = step(params, x, y, loss_scale=state.scale)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    keys = jax.random.split(jax.random.key(1))
    params = {"in": jax.random.normal(keys[0], (6, 16)), "out": jax.random.normal(keys[1], (16, 1))}
    state, scales = tx.init(params), []
    for x, y in batches():
        params, state, _loss = train_step(params, state, x, y)
        scales.append(int(jnp.log2(state.scale)))
    print("scale after every window: 2 to the power of", *scales)
    print(f"skipped {state.skipped}, compiled {train_step._cache_size()} time")

    _, plain = funcga.accumulate(funcga.value_and_grad(loss_fn), N)(params, x, y)
    _, scaled = step(params, x, y, loss_scale=state.scale)
    for name, grads in (("without", plain), ("with", scaled)):
        kept = jnp.concatenate([jnp.ravel(g) for g in grads.values()])
        print(f"{name} a scale {jnp.mean(kept != 0):.0%} of the gradient is not zero")


if __name__ == "__main__":
    main()
