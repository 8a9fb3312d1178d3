"""The facts about arrays of this framework that the mathematics needs."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec

from funcga._fold import Tally, two_sum
from funcga._types import Array, Dtype, Scalar, Tree
from funcga.errors import no_derivative, no_device
from jax_backend import _private

if TYPE_CHECKING:
    from jax.core import ShapedArray

xp = jnp


def owns(leaf: object) -> bool:
    """Whether only this framework can have made the leaf."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def is_array(leaf: object) -> bool:
    """Whether the leaf can be split and folded as it is."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def as_array(leaf: Array) -> Array:
    """The leaf as an array: itself, or a number as a 0-d array; TypeError for anything else."""
    if is_array(leaf):
        return leaf
    # The number of rows of a program that is exported for any number of them is a symbol.
    if isinstance(leaf, int | float | complex) or is_symbolic_dim(leaf):
        return jnp.asarray(leaf)
    raise TypeError(type(leaf).__name__)


def moved_like(array: jax.Array, like: Array) -> jax.Array:
    """The array on the devices of another one of its shape."""
    # What is committed to a device cannot meet an array on a mesh, and is another program to
    # compile.
    return (
        jax.device_put(array, like.sharding)
        if isinstance(like, jax.Array) and like.committed
        else array
    )


def describe(leaf: Array) -> str:
    """`float32[8, 3]`, or the type of anything that is not an array."""
    if is_array(leaf):
        kind_of = "a NumPy array " if isinstance(leaf, np.ndarray | np.generic) else ""
        dtype = "float0" if leaf.dtype == jax.dtypes.float0 else leaf.dtype
        return f"{kind_of}{dtype}[{', '.join(map(str, leaf.shape))}]"
    return "None" if leaf is None else f"of type {type(leaf).__name__}"


def kind(dtype: Dtype) -> str:
    """'bool', 'int', 'float', 'complex' or 'other'."""
    return next((name for name, kinds in _KINDS.items() if jnp.issubdtype(dtype, kinds)), "other")


_KINDS = {
    "bool": jnp.bool_,
    "int": jnp.integer,
    "float": jnp.floating,
    "complex": jnp.complexfloating,
}


def as_dtype(dtype: Dtype) -> Dtype:
    """The dtype of this name; TypeError if the framework has none."""
    named = jnp.dtype(dtype)
    if named != jax.dtypes.canonicalize_dtype(named):
        raise TypeError('64-bit types are switched off: jax.config.update("jax_enable_x64", True)')
    return named


def accumulator_dtype(dtype: Dtype) -> Dtype:
    """The dtype that sums of this dtype are held in: at least 32 bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype("float32") if dtype.itemsize < 4 else dtype
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        return jnp.dtype("int32") if dtype.itemsize < 4 else dtype
    return dtype


def strong(leaf: Array) -> jax.Array:
    """The leaf as an array whose dtype a loop can keep: one without a weak type, which an
    operation would change.
    """
    leaf = as_array(leaf)
    return jnp.asarray(leaf, dtype=leaf.dtype)


def cast(array: Array, dtype: Dtype, beside: Array | None = None) -> jax.Array:
    """The array in another dtype, and on the device of the one beside it."""
    # JAX itself puts numbers where they are computed with, as all arrays of a program are on the
    # same devices.
    return jnp.asarray(array, dtype=dtype)


