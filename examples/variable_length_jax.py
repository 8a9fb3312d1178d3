"""A causal language model on sentences of different lengths: every token of a batch counts the same.

    python examples/variable_length_jax.py

The eight sentences of Accelerate's guide have 36 tokens, and one step of SGD leads from [-0.0075, 0.5364] to
[0.0953, 0.4337], in any number of micro-batches, although these have 1 token or 26. The average of the micro-batches'
means, which is what a loop by hand adds up, gives each token of a short sentence more.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import funcga

PADDING = -100
START = jnp.array([-0.00748682, 0.53644359])  # of torch.nn.Linear(1, 2), as seed 0 makes it

length = np.arange(1, 9)
tokens = np.where(length <= length[:, None], length, PADDING)  # [8, 8]: 1; 1, 2; 1, 2, 3; ...
labels = np.where(tokens == PADDING, PADDING, tokens % 2)


def summed_loss(w, tokens, labels):
    """The sum over the tokens of how badly it is told whether they are odd."""
    there = labels != PADDING
    logits = tokens[..., None].astype(w.dtype) * w
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(there, labels, 0))
    return jnp.where(there, losses, 0).sum()


def count_tokens(tokens, labels):
    """How many there are, without the padding."""
    return (labels != PADDING).sum()


def mean_loss(w, tokens, labels):
    """The mean over the tokens of a micro-batch."""
    return summed_loss(w, tokens, labels) / count_tokens(tokens, labels)


def trained(loss_fn, n, **how):
    """The weights after one step."""
    grads = funcga.accumulate(jax.grad(loss_fn), n, **how)(START, tokens, labels)
    return START - 0.08 * grads


def shown(w):
    """The weights, rounded."""
    return [round(x, 4) for x in w.tolist()]


def main():
    """The loss as a sum and as a mean, and the mean of means."""
    by_sum = {"fold": funcga.per_weight(), "weight": count_tokens}
    print(f"a sum, divided by the tokens: {shown(trained(summed_loss, 8, **by_sum))}")
    print(f"means, weighed by the tokens: {shown(trained(mean_loss, 3, weight=count_tokens))}")
    print(f"wrong, means that all count the same: {shown(trained(mean_loss, 2, weight=lambda *_: 1))}")


if __name__ == "__main__":
    main()
