"""The facts about arrays of this framework that the mathematics needs."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding, PartitionSpec

from funcga._fold.tally import two_sum

xp = jnp


def owns(leaf: Any) -> bool:
    """Whether only this framework can have made the leaf."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def is_array(leaf: Any) -> bool:
    """Whether the leaf can be split and folded as it is."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def as_array(leaf: Any) -> Any:
    """The leaf as an array: itself, or a number as a 0-d array; TypeError for anything else."""
    if is_array(leaf):
        return leaf
    if isinstance(leaf, int | float | complex):
        return jnp.asarray(leaf)
    raise TypeError(type(leaf).__name__)


def placed(array: jax.Array, like: Any) -> jax.Array:
    """The array where another one of its shape lies."""
    # What is committed to a device cannot meet an array on a mesh, and is another program to compile.
    return jax.device_put(array, like.sharding) if isinstance(like, jax.Array) and like.committed else array


def describe(leaf: Any) -> str:
    """`float32[8, 3]`, or the type of what is no array."""
    if is_array(leaf):
        kind_of = "a NumPy array " if isinstance(leaf, np.ndarray | np.generic) else ""
        dtype = "float0" if leaf.dtype == jax.dtypes.float0 else leaf.dtype
        return f"{kind_of}{dtype}[{', '.join(map(str, leaf.shape))}]"
    return "None" if leaf is None else f"of type {type(leaf).__name__}"


def kind(dtype: Any) -> str:
    """'bool', 'int', 'float', 'complex' or 'other'."""
    return next((name for name, kinds in _KINDS.items() if jnp.issubdtype(dtype, kinds)), "other")


_KINDS = {"bool": jnp.bool_, "int": jnp.integer, "float": jnp.floating, "complex": jnp.complexfloating}


def as_dtype(dtype: Any) -> Any:
    """The dtype of this name; TypeError if the framework has none."""
    found = jnp.dtype(dtype)
    if found != jax.dtypes.canonicalize_dtype(found):
        raise TypeError('64-bit types are switched off: jax.config.update("jax_enable_x64", True)')
    return found


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype that sums of this dtype are held in: at least 32 bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype("float32") if dtype.itemsize < 4 else dtype
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        return jnp.dtype("int32") if dtype.itemsize < 4 else dtype
    return dtype


def cast(array: Any, dtype: Any) -> Any:
    """The array in another dtype."""
    return jnp.asarray(array, dtype=dtype)


def slice(array: Any, axis: int, start: Any, size: int) -> jax.Array:
    """`size` rows from `start` on, along an axis."""
    return lax.dynamic_slice_in_dim(_gathered(jnp.asarray(array), axis, size), start, size, axis)


def _gathered(array: jax.Array, axis: int, size: int) -> jax.Array:
    """The array whole along an axis, if that is an Explicit one that so many rows cannot be sharded over."""
    sharding: Any = jax.typeof(array).sharding
    names = sharding.spec[axis] if any(sharding.spec) else None
    if (
        names is None
        or size % prod(sharding.mesh.shape[n] for n in (names if isinstance(names, tuple) else (names,))) == 0
    ):
        return array
    entries = [*sharding.spec]
    entries[axis] = None
    spec: Any = PartitionSpec(*entries)  # type: ignore[no-untyped-call]
    whole: jax.Array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))  # type: ignore[no-untyped-call]
    return whole


def scalar(weight: Any) -> Any:
    """A weight as a Python number where the host can see it without waiting for a device, else as it is."""
    if isinstance(weight, jax.core.Tracer) or not isinstance(weight, jax.Array):
        return weight
    return weight.item() if {device.platform for device in weight.devices()} == {"cpu"} else weight


def limbs(weight: Any) -> tuple[Any, ...]:
    """A weight as addends in the widest scalar type: one if that has 53 bits and more, else two."""
    return addends(weight, wide=jax.dtypes.canonicalize_dtype(np.float64) == np.float64)


def addends(weight: Any, wide: bool) -> tuple[Any, ...]:
    """A weight as arrays that it is the sum of: one float64 if `wide`, else two of float32."""
    if wide:
        return (jnp.asarray(weight, dtype=jnp.float64),)
    if is_symbolic_dim(weight):
        weight = jnp.asarray(weight)
    if not isinstance(weight, jax.Array):
        high = np.float32(weight)
        return jnp.asarray(high), jnp.asarray(np.float32(weight - float(high)))
    if not jnp.issubdtype(weight.dtype, jnp.integer):
        rounded = weight.astype(jnp.float32)
        if weight.dtype.itemsize <= 4:
            return rounded, jnp.zeros_like(rounded)
        return rounded, (weight - rounded.astype(weight.dtype)).astype(jnp.float32)
    low = weight & jnp.asarray(0xFFFF, dtype=weight.dtype) if weight.dtype.itemsize > 2 else jnp.zeros_like(weight)
    return two_sum((weight - low).astype(jnp.float32), low.astype(jnp.float32))


def integer(number: Any) -> jax.Array:
    """A count as a 0-d int32 array."""
    return jnp.asarray(number, dtype=jnp.int32)


def owned(array: jax.Array, others: Sequence[jax.Array]) -> jax.Array:
    """The array, or a copy of it where it is one of these others, or a view of one."""
    # nobody writes to it, but who donates it would take it from whoever has the other
    return jnp.array(array, copy=True) if any(array is other for other in others) else array


def stored(array: Any) -> Any:
    """The array as one of numbers, which any file format takes: of random keys, their data."""
    return jax.random.key_data(array) if _is_key(array) else array


def restored(numbers: Any, like: Any) -> Any:
    """What was stored of an array like this one."""
    if not _is_key(like) or _is_key(numbers):
        return numbers
    return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(like))


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def count(steps: int) -> jax.Array:
    """A number of steps in the type that a loop can carry."""
    return jnp.asarray(steps, dtype=jnp.int32)
