"""What the mathematics has to know of JAX arrays."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec

from funcga._types import Array, Dtype, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import _private

if TYPE_CHECKING:
    from jax.core import ShapedArray

xp = jnp


def is_array(leaf: object) -> bool:
    """Whether the leaf can be split and folded as it is."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def as_array(leaf: Any, dtype: Dtype | None = None, beside: Array | None = None) -> Array:
    """The leaf as an array, a number as a 0-d array, in a dtype, and on the device of the one
    beside it; TypeError for anything else.
    """
    # JAX itself places numbers, as all arrays of a program are on the same devices.
    if dtype is None and is_array(leaf):
        return leaf
    # In a program exported for any number of rows, that number is a symbol.
    if dtype is not None or isinstance(leaf, int | float | complex) or is_symbolic_dim(leaf):
        return jnp.asarray(leaf, dtype=dtype)
    raise TypeError(type(leaf).__name__)


def as_dtype(dtype: Dtype) -> Dtype:
    """The dtype of this name; FuncgaError if the framework has none."""
    named = jnp.dtype(dtype)
    if named != jax.dtypes.canonicalize_dtype(named):
        raise FuncgaError(
            f"{dtype!r} is no dtype of JAX here, as 64-bit types are switched off: "
            'jax.config.update("jax_enable_x64", True).'
        )
    return named


def device_of(device: Any) -> Any:
    """A device, also by its name, such as "gpu:1", which JAX itself does not have for devices."""
    if not isinstance(device, str):
        return device
    platform, _, number = device.partition(":")
    return jax.local_devices(backend=platform)[int(number or 0)]


def without_weak_type(leaf: Array) -> jax.Array:
    """The leaf as an array without a weak type, which a loop could not keep."""
    leaf = as_array(leaf)
    return jnp.asarray(leaf, dtype=leaf.dtype)


def slice(array: Array, axis: int, start: Scalar, size: int) -> jax.Array:
    """`size` rows from `start` on, along an axis."""
    array = jnp.asarray(array)
    sharding = jax.typeof(array).sharding
    # If Explicit axes shard the array, they have to divide the slice, too; else the array is
    # unsharded along the axis.
    if any(sharding.spec) and size % devices_along(sharding, axis):
        entries = [*sharding.spec]
        entries[axis] = None
        whole = NamedSharding(sharding.mesh, PartitionSpec(*entries))
        array = jax.sharding.reshard(array, whole)
    return lax.dynamic_slice_in_dim(array, start, size, axis)


def scalar(weight: Scalar) -> Scalar:
    """A weight as a Python number where the host can see it without waiting for a device, else
    as it is.
    """
    if _private.is_traced(weight) or not isinstance(weight, jax.Array):
        return weight
    # Reading from an accelerator would block.
    return weight.item() if {device.platform for device in weight.devices()} == {"cpu"} else weight


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


# -- types: sharding over Explicit axes of a mesh, and varying manual axes


def zeros(aval: "ShapedArray") -> jax.Array:
    """Zeros of a type."""
    array = lax.full(aval.shape, 0, aval.dtype, sharding=aval.sharding)
    return array if aval.sharding.mesh.empty else typed(array, aval)


def typed(array: jax.Array, aval: "ShapedArray") -> jax.Array:
    """The array sharded and varying as a type says."""
    # From 0.11 on a replicated constant has no mesh.
    if jax.typeof(array).sharding != aval.sharding and not aval.sharding.mesh.empty:
        array = jax.sharding.reshard(array, aval.sharding)
    return as_varying(array, varying_axes(aval))


def settle_types(body: Callable[[Tree], Tree], carry: Tree) -> tuple[Tree, Tree]:
    """The carry with the types that the body of a loop gives it, and the types of the body's
    results, of which the carry is the first.
    """
    # Marking one leaf as varying may make others vary. Usually one round is enough.
    for _ in range(4):
        leaves, structure = jax.tree.flatten(carry)
        program, result = jax.make_jaxpr(body, return_shape=True)(carry)
        marked = [typed(leaf, aval) for leaf, aval in zip(leaves, program.out_avals, strict=False)]
        if all(a is b for a, b in zip(leaves, marked, strict=True)):
            break
        carry = jax.tree.unflatten(structure, marked)
    return carry, jax.tree.unflatten(jax.tree.structure(result), program.out_avals)


def with_common_sharding(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """The parts of one array with the sharding of the part that is sharded over the fewest
    Explicit axes.
    """
    types = [jax.typeof(part) for part in parts]
    least = min(types, key=lambda aval: sum(entry is not None for entry in aval.sharding.spec))
    return [typed(part, least) for part in parts]


def as_varying(array: jax.Array, names: Iterable[str]) -> jax.Array:
    """The array marked as varying along mesh axes, along some of which it may vary already."""
    manual = manual_axes()
    varies_along = (_private.varying(jax.typeof(array)) or ()) if manual else ()
    for name in names:
        if name in manual and name not in varies_along:
            # The error is that it varies along this one already, if its type does not say so.
            with suppress(ValueError):
                array = lax.pcast(array, name, to="varying")
    return array


def varying_axes(aval: "ShapedArray") -> frozenset[str]:
    """The mesh axes along which an array of this type varies."""
    varying = _private.varying(aval)
    return manual_axes() if varying is None else varying


def typed_axes(names: Iterable[str]) -> frozenset[str]:
    """The mesh axes whose variance is in the types of arrays: not those of vmap, and none in
    shard_map(check_vma=False).
    """
    return frozenset(
        name for name in names if name in varying_axes(jax.typeof(lax.axis_index(name)))
    )


def manual_axes() -> frozenset[str]:
    """The manual axes: those of shard_map, not those of vmap."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def axis_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the mesh axes in an entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def devices_along(sharding: NamedSharding, axis: int) -> int:
    """How many devices an axis of an array lies over, one part on each."""
    return prod(sharding.mesh.shape[name] for name in axis_names(sharding.spec[axis]))
