"""The merge over replicas, after the loop: the monoids of the leaves as collectives.

Only JAX has this file: inside shard_map a collective is an operation of the program. All leaves
but a few large ones are merged by one psum, of which XLA makes one all-reduce for each dtype.
Small arrays that have to be gathered are part of it: each replica fills its row of an array of
zeros, [replicas, ...].
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcga._backend.prefixes import PrefixError, broadcast, named_by_leaf
from funcga._fold import LeafFold, Tally, largest
from funcga._fold.outputs import Outputs
from funcga._types import Dtype, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, sharding, trees
from jax_backend.arrays import as_varying, axis_names, varying_axes
from jax_backend.replicas import WRITE_LEAVES, Replicas, is_names, listed, spelled

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr


class Folded(NamedTuple):
    """What has been folded, before it is normalised: the carry of a loop, and what replicas merge.

    The loop carries neither `collected` nor the `unit` of weights in means. With drop="window" it
    counts the micro-batches that it `rejected`, and keeps the threaded state from before the first.
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
    names = _names_of_leaves(outputs, replicas)
    scatter = _scatter_axes(outputs, folded.reduced, replicas, names)
    of_axes = {axes: _Collectives(axes) for axes in dict.fromkeys([replicas.names, *names]) if axes}
    collectives = of_axes[replicas.names]
    reduced = [
        _merge_leaf(of_axes.get(names[leaf_index]), fold, lifted, scatter.get(leaf_index))
        for leaf_index, fold, lifted in zip(
            outputs.reduced, outputs.reduced_folds, folded.reduced, strict=True
        )
    ]
    total = _merge_tally(collectives, folded.total)
    # Replicas have the rows of a batch in order, so its final state is that of the last replica.
    state = [collectives.last(leaf) for leaf in folded.state]
    collected = [collectives.gather(leaf) for leaf in folded.collected]
    rejected = None
    if folded.rejected is not None:  # a count, sent as a float, with the weights
        rejected = collectives.sum(folded.rejected.astype(folded.total.weight[0].dtype))
    state_before = [collectives.last(leaf) for leaf in folded.state_before]
    for each in of_axes.values():
        each.run()
    rows = [
        sharding.concatenated(later(), fold.axis or 0)
        for fold, later in zip(outputs.collected_folds, collected, strict=True)
    ]
    return Folded(
        [later() for later in reduced],
        total(),
        [later() for later in state],
        rows,
        folded.unit,
        None if rejected is None else rejected().astype(jnp.int32),
        [later() for later in state_before],
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
    pairs = zip(outputs.reduced_folds, folded.reduced, strict=True)
    reduced = [leaf * unit.astype(leaf.dtype) if fold.is_mean else leaf for fold, leaf in pairs]
    return folded._replace(reduced=reduced, unit=1.0)


def _names_of_leaves(outputs: Outputs, replicas: Replicas) -> list[tuple[str, ...]]:
    """The axes that each leaf is merged over; () for one that is not merged."""
    if replicas.leaves is None:
        return [replicas.names] * len(outputs.folds)
    value = outputs.value_of(range(len(outputs.folds)))
    named = named_by_leaf(replicas.leaves, value, is_names, trees, "output", WRITE_LEAVES)
    names = [replicas.names] * outputs.before + [*map(axis_names, named)]
    for leaf_index, axes in enumerate(names):
        replicas.check_part(axes)
        fold = outputs.folds[leaf_index]
        is_of_window = leaf_index not in outputs.reduced or (fold is not None and fold.is_of_window)
        if is_of_window and {*axes} != {*replicas.names}:
            raise FuncgaError(
                f"across= names fewer axes than all for `{outputs.paths()[leaf_index]}`, whose "
                f"fold ({fold and fold.fold.name}) is of the whole window. Write "
                f"{spelled(replicas.names)} there."
            )
    # The same axes in another order are the same replicas.
    return [replicas.names if {*axes} == {*replicas.names} else axes for axes in names]


# Collectives that may bring gradients of other devices' losses.
_COLLECTIVES = {
    "psum",
    "psum_invariant",
    "reduce_scatter",
    "unreduced_psum",
    "unreduced_reduce_scatter",
    "preduced",
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "ragged_all_to_all",
    "ppermute",
    "pbroadcast",
    "psend",
    "precv",
}


def check_unmixed(outputs: Outputs, traced: "ClosedJaxpr", replicas: Replicas) -> None:
    """Raises FuncgaError if grad_fn, the program `traced`, adds unweighted gradients of other
    devices' losses to a leaf. Leaves merged over fewer axes than the window get them along the
    other axes; then no weighted mean can be computed.
    """
    names = _names_of_leaves(outputs, replicas)
    for leaf_index, fold in zip(outputs.reduced, outputs.reduced_folds, strict=True):
        others = {*replicas.names} - {*names[leaf_index]}
        if others and fold.weighs and others & {*_axes_of_collectives(traced.jaxpr)}:
            raise FuncgaError(
                f"weight= was given, and `{outputs.paths()[leaf_index]}` has from grad_fn what the "
                f"losses of other devices along {listed(sorted(others))} add to it, each as if it "
                "weighed 1. Return sums, and let funcga divide them: a loss that is summed over "
                "what weight counts, and fold=funcga.per_weight()."
            )


def _axes_of_collectives(jaxpr: "Jaxpr") -> Iterator[str]:
    """The axes that a program communicates over."""
    for equation in _private.equations(jaxpr):
        if equation.primitive.name in _COLLECTIVES:
            axes = equation.params.get("axes", equation.params.get("axis_name", ()))
            yield from axis_names(axes)


def _merge_leaf(
    collectives: "_Collectives | None", fold: LeafFold, lifted: Tree, scatter: int | None
) -> Callable[[], Tree]:
    """The merge of a leaf by its monoid; without collectives the leaf stays as it is."""
    if collectives is None:
        return lambda: lifted
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
    numbers = jnp.stack([*total.weight, *arrays.addends(total.steps, wide=limbs == 1)])
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


def _scatter_axes(
    outputs: Outputs, reduced: list[Tree], replicas: Replicas, names: list[tuple[str, ...]]
) -> dict[int, int]:
    """The axis of every leaf that is scattered, by leaf index."""
    if replicas.scatter is None:
        return {}
    count = len(outputs.folds)
    tree = outputs.structure_of(range(count))
    try:
        leaf_axes = broadcast(replicas.scatter, tree, count, _is_axis, trees, "output")
    except PrefixError as error:
        raise error.refusal(
            "scatter is no prefix of what grad_fn returns",
            "Write an axis, or None (the whole leaf on every replica), for all that stands below: "
            "scatter=(None, 0).",
            trees,
            lambda leaf: "...",
        ) from error
    lifted = dict(zip(outputs.reduced, reduced, strict=True))
    return {
        leaf_index: _check_scatter(
            outputs, leaf_index, axis, lifted.get(leaf_index), names[leaf_index]
        )
        for leaf_index, (axis, _) in enumerate(leaf_axes)
        if axis is not None
    }


def _is_axis(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _check_scatter(
    outputs: Outputs, leaf_index: int, axis: int, lifted: Tree, names: tuple[str, ...]
) -> int:
    """The axis, counted from the first. Raises FuncgaError, which names the leaf, if it cannot
    be cut along it.
    """
    fold, path = outputs.folds[leaf_index], outputs.paths()[leaf_index]
    count = int(lax.axis_size(names)) if names else 1
    if lifted is None or fold is None or fold.fold.reducer.monoid.collective != "sum":
        raise FuncgaError(
            f"scatter={axis} for {path}, and its fold is no sum: only what is summed over the "
            "replicas can be scattered. Write None in its place, or fold it with funcga.mean(), "
            "funcga.per_weight() or funcga.sum()."
        )
    for part in jax.tree.leaves(lifted):
        if not -part.ndim <= axis < part.ndim or part.shape[axis] % count:
            raise FuncgaError(
                f"scatter={axis} for {path}, which is {arrays.describe(part)}: it has no axis "
                f"{axis} whose rows divide among {count} replicas. Choose another axis, or write "
                "None in its place, as in scatter=(None, 0)."
            )
    return axis % len(largest(lifted).shape)


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
    return arrays.cast(numbers, jnp.int32)


def _from_integers(integers: jax.Array, dtype: Dtype) -> jax.Array:
    """The numbers of this dtype that have these bits."""
    if dtype.itemsize >= 4:
        return lax.bitcast_convert_type(integers, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return lax.bitcast_convert_type(arrays.cast(integers, _integer_like(dtype)), dtype)
    return arrays.cast(integers, dtype)


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
