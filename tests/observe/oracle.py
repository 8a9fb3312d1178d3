"""What observers have to say, from the gradients of the micro-batches one by one, in NumPy."""

import numpy as np


def flat(leaves):
    return np.concatenate([np.asarray(leaf, "float64").reshape(-1) for leaf in leaves])


def noise(gradients, weights):
    """(the trace, the squared norm) by the formulas, from [n, elements] of mean gradients; a weight of 0 is nothing."""
    kept = np.asarray(weights) > 0
    g, b = np.asarray(gradients)[kept], np.asarray(weights, "float64")[kept]
    mean = (b[:, None] * g).sum(0) / b.sum()
    # The sum of squared deviations is the same as the difference of sums, and nothing cancels in it.
    trace = (b * ((g - mean) ** 2).sum(1)).sum() / (len(b) - 1)
    return trace, (mean**2).sum() - trace / b.sum()


def norms(gradients, weights):
    """(the norm of each, that of their weighted mean)."""
    g, b = np.asarray(gradients), np.asarray(weights, "float64")
    return np.sqrt((g**2).sum(1)), np.sqrt((((b[:, None] * g).sum(0) / b.sum()) ** 2).sum())


def sizes(rows, n):
    """How many rows each of n micro-batches has."""
    return [rows // n + (index < rows % n) for index in range(n)]


def apart(total, sizes):
    """The slices of micro-batches of these sizes."""
    ends = np.cumsum(sizes)
    assert ends[-1] == total
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
