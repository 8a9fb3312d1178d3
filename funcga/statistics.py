"""Batch statistics, as BatchNorm keeps them: those of one micro-batch for `pooled()`, and the
running ones after it.

Statistics are nested dicts in which each layer is {"mean": array, "var": array}, as flax's
`batch_stats` are, and the state of its nnx, `nnx.state(model, nnx.BatchStat)`.

Example:
    >>> moments = lambda x: {"mean": x.mean(0), "var": x.var(0)}
    >>> batch = lambda x: funcga.statistics.batch_moments(moments(x), len(x))
    >>> x = jnp.arange(8.0).reshape(4, 2)
    >>> pooled = funcga.accumulate(batch, 2, in_axes=0, fold=funcga.pooled())(x)
    >>> old, options = {"mean": jnp.zeros(2), "var": jnp.ones(2)}, {"share": 0.5, "unbiased": False}
    >>> funcga.statistics.running_statistics(old, pooled, **options)["mean"]
    Array([1.5, 2. ], dtype=float32)
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from funcga._backend import Backend
from funcga._backend.dispatch import backend_of
from funcga._fold import accumulator_dtype, describe
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.normalizers import Pooled

__all__ = ["batch_moments", "running_statistics"]


def batch_moments(statistics: Tree, count: Scalar) -> Tree:
    """One leaf [3, ...] for each layer, (count, mean, variance) stacked on axis 0: what the fold
    `pooled()` takes.

    Args:
        statistics: The mean and the population variance of one micro-batch: {"mean": array, "var":
            array}, or nested dicts of these, or nnx.state(model, nnx.BatchStat). Floats; those of
            less than 32 bits become float32, which a count needs.
        count: How many items they are of, a number >= 0 or a 0-d array. Only the ratios of
            micro-batches matter for the mean and the variance, so the rows will do for layers that
            see as many values of each row.

    Returns:
        The nested dicts with one array in the place of each layer's statistics.

    Raises:
        FuncgaError: The count is no number >= 0, or what stands for a layer is not its statistics.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> statistics = {"mean": x.mean(0), "var": x.var(0, correction=0)}
        >>> funcga.statistics.batch_moments(statistics, len(x))
        tensor([[2.],
                [2.],
                [1.]])
    """
    backend = backend_of([statistics], lambda: ["statistics"])
    arrays = backend.arrays
    if not arrays.is_array(count) and not 0 <= count <= sys.float_info.max:
        raise FuncgaError(
            f"count is {count!r}: it is how many items a micro-batch has, at least 0."
        )

    def stacked(path: str, mean: Array, variance: Array, _: None) -> Array:
        mean, variance = _unboxed(mean, backend), _unboxed(variance, backend)
        dtype = accumulator_dtype(mean.dtype, arrays)
        mean, variance = arrays.as_array(mean, dtype), arrays.as_array(variance, dtype)
        # The count is as large as the mean, so that one array holds all three.
        amount = arrays.xp.zeros_like(mean) + arrays.as_array(count, dtype)
        return arrays.xp.stack((amount, mean, variance))

    return _each_layer(stacked, "statistics", statistics, None)


def running_statistics(statistics: Tree, pooled: Tree, *, share: Scalar, unbiased: bool) -> Tree:
    """The running statistics after one more batch: `(1 - share) * old + share * new`, in the
    structure of the old.

    Args:
        statistics: The running ones, {"mean": array, "var": array} or nested dicts of these.
        pooled: The same with a `Pooled` for each layer, as the fold `pooled()` gives. Where its
            count is 0 the old statistics stay.
        share: The share of the new statistics, a number from 0 to 1 or a 0-d array. The momentum of
            torch is this share, that of flax is the share of the old: 1 - momentum.
        unbiased: Whether the variance is multiplied by count / (count - 1), as torch does; flax
            does not.

    Returns:
        Statistics in the structure and dtypes of the old ones.

    Raises:
        FuncgaError: The share is out of its range, or the trees do not match.

    Example:
        >>> from funcga.statistics import running_statistics
        >>> old = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
        >>> new = funcga.normalizers.Pooled(jnp.full(2, 8.0), jnp.ones(2), jnp.ones(2))
        >>> running_statistics(old, new, share=0.01, unbiased=False)["mean"]  # as in flax
        Array([0.01, 0.01], dtype=float32)
    """
    backend = backend_of([statistics, pooled], lambda: ["statistics", "pooled"])
    arrays = backend.arrays
    if not arrays.is_array(share) and not 0 <= share <= 1:
        raise FuncgaError(f"share is {share!r}: it is the part of the new statistics, from 0 to 1.")

    xp = arrays.xp

    def updated(path: str, mean: Tree, variance: Tree, new: Any) -> dict[str, Array]:
        mean, variance = _unboxed(mean, backend), _unboxed(variance, backend)
        if not isinstance(new, Pooled) or new.mean.shape != mean.shape:
            found = new.mean if isinstance(new, Pooled) else new
            raise FuncgaError(
                f"`{path}` is {describe(mean)}, and the pooled statistics for it are "
                f"{describe(found)}. Give a Pooled of that shape: "
                "what fold=funcga.pooled() makes of the statistics of micro-batches."
            )
        # In at least float32, as a small share of a float16 would be lost.
        dtype = accumulator_dtype(mean.dtype, arrays)
        count, new_mean, new_variance = (arrays.as_array(part, dtype) for part in new)
        if unbiased:
            # The inner `where` keeps the division finite where the outer one discards it.
            factor = count / xp.where(count > 1, count - 1, 1)
            new_variance = new_variance * xp.where(count > 1, factor, 1)
        part = arrays.as_array(share, dtype) if arrays.is_array(share) else float(share)

        def moved(old: Array, new: Array) -> Array:
            wide = arrays.as_array(old, dtype)
            # Unchanged if the count is 0.
            return arrays.as_array(
                xp.where(count > 0, (1 - part) * wide + part * new, wide), old.dtype
            )

        return {"mean": moved(mean, new_mean), "var": moved(variance, new_variance)}

    # A State of nnx shows its nested dicts as States, so the structure is put back at last.
    after = backend.trees.flatten(_each_layer(updated, "statistics", statistics, pooled))[0]
    return backend.trees.unflatten(backend.trees.flatten(statistics)[1], after)


def _unboxed(node: Tree, backend: Backend) -> Tree:
    """The array in a node that holds a single one, such as a variable of nnx; all else as it is."""
    leaves = backend.trees.flatten(node)[0]
    return leaves[0] if len(leaves) == 1 else node


def _each_layer(function: Callable[..., Tree], path: str, tree: Tree, pooled: Tree) -> Tree:
    """The nested dicts with `function` applied to each layer, {"mean", "var"}, and to what is
    pooled there, if anything is.
    """
    # A layer is recognised by its two keys.
    if isinstance(tree, Mapping) and {*tree} == {"mean", "var"}:
        result = function(path, tree["mean"], tree["var"], pooled)
        return {key: result[key] for key in tree} if isinstance(result, dict) else result
    if not isinstance(tree, Mapping):
        raise FuncgaError(
            f"`{path}` is of type {type(tree).__name__}, which is no layer's statistics. They are "
            "nested dicts, in "
            f'which each layer is {{"mean": array, "var": array}}: the "batch_stats" of flax, or '
            "nnx.state(model, nnx.BatchStat) of its nnx."
        )
    pooled = dict.fromkeys(tree) if pooled is None else pooled
    if pooled.keys() != {*tree}:
        raise FuncgaError(
            f"`{path}` has {[*tree]}, and the pooled statistics have {[*pooled]} there. Give those "
            "of the same layers."
        )
    replaced = {
        key: _each_layer(function, f"{path}[{key!r}]", child, pooled[key])
        for key, child in tree.items()
    }
    # For example flax's FrozenDict.
    return replaced if type(tree) is dict else type(tree)(replaced)  # type: ignore[call-arg]
