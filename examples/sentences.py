"""The causal language model of Accelerate's guide to gradient accumulation: sentences of 1, 2, 3, ... tokens, padded.

Its training set, its loss and its weight, which the examples share.
"""

import torch
from torch.nn.functional import cross_entropy

PADDING = -100


def microbatch(first, size):
    """Rows `first` to `first + size` of the data: (tokens, labels), [rows, length, 1], padded."""
    tokens = [torch.arange(1.0, i + 2) for i in range(first, first + size)]
    labels = [row.remainder(2) for row in tokens]
    pad = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)[..., None]
    return pad(tokens), pad(labels)


def window(rank, replicas, n, size):
    """The n micro-batches of a replica; the replicas take turns."""
    return [microbatch(size * (i * replicas + rank), size) for i in range(n)]


def summed_loss(module, tokens, labels):
    """The sum over the tokens of how badly it is told which of two classes they belong to."""
    return cross_entropy(module(tokens).flatten(0, 1), labels.flatten().long(), reduction="sum")


def count_tokens(tokens, labels):
    """How many there are, without the padding."""
    return (labels != PADDING).sum()
