"""Where arrays lie on a mesh: accumulators like the parameters, and the rows of each micro-batch on
all devices.

Only JAX has this file; what does the same in torch is for DTensors.
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
from funcga._fold import Tally
from funcga._fold.outputs import Outputs
from funcga._types import Array, Scalar, Tree
from jax_backend import _private
from jax_backend.arrays import axis_names, devices_along

Entry: TypeAlias = str | tuple[str, ...] | None
Shape: TypeAlias = tuple[int, ...] | None
KeyPath: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class Spread:
    """Where the arguments of a call lie on a mesh, as far as no type says it: part of the program,
    as inside jit an array does not say where it lies.

    The accumulators are made before the compiler has seen a gradient. So each lies like the
    argument whose gradient it seems to be, which has its shape and its path; where there is none
    the compiler chooses. A single number is on every device.

    Attributes:
        blocks: How many equal blocks the rows of every split array lie in, one after the other,
            each on devices of its own.
        arguments: How arguments are sharded over the axes of a mesh that are left to the compiler,
            by path and shape.
    """

    blocks: int = 1
    arguments: tuple[tuple[tuple[KeyPath, Shape], NamedSharding], ...] = ()

    def pinned(
        self, outputs: Outputs, reduced: list[Tree], total: Tally
    ) -> tuple[list[Tree], Tally]:
        """Accumulators and their tally where they belong, whichever micro-batch is the last one
        in them.
        """
        if not self.arguments:
            return reduced, total
        tree = outputs.structure_of(range(len(outputs.folds)))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        pinned = []
        for leaf_index, lifted in zip(outputs.reduced, reduced, strict=True):
            shape = outputs.shapes[leaf_index]
            like = self._like(paths[leaf_index], shape)
            pinned.append(jax.tree.map(partial(self._pin, shape, like), lifted))
        return pinned, jax.tree.map(partial(self._pin, (), None), total)

    def _like(self, path: KeyPath, shape: Shape) -> NamedSharding | None:
        """How the argument lies whose path is the end of this one: `w` in {"w": ...} for `w` in
        (loss, {"w": ...}).
        """
        arguments = dict(self.arguments)
        # The gradient's path in grad_fn's output begins with what is above it; the longest end that
        # matches is first.
        ends = ((path[start:], shape) for start in range(len(path) + 1))
        return next((arguments[end] for end in ends if end in arguments), None)

    def _pin(self, shape: Shape, like: NamedSharding | None, part: jax.Array) -> jax.Array:
        if part.ndim == 0:  # a single number is on every device
            like = NamedSharding(self.arguments[0][1].mesh, PartitionSpec())
        elif like is None or part.shape != shape:
            return part
        pinned: jax.Array = lax.with_sharding_constraint(part, like)
        return pinned


def spread_of_call(program: Program, args: tuple[Tree, ...], backend: Backend) -> Spread:
    """The Spread of a call. It is asked before that is compiled: inside of jit an array does not
    say where it lies.
    """
    if program.across is not None or jax.device_count() == 1:
        return Spread()
    return spread_of(args, _blocks_of(program.read(args, backend)))


def spread_of(args: Sequence[Tree], blocks: int = 1) -> Spread:
    """The Spread of some arguments, whose rows lie in so many blocks."""
    shardings: dict[tuple[KeyPath, Shape], NamedSharding] = {}
    for arg in args:
        if any(_left_to_the_compiler(leaf) for leaf in jax.tree.leaves(arg)):
            for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
                if sharding := _left_to_the_compiler(leaf):
                    shardings.setdefault((path, leaf.shape), sharding)
    return Spread(blocks, tuple(shardings.items()))


def _left_to_the_compiler(leaf: object) -> NamedSharding | None:
    """How an array is sharded over the axes that no type names; None if there are none."""
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
    # Over Explicit axes types say how gradients lie, and over Manual ones arrays are whole.
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
    """How many blocks the rows of every split array lie in.

    1 if they lie together, or in different ways, or if it is the compiler that says where; and for
    threaded state, whose order counts.
    """
    if arguments.state:
        return 1
    # All split arrays lie in as many blocks, or the rows of one example would be on several
    # devices.
    counts = {
        _blocks(leaf, axis)
        for leaf, axis in arguments
        if isinstance(axis, int) and isinstance(leaf, jax.Array)
    }
    return counts.pop() if len(counts) == 1 else 1


def _blocks(leaf: jax.Array, axis: int) -> int:
    if not -leaf.ndim <= axis < leaf.ndim or not leaf.shape[axis]:
        return 1  # refused later, by whoever counts the rows
    if not _private.is_traced(leaf):
        return int(leaf.shape[axis] // leaf.sharding.shard_shape(leaf.shape)[axis])
    # Over the axes that are Explicit.
    return devices_along(jax.typeof(leaf).sharding, axis % leaf.ndim)


# -- micro-batches that take as many rows from each block, so that no row moves to another device


def keeps_result(outputs: Outputs, size: int) -> bool:
    """Whether micro-batches of this size may take other rows: what is folded is so in any order,
    whichever rows meet.

    What is collected has to have one row for each of theirs; what observers collect has one for all
    of them.
    """
    if any(fold.fold.reducer.monoid.collective is None for fold in outputs.reduced_folds):
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
    return [fold.fold.reducer.monoid.axis or 0 for fold in outputs.collected_folds]


def rows_of_blocks(blocks: int, array: Array, axis: int, start: Scalar, size: int) -> jax.Array:
    """`size` rows along an axis: as many of each block, in the order of the blocks, from its row
    start / blocks on.
    """
    array = jnp.asarray(array)
    axis %= array.ndim
    # [blocks, rows of each]: a slice of the second axis moves nothing between devices.
    before, rows, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
    apart = array.reshape(*before, blocks, rows // blocks, *after)
    taken = lax.dynamic_slice_in_dim(apart, start // blocks, size // blocks, axis + 1)
    return taken.reshape(*before, size, *after)


def in_order(
    outputs: Outputs,
    blocks: int,
    groups: Sequence[tuple[int, int]],
    chunks: Sequence[Sequence[jax.Array]],
) -> list[jax.Array]:
    """What was collected from each group of micro-batches, as one array a leaf with its rows in
    those of the batch.
    """
    ordered = []
    for axis, column in zip(_axes(outputs), zip(*chunks, strict=True), strict=True):
        axis %= column[0].ndim
        parts = []
        for array, (count, size) in zip(column, groups, strict=True):
            # [micro-batches, blocks, rows], and then the blocks first, as in the batch
            apart = _apart(array, axis, (count, blocks, size // blocks))
            parts.append(_joined(jnp.moveaxis(apart, axis + 1, axis), axis + 1))
        ordered.append(_joined(jnp.concatenate(parts, axis=axis + 1), axis))
    return ordered


def joined_along(stacked: jax.Array, axis: int) -> jax.Array:
    """Arrays that are stacked, [arrays, ...], as one, in order along an axis of theirs."""
    axis %= stacked.ndim - 1
    return _joined(jnp.moveaxis(stacked, 0, axis), axis)


def _joined(array: jax.Array, axis: int) -> jax.Array:
    """The array with an axis and the next one as one, which is sharded as the next one was."""
    size = array.shape[axis] * array.shape[axis + 1]
    return _reshaped(array, axis, 2, (size,), lambda _, entry: (entry,))


def _apart(array: jax.Array, axis: int, sizes: tuple[int, int, int]) -> jax.Array:
    """The array with an axis as three, of which the second one is sharded as that was."""
    return _reshaped(array, axis, 1, sizes, lambda entry: (None, entry, None))


def _reshaped(
    array: jax.Array,
    axis: int,
    count: int,
    sizes: tuple[int, ...],
    sharded: Callable[..., tuple[Entry, ...]],
) -> jax.Array:
    """The array with axes of these sizes in place of so many. JAX does not guess how the new ones
    are sharded: as `sharded` makes of the old ones.
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
