"""A mixture of experts with its load-balancing loss, exact in micro-batches of texts of different lengths.

    python examples/mixture_of_experts_jax.py

The loss is a cross entropy plus the load-balancing loss of the Switch Transformer: E * sum(share * probability), where
share is the part of the tokens that an expert got, and probability what the router gave it on average. Both are means
over the tokens of the batch. The product of two means is no mean: accumulated as usual, every micro-batch has to be
balanced by itself, as if a text on one subject needed all experts alike. `funcga.coupled` folds the means, whose size
is that of the experts, and the cross entropy beside them; a micro-batch weighs as many as it has tokens.

Source: Fedus, Zoph and Shazeer (2022), "Switch Transformers".
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from training import PAD, paragraphs

import funcga

EXPERTS = 4


class Mixture(eqx.Module):
    """Bytes in, logits of the next byte out. Each token is sent to one of the experts."""

    embedding: jax.Array
    before: jax.Array
    router: eqx.nn.Linear
    experts: eqx.nn.MLP
    output: eqx.nn.Linear

    def __init__(self, width, key):
        first, second, third, fourth, fifth = jax.random.split(key, 5)
        self.embedding = jax.random.normal(first, (256, width))
        self.before = jax.random.normal(second, (256, width))
        self.router = eqx.nn.Linear(width, EXPERTS, key=third)
        expert = lambda key: eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=key)
        self.experts = eqx.filter_vmap(expert)(jax.random.split(fourth, EXPERTS))
        self.output = eqx.nn.Linear(width, 256, key=fifth)

    def __call__(self, tokens):
        """The logits, [length, 256], and the router's probabilities, [length, EXPERTS], of one text."""
        x = self.embedding[tokens] + self.before[jnp.pad(tokens[:-1], (1, 0))]
        probabilities = jax.nn.softmax(jax.vmap(self.router)(x))
        chosen = jax.nn.one_hot(probabilities.argmax(-1), EXPERTS)
        # In a program as small as this one, all experts see all tokens.
        of_experts = eqx.filter_vmap(lambda expert: jax.vmap(expert)(x))(self.experts)
        return jax.vmap(self.output)(x + jnp.einsum("te,te,etw->tw", chosen, probabilities, of_experts)), probabilities


def statistics(model, tokens):
    """The summary of a micro-batch: three means over the tokens that are to be predicted."""
    logits, probabilities = jax.vmap(model)(tokens[:, :-1])
    there = tokens[:, 1:] != PAD
    mean = lambda x: jnp.where(there.reshape(*there.shape, *(1,) * (x.ndim - 2)), x, 0).sum((0, 1)) / there.sum()
    return {
        "cross_entropy": mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])),
        "share": mean(jax.nn.one_hot(probabilities.argmax(-1), EXPERTS)),
        "probability": mean(probabilities),
    }


def balance(model, s):
    """The load-balancing loss of the statistics of the whole batch: 1 if all experts get equally much."""
    return EXPERTS * (s["share"] * s["probability"]).sum()


def total(model, s):
    """The loss that is trained."""
    return s["cross_entropy"] + 0.1 * balance(model, s)


def count_tokens(tokens):
    """The weight of a micro-batch: how many tokens are to be predicted."""
    return (tokens[:, 1:] != PAD).sum()


def in_two_passes(static, loss_fn, n):
    """(loss, gradients) of (params, tokens), exact for every n."""
    summary_fn = lambda params, tokens: statistics(eqx.combine(params, static), tokens)
    return funcga.coupled(summary_fn, loss_fn, n, fold=funcga.mean(), weight=count_tokens)


def plainly(static, loss_fn, n):
    """The same loss, accumulated as usual, with the right weights."""
    of_rows = lambda params, tokens: loss_fn(params, statistics(eqx.combine(params, static), tokens))
    return funcga.accumulate(jax.value_and_grad(of_rows), n, weight=count_tokens)


def apart(left, right):
    """The largest difference of the gradients, relative to the largest element of the second."""
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    return max(abs(a - b).max() for a, b in zip(left, right, strict=True)) / max(abs(b).max() for b in right)


def main():
    """A few updates; then the gradients of one batch, in two passes and plainly."""
    jax.config.update("jax_enable_x64", True)
    texts = jnp.array(paragraphs())
    params, static = eqx.partition(eqx.filter_jit(Mixture)(32, jax.random.key(0)), eqx.is_inexact_array)
    tx = optax.adamw(1e-2)
    state = tx.init(params)

    @jax.jit
    def train_step(params, state, tokens):
        loss, grads = in_two_passes(static, total, n=8)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, loss

    for update, key in enumerate(jax.random.split(jax.random.key(1), 24), 1):
        batch = texts[jax.random.permutation(key, len(texts))[:48]]
        params, state, loss = train_step(params, state, batch)
        if update % 8 == 0:
            print(f"update {update}: loss {loss:.3f}")

    for name, loss_fn in (("the whole loss", total), ("its load balancing", balance)):
        _, whole = plainly(static, loss_fn, n=1)(params, texts[:48])
        _, exact = in_two_passes(static, loss_fn, n=8)(params, texts[:48])
        _, plain = plainly(static, loss_fn, n=8)(params, texts[:48])
        print(f"{name}: {apart(exact, whole):.0e} off in two passes, {apart(plain, whole):.1%} off plainly")


if __name__ == "__main__":
    main()
