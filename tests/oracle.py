"""The fold a third time, in NumPy float64 and without any of funcga's code: what the other two are held against."""

import numpy as np


def fold(name, values, weights):
    """The result of a stock fold over the values (arrays) of micro-batches with these weights."""
    values = [np.asarray(v, dtype="float64") for v in values]
    weights = [float(w) for w in weights]
    total = sum(weights)
    zeros = np.zeros_like(values[0])
    if name == "mean":
        return sum((w * v for v, w in zip(values, weights, strict=True) if w), zeros) / (total or 1)
    if name == "per_weight":
        return sum(values, zeros) / total if total else zeros
    if name == "sum":
        return sum(values, zeros)
    if name == "max":
        return np.max(values, axis=0)
    if name == "min":
        return np.min(values, axis=0)
    if name == "logsumexp":
        return np.logaddexp.reduce(values, axis=0)
    if name == "by_steps":
        return sum((w * v for v, w in zip(values, weights, strict=True)), zeros) / len(values)
    if name == "moments":
        mean = fold("mean", values, weights)
        return mean, fold("mean", [(v - mean) ** 2 for v in values], weights)
    if name == "pooled":  # of |v| items each, of mean v and variance v * v
        count = sum(np.abs(v) for v in values)
        safe = np.where(count > 0, count, 1)
        mean = sum(np.abs(v) * v for v in values) / safe
        return count, mean, sum(np.abs(v) * (v * v + (v - mean) ** 2) for v in values) / safe
    if name == "concat":
        return np.concatenate(values)
    if name == "carry":
        return values[-1]
    raise NotImplementedError(
        f"NumPy does not know the fold {name!r} yet: say in tests/oracle.py what it makes of `values`"
    )
