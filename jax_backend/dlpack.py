"""How arrays are handed from one framework to another: in the memory where they lie, or in new memory once."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from funcga._backend.protocols import Handed, UnfitError
from funcga.errors import FuncgaError
from jax_backend import arrays


def platforms() -> set[str]:
    """The kinds of devices on which this framework can take arrays: 'cpu', 'gpu' and so on."""
    # without the CPU, where it takes NumPy's arrays: those are uncommitted, and go to its default device
    return {device.platform for device in jax.local_devices()} - {"cpu"}


def device(name: Any) -> Any:
    """The device of this name; FuncgaError, which says what there is, if there is none."""
    if isinstance(name, jax.Device | jax.sharding.Sharding):
        return name
    platform, _, index = str(name).partition(":")
    try:
        return jax.local_devices(backend=platform)[int(index or 0)]
    except (IndexError, RuntimeError, ValueError) as error:
        raise FuncgaError(
            f"device={str(name)!r} is none that JAX has here; it has {', '.join(map(repr, devices()))}."
        ) from error


def devices() -> list[str]:
    """The names of the devices that there are."""
    kinds = sorted({"cpu", *platforms()})
    return [f"{kind}:{i}" for kind in kinds for i in range(len(jax.local_devices(backend=kind)))]


def lent(leaf: Any, platforms: set[str]) -> Handed:
    """The array for others to take: by DLPack, on platforms of theirs, else as NumPy's; or UnfitError."""
    _check_memory(leaf)
    devices = leaf.devices()
    if len(devices) > 1:
        return Handed(
            _on_host(leaf), f"it lies on {len(devices)} devices; jax.device_put(x, jax.devices()[0]) does not"
        )
    platform = next(iter(devices)).platform
    if platform in platforms:
        return Handed(jax.block_until_ready(leaf) if platform == "cpu" else leaf)  # type: ignore[no-untyped-call]
    if platform == "cpu":
        array = np.asarray(leaf)
        shared = not array.size or array.__array_interface__["data"][0] == leaf.unsafe_buffer_pointer()
        return Handed(array, None if shared else "NumPy has no such dtype or layout; x.astype('int8') it has, say")
    return Handed(_on_host(leaf), f"it lies on {platform}; jax.device_put(x, jax.devices('cpu')[0]) does not")


def _check_memory(leaf: Any) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise UnfitError(f"{arrays.describe(leaf)}, traced by JAX, and has no numbers yet; hand it over outside of jit")
    if not isinstance(leaf, jax.Array):
        raise UnfitError(f"{arrays.describe(leaf)} of type {type(leaf).__name__}, a shape without numbers")
    _check_alive(leaf)
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UnfitError(
            f"{arrays.describe(leaf)}, a typed key, which only JAX has. Hand over jax.random.key_data(key), and make a "
            f"key of it again with jax.random.wrap_key_data(data)"
        )
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise UnfitError(
            f"{arrays.describe(leaf)}, parts of which lie on devices of other processes; "
            f"jax.experimental.multihost_utils.process_allgather(x, tiled=True) has them all"
        )


def _check_alive(leaf: Any) -> None:
    if not isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) and leaf.is_deleted():
        raise UnfitError(f"{arrays.describe(leaf)}, whose memory was donated or deleted; hand it over before")


def _on_host(leaf: jax.Array) -> Any:
    """NumPy's array of one that lies elsewhere; JAX would keep what numpy.asarray(leaf) makes as long as the leaf."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS without it
        return np.asarray(leaf)
    return np.asarray(jax.device_put(leaf, host) if leaf.is_fully_addressable else leaf)


def check(array: Any) -> None:
    """Raises UnfitError if this framework cannot have the array of another, or NumPy's, as it is."""
    if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        _check_alive(array)
        return
    dtype = _dtype(array.dtype)
    if dtype is None:
        raise UnfitError(f"{array.dtype}{list(array.shape)}, and JAX has arrays of numbers only, of 64 bits at most")
    if dtype.itemsize >= 8 and dtype != (narrowed := jax.dtypes.canonicalize_dtype(dtype)):
        raise UnfitError(
            f"{dtype}{list(array.shape)}, and JAX would narrow it to {narrowed} because 64-bit types are switched off. "
            f'Switch them on: jax.config.update("jax_enable_x64", True), or narrow it yourself before you convert'
        )


