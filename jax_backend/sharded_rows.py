"""Rows that lie on several devices: micro-batches that take as many rows from each device, so that none moves.

Only JAX has this file; what does the same in torch is `placements`, for DTensors.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from funcga._call.arguments import Arguments
from funcga._fold.outputs import Outputs


def blocks_of(arguments: Arguments) -> int:
    """How many equal blocks the rows of every split array lie in, one after the other, each on devices of its own.

    1 if they lie together, or in different ways, or if it is the compiler that says where; and for threaded state,
    whose order counts.
    """
    if arguments.state:
        return 1
    counts = {_count(leaf, axis) for leaf, axis in arguments if isinstance(axis, int) and isinstance(leaf, jax.Array)}
    return counts.pop() if len(counts) == 1 else 1


def _count(leaf: jax.Array, axis: int) -> int:
    if not -leaf.ndim <= axis < leaf.ndim or not leaf.shape[axis]:
        return 1  # refused later, by whoever counts the rows
    if not isinstance(leaf, jax.core.Tracer):
        return int(leaf.shape[axis] // leaf.sharding.shard_shape(leaf.shape)[axis])
    sharding: Any = jax.typeof(leaf).sharding  # of the axes that are Explicit
    names = sharding.spec[axis % leaf.ndim] or ()
    return prod(sharding.mesh.shape[name] for name in (names if isinstance(names, tuple) else (names,)))


def fits(blocks: int, found: Sequence[tuple[int, int]]) -> bool:
    """Whether every micro-batch of these (count, size) can take as many rows from each block."""
    return blocks > 1 and all(size % blocks == 0 for _, size in found)


def keeps_result(outputs: Outputs, size: int) -> bool:
    """Whether micro-batches of this size may take other rows: what is folded is so in any order, whichever rows meet.

    What is collected has to have one row for each of theirs.
    """
    if any(fold.fold.reducer.monoid.collective is None for fold in outputs.reduced_folds):
        return False
    shapes = [outputs.shapes[i] for i in outputs.collected]
    return all(shape is not None and shape[axis] == size for shape, axis in zip(shapes, _axes(outputs), strict=True))


def _axes(outputs: Outputs) -> list[int]:
    return [fold.fold.reducer.monoid.axis or 0 for fold in outputs.collected_folds]


def narrow(blocks: int, array: Any, axis: int, start: Any, size: int) -> jax.Array:
    """`size` rows along an axis: as many of each block, in the order of the blocks, from its row start / blocks on."""
    array = jnp.asarray(array)
    axis %= array.ndim
    apart = _reshaped(array, axis, (blocks, array.shape[axis] // blocks))
    cut = lax.dynamic_slice_in_dim(apart, start // blocks, size // blocks, axis + 1)
    return cut.reshape(*array.shape[:axis], size, *array.shape[axis + 1 :])


def in_order(
    outputs: Outputs, blocks: int, found: Sequence[tuple[int, int]], chunks: list[list[jax.Array]]
) -> list[jax.Array]:
    """What was collected from each group of micro-batches, as one array a leaf with its rows in those of the batch."""
    columns = zip(_axes(outputs), zip(*chunks, strict=True), strict=True)
    return [_joined(blocks, found, axis % column[0].ndim, column) for axis, column in columns]


def _joined(blocks: int, found: Sequence[tuple[int, int]], axis: int, column: Sequence[jax.Array]) -> jax.Array:
    parts = []
    for array, (count, size) in zip(column, found, strict=True):
        apart = jnp.moveaxis(_apart(array, axis, (count, blocks, size // blocks)), axis + 1, axis)
        parts.append(joined(apart, axis + 1))
    return joined(jnp.concatenate(parts, axis=axis + 1), axis)


def joined(array: jax.Array, axis: int) -> jax.Array:
    """The array with an axis and the next one as one, which is sharded as the next one was."""
    sizes = (*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])
    sharding: Any = jax.typeof(array).sharding
    if not any(sharding.spec):
        return array.reshape(sizes)
    spec: Any = PartitionSpec(*sharding.spec[:axis], *sharding.spec[axis + 1 :])  # type: ignore[no-untyped-call]
    return lax.reshape(array, sizes, out_sharding=NamedSharding(sharding.mesh, spec))


def _apart(array: jax.Array, axis: int, sizes: tuple[int, int, int]) -> jax.Array:
    """The array with an axis as three, of which the second one is sharded as that was."""
    sharding: Any = jax.typeof(array).sharding
    if not any(sharding.spec):
        return _reshaped(array, axis, sizes)
    before, own, after = sharding.spec[:axis], sharding.spec[axis], sharding.spec[axis + 1 :]
    spec: Any = PartitionSpec(*before, None, own, None, *after)  # type: ignore[no-untyped-call]
    whole = (*array.shape[:axis], *sizes, *array.shape[axis + 1 :])
    return lax.reshape(array, whole, out_sharding=NamedSharding(sharding.mesh, spec))


def _reshaped(array: jax.Array, axis: int, sizes: tuple[int, ...]) -> jax.Array:
    return array.reshape(*array.shape[:axis], *sizes, *array.shape[axis + 1 :])
