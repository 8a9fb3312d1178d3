"""Arrays to and from other frameworks: by DLPack or NumPy in the memory where they lie, or in
new memory once.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import jax
import numpy as np

from funcga._types import Array, Dtype
from funcga.tools.trees import ExportError, Extent, no_device
from jax_backend import _private, arrays

Place: TypeAlias = jax.Device | jax.sharding.Sharding


def platforms() -> set[str]:
    """The kinds of devices from which this framework imports by DLPack: 'cpu', 'gpu' and so on."""
    # The CPU is left out: NumPy's arrays are uncommitted there, and go to the default device.
    return {device.platform for device in jax.local_devices()} - {"cpu"}


def device(name: object) -> Place:
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


def export_array(leaf: jax.Array, platforms: set[str]) -> Array:
    """The array as others import it: by DLPack, if it lies on one of their platforms, else as
    NumPy's.
    """
    _check_exportable(leaf)
    # A sharded array is gathered on the host; others have no name for one that lies on several
    # devices.
    devices = leaf.devices()
    platform = "several" if len(devices) > 1 else next(iter(devices)).platform
    if platform in platforms:
        return jax.block_until_ready(leaf) if platform == "cpu" else leaf
    # NumPy takes the memory as it is, unless its strides or dtype are JAX's own.
    return np.asarray(leaf) if platform == "cpu" else _on_host(leaf)


def _check_exportable(leaf: jax.Array) -> None:
    """Raises ExportError for an array whose numbers this process does not have, or that only JAX
    knows.
    """
    if _private.is_traced(leaf):
        raise ExportError(
            f"{arrays.describe(leaf)}, traced by JAX, and has no numbers yet; convert it outside "
            "of jit"
        )
    if not isinstance(leaf, jax.Array):
        raise ExportError(
            f"{arrays.describe(leaf)} of type {type(leaf).__name__}, a shape without numbers"
        )
    _check_alive(leaf)
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ExportError(
            f"{arrays.describe(leaf)}, a typed key, which only JAX has. Convert "
            "jax.random.key_data(key), and make a key of it again with "
            "jax.random.wrap_key_data(data)"
        )
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ExportError(
            f"{arrays.describe(leaf)}, parts of which lie on devices of other processes; "
            f"jax.experimental.multihost_utils.process_allgather(x, tiled=True) has them all"
        )


def _check_alive(leaf: jax.Array) -> None:
    if leaf.is_deleted():
        raise ExportError(
            f"{arrays.describe(leaf)}, whose memory was donated or deleted; convert it before"
        )


def _on_host(leaf: jax.Array) -> Array:
    """NumPy's array of one that lies elsewhere; JAX would keep what numpy.asarray(leaf) makes as
    long as the leaf.
    """
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS without it
        return np.asarray(leaf)
    return np.asarray(jax.device_put(leaf, host) if leaf.is_fully_addressable else leaf)


def check_importable(array: Array) -> None:
    """Raises ExportError if this framework cannot have the array of another, or NumPy's, as it
    is.
    """
    if _is_abstract(array):
        return
    if isinstance(array, jax.Array):
        _check_alive(array)
        return
    dtype = _native(array.dtype)
    if dtype is None:
        raise ExportError(
            f"{array.dtype}{list(array.shape)}, and JAX has arrays of numbers only, of 64 bits at "
            "most"
        )
    if dtype.itemsize >= 8 and dtype != (narrowed := jax.dtypes.canonicalize_dtype(dtype)):
        raise ExportError(
            f"{dtype}{list(array.shape)}, and JAX would narrow it to {narrowed} because 64-bit "
            "types are switched off. "
            'Switch them on: jax.config.update("jax_enable_x64", True), or narrow it yourself '
            "before you convert"
        )


def _is_abstract(array: Array) -> bool:
    return isinstance(array, jax.ShapeDtypeStruct) or _private.is_traced(array)


@cache
def _native(dtype: Dtype) -> np.dtype[np.generic] | None:
    """A dtype of another framework in this machine's order of bytes; None if it is not one of
    JAX's numbers.
    """
    if isinstance(dtype, np.dtype):
        native = dtype.newbyteorder("=")
    else:
        native = jax.numpy.dtype(str(dtype).removeprefix("torch."))
    is_number = native.kind in "biufc" and native.itemsize <= (16 if native.kind == "c" else 8)
    # 2: a dtype that is registered, as by ml_dtypes.
    return native if is_number or native.isbuiltin == 2 else None


def import_arrays(exports: Sequence[Array], device: Place | None) -> list[Array]:
    """Exported arrays as this framework's, in the same memory where it can be."""
    imported = iter(_imported([array for array in exports if not _is_abstract(array)], device))
    return [
        next(imported)
        if not _is_abstract(array)
        else array
        if device is None
        else jax.device_put(array, device)
        for array in exports
    ]


def _imported(exports: Sequence[Array], device: Place | None) -> list[Array]:
    """Arrays that are not traced, as this framework's."""
    arrays = [
        array if isinstance(array, jax.Array | np.ndarray) else jax.dlpack.from_dlpack(array)
        for array in exports
    ]
    moving = [
        index
        for index, array in enumerate(arrays)
        if device is not None or isinstance(array, np.ndarray)
    ]
    # Also inside of jit, where an array that is not traced still has its numbers. By one call of
    # device_put for all; where the device is None, JAX's own stay as they are.
    with jax.ensure_compile_time_eval():
        moved = jax.device_put([arrays[index] for index in moving], device, may_alias=True)
    for index, array in zip(moving, moved, strict=True):
        arrays[index] = array
    # The caller may write to memory that was copied from.
    pairs = zip(arrays, exports, strict=True)
    jax.block_until_ready([new for new, old in pairs if not isinstance(old, jax.Array)])
    return arrays


def copies(sources: list[jax.Array]) -> list[jax.Array]:
    """The arrays in new memory, once that is done."""
    # The caller may write to what was copied from. device_put ignores may_alias=False for NumPy's
    # arrays, which have become JAX's before.
    with jax.ensure_compile_time_eval():
        made: list[jax.Array] = jax.block_until_ready(jax.device_put(sources, may_alias=False))
    return made


def _address_of(array: jax.Array) -> int:
    """Where the memory of an array on one device begins."""
    return int(array.unsafe_buffer_pointer())


def extents(leaf: jax.Array) -> list[Extent]:
    """The addresses of the first byte and of that after the last, of every piece of memory of
    the array.
    """
    if _is_abstract(leaf) or leaf.is_deleted():
        return []
    pieces = [shard.data for shard in arrays.stored(leaf).addressable_shards if shard.data.size]
    return [(_address_of(piece), _address_of(piece) + piece.nbytes) for piece in pieces]


stored, restored = arrays.stored, arrays.restored  # as replicas send them


def moved_like(array: jax.Array, like: Array) -> jax.Array:
    """The array on the devices of another one of its shape."""
    # Only if the other one is committed: a committed array cannot be combined with one on a
    # mesh, and makes another program.
    return (
        jax.device_put(array, like.sharding)
        if isinstance(like, jax.Array) and like.committed
        else array
    )
