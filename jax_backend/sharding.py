"""Placement on a mesh: accumulators like the parameters, and the rows of each micro-batch on all
devices.

Only JAX has this file; torch has DTensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold.outputs import Outputs
from funcga._types import Args, Array, Scalar, Tree
from jax_backend import _private
from jax_backend.arrays import axis_names, devices_along

Entry: TypeAlias = str | tuple[str, ...] | None
Shape: TypeAlias = tuple[int, ...] | None
KeyPath: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class Spread:
    """How the arguments of a call are sharded, as far as their types do not say it; static, as a
    traced array has no placement. Accumulators are created before the compiler sees a gradient.
    So each is sharded like the argument with its shape and path, whose gradient it seems to be;
    without one the compiler chooses. Scalars are replicated.

    Attributes:
        blocks: How many equal, consecutive blocks the rows of every split array are in, each on
        devices of its own.
        arguments: How arguments are sharded over the axes of a mesh that are left to the compiler,
            by path and shape.
    """

    blocks: int = 1
    arguments: tuple[tuple[tuple[KeyPath, Shape], NamedSharding], ...] = ()

    def pinned(self, outputs: Outputs, carry: Tree) -> Tree:
        """The carry of a loop, with constraints on the sharding of its accumulators and tally."""
        tree = outputs.structure_of(range(len(outputs.folds)))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        pinned = []
        for leaf_index, lifted in zip(outputs.reduced, carry.reduced, strict=True):
            shape = outputs.shapes[leaf_index]
            like = self._like(paths[leaf_index], shape)
            pinned.append(jax.tree.map(partial(self._pin, shape, like), lifted))
        total = jax.tree.map(partial(self._pin, (), None), carry.total)
        return carry._replace(reduced=pinned, total=total)

    def _like(self, path: KeyPath, shape: Shape) -> NamedSharding | None:
        """The sharding of the argument whose path is the end of this one: `w` in {"w": ...} for
        `w` in (loss, {"w": ...}).
        """
        arguments = dict(self.arguments)
        # The longest matching end first.
        ends = ((path[start:], shape) for start in range(len(path) + 1))
        return next((arguments[end] for end in ends if end in arguments), None)

    def _pin(self, shape: Shape, like: NamedSharding | None, part: jax.Array) -> jax.Array:
        if part.ndim == 0:  # a single number is on every device
            like = NamedSharding(self.arguments[0][1].mesh, PartitionSpec())
        elif like is None or part.shape != shape:
            return part
        pinned: jax.Array = lax.with_sharding_constraint(part, like)
        return pinned


def spread_of_call(program: Program, args: Args, backend: Backend) -> Spread:
    """The Spread of a call, sliced outside of jit, where arrays have a placement."""
    if program.across is not None or jax.device_count() == 1:
        return Spread()
    return spread_of(args, _blocks_of(program.read(args, backend)))


def spread_of(args: Sequence[Tree], blocks: int = 1) -> Spread:
    """The Spread of some arguments, with rows in so many blocks."""
    shardings: dict[tuple[KeyPath, Shape], NamedSharding] = {}
    for arg in args:
        if any(_left_to_the_compiler(leaf) for leaf in jax.tree.leaves(arg)):
            for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
                if sharding := _left_to_the_compiler(leaf):
                    shardings.setdefault((path, leaf.shape), sharding)
    return Spread(blocks, tuple(shardings.items()))


def _left_to_the_compiler(leaf: object) -> NamedSharding | None:
    """The sharding of an array over Auto axes; None if there are none."""
    if not isinstance(leaf, jax.Array) or _private.is_traced(leaf):
        return None
    sharding = leaf.sharding
    if (
        not isinstance(sharding, NamedSharding)
        or not isinstance(sharding.mesh, Mesh)
        or sharding.mesh.size == 1
    ):
        return None
    mesh = sharding.mesh
    # Shardings over Explicit axes are in the types.
    free = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Auto
    }
    kept = [
        tuple(name for name in axis_names(entry) if name in free) or None for entry in sharding.spec
    ]
    return NamedSharding(mesh, PartitionSpec(*kept)) if free else None


def _blocks_of(arguments: Arguments) -> int:
    """How many blocks the rows of every split array are in. 1 if arrays differ, or if the
    placement is unknown; and with threaded state, which depends on the order.
    """
    if arguments.state:
        return 1
    # All arrays need equally many blocks, or the rows of an example would be on several devices.
    counts = {
        _blocks(leaf, axis)
        for leaf, axis in arguments
        if isinstance(axis, int) and isinstance(leaf, jax.Array)
    }
    return counts.pop() if len(counts) == 1 else 1


def _blocks(leaf: jax.Array, axis: int) -> int:
    if not -leaf.ndim <= axis < leaf.ndim or not leaf.shape[axis]:
        return 1  # an error is raised when rows are counted
    if not _private.is_traced(leaf):
        return int(leaf.shape[axis] // leaf.sharding.shard_shape(leaf.shape)[axis])
    # Over the axes that are Explicit.
    return devices_along(jax.typeof(leaf).sharding, axis % leaf.ndim)


# -- micro-batches with equally many rows of each block, so that no row moves to another device


def may_reorder_rows(outputs: Outputs, size: int) -> bool:
    """Whether micro-batches of this size may take other rows: folds have to be independent of
    the order, and collected leaves have one row for each row of the micro-batch. Those that come
    before the value have one row for a micro-batch.
    """
    if any(fold.fold.reducer.monoid.collective is None for fold in outputs.reduced.values()):
        return False
    shapes = [
        None if leaf_index < outputs.before else outputs.shapes[leaf_index]
        for leaf_index in outputs.collected
    ]
    return all(
        shape is not None and shape[axis] == size
        for shape, axis in zip(shapes, _axes(outputs), strict=True)
    )


def _axes(outputs: Outputs) -> list[int]:
    return [fold.axis or 0 for fold in outputs.collected.values()]


def narrowing(
    blocks: int, groups: Sequence[tuple[int, int]]
) -> Callable[[Array, int, Scalar, int], jax.Array] | None:
    """What cuts micro-batches of these groups; None if a block would not have equally many rows."""
    if any(size % blocks for _, size in groups):
        return None
    return partial(rows_of_blocks, blocks)


def rows_of_blocks(blocks: int, array: Array, axis: int, start: Scalar, size: int) -> jax.Array:
    """`size` rows along an axis: equally many of each block, from its row start / blocks on."""
    array = jnp.asarray(array)
    axis %= array.ndim
    # [blocks, rows of each]: a slice of the second axis moves nothing between devices.
    before, rows, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    blocked = array.reshape(*before, blocks, rows // blocks, *after)
    sliced = lax.dynamic_slice_in_dim(blocked, start // blocks, size // blocks, axis + 1)
    return sliced.reshape(*before, size, *after)


def in_order(
    outputs: Outputs,
    blocks: int,
    groups: Sequence[tuple[int, int]],
    chunks: Sequence[Sequence[jax.Array]],
) -> list[jax.Array]:
    """The collected chunks of each group of micro-batches as one array for each leaf, in the
    order of the batch.
    """
    ordered = []
    for axis, column in zip(_axes(outputs), zip(*chunks, strict=True), strict=True):
        axis %= column[0].ndim
        parts = []
        for array, (count, size) in zip(column, groups, strict=True):
            # [micro-batches, blocks, rows], and then the blocks first, as in the batch
            blocked = _split_axis(array, axis, (count, blocks, size // blocks))
            parts.append(_merge_axes(jnp.moveaxis(blocked, axis + 1, axis), axis + 1))
        ordered.append(_merge_axes(jnp.concatenate(parts, axis=axis + 1), axis))
    return ordered


def concatenated(stacked: jax.Array, axis: int) -> jax.Array:
    """Stacked arrays, [arrays, ...], concatenated along an axis of theirs."""
    axis %= stacked.ndim - 1
    return _merge_axes(jnp.moveaxis(stacked, 0, axis), axis)


def _merge_axes(array: jax.Array, axis: int) -> jax.Array:
    """The array with an axis and the next one merged, sharded as the next one."""
    size = array.shape[axis] * array.shape[axis + 1]
    return _reshaped(array, axis, 2, (size,), lambda _, entry: (entry,))


def _split_axis(array: jax.Array, axis: int, sizes: tuple[int, int, int]) -> jax.Array:
    """The array with an axis split into three, the second one sharded as the axis was."""
    return _reshaped(array, axis, 1, sizes, lambda entry: (None, entry, None))


def _reshaped(
    array: jax.Array,
    axis: int,
    count: int,
    sizes: tuple[int, ...],
    sharded: Callable[..., tuple[Entry, ...]],
) -> jax.Array:
    """The array with axes of these sizes in place of `count` axes; `sharded` maps their
    sharding, which JAX does not infer.
    """
    whole = (*array.shape[:axis], *sizes, *array.shape[axis + count :])
    sharding = jax.typeof(array).sharding
    if not any(sharding.spec):
        return array.reshape(whole)
    before, old, after = (
        sharding.spec[:axis],
        sharding.spec[axis : axis + count],
        sharding.spec[axis + count :],
    )
    entries = PartitionSpec(*before, *sharded(*old), *after)
    return lax.reshape(array, whole, out_sharding=NamedSharding(sharding.mesh, entries))
