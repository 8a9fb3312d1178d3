"""The merge over replicas, after the loop: the monoids of the leaves as collectives.

Only JAX has this file: inside shard_map a collective is an operation of the program. All leaves
but a few large ones are merged by one psum, of which XLA makes one all-reduce for each dtype.
Small arrays that have to be gathered are part of it: each replica fills its row of an array of
zeros, [replicas, ...].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcga._backend.prefixes import broadcast
from funcga._fold import LeafFold, Tally, addends
from funcga._fold.outputs import Outputs
from funcga._types import Dtype, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import arrays, sharding, trees
from jax_backend.arrays import as_varying, varying_axes
from jax_backend.replicas import Replicas


class Folded(NamedTuple):
    """What has been folded, before it is normalised: the carry of a loop, and what replicas merge.

    The loop carries neither `collected` nor the `unit` of weights in means. A tool that may leave
    a whole window out counts what it `rejected`, in a float, as that is sent with the weights, and
    keeps the state from before the first micro-batch.
    """

    reduced: list[Tree]
    total: Tally
    state: list[jax.Array]
    collected: Sequence[jax.Array] = ()
    unit: Scalar = None
    rejected: jax.Array | None = None
    state_before: Sequence[jax.Array] = ()


def merge(outputs: Outputs, folded: Folded, replicas: Replicas) -> Folded:
    """The folds of all replicas, merged: the same on each of them, but for scattered leaves.

    Raises FuncgaError for a leaf that cannot be scattered.
    """
    # Three steps: all operands are registered, the collectives run, and each result is read
    # (`later()`).
    folded = _in_one_unit(outputs, folded, replicas)
    scatter = _scatter_axes(outputs, replicas)
    collectives = _Collectives(replicas.names)
    reduced = [
        _merge_leaf(collectives, fold, lifted, scatter.get(leaf_index))
        for (leaf_index, fold), lifted in zip(outputs.reduced.items(), folded.reduced, strict=True)
    ]
    total = _merge_tally(collectives, folded.total)
    # Replicas have the rows of a batch in order, so its final state is that of the last replica.
    state = _each(collectives.last, folded.state)
    collected = _each(collectives.gather, folded.collected)
    rejected = _each(collectives.sum, folded.rejected)
    state_before = _each(collectives.last, folded.state_before)
    collectives.run()
    rows = [
        sharding.concatenated(gathered, fold.axis or 0)
        for fold, gathered in zip(outputs.collected.values(), collected(), strict=True)
    ]
    return folded._replace(
        reduced=[later() for later in reduced],
        total=total(),
        state=state(),
        collected=rows,
        rejected=rejected(),
        state_before=state_before(),
    )


def _in_one_unit(outputs: Outputs, folded: Folded, replicas: Replicas) -> Folded:
    """The folds in a unit that is the same on all replicas: the present one if its type says so,
    else 1.
    """
    unit, names = folded.unit, {*replicas.names}
    # Units of traced weights may differ between replicas.
    if isinstance(unit, float) or (
        names <= arrays.typed_axes(names) and not names & varying_axes(jax.typeof(unit))
    ):
        return folded
    pairs = zip(outputs.reduced.values(), folded.reduced, strict=True)
    reduced = [leaf * unit.astype(leaf.dtype) if fold.is_mean else leaf for fold, leaf in pairs]
    return folded._replace(reduced=reduced, unit=1.0)


def _merge_leaf(
    collectives: "_Collectives", fold: LeafFold, lifted: Tree, scatter: int | None
) -> Callable[[], Tree]:
    """The merge of a leaf by its monoid."""
    monoid = fold.fold.reducer.monoid
    # Only sums are scattered.
    send = collectives.sum if scatter is None else partial(collectives.scatter, axis=scatter)
    if monoid.sent is not None and monoid.received is not None:
        receive, sums = monoid.received, _each(send, monoid.sent(jnp, lifted))
        return lambda: receive(jnp, sums())
    if monoid.collective is None:
        gathered = _each(collectives.gather, lifted)
        return lambda: _in_order(fold.combine, gathered())
    if monoid.collective == "sum":
        return _each(send, lifted)
    return _each(partial(collectives.extreme, which=monoid.collective), lifted)


def _merge_tally(collectives: "_Collectives", total: Tally) -> Callable[[], Tally]:
    """The tally of all replicas. Its counts are sent as floats, with the gradients, in exact
    addends.
    """
    limbs = len(total.weight)
    # As float32 a count would be exact up to 2**24 alone; as two addends it is as exact as the
    # weight.
    numbers = jnp.stack([*total.weight, *addends(total.steps, limbs == 1, arrays)])
    gathered = collectives.rows(numbers)

    def later() -> Tally:
        rows = gathered()  # for each replica the limbs of its weight, and those of its steps
        steps = rows[:, limbs:].astype(jnp.int32).sum(axis=1, dtype=jnp.int32)
        merged: Tally = _in_order(Tally.merge, Tally(tuple(rows[:, :limbs].T), steps))
        return merged

    return later


def _each(send: "Callable[[jax.Array], Later]", tree: Tree) -> Callable[[], Tree]:
    parts, structure = jax.tree.flatten(tree)
    laters = [send(part) for part in parts]
    return lambda: jax.tree.unflatten(structure, [later() for later in laters])


def _in_order(combine: Callable[[Tree, Tree], Tree], gathered: Tree) -> Tree:
    """The combination along the first axis, [replicas, ...], in order."""
    first = jax.tree.map(lambda leaf: leaf[0], gathered)
    rest = jax.tree.map(lambda leaf: leaf[1:], gathered)
    # Unrolled, as there are few replicas, and iterations on a device are slow.
    return lax.scan(lambda before, more: (combine(before, more), None), first, rest, unroll=16)[0]


# -- scattered leaves


def _scatter_axes(outputs: Outputs, replicas: Replicas) -> dict[int, int]:
    """The axis of every leaf that is scattered, counted from the first, by leaf index. Raises
    FuncgaError, which names the leaf, for one that is not summed.
    """
    if replicas.scatter is None:
        return {}
    tree = outputs.structure_of(range(len(outputs.folds)))
    what = "scatter is no prefix of what grad_fn returns"
    leaf_axes = broadcast(replicas.scatter, tree, _is_axis, trees, "output", what)
    scatter: dict[int, int] = {}
    for leaf_index, (axis, _) in enumerate(leaf_axes):
        if axis is None:
            continue
        fold, axes = outputs.reduced.get(leaf_index), len(outputs.shapes[leaf_index] or ())
        if fold is None or fold.fold.reducer.monoid.collective != "sum":
            raise FuncgaError(
                f"scatter={axis} for {outputs.paths()[leaf_index]}, and its fold is no sum: only "
                "what is summed over the replicas can be scattered. Write None in its place, or "
                "fold it with funcga.mean(), funcga.per_weight() or funcga.sum()."
            )
        scatter[leaf_index] = axis if axis >= 0 else axis + axes
    return scatter


def _is_axis(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


# -- collectives

Later = Callable[[], jax.Array]
"""Returns the result of a collective, once `run` was called."""

# An array of at most so many bytes, over all replicas, travels as rows in the sum.
_SMALL = 2**16


class _Collectives:
    """Collectives over some mesh axes, most of them parts of one psum. Methods register an array
    and return a Later, to be called after `run`. Copies are sums, too, with zeros on all
    replicas but one.
    """

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self.replicas = int(lax.axis_size(names))
        self.index = lax.axis_index(names)
        self.addends: list[jax.Array] = []
        self.copied: set[int] = set()  # which of the addends are copied
        self.sums: list[jax.Array] = []
        self.used = 0  # of _SMALL

    def run(self) -> None:
        """Runs the psum of all registered arrays."""

        # Copies are sent as integers, which zeros do not change; XLA on the CPU makes 0.0 of the
        # floats -0.0 and of subnormal ones. The derivative is that of a sum of floats.
        @jax.custom_jvp
        def exchange(addends: list[jax.Array]) -> list[jax.Array]:
            sent = [
                _as_integers(part) if index in self.copied else part
                for index, part in enumerate(addends)
            ]
            return [
                _from_integers(part, addends[index].dtype) if index in self.copied else part
                for index, part in enumerate(self._psum(sent))
            ]

        exchange.defjvp(
            lambda primals, tangents: (
                exchange(*primals),
                jax.jvp(self._psum, primals, tangents)[1],
            )
        )
        self.sums += exchange(self.addends)

    def _psum(self, addends: list[jax.Array]) -> list[jax.Array]:
        sums: list[jax.Array] = lax.psum(addends, self.names)
        return sums

    def sum(self, array: jax.Array, is_copied: bool = False) -> Later:
        """The sum over the replicas."""
        if jnp.iscomplexobj(array):
            # As real numbers, so that they are part of their all-reduce.
            parts = self.sum(jnp.stack([array.real, array.imag], axis=-1), is_copied)
            return lambda: lax.complex(parts()[..., 0], parts()[..., 1])
        addend_index = len(self.addends)
        self.addends.append(as_varying(array, self.names))
        if is_copied:
            self.copied.add(addend_index)
        return lambda: self.sums[addend_index]

    def rows(self, numbers: jax.Array, is_copied: bool = False) -> Later:
        """The numbers of all replicas in order, [replicas, ...]: each fills a row of its own."""
        is_own = (
            lax.broadcasted_iota(jnp.int32, (self.replicas, *[1] * numbers.ndim), 0) == self.index
        )
        return self.sum(_where(is_own, numbers[None]), is_copied)

    def gather(self, array: jax.Array) -> Later:
        """The arrays of all replicas in order, [replicas, ...]."""
        numbers = arrays.stored(array)
        if self._has_room(array):
            gathered = self.rows(numbers, is_copied=True)
            return lambda: arrays.restored(gathered(), array)
        # Along an axis of vmap arrays have no varying type.
        to = "invarying" if {*self.names} <= arrays.manual_axes() else "varying"
        large = lax.all_gather(as_varying(numbers, self.names), self.names, to=to)
        return lambda: arrays.restored(large, array)

    def last(self, array: jax.Array) -> Later:
        """The array of the last replica."""
        numbers = _where(self.index == self.replicas - 1, arrays.stored(array))
        copied = self.sum(numbers, is_copied=True)
        return lambda: arrays.restored(copied(), array)

    def extreme(self, array: jax.Array, which: str) -> Later:
        """The elementwise maximum ("max") or minimum over the replicas; NaN if any of them is."""
        if self._has_room(array):
            gathered = self.rows(array, is_copied=True)
            return lambda: (jnp.max if which == "max" else jnp.min)(gathered(), axis=0)
        # Too large to gather: reduced as integers in the same order.
        ranks, back = _as_ranks(as_varying(array, self.names), which)
        extreme = lax.pmax(ranks, self.names) if which == "max" else lax.pmin(ranks, self.names)
        return lambda: back(extreme)

    def scatter(self, array: jax.Array, axis: int) -> Later:
        """The sum over the replicas, of which each has one part along an axis."""
        array = as_varying(array, self.names)
        part: jax.Array = lax.psum_scatter(array, self.names, scatter_dimension=axis, tiled=True)
        return lambda: part

    def _has_room(self, array: jax.Array) -> bool:
        """Whether a row of this array for each replica fits in the sum; if so, its bytes are
        reserved.
        """
        size = array.size * array.dtype.itemsize * self.replicas
        if self.used + size > _SMALL:
            return False
        self.used += size
        return True


def _where(mask: jax.Array, numbers: jax.Array) -> jax.Array:
    """The numbers where the mask is true, and zeros elsewhere."""
    # `where`, as 0 * NaN is NaN.
    return jnp.where(mask, numbers, jnp.zeros_like(numbers))


def _as_integers(numbers: jax.Array) -> jax.Array:
    """The bits of the numbers as int32; of 64 bits two integers, on a new last axis."""
    if numbers.dtype.itemsize >= 4:
        return lax.bitcast_convert_type(numbers, jnp.int32)
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        numbers = lax.bitcast_convert_type(numbers, _integer_like(numbers.dtype))
    return jnp.asarray(numbers, jnp.int32)


def _from_integers(integers: jax.Array, dtype: Dtype) -> jax.Array:
    """The numbers of this dtype that have these bits."""
    if dtype.itemsize >= 4:
        return lax.bitcast_convert_type(integers, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.bitcast_convert_type(jnp.asarray(integers, _integer_like(dtype)), dtype)
    return jnp.asarray(integers, dtype)


def _integer_like(dtype: Dtype) -> Dtype:
    return jnp.dtype(f"int{8 * dtype.itemsize}")


def _as_ranks(array: jax.Array, which: str) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Integers in the order of the numbers, NaN as the extreme, and the inverse, as XLA's
    maximum may lose a NaN.
    """
    dtype = array.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        # Not every device compares bools and integers of 8 bits.
        wide = array.astype(jnp.int32) if dtype.itemsize < 4 else array
        return wide, lambda extreme: extreme.astype(dtype)
    integer = _integer_like(dtype)
    least, most = (
        jnp.asarray(extreme, integer) for extreme in (np.iinfo(integer).min, np.iinfo(integer).max)
    )

    def turned(bits: jax.Array) -> jax.Array:
        # Bits of floats are in the order of the numbers, except that negative ones are reversed.
        return jnp.where(bits < 0, bits ^ most, bits)

    bits = turned(lax.bitcast_convert_type(array, integer))
    ranks = jnp.where(jnp.isnan(array), most if which == "max" else least, bits)
    return ranks, lambda extreme: lax.bitcast_convert_type(turned(extreme), dtype)
