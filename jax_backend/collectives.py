"""The collectives of one merge over replicas: as few of them as possible.

Only JAX has this file: inside shard_map a collective is an operation of the program like any other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_backend.bits import HOLD_16_BITS, as_numbers, as_ranks, pack, unpack

Later = Callable[[], Any]
"""What a collective will have found, once the exchange has run."""

_SMALL = 2**16  # bytes over all replicas: so much is sent bit by bit along with the sums, more has its own collectives


class Exchange:
    """Arrays that wait for the collectives over some mesh axes; what the methods return can be asked after `run`."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names
        self.replicas = int(lax.axis_size(names))
        self.index = lax.axis_index(names)
        self.sums: list[jax.Array] = []
        self.summed: list[jax.Array] = []
        self.letters: list[jax.Array] = []
        self.used = 0
        self.delivered: list[jax.Array] = []

    def sum(self, array: jax.Array) -> Later:
        """The sum over the replicas."""
        self.sums.append(as_varying(array, self.names))
        return partial(_item, self.summed, len(self.sums) - 1)

    def gather(self, array: jax.Array) -> Later:
        """The arrays of all replicas in order, [replicas, ...]."""
        array = as_varying(array, self.names)
        if self._is_small(array):
            self.used += self._size(array)
            self.letters.append(array)
            return partial(_item, self.delivered, len(self.letters) - 1)
        return self._all_gather(array, axis=0, tiled=False)

    def rows(self, array: jax.Array, axis: int) -> Later:
        """The rows of all replicas in order, joined along an axis."""
        if self._is_small(array):
            stacked = self.gather(array)
            return lambda: jnp.concatenate(list(stacked()), axis=axis)
        return self._all_gather(as_varying(array, self.names), axis=axis % array.ndim, tiled=True)

    def last(self, array: jax.Array) -> Later:
        """The array of the last replica."""
        array = as_varying(array, self.names)
        if self._is_small(array):
            stacked = self.gather(array)
            return lambda: stacked()[-1]
        numbers, back = as_numbers(array)
        found = self.sum(jnp.where(self.index == self.replicas - 1, numbers, jnp.zeros_like(numbers)))
        return lambda: back(found())

    def extreme(self, array: jax.Array, which: str) -> Later:
        """The elementwise "max" or "min" over the replicas; NaN if any of them is."""
        array = as_varying(array, self.names)
        if self._is_small(array):
            stacked = self.gather(array)
            return lambda: getattr(jnp, which)(stacked(), axis=0)
        ranks, back = as_ranks(array, highest=which == "max")
        found = getattr(lax, f"p{which}")(ranks, self.names)
        return lambda: back(found)

    def scatter(self, array: jax.Array, axis: int) -> Later:
        """The sum over the replicas, of which each has one part along an axis."""
        array = as_varying(array, self.names)
        part: Any = lax.psum_scatter(array, self.names, scatter_dimension=axis, tiled=True)  # type: ignore[no-untyped-call]
        return lambda: part

    def run(self) -> None:
        """Runs the collectives: one all-reduce for each dtype, in the largest of which whatever is small travels."""
        dtype = self._carrier()
        alone = []
        for array in self.sums:
            alone.append(array.dtype == dtype or not self._is_small(array))
            self.used += 0 if alone[-1] else self._size(array)
        letters = [*self.letters, *(array for array, is_alone in zip(self.sums, alone, strict=True) if not is_alone)]
        sums = [array for array, is_alone in zip(self.sums, alone, strict=True) if is_alone]
        sums, slots = lax.psum((sums, self._slots(pack(letters), dtype)), self.names)  # type: ignore[no-untyped-call]

        rows = slots.real if jnp.issubdtype(dtype, jnp.complexfloating) else slots
        opened = unpack(rows.astype(jnp.uint16), letters)
        self.delivered += opened[: len(self.letters)]
        whole, apart = iter(sums), iter(opened[len(self.letters) :])
        self.summed += [next(whole) if is_alone else _total(next(apart)) for is_alone in alone]

    def _is_small(self, array: jax.Array) -> bool:
        return self.used + self._size(array) <= _SMALL

    def _size(self, array: jax.Array) -> int:
        return array.size * array.dtype.itemsize * self.replicas

    def _carrier(self) -> Any:
        """The dtype of most of what is summed, among those whose numbers hold 16 bits."""
        sizes: dict[Any, int] = {}
        for array in self.sums:
            if array.dtype.name in HOLD_16_BITS:
                sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size * array.dtype.itemsize
        return max(sizes, key=sizes.__getitem__, default=jnp.dtype("float32"))

    def _slots(self, letters: jax.Array, dtype: Any) -> jax.Array:
        """The letters in this replica's own row of zeros, [replicas, ...], so that a sum over the replicas has all."""
        mine = lax.broadcasted_iota(jnp.int32, (self.replicas, 1), 0) == self.index
        letters = letters.astype(dtype)[None]
        return jnp.where(mine, letters, jnp.zeros_like(letters))

    def _all_gather(self, array: jax.Array, axis: int, tiled: bool) -> Later:
        numbers, back = as_numbers(array)
        to = "invarying" if set(self.names) <= set(_manual_axes()) else "varying"
        found = lax.all_gather(numbers, self.names, axis=axis, tiled=tiled, to=to)
        return lambda: back(found)


def _item(found: list[jax.Array], i: int) -> jax.Array:
    return found[i]


def _total(stacked: jax.Array) -> jax.Array:
    return jnp.sum(stacked, axis=0, dtype=stacked.dtype)


def as_varying(array: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The array marked as one that may differ along these mesh axes."""
    missing = tuple(name for name in names if name in _manual_axes() and name not in varying_axes(jax.typeof(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes along which an array of this type may differ."""
    kind = getattr(aval, "manual_axis_type", None)
    found = kind.varying if kind is not None else getattr(aval, "vma", None)
    return frozenset(found or ())


def typed_axes(names: tuple[str, ...]) -> frozenset[Any]:
    """Those of the mesh axes along which types say whether an array differs.

    They do not along an axis of vmap, and nowhere in shard_map(check_vma=False).
    """
    return frozenset(name for name in names if name in varying_axes(jax.typeof(lax.axis_index(name))))


def _manual_axes() -> tuple[Any, ...]:
    """The axes that have replicas in the types of arrays: those of shard_map, not those of vmap."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
