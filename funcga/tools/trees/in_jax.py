"""Arrays to and from other frameworks: by DLPack or NumPy in the memory where they lie, or in
new memory once.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import jax
import numpy as np

from funcga._types import Array, Dtype
from funcga.tools.trees import ExportError, Extent, Transfer
from jax_backend import _private, arrays
from jax_backend.arrays import device as device
from jax_backend.arrays import devices as devices

Place: TypeAlias = jax.Device | jax.sharding.Sharding


def platforms() -> set[str]:
    """The kinds of devices from which this framework imports by DLPack: 'cpu', 'gpu' and so on."""
    # The CPU is left out: NumPy's arrays are uncommitted there, and go to the default device.
    return {device.platform for device in jax.local_devices()} - {"cpu"}


def export_array(leaf: jax.Array, platforms: set[str]) -> Transfer:
    """The array as others import it: by DLPack, if it lies on one of their platforms, else as
    NumPy's.
    """
    _check_exportable(leaf)
    # A sharded array is gathered on the host; others have no name for one that lies on several
    # devices.
    devices = leaf.devices()
    if len(devices) > 1:
        return Transfer(
            _on_host(leaf),
            f"it lies on {len(devices)} devices; jax.device_put(x, jax.devices()[0]) does not",
        )
    platform = next(iter(devices)).platform
    if platform in platforms:
        return Transfer(jax.block_until_ready(leaf) if platform == "cpu" else leaf)
    if platform == "cpu":
        # NumPy takes the memory as it is, unless its strides or dtype are JAX's own.
        array = np.asarray(leaf)
        shared = not array.size or _address(array) == _address_of(leaf)
        return Transfer(
            array,
            None if shared else "NumPy has no such dtype or layout; x.astype('int8') it has, say",
        )
    return Transfer(
        _on_host(leaf), f"it lies on {platform}; jax.device_put(x, jax.devices('cpu')[0]) does not"
    )


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


def import_arrays(exports: Sequence[Transfer], device: Place | None, copy: bool) -> list[Transfer]:
    """Exported arrays as this framework's, in the same memory where it can be; if `copy`, all in
    new memory.
    """
    # Also inside of jit, where an array that is not traced still has its numbers.
    with jax.ensure_compile_time_eval():
        imports = _placed(
            [_imported(export) for export in exports if not _is_abstract(export.array)], device
        )
        if copy:
            # device_put ignores may_alias=False for NumPy's arrays, so these have become JAX's
            # before.
            copies = iter(
                jax.device_put(
                    [array for array, copied in imports if copied is None], may_alias=False
                )
            )
            imports = [
                t if t.copied else Transfer(next(copies), "a copy was asked for") for t in imports
            ]
        # The caller may write to the memory that was copied from.
        jax.block_until_ready([array for array, copied in imports if copied])
    concrete = iter(imports)
    return [
        _traced(export, device) if _is_abstract(export.array) else next(concrete)
        for export in exports
    ]


def _traced(export: Transfer, device: Place | None) -> Transfer:
    return (
        export if device is None else Transfer(jax.device_put(export.array, device), export.copied)
    )


def _imported(export: Transfer) -> Transfer:
    """The array as one that device_put takes: JAX's or NumPy's."""
    array, copied = export
    if isinstance(array, jax.Array | np.ndarray):
        return export
    try:
        return Transfer(jax.dlpack.from_dlpack(array, copy=False), copied)
    except ValueError:
        return Transfer(jax.dlpack.from_dlpack(array), copied or _UNALIGNED)


_UNALIGNED = (
    "it does not begin at a multiple of 64 bytes, where memory of JAX and new memory of torch does"
)


def _placed(imports: list[Transfer], device: Place | None) -> list[Transfer]:
    """The arrays on a device, by one call of device_put for all; where it is None, JAX's stay as
    they are.
    """
    moving = [
        index
        for index, (array, _) in enumerate(imports)
        if device is not None or isinstance(array, np.ndarray)
    ]
    moved = jax.device_put([imports[index].array for index in moving], device, may_alias=True)
    transfers = [*imports]
    for index, new in zip(moving, moved, strict=True):
        old, copied = imports[index]
        transfers[index] = Transfer(new, copied or _copy_reason(old, new))
    return transfers


def _copy_reason(old: Array, new: jax.Array) -> str | None:
    """Why the new array is not in the memory of the old one; None if it is."""
    # A JAX array moves only where `device=` asks for it.
    if isinstance(old, jax.Array):
        here, there = old.sharding, new.sharding
        return (
            None
            if here == there
            else f"it lies on {old.device}, and device= is {new.device}; leave that out"
        )
    # NumPy's is shared if the new array begins at its address.
    single = isinstance(new.sharding, jax.sharding.SingleDeviceSharding)
    if not old.size or (single and _address(old) == _address_of(new)):
        return None
    # Where JAX's default device is a GPU, say.
    if not single or next(iter(new.devices())).platform != "cpu":
        return f"it lies on the CPU, and the result on {new.device}; device='cpu' leaves it there"
    if not old.flags.c_contiguous:
        return "it is not contiguous; x.contiguous() of torch and numpy.ascontiguousarray(x) are"
    return _UNALIGNED


def _address_of(array: jax.Array) -> int:
    """Where the memory of an array on one device begins."""
    return int(array.unsafe_buffer_pointer())


def _address(array: Array) -> int:
    start: int = array.__array_interface__["data"][0]
    return start


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
