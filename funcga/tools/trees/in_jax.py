"""Arrays to and from other frameworks: by DLPack or NumPy in the memory where they lie, or in
new memory once.
"""

from contextlib import suppress

import jax
import numpy as np

from funcga._types import Array
from funcga.tools.trees import Extent
from jax_backend import _private, arrays
from jax_backend.arrays import device_of


def platforms() -> set[str]:
    """The kinds of devices from which this framework imports by DLPack: 'cpu', 'gpu' and so on."""
    # The CPU is left out: NumPy's arrays are uncommitted there, and go to the default device.
    return {device.platform for device in jax.local_devices()} - {"cpu"}


def devices() -> list[str]:
    """The names of the devices that there are."""
    kinds = sorted({"cpu", *(device.platform for device in jax.local_devices())})
    return [
        f"{kind}:{index}" for kind in kinds for index in range(len(jax.local_devices(backend=kind)))
    ]


def export_array(leaf: jax.Array, platforms: set[str]) -> Array:
    """The array as others import it: by DLPack, if it lies on one of their platforms, else as
    NumPy's.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError("it is a shape without numbers")
    # A sharded array is gathered on the host; others have no name for one that lies on several
    # devices.
    devices = leaf.devices()
    platform = "several" if len(devices) > 1 else next(iter(devices)).platform
    if platform in platforms:
        return jax.block_until_ready(leaf) if platform == "cpu" else leaf
    # NumPy takes the memory as it is, unless its strides or dtype are JAX's own.
    return np.asarray(leaf) if platform == "cpu" else _on_host(leaf)


def _on_host(leaf: jax.Array) -> Array:
    """NumPy's array of one that lies elsewhere; JAX would keep what numpy.asarray(leaf) makes as
    long as the leaf.
    """
    # Unless JAX_PLATFORMS is without it, or parts lie on devices of other processes.
    with suppress(RuntimeError, ValueError):
        leaf = jax.device_put(leaf, jax.local_devices(backend="cpu")[0])
    return np.asarray(leaf)


def import_array(array: Array) -> Array:
    """An exported array as this framework takes it, where it lies if possible."""
    if _is_abstract(array) or isinstance(array, jax.Array):
        return array
    dtype = str(array.dtype).removeprefix("torch.")
    narrowed = str(jax.dtypes.canonicalize_dtype(dtype))
    if narrowed != dtype:
        raise TypeError(
            f"it would be narrowed to {narrowed}, as 64-bit types are switched off. Switch them "
            'on: jax.config.update("jax_enable_x64", True), or narrow it yourself before'
        )
    return array if isinstance(array, np.ndarray) else jax.dlpack.from_dlpack(array)


def _is_abstract(array: Array) -> bool:
    return isinstance(array, jax.ShapeDtypeStruct) or _private.is_traced(array)


def placed(arrays: list[Array], device: object) -> list[Array]:
    """Imported arrays as this framework's on a device, in the same memory where it can be.

    JAX's own stay where they are if there is none, and traced ones always.
    """
    device = device_of(device)
    moving = [
        index
        for index, array in enumerate(arrays)
        if isinstance(array, np.ndarray) or (device is not None and not _is_abstract(array))
    ]
    # Also inside of jit, where an array that is not traced still has its numbers. By one call of
    # device_put for all, and done: the caller may write to memory that was copied from.
    with jax.ensure_compile_time_eval():
        moved = jax.device_put([arrays[index] for index in moving], device, may_alias=True)
    for index, array in zip(moving, jax.block_until_ready(moved), strict=True):
        arrays[index] = array
    return arrays


def copies(sources: list[jax.Array]) -> list[jax.Array]:
    """The arrays in new memory, once that is done."""
    # The caller may write to what was copied from. device_put ignores may_alias=False for NumPy's
    # arrays, which have become JAX's before.
    with jax.ensure_compile_time_eval():
        made: list[jax.Array] = jax.block_until_ready(jax.device_put(sources, may_alias=False))
    return made


def extents(leaf: jax.Array) -> list[Extent]:
    """The addresses of the first byte and of that after the last, of every piece of memory of
    the array.
    """
    if _is_abstract(leaf) or leaf.is_deleted():
        return []
    pieces = [shard.data for shard in arrays.stored(leaf).addressable_shards if shard.data.size]
    starts = [int(piece.unsafe_buffer_pointer()) for piece in pieces]
    return [(start, start + piece.nbytes) for start, piece in zip(starts, pieces, strict=True)]


stored = arrays.stored  # as replicas send them


def moved_like(array: jax.Array, like: Array) -> jax.Array:
    """The array, or the random keys that were stored so, on the devices of another one."""
    array = arrays.restored(array, like)
    # Only if the other one is committed: a committed array cannot be combined with one on a
    # mesh, and makes another program.
    is_committed = isinstance(like, jax.Array) and like.committed
    return jax.device_put(array, like.sharding) if is_committed else array
