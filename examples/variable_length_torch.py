"""A causal language model on sentences of different lengths: every token counts the same, and nothing is fetched ahead.

    python examples/variable_length_torch.py

The eight sentences of Accelerate's guide have 36 tokens, and one step of SGD leads from [-0.0075, 0.5364] to
[0.0953, 0.4337]. The average over micro-batches of their means does not, as 10 tokens then count as much as 26. By hand
that takes all micro-batches of a window in memory, to count their tokens before the first backward pass; a fold counts
as it goes, and divides at the end.

`funcga.windows` gives lists, and so has the inputs of a window in memory, too. What `itertools.islice` takes of an
iterator has one micro-batch at a time; one has to know how many updates there are.
"""

import itertools

import torch
from sentences import count_tokens, microbatch, summed_loss

import funcga
import torch_backend


def mean_loss(module, tokens, labels):
    """The mean over the tokens of a micro-batch."""
    return summed_loss(module, tokens, labels) / count_tokens(tokens, labels)


def trained(microbatches, loss_fn, updates=1, n=None, **how):
    """The weights after so many updates, of n of the micro-batches each, or of all; they may be a generator."""
    torch.manual_seed(0)
    module, iterator = torch.nn.Linear(1, 2, bias=False), iter(microbatches)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.08)
    step = funcga.stream(funcga.grad(torch_backend.pure_loss(module, loss_fn)), **how)
    for _ in range(updates):
        grads = step(torch_backend.trainable(module), itertools.islice(iterator, n))
        torch_backend.assign_grads(module, grads)
        optimizer.step()
    return module.weight.detach().flatten()


def one_by_one(size, rows=8):
    """Micro-batches that are made when they are asked for; one at a time is there."""
    for first in range(0, rows, size):
        yield microbatch(first, size)


def shown(weights):
    """The weights, rounded."""
    return [round(w, 4) for w in weights.tolist()]


def main():
    """The loss as a sum and as a mean, and the mean of means."""
    by_sum = {"fold": funcga.per_weight(), "weight": count_tokens}
    print(f"a sum, divided by the tokens: {shown(trained(one_by_one(4), summed_loss, **by_sum))}")
    print(f"means, weighed by the tokens: {shown(trained(one_by_one(4), mean_loss, weight=count_tokens))}")
    print(f"one batch: {shown(trained(one_by_one(8), mean_loss))}")
    print(f"two updates of 4 sentences: {shown(trained(one_by_one(2), summed_loss, updates=2, n=2, **by_sum))}")
    print(f"wrong, means that all count the same: {shown(trained(one_by_one(4), mean_loss, weight=lambda *_: 1))}")


if __name__ == "__main__":
    main()
