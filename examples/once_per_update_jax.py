"""Once per update in JAX: optax's Muon, EMA and reduce_on_plateau, and L-BFGS, around `accumulate` in one jitted step.

    python examples/once_per_update_jax.py

The loss is a mean over rows, so a plain step is right. All that optax does comes after it, once for each update: Muon
for a matrix and AdamW for the other one, an EMA of the parameters, and `reduce_on_plateau`. The last one is given the
loss that the step returns, which is the mean over all rows; `optax.MultiSteps` gives it that of the last micro-batch.

`optax.lbfgs` takes the loss as `value_fn`, and differentiates it several times for each update. The loss of the whole
batch is `accumulate(loss_fn, n)`, but its derivative needs the activations of all micro-batches. `value_fn_of` makes
JAX take the accumulated gradient instead, which needs those of one micro-batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import funcga

ROWS, N, UPDATES = 250, 10, 30
MATRICES = {"hidden": contrib.MuonDimensionNumbers(), "out": None}


def loss_fn(params, x, y):
    """The mean over the rows."""
    logits = jnp.tanh(x @ params["hidden"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def trained(value_and_grad, params, batches):
    """After an update for each batch: the parameters, their EMA, and the factor of the learning rate."""
    muon = contrib.muon(0.02, muon_weight_dimension_numbers=MATRICES)
    tx, ema = optax.chain(muon, contrib.reduce_on_plateau(0.5, patience=3)), optax.ema(0.9)

    @jax.jit
    def train_step(params, state, averages, x, y):
        loss, grads = value_and_grad(params, x, y)
        updates, state = tx.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        average, averages = ema.update(params, averages)
        return params, state, averages, average

    state, averages = tx.init(params), ema.init(params)
    for x, y in batches:
        params, state, averages, average = train_step(params, state, averages, x, y)
    return params, average, state[1].scale


def value_fn_of(loss_fn, n):
    """The loss of a batch, as a function whose gradient is the accumulated one."""
    value_fn = jax.custom_vjp(funcga.accumulate(loss_fn, n))
    backward = lambda grads, slope: (jax.tree.map(lambda grad: slope * grad, grads), None, None)
    value_fn.defvjp(funcga.accumulate(jax.value_and_grad(loss_fn), n), backward)
    return value_fn


def trained_by_lbfgs(value_fn, params, x, y, updates=5):
    """The parameters after some updates on the same batch, and the loss before the last one."""
    tx = optax.lbfgs()

    @jax.jit
    def train_step(params, state, x, y):
        of_batch = lambda params: value_fn(params, x, y)
        loss, grads = optax.value_and_grad_from_state(of_batch)(params, state=state)
        updates, state = tx.update(grads, state, params, value=loss, grad=grads, value_fn=of_batch)
        return optax.apply_updates(params, updates), state, loss

    # Numbers of the first state have weak types. Without them, the step compiles once.
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), tx.init(params))
    for _ in range(updates):
        params, state, loss = train_step(params, state, x, y)
    return params, loss


def temporary(value_fn, *args):
    """The bytes that a gradient takes beside its arguments and results."""
    return jax.jit(jax.grad(value_fn)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def off(got, expected):
    """The largest error, relative to the largest element."""
    pairs = [*zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)]
    return max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(b).max() for _, b in pairs)


def main():
    """Both ways of training beside whole batches."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    params = {"hidden": jnp.asarray(rng.normal(size=(8, 24)) / 3), "out": jnp.asarray(rng.normal(size=(24, 4)) / 5)}
    x = rng.normal(size=(UPDATES, ROWS, 8))
    y = (x[..., :4] + rng.normal(size=(UPDATES, ROWS, 4))).argmax(-1)
    batches = [*zip(x, y, strict=True)]

    got = trained(funcga.accumulate(jax.value_and_grad(loss_fn), N), params, batches)
    expected = trained(jax.value_and_grad(loss_fn), params, batches)
    weights, ema, _ = (off(a, b) for a, b in zip(got, expected, strict=True))
    print(f"Muon, {UPDATES} updates in {N} micro-batches: weights off by {weights:.0e}, EMA by {ema:.0e}")
    print(f"reduce_on_plateau ends at {got[2]} of the learning rate, with whole batches at {expected[2]}")

    batch, value_fn = batches[0], value_fn_of(loss_fn, N)
    got, loss = trained_by_lbfgs(value_fn, params, *batch)
    expected, _ = trained_by_lbfgs(loss_fn, params, *batch)
    print(f"L-BFGS, 5 updates in {N} micro-batches: weights off by {off(got, expected):.0e}, loss {loss:.3f}")
    through = temporary(funcga.accumulate(loss_fn, N), params, *batch)
    print(f"its gradient takes {temporary(value_fn, params, *batch):,} temporary bytes, through the loop {through:,}")


if __name__ == "__main__":
    main()
