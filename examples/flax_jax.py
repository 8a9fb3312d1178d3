"""A language model of flax (nnx), accumulated over micro-batches with different numbers of tokens.

    python examples/flax_jax.py

An nnx module is split into its graph and its state, which is a tree: the parameters of a pure loss. Gradients are such
a state again, as an optimizer of optax takes it. They must be those of the whole batch.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import funcga

PADDING = -1


class Net(nnx.Module):
    """Bytes in, a convolution over those before, logits of the next byte out."""

    def __init__(self, vocabulary, width, rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.convolution = nnx.Conv(width, width, 5, padding="CAUSAL", rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.output = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        """The logits of the next byte, at every byte."""
        x = self.embed(tokens)
        return self.output(self.norm(x + nnx.silu(self.convolution(x))))


def rows(count, longest, vocabulary):
    """Token ids of texts that get shorter, padded."""
    tokens = jax.random.randint(jax.random.key(0), (count, longest), 0, vocabulary)
    return jnp.where(jnp.arange(longest) < jnp.linspace(longest, 2, count)[:, None], tokens, PADDING)


def count_tokens(tokens):
    """How many are to be predicted."""
    return (tokens[:, 1:] != PADDING).sum()


def main():
    """The whole batch and four micro-batches, compared parameter by parameter."""
    graph, params = nnx.split(Net(32, 16, nnx.Rngs(0)), nnx.Param)

    def summed_loss(params, tokens):
        logits = nnx.merge(graph, params)(jnp.maximum(tokens, 0))[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.where(tokens[:, 1:] != PADDING, losses, 0).sum()

    gradient = jax.value_and_grad(summed_loss)
    tokens = rows(12, 16, 32)
    accumulated = funcga.accumulate(gradient, n=4, fold=funcga.per_weight(), weight=count_tokens)(params, tokens)
    whole = jax.tree.map(lambda leaf: leaf / count_tokens(tokens), jax.jit(gradient)(params, tokens))

    report = funcga.compare(accumulated, whole, names=("accumulated", "whole"))
    report.assert_close()
    print(report)


if __name__ == "__main__":
    main()
