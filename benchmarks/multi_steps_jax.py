"""Claim: in JAX, `multi_steps` costs less than optax.MultiSteps, and its two halves, jitted apart, far less.

    python -m benchmarks.multi_steps_jax

Adam, windows of 8 micro-batches, eight matrices of 1024x1024: accumulation and update alone, no model. Every step is
jitted, with whatever it replaces donated. Time is that of whole windows, ours over theirs; bytes are those that XLA's
cost analysis counts for one call, whichever branches it takes, by parameter.
"""

import jax
import jax.numpy as jnp
import optax

import funcga
from benchmarks.measure import ratio

N, MATRICES, SIDE = 8, 8, 1024


def matrices(seed: int):
    """Eight of them."""
    keys = jax.random.split(jax.random.key(seed), MATRICES)
    return {f"w{i}": jax.random.normal(key, (SIDE, SIDE)) for i, key in enumerate(keys)}


def applied(tx, grads):
    """A window of calls of `update`: each step applies the updates, and the params and the state are donated."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    carry = [matrices(0)]
    carry.append(tx.init(carry[0]))

    def window():
        for _ in range(N):
            carry[:] = step(*carry, grads)
        return jax.block_until_ready(carry)

    return window


def returned(tx, grads):
    """The same, with the updates returned and only the state donated."""
    step, params = jax.jit(tx.update, donate_argnums=1), matrices(0)
    carry = [None, tx.init(params)]

    def window():
        for _ in range(N):
            carry[:] = step(grads, carry[1], params)
        return jax.block_until_ready(carry)

    return window


def split(tx, grads):
    """A window of `accumulate` and `flush`, jitted apart."""
    accumulate = jax.jit(tx.accumulate, donate_argnums=1)

    def flush(params, state):
        updates, state = tx.flush(state, params)
        return optax.apply_updates(params, updates), state

    flush = jax.jit(flush, donate_argnums=(0, 1))
    carry = [matrices(0)]
    carry.append(tx.init(carry[0]))

    def window():
        for _ in range(N):
            carry[1] = accumulate(grads, carry[1])
        carry[:] = flush(*carry)
        return jax.block_until_ready(carry)

    return window


def micro_step(tx, grads):
    """One `accumulate`."""
    accumulate, carry = jax.jit(tx.accumulate, donate_argnums=1), [tx.init(grads)]

    def once():
        carry[0] = accumulate(grads, carry[0])
        return jax.block_until_ready(carry)

    return once


def plain_add(grads):
    """One donated add of the same trees."""
    add = jax.jit(lambda grads, held: jax.tree.map(jnp.add, held, grads), donate_argnums=1)
    carry = [jax.tree.map(jnp.zeros_like, grads)]

    def once():
        carry[0] = add(grads, carry[0])
        return jax.block_until_ready(carry)

    return once


def costs(function, *args):
    """(bytes accessed, bytes of temporaries), by parameter, with the second argument donated."""
    program = jax.jit(function, donate_argnums=1).lower(*args).compile()
    count = sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    return program.cost_analysis()["bytes accessed"] / count, program.memory_analysis().temp_size_in_bytes / count


def uneven():
    """As many parameters in matrices of different shapes: of equal zeros XLA makes one, and copies of it."""
    return {f"w{i}": jnp.ones((SIDE + 32 * (2 * i - MATRICES + 1), SIDE)) for i in range(MATRICES)}


def main() -> None:
    """Prints one line a comparison, and the bytes."""
    ours, theirs = funcga.multi_steps(optax.adam(1e-3), N), optax.MultiSteps(optax.adam(1e-3), N)
    grads = jax.block_until_ready(matrices(1))
    print(f"jax {jax.__version__}, optax {optax.__version__} on {jax.devices()[0].platform}, Adam, n={N}")
    print(f"{'time':36} {'over':28} {'ratio (quartiles)':>20}")
    for name, rival, contender, other in (
        ("update, applied", "optax.MultiSteps", applied(ours, grads), applied(theirs, grads)),
        ("update, returned", "optax.MultiSteps", returned(ours, grads), returned(theirs, grads)),
        ("accumulate and flush, applied", "optax.MultiSteps", split(ours, grads), applied(theirs, grads)),
        ("one accumulate", "one donated add", micro_step(ours, grads), plain_add(grads)),
    ):
        low, median, high = ratio(contender, other, runs=21 if other.__name__ == "window" else 201)
        print(f"{name:36} {rival:28} {median:.3f} ({low:.3f}-{high:.3f})")

    params = uneven()
    with_zeros = lambda grads, state: (ours.accumulate(grads, state), jax.tree.map(jnp.zeros_like, grads))
    print(f"{'a call':36} {'bytes accessed a parameter':>28} {'temporaries':>20}")
    for name, function, state in (
        ("accumulate", ours.accumulate, ours.init(params)),
        ("accumulate, and updates of zeros", with_zeros, ours.init(params)),
        ("optax.MultiSteps.update", theirs.update, theirs.init(params)),
    ):
        accessed, temporaries = costs(function, params, state)
        print(f"{name:36} {accessed:28.2f} {temporaries:20.2f}")


if __name__ == "__main__":
    main()
