"""Train a convolutional network with BatchNorm on digits in JAX, with an optimizer of optax.

    python examples/train_digits_jax.py
    python examples/train_digits_jax.py --plot loss.png --checkpoint digits.npz --stop-after 50

All rows of a window count the same, though an epoch's last micro-batch and window are smaller: optax.MultiSteps weighs
micro-batches alike, and waits. NumPy saves all in the middle of a window: `--resume` ends bit for bit as it would have.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training import digits, load, options, order, progress, report, saving

import funcga


def initialized():
    """The parameters of two convolutions, BatchNorm and a linear layer."""
    shapes = {"conv1": (8, 1, 3, 3), "conv2": (32, 8, 3, 3), "scale": (32, 1, 1), "bias": (32, 1, 1), "out": (128, 10)}
    random = np.random.default_rng(0)
    return {name: jnp.asarray(0.1 * random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def network(params, x, given=None):
    """(logits of images [rows, 8, 8], statistics): normalised by the statistics given, or by those of x."""
    x = jax.nn.relu(jax.lax.conv(x[:, None], params["conv1"], (2, 2), "SAME"))
    x = jax.lax.conv(x, params["conv2"], (2, 2), "SAME")
    stats = given or {"mean": x.mean((0, 2, 3), keepdims=True), "var": x.var((0, 2, 3), keepdims=True)}
    x = (x - stats["mean"]) * jax.lax.rsqrt(stats["var"] + 1e-5) * (1 + params["scale"]) + params["bias"]
    return jax.nn.relu(x).reshape(len(x), -1) @ params["out"], stats


def mean_loss(params, x, y):
    """(the mean over the rows, what BatchNorm sees)."""
    logits, stats = network(params, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses.mean(), funcga.statistics.batch_moments(stats, len(x))


def main(arguments=None):
    """Trains, and says how the loss went and how many of the test images are told right."""
    args, ((x, y), (test_x, test_y)) = options(__file__, arguments, updates=48), digits()
    tx = funcga.multi_steps(optax.adamw(optax.linear_schedule(1e-2, 0.0, args.updates)), 4)
    both = funcga.Accumulator((funcga.mean(), funcga.pooled()))  # of the loss, and of what BatchNorm sees
    nothing = lambda stats: both.init((jnp.zeros(()), funcga.statistics.batch_moments(stats, 0)))

    @jax.jit(donate_argnums=0)
    def accumulate(run, x, y):
        params, stats, state, seen, curve = run
        value, grads = jax.value_and_grad(mean_loss, has_aux=True)(params, x, y)
        return params, stats, tx.accumulate(grads, state, weight=len(x)), both.update(seen, value, weight=len(x)), curve

    @jax.jit(donate_argnums=0)
    def flush(run):
        params, stats, state, seen, curve = run
        (updates, state), (loss, pooled) = tx.flush(state, params), both.finalize(seen)
        stats = funcga.statistics.running_statistics(stats, pooled, share=0.1, unbiased=False)
        return optax.apply_updates(params, updates), stats, state, nothing(stats), curve.at[state.updates - 1].set(loss)

    params, stats = initialized(), {"mean": jnp.zeros((1, 32, 1, 1)), "var": jnp.ones((1, 32, 1, 1))}
    run, start = (params, stats, tx.init(params), nothing(stats), jnp.zeros(args.updates)), 0
    if args.resume:
        run, start = funcga.trees.from_state_dict((run, start), load(args, np.load))
    steps = order(len(x), rows=32, n=4, updates=args.updates)[: args.stop_after]
    for done, (indices, is_last) in enumerate(progress(steps, start), start + 1):
        run = accumulate(run, x[indices], y[indices])
        run = flush(run) if is_last else run
        if args.checkpoint and (done % 25 == 0 or done == len(steps)):
            with saving(args) as file:
                np.savez(file, **funcga.to_numpy(funcga.trees.to_state_dict((run, done))))
    params, stats, state, _, curve = run
    report(curve[: state.updates], args.plot)
    print(f"accuracy {(jax.jit(network)(params, test_x, stats)[0].argmax(1) == test_y).mean():.3f}")


if __name__ == "__main__":
    main()