@cache
def _dtype(dtype: Any) -> Any:
    """The dtype of an array of another framework, in bytes of this machine's order; None if it is not of numbers."""
    own = dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else jax.numpy.dtype(str(dtype).removeprefix("torch."))
    known = own.isbuiltin == 2 or (own.kind in "biufc" and own.itemsize <= (16 if own.kind == "c" else 8))
    return own if known else None


def taken(lent: Sequence[Handed], device: Any, copy: bool) -> list[Handed]:
    """Arrays of this framework in the memory that is lent, where that is possible; if `copy`, all in new memory."""
    with jax.ensure_compile_time_eval():  # what is not traced has its numbers, inside of jit too
        found = [_ready(handed) for handed in lent]
        places = [place for place, (array, _) in enumerate(found) if not _is_abstract(array)]
        put = _put([found[place] for place in places], device, copy)
    for place, handed in zip(places, put, strict=True):
        found[place] = handed
    if device is None:
        return found
    return [Handed(jax.device_put(x, device), why) if _is_abstract(x) else Handed(x, why) for x, why in found]


def _is_abstract(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct)


def _ready(handed: Handed) -> Handed:
    """What device_put can take."""
    array, why = handed
    if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        return handed
    if isinstance(array, np.ndarray):
        if array.dtype.isnative:
            return Handed(np.asarray(array), why)
        return Handed(
            array.astype(array.dtype.newbyteorder("=")),
            f"its bytes are in another order ({array.dtype.str}); x.astype({array.dtype.name!r}) has them in order",
        )
    if isinstance(array, np.generic):
        return Handed(np.asarray(array), "it is a scalar of NumPy; numpy.asarray(x) is an array")
    try:
        return Handed(jax.dlpack.from_dlpack(array, copy=False), why)
    except ValueError:
        return Handed(jax.dlpack.from_dlpack(array), why or _UNALIGNED)


_UNALIGNED = "it does not begin at a multiple of 64 bytes, where memory of JAX and new memory of torch does"


def _put(ready: list[Handed], device: Any, copy: bool) -> list[Handed]:
    """What is ready, on a device; whose memory it was may write to that afterwards, if the result is not in it."""
    put, why = [array for array, _ in ready], [why for _, why in ready]
    moving = [place for place, old in enumerate(put) if device is not None or isinstance(old, np.ndarray)]
    moved = jax.device_put([put[place] for place in moving], device, may_alias=True)
    for place, new in zip(moving, moved, strict=True):
        put[place], why[place] = new, why[place] or _why(put[place], new)
    if copy:  # device_put ignores may_alias=False for NumPy's arrays
        shared = [place for place, reason in enumerate(why) if reason is None]
        apart = jax.device_put([put[place] for place in shared], may_alias=False)
        for place, new in zip(shared, apart, strict=True):
            put[place], why[place] = new, "a copy was asked for"
    jax.block_until_ready([new for new, reason in zip(put, why, strict=True) if reason])  # type: ignore[no-untyped-call]
    return list(map(Handed, put, why))


def _why(old: Any, new: jax.Array) -> str | None:
    """Why the new array is not in the memory of the old one; None if it is."""
    if isinstance(old, jax.Array):
        here, there = old.sharding, new.sharding
        return None if here == there else f"it lies on {old.device}, and device= is {new.device}; leave that out"
    single = isinstance(new.sharding, jax.sharding.SingleDeviceSharding)
    if not old.size or (single and old.__array_interface__["data"][0] == new.unsafe_buffer_pointer()):
        return None
    if not single or next(iter(new.devices())).platform != "cpu":  # as where JAX's default is a GPU
        return f"it lies on the CPU, and the result on {new.device}; device='cpu' leaves it there"
    if not old.flags.c_contiguous:
        return "it is not contiguous; x.contiguous() of torch and numpy.ascontiguousarray(x) are"
    return _UNALIGNED


def extents(leaf: Any) -> list[tuple[int, int]]:
    """The addresses of the first byte and of that after the last, of every piece of memory of the array."""
    if _is_abstract(leaf) or leaf.is_deleted():
        return []
    array = jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    pieces = [shard.data for shard in array.addressable_shards]
    starts = [piece.unsafe_buffer_pointer() for piece in pieces if piece.size]
    return [(start, start + piece.nbytes) for start, piece in zip(starts, pieces, strict=False)]