def exact(array: jax.Array, name: str) -> jax.Array:
    """The array, of which `name` takes the bits; FuncgaError if it is differentiated, or has no
    bits of its own.
    """

    @jax.custom_jvp
    def same(array: jax.Array) -> jax.Array:
        return array

    @same.defjvp
    def _(
        primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        raise no_derivative(name)

    result: jax.Array = same(array)
    return result


def slice(array: Array, axis: int, start: Scalar, size: int) -> jax.Array:
    """`size` rows from `start` on, along an axis."""
    array = jnp.asarray(array)
    sharding = jax.typeof(array).sharding
    # A slice of an array that Explicit axes cut has to be cut evenly itself, or the array is whole
    # along the axis.
    if any(sharding.spec) and size % devices_along(sharding, axis):
        entries = [*sharding.spec]
        entries[axis] = None
        whole = NamedSharding(sharding.mesh, PartitionSpec(*entries))
        array = jax.sharding.reshard(array, whole)
    return lax.dynamic_slice_in_dim(array, start, size, axis)


def squared_norms(arrays: Sequence[jax.Array], dtype: Dtype) -> jax.Array:
    """The sum of the squared absolute values of all elements of each array, [arrays], without a
    copy of them.
    """
    wide = [array.astype(accumulator_dtype(array.dtype)) for array in arrays]
    return jnp.stack([jnp.sum(jnp.real(array * jnp.conj(array))).astype(dtype) for array in wide])


def measured(
    measure: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """`measure(array)`, a sum over the elements, of each array; the sum over all of one that
    lies in parts.
    """
    return [measure(array) for array in arrays]  # XLA knows where the parts are


def finite(arrays: Sequence[jax.Array | None]) -> jax.Array:
    """Whether every number is finite: a 0-d array. None among the arrays has no numbers."""
    all_finite = jnp.asarray(True)
    for array in arrays:
        all_finite = all_finite if array is None else jnp.isfinite(array).all() & all_finite
    return all_finite


def scalar(weight: Scalar) -> Scalar:
    """A weight as a Python number where the host can see it without waiting for a device, else
    as it is.
    """
    if _private.is_traced(weight) or not isinstance(weight, jax.Array):
        return weight
    # Reading a number from an accelerator would wait for all that it still has to compute.
    return weight.item() if {device.platform for device in weight.devices()} == {"cpu"} else weight


def tally(weight: Scalar, steps: int = 1) -> Tally:
    """The Tally of micro-batches that weigh this much together, in the widest type that counts."""
    wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    return Tally(addends(weight, wide), jnp.asarray(steps, dtype=jnp.int32))


def addends(weight: Scalar, wide: bool) -> tuple[jax.Array, ...]:
    """A weight as arrays that it is the sum of: one float64 if `wide`, else two of float32."""
    if wide:
        return (jnp.asarray(weight, dtype=jnp.float64),)
    if is_symbolic_dim(weight):
        weight = jnp.asarray(weight)
    # Of a Python number the remainder is exact in Python's float64.
    if not isinstance(weight, jax.Array):
        high = np.float32(weight)
        return jnp.asarray(high), jnp.asarray(np.float32(weight - float(high)))
    if not jnp.issubdtype(weight.dtype, jnp.integer):
        rounded = weight.astype(jnp.float32)
        if weight.dtype.itemsize <= 4:
            return rounded, jnp.zeros_like(rounded)
        return rounded, (weight - rounded.astype(weight.dtype)).astype(jnp.float32)
    # An integer of more than 24 bits is the sum of its lower 16 bits and the rest, each exact in
    # float32.
    low = (
        weight & jnp.asarray(0xFFFF, dtype=weight.dtype)
        if weight.dtype.itemsize > 2
        else jnp.zeros_like(weight)
    )
    return two_sum((weight - low).astype(jnp.float32), low.astype(jnp.float32))


def integer(number: Scalar) -> jax.Array:
    """A count as a 0-d int32 array."""
    return jnp.asarray(number, dtype=jnp.int32)


def device(name: object) -> jax.Device | jax.sharding.Sharding:
    """The device of this name; FuncgaError, which says what there is, if there is none."""
    if isinstance(name, jax.Device | jax.sharding.Sharding):
        return name
    platform, _, index = str(name).partition(":")
    try:
        return jax.local_devices(backend=platform)[int(index or 0)]
    except (IndexError, RuntimeError, ValueError) as error:
        raise no_device(name, "JAX", devices()) from error


def devices() -> list[str]:
    """The names of the devices that there are."""
    kinds = sorted({"cpu", *(device.platform for device in jax.local_devices())})
    return [
        f"{kind}:{index}" for kind in kinds for index in range(len(jax.local_devices(backend=kind)))
    ]


def owned(array: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """The array, or a copy of it where it is one of these others, or a view of one."""
    # Nobody writes to a JAX array, but a caller who donates the result would take the other one
    # away.
    return jnp.array(array, copy=True) if any(array is other for other in others) else array


def stored(array: Array) -> Array:
    """The array as one of numbers, which any file format takes: of random keys, their data."""
    return jax.random.key_data(array) if _is_key(array) else array


def restored(numbers: Array, like: Array) -> Array:
    """What was stored of an array like this one."""
    if not _is_key(like) or _is_key(numbers):
        return numbers
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like))


def _is_key(array: object) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


# -- types: how an array is sharded over the Explicit axes of a mesh, and varies over manual ones


def zeros(aval: "ShapedArray") -> jax.Array:
    """Zeros of a type."""
    array = lax.full(aval.shape, 0, aval.dtype, sharding=aval.sharding)
    return array if aval.sharding.mesh.empty else typed(array, aval)


def typed(array: jax.Array, aval: "ShapedArray") -> jax.Array:
    """The array sharded and varying as a type says, for a loop that makes it so."""
    # From 0.11 on a constant that is whole on all devices lies on no mesh, whatever it was made
    # for.
    if jax.typeof(array).sharding != aval.sharding and not aval.sharding.mesh.empty:
        array = jax.sharding.reshard(array, aval.sharding)
    return as_varying(array, varying_axes(aval))


def settled(body: Callable[[Tree], Tree], carry: Tree) -> tuple[Tree, Tree]:
    """The carry sharded and varying as the body of a loop makes it, and the types of what the body
    then returns.

    The leaves of the carry are the first of those that the body returns.
    """
    # What is marked as varying may let more come back as varying. In practice it settles at once.
    for _ in range(4):
        leaves, structure = jax.tree.flatten(carry)
        program, result = jax.make_jaxpr(body, return_shape=True)(carry)
        marked = [typed(leaf, aval) for leaf, aval in zip(leaves, program.out_avals, strict=False)]
        if all(a is b for a, b in zip(leaves, marked, strict=True)):
            break
        carry = jax.tree.unflatten(structure, marked)
    return carry, jax.tree.unflatten(jax.tree.structure(result), program.out_avals)


def alike(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """The parts of one array sharded as that of them which is sharded over the fewest Explicit
    axes.
    """
    types = [jax.typeof(part) for part in parts]
    least = min(types, key=lambda aval: sum(entry is not None for entry in aval.sharding.spec))
    return [typed(part, least) for part in parts]


def as_varying(array: jax.Array, names: Iterable[str]) -> jax.Array:
    """The array marked as one that may differ along these mesh axes."""
    manual = manual_axes()
    return (
        _private.cast_varying(array, [name for name in names if name in manual])
        if manual
        else array
    )


def varying_axes(aval: "ShapedArray") -> frozenset[str]:
    """The mesh axes along which an array of this type may differ."""
    varying = _private.varying(aval)
    return manual_axes() if varying is None else varying


def typed_axes(names: Iterable[str]) -> frozenset[str]:
    """Those of the mesh axes along which types say whether an array differs.

    They do not along an axis of vmap, and nowhere in shard_map(check_vma=False).
    """
    return frozenset(
        name for name in names if name in varying_axes(jax.typeof(lax.axis_index(name)))
    )


def manual_axes() -> frozenset[str]:
    """The axes that have replicas in the types of arrays: those of shard_map, not those of vmap."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def axis_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the mesh axes in an entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def devices_along(sharding: NamedSharding, axis: int) -> int:
    """How many devices an axis of an array lies over, one part on each."""
    return prod(sharding.mesh.shape[name] for name in axis_names(sharding.spec[axis]))
