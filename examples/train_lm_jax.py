"""Train a causal language model on real text in JAX, with an optimizer of optax.

    python examples/train_lm_jax.py
    python examples/train_lm_jax.py --plot loss.png --checkpoint lm.npz --stop-after 90

Micro-batches have different numbers of tokens and the last window of an epoch is shorter, yet all tokens of a window
count the same. optax.MultiSteps weighs micro-batches alike, and leaves a shorter window waiting. Everything is a tree
of arrays, which NumPy saves in the middle of a window: with `--resume` in place of `--stop-after 90` the training ends
as it would have, bit for bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training import PAD, load, options, order, paragraphs, progress, report, saving

import funcga


def initialized(length, width=48, heads=4):
    """The parameters of a transformer with one block: bytes in, logits of the next byte out."""
    shapes = {"token": (256, width), "position": (length - 1, width), "qkv": (width, 3, heads, width // heads)}
    shapes |= {"out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    random = np.random.default_rng(0)
    return {name: jnp.asarray(0.1 * random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def mean_loss(params, tokens):
    """The mean over the tokens that are to be predicted."""
    x = params["token"][tokens[:, :-1]] + params["position"]
    query, key, value = jnp.einsum("rld,dnhe->nrlhe", jax.nn.standardize(x), params["qkv"])
    x += jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape) @ params["out"]
    x += jax.nn.gelu(jax.nn.standardize(x) @ params["up"]) @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(jax.nn.standardize(x) @ params["token"].T, tokens[:, 1:])
    return losses.mean(where=tokens[:, 1:] != PAD)


def main(arguments=None):
    """Trains, and says how the loss went."""
    args, texts = options(__file__, arguments, updates=40), paragraphs()
    adamw = optax.adamw(optax.linear_schedule(1e-2, 0.0, args.updates))
    tx = funcga.multi_steps(optax.chain(optax.clip_by_global_norm(1.0), adamw), 4)
    mean = funcga.Accumulator(funcga.mean())

    @jax.jit(donate_argnums=0)
    def accumulate(run, tokens):
        params, state, total, curve = run
        loss, grads = jax.value_and_grad(mean_loss)(params, tokens)
        count = (tokens[:, 1:] != PAD).sum()
        return params, tx.accumulate(grads, state, weight=count), mean.update(total, loss, weight=count), curve

    @jax.jit(donate_argnums=0)
    def flush(run):
        params, state, total, curve = run
        updates, state = tx.flush(state, params)
        curve = curve.at[state.updates - 1].set(mean.finalize(total))
        return optax.apply_updates(params, updates), state, mean.init(jnp.zeros(())), curve

    params = initialized(texts.shape[1])
    run, start = (params, tx.init(params), mean.init(jnp.zeros(())), jnp.zeros(args.updates)), 0
    if args.resume:
        run, start = funcga.trees.from_state_dict((run, start), load(args, np.load))
    steps = order(len(texts), rows=8, n=4, updates=args.updates)[: args.stop_after]
    for done, (indices, is_last) in enumerate(progress(steps, start), start + 1):
        run = accumulate(run, texts[indices])
        run = flush(run) if is_last else run
        if args.checkpoint and (done % 25 == 0 or done == len(steps)):
            with saving(args) as file:
                np.savez(file, **funcga.to_numpy(funcga.trees.to_state_dict((run, done))))
    _, state, _, curve = run
    report(curve[: state.updates], args.plot)


if __name__ == "__main__":
    main()
