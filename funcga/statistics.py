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
from collections.abc import Mapping

from funcga._backend.dispatch import backend_of
from funcga._backend.prefixes import broadcast, paths_and_leaves
from funcga._types import Scalar, Tree
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

    def stacked(path: str, tree: Tree) -> Tree:
        if not isinstance(tree, Mapping):
            raise FuncgaError(
                f"`{path}` is of type {type(tree).__name__}, which is no layer's statistics. They "
                'are nested dicts, in which each layer is {"mean": array, "var": array}: the '
                '"batch_stats" of flax, or nnx.state(model, nnx.BatchStat) of its nnx.'
            )
        # A layer is recognised by its two keys.
        if {*tree} != {"mean", "var"}:
            layers = {key: stacked(f"{path}[{key!r}]", child) for key, child in tree.items()}
            # For example flax's FrozenDict.
            return layers if type(tree) is dict else type(tree)(layers)  # type: ignore[call-arg]
        # Each is an array, perhaps in a variable of nnx.
        mean, variance = (backend.trees.flatten(tree[key])[0][0] for key in ("mean", "var"))
        dtype = arrays.accumulator_dtype(mean.dtype)
        mean, variance = arrays.cast(mean, dtype), arrays.cast(variance, dtype)
        # The count is as large as the mean, so that one array holds all three.
        amount = arrays.xp.zeros_like(mean) + arrays.cast(count, dtype)
        return arrays.xp.stack((amount, mean, variance))

    return stacked("statistics", statistics)


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
    arrays, trees, xp = backend.arrays, backend.trees, backend.arrays.xp
    if not arrays.is_array(share) and not 0 <= share <= 1:
        raise FuncgaError(f"share is {share!r}: it is the part of the new statistics, from 0 to 1.")
    # The Pooled of a layer is one value for its mean and its variance.
    is_pooled = lambda node: isinstance(node, Pooled)
    wrong = "the pooled statistics are not those of these layers"
    of_layers = broadcast(pooled, statistics, is_pooled, trees, "statistics", wrong)
    after = []
    for (path, old), (new, _) in zip(
        paths_and_leaves(statistics, trees.children), of_layers, strict=True
    ):
        is_variance = {"mean": False, "var": True}[path.rpartition(".")[2]]
        if new.mean.shape != old.shape:
            raise FuncgaError(
                f"`{path}` is {arrays.describe(old)}, and the pooled statistics for it are "
                f"{arrays.describe(new.mean)}. Give a Pooled of that shape: "
                "what fold=funcga.pooled() makes of the statistics of micro-batches."
            )
        # In at least float32, as a small share of a float16 would be lost.
        dtype = arrays.accumulator_dtype(old.dtype)
        measured = new.variance if is_variance else new.mean
        wide, count, measured = (arrays.cast(each, dtype) for each in (old, new.count, measured))
        if unbiased and is_variance:
            # The inner `where` keeps the division finite where the outer one discards it.
            factor = count / xp.where(count > 1, count - 1, 1)
            measured = measured * xp.where(count > 1, factor, 1)
        part = arrays.cast(share, dtype) if arrays.is_array(share) else float(share)
        moved = (1 - part) * wide + part * measured
        # Unchanged if the count is 0.
        after.append(arrays.cast(xp.where(count > 0, moved, wide), old.dtype))
    return trees.unflatten(trees.flatten(statistics)[1], after)
