"""CLIP and SigLIP in micro-batches, exactly: each picture is compared with the captions of the whole batch.

    python examples/image_text_jax.py

Both losses need the embeddings of all rows at once, and nothing else of the model. `funcga.coupled` collects them in
one pass over the micro-batches, computes the loss with its learned temperature (SigLIP: scale and bias), and pulls the
gradient back in a second pass. Memory is that of one micro-batch and of the embeddings.

Plain accumulation takes the mean of the losses of the micro-batches. There a picture is compared with the few captions
of its own micro-batch: that is another loss. Two noisy views of the same numbers stand for pictures and captions.

Sources: Radford et al. (2021), "Learning transferable visual models from natural language supervision"; Zhai, Mustafa,
Kolesnikov and Beyer (2023), "Sigmoid loss for language image pre-training".
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import funcga


class TwoTowers(nnx.Module):
    """Embeddings of pictures and of captions, and how similarities become logits."""

    def __init__(self, scale, bias, rngs):
        linear = lambda width, features: nnx.Linear(width, features, param_dtype=float, rngs=rngs)
        self.picture = nnx.Sequential(linear(32, 64), nnx.gelu, linear(64, 16))
        self.caption = nnx.Sequential(linear(32, 64), nnx.gelu, linear(64, 16))
        self.scale, self.bias = nnx.Param(jnp.log(scale)), nnx.Param(jnp.array(bias))

    def logits(self, pictures, captions):
        """Of each picture with each caption, from their embeddings."""
        return jnp.exp(self.scale[...]) * pictures @ captions.T + self.bias[...]


def normalize(x):
    """The rows, each of length 1."""
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def embed(model, pictures, captions):
    """The summary of a micro-batch: its embeddings."""
    return {"pictures": normalize(model.picture(pictures)), "captions": normalize(model.caption(captions))}


def clip_loss(model, s):
    """How well the caption of each picture is found among all of them, and the picture of each caption."""
    logits = model.logits(s["pictures"], s["captions"])
    rows, columns = jax.nn.logsumexp(logits, axis=1), jax.nn.logsumexp(logits, axis=0)
    return ((rows + columns) / 2 - jnp.diagonal(logits)).mean()


def siglip_loss(model, s):
    """How well pairs that belong together are told from all others: a sum over all pairs, divided by the rows."""
    logits = model.logits(s["pictures"], s["captions"])
    sign = 2 * jnp.eye(len(logits)) - 1
    return -jax.nn.log_sigmoid(sign * logits).sum() / len(logits)


LOSSES = {"CLIP": (clip_loss, (1 / 0.07, 0.0)), "SigLIP": (siglip_loss, (10.0, -10.0))}


def in_two_passes(loss_fn, n):
    """(loss, gradients) of (model, *batch), exact for every n."""
    return funcga.coupled(embed, loss_fn, n)


def plainly(loss_fn, n):
    """The same loss, accumulated as usual: the mean of the losses of n micro-batches."""
    return funcga.accumulate(nnx.value_and_grad(lambda model, *rows: loss_fn(model, embed(model, *rows))), n)


def apart(left, right):
    """The largest difference of the gradients, relative to the largest element of the second."""
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    return max(abs(a - b).max() for a, b in zip(left, right, strict=True)) / max(abs(b).max() for b in right)


def gradients(loss_fn):
    """Three ways to the gradient: of the whole batch, and of 8 micro-batches in two passes and plainly."""
    return plainly(loss_fn, n=1), in_two_passes(loss_fn, n=8), plainly(loss_fn, n=8)


def compare(ways, model, batch):
    """Prints how far the gradients of 8 micro-batches are from that of the whole batch."""
    whole, exact, plain = (way(model, *batch)[1] for way in ways)
    print(f"    8 micro-batches: {apart(exact, whole):.0e} off in two passes, {apart(plain, whole):.0%} off plainly")


def pairs(rows):
    """Pictures [rows, 32] and the captions [rows, 32] that belong to them."""
    shapes = [(rows, 8), (8, 32), (8, 32), (rows, 32), (rows, 32)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    contents, of_picture, of_caption, *noise = map(jax.random.normal, keys, shapes)
    return contents @ of_picture + noise[0], contents @ of_caption + noise[1]


def main():
    """A training with each of the losses, and how far plain accumulation is off before and after it."""
    jax.config.update("jax_enable_x64", True)
    pictures, captions = pairs(1000)
    batch, test = (pictures[:350], captions[:350]), (pictures[800:], captions[800:])
    for name, (loss_fn, start) in LOSSES.items():
        model, ways = TwoTowers(*start, nnx.Rngs(0)), gradients(loss_fn)
        print(f"{name}, before the training")
        compare(ways, model, batch)

        optimizer, (_, step, _) = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param), ways
        for key in jax.random.split(jax.random.key(1), 30):
            rows = jax.random.permutation(key, 800)[:350]
            loss, grads = step(model, pictures[rows], captions[rows])
            optimizer.update(model, grads)

        found = model.logits(*embed(model, *test).values()).argmax(1)
        hits, scale = (found == jnp.arange(len(found))).mean(), jnp.exp(model.scale[...])
        print(f"{name}, after 30 updates: loss {loss:.3f}, scale {scale:.2f}, {hits:.0%} of captions found")
        compare(ways, model, batch)


if __name__ == "__main__":
    main()
