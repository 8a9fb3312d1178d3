"""Train a convolutional network with BatchNorm on digits in JAX, with an optimizer of optax.

    python examples/train_digits_jax.py
    python examples/train_digits_jax.py --plot loss.png --checkpoint digits.npz --stop-after 50

The running statistics are state that goes from one micro-batch to the next. The last micro-batch of an epoch has fewer
rows and its last window fewer micro-batches, and all rows of a window count the same; optax.MultiSteps weighs
micro-batches alike, and leaves a shorter window waiting. Everything is a tree of arrays, which NumPy saves in the
middle of a window: with `--resume` in place of `--stop-after 50` it ends as it would have, bit for bit.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track
from training import digits, options, order, plot

import funcga

WIDTHS = (1, 16, 32)


def initialized(key):
    """(params, running statistics) of two convolutions with BatchNorm, each halving the image, and a linear layer."""
    layers, running, keys = [], [], jax.random.split(key, 3)
    for k, inputs, width in zip(keys, WIDTHS, WIDTHS[1:]):
        kernel = jax.random.normal(k, (3, 3, inputs, width)) * (9 * inputs) ** -0.5
        layers.append({"kernel": kernel, "scale": jnp.ones(width), "shift": jnp.zeros(width)})
        running.append({"mean": jnp.zeros(width), "var": jnp.ones(width)})
    return {"layers": layers, "output": 0.1 * jax.random.normal(keys[2], (4 * WIDTHS[-1], 10))}, running


def logits(params, running, x, training):
    """The logits of images [rows, 8, 8], and the running statistics with those of these images."""
    x, found = x[..., None], []
    for layer, old in zip(params["layers"], running, strict=True):
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        used = {"mean": x.mean((0, 1, 2)), "var": x.var((0, 1, 2))} if training else old
        found.append(jax.tree.map(lambda before, now: 0.9 * before + 0.1 * now, old, used))
        x = jax.nn.relu((x - used["mean"]) * jax.lax.rsqrt(used["var"] + 1e-5) * layer["scale"] + layer["shift"])
    return x.reshape(len(x), -1) @ params["output"], found


def mean_loss(params, running, x, y):
    """(the mean over the rows, the running statistics)."""
    found, running = logits(params, running, x, training=True)
    return optax.softmax_cross_entropy_with_integer_labels(found, y).mean(), running


def main(arguments=None):
    """Trains, and prints the loss of the first and of the last update, and how many test images are told right."""
    args, ((x, y), (test_x, test_y)) = options(arguments, updates=48), digits()
    adamw = optax.adamw(optax.linear_schedule(1e-2, 0.0, args.updates))
    tx = funcga.multi_steps(optax.chain(optax.clip_by_global_norm(1.0), adamw), 4)
    mean = funcga.Accumulator(funcga.mean())

    @jax.jit(donate_argnums=0)
    def accumulate(run, x, y):
        params, running, state, total, curve = run
        (loss, running), grads = jax.value_and_grad(mean_loss, has_aux=True)(params, running, x, y)
        state, total = tx.accumulate(grads, state, weight=len(x)), mean.update(total, loss, weight=len(x))
        return params, running, state, total, curve

    @jax.jit(donate_argnums=0)
    def flush(run):
        params, running, state, total, curve = run
        updates, state = tx.flush(state, params)
        params, loss = optax.apply_updates(params, updates), mean.finalize(total)
        return params, running, state, mean.init(loss), curve.at[state.updates - 1].set(loss)

    params, running = initialized(jax.random.key(0))
    run, done = (params, running, tx.init(params), mean.init(jnp.zeros(())), jnp.zeros(args.updates)), 0
    if args.resume:
        run, done = funcga.from_state_dict((run, done), np.load(args.checkpoint))
    steps = order(len(x), rows=32, n=4, updates=args.updates)[: args.stop_after]
    for indices, is_last in track(steps[done:], "training", len(steps), done, disable=not sys.stdout.isatty()):
        run = accumulate(run, x[indices], y[indices])
        run = flush(run) if is_last else run
        done += 1
        if args.checkpoint and (done % 25 == 0 or done == len(steps)):
            np.savez(args.checkpoint, **funcga.to_numpy(funcga.to_state_dict((run, done))))
    params, running, state, _, curve = run
    curve = curve[: state.updates]
    plot(curve, args.plot)
    accuracy = (logits(params, running, test_x, training=False)[0].argmax(1) == test_y).mean()
    print(f"loss {curve[0]:.3f} at the first update, {curve[-1]:.3f} at update {len(curve)}; accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
