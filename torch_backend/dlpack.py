"""How arrays are handed from one framework to another: in the memory where they lie, or in new memory once."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import dlpack

from funcga._backend.protocols import Handed, UnfitError
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import is_placed, local


def platforms() -> set[str]:
    """The kinds of devices on which this framework can take arrays: 'cpu', 'gpu' and so on."""
    return {"cpu", "gpu"} if torch.cuda.is_available() else {"cpu"}


def device(name: Any) -> torch.device:
    """The device of this name; FuncgaError, which says what there is, if there is none."""
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise FuncgaError(
            f"device={str(name)!r} is none that torch has here; it has {', '.join(map(repr, devices()))}."
        ) from error


def devices() -> list[str]:
    """The names of the devices that there are."""
    return ["cpu", *[f"cuda:{index}" for index in range(torch.cuda.device_count())]]


def lent(leaf: torch.Tensor, platforms: set[str]) -> Handed:
    """The array for others to take: by DLPack, on platforms of theirs, else as NumPy's; or UnfitError."""
    _check_memory(leaf)
    tensor, why = leaf.detach(), None
    if leaf.is_conj() or leaf.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
        why = "it is conjugated, or negated, only when it is read; x.resolve_conj().resolve_neg() is what it reads as"
    platform = "gpu" if leaf.is_cuda else leaf.device.type
    if platform not in platforms:
        on_host = platform == "cpu"
        return Handed(_numpy(tensor.cpu()), why if on_host else f"it lies on {leaf.device}; x.cpu() does not")
    if not tensor.is_contiguous():
        return Handed(tensor.contiguous(), "it is not contiguous; x.contiguous() is")
    return Handed(tensor, why)


def _check_memory(leaf: torch.Tensor) -> None:
    if is_placed(leaf):
        raise UnfitError(f"a DTensor {arrays.describe(leaf)}, which lies on several devices; x.full_tensor() does not")
    if leaf.layout is not torch.strided:
        raise UnfitError(
            f"a sparse tensor {arrays.describe(leaf)}, or one of other parts; x.to_dense() is in one piece"
        )
    if leaf.device.type == "meta":
        raise UnfitError(f"{arrays.describe(leaf)} on the meta device, where nothing has numbers")
    _check_dtype(_name(leaf.dtype), leaf.shape)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(name: str, shape: Sequence[int]) -> None:
    if name not in _DTYPES:
        raise UnfitError(
            f"{name}[{', '.join(map(str, shape))}], of a dtype that torch does not have, or has alone. Convert it "
            f"before, to one that all have, such as int8 or float32"
        )


_EXTENSIONS = {name for name in dir(torch) if name.startswith("float8_")} | {"bfloat16"}  # NumPy has them of ml_dtypes
_DTYPES = _EXTENSIONS | {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def _numpy(tensor: torch.Tensor) -> Any:
    """NumPy's view of a tensor on the CPU."""
    name = _name(tensor.dtype)
    try:
        if name not in _EXTENSIONS:
            return tensor.numpy()
        import ml_dtypes

        return tensor.view(_bits(tensor.itemsize)).numpy().view(getattr(ml_dtypes, name))
    except ModuleNotFoundError as error:
        raise UnfitError(
            f"{arrays.describe(tensor)}, which NumPy has with ml_dtypes only: pip install ml_dtypes"
        ) from error
    except (RuntimeError, TypeError) as error:  # of a running torch.func transform, or of a FakeTensorMode
        raise UnfitError(
            f"{arrays.describe(tensor)} without memory that can be read ({str(error).splitlines()[0].rstrip('.')}). A "
            f"tensor inside of a torch.func transform or of torch.compile has none; hand it over outside"
        ) from error


def _bits(itemsize: int) -> torch.dtype:
    return torch.uint16 if itemsize == 2 else torch.uint8


def check(array: Any) -> None:
    """Raises UnfitError if this framework cannot have the array of another, or NumPy's, as it is."""
    if not isinstance(array, torch.Tensor):
        _check_dtype(array.dtype.name, array.shape)


def taken(lent: Sequence[Handed], device: Any, copy: bool) -> list[Handed]:
    """Arrays of this framework in the memory that is lent, where that is possible; if `copy`, all in new memory."""
    found = [_taken(handed, device, copy) for handed in lent]
    if copy:  # who has lent may write to that memory as soon as this returns
        for place in {
            new.array.device for new, old in zip(found, lent, strict=True) if _is_dlpack(old) and new.array.is_cuda
        }:
            torch.cuda.current_stream(place).synchronize()
    return found


def _is_dlpack(handed: Handed) -> bool:
    return type(handed.array).__module__.startswith("jax")


def _taken(handed: Handed, device: Any, copy: bool) -> Handed:
    tensor, why = _tensor(handed)
    if device is not None and tensor.device != device:
        tensor, why = tensor.to(device), f"it lies on {tensor.device}, and device= is {str(device)!r}; leave that out"
    if copy and why is None:
        return Handed(tensor.clone(), "a copy was asked for")
    return Handed(tensor, why)


def _tensor(handed: Handed) -> Handed:
    if isinstance(handed.array, torch.Tensor):
        return Handed(handed.array.detach(), handed.why)
    if _is_dlpack(handed):
        return Handed(dlpack.from_dlpack(handed.array), handed.why)
    array, why = _writable(handed.array)
    if array.dtype.name in _EXTENSIONS:
        bits = torch.from_numpy(array.view(f"uint{8 * array.itemsize}"))
        return Handed(bits.view(arrays.as_dtype(array.dtype.name)), handed.why or why)
    return Handed(torch.from_numpy(array), handed.why or why)


def _writable(leaf: Any) -> Handed:
    """NumPy's array as torch can have it, which knows nothing read-only, and no strides but whole, positive ones."""
    import numpy as np

    array = np.asarray(leaf)
    if not isinstance(leaf, np.ndarray):
        return Handed(array, "it is a scalar of NumPy; numpy.asarray(x) is an array")
    if not array.dtype.isnative:
        return Handed(
            array.astype(array.dtype.newbyteorder("=")),
            f"its bytes are in another order ({array.dtype.str}); x.astype({array.dtype.name!r}) has them in order",
        )
    if not array.flags.writeable:
        return Handed(array.copy(), "it is read-only, which no tensor is; x.copy() is not")
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return Handed(array.copy(), f"torch has no strides of {list(array.strides)} bytes; x.copy() has others")
    return Handed(array)


def extents(leaf: Any) -> list[tuple[int, int]]:
    """The addresses of the first byte and of that after the last, of every piece of memory of the array."""
    return [extent for part in _parts(local(leaf)) for extent in _extent(part)]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = [tensor.crow_indices(), tensor.col_indices()] if rows else [tensor.ccol_indices(), tensor.row_indices()]
    return [*indices, tensor.values()]


def _extent(tensor: Any) -> list[tuple[int, int]]:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a running torch.func transform
        return []
    if storage.device.type == "meta" or not tensor.numel():
        return []
    start = storage.data_ptr() + tensor.storage_offset() * tensor.itemsize
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [(start, start + (span + 1) * tensor.itemsize)]
