"""Tensors to and from other frameworks: by DLPack or NumPy in the memory where they lie, or in
new memory once.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module

import torch
from torch.utils import dlpack

from funcga._types import Array
from funcga.errors import needs_numpy
from funcga.tools.trees import ExportError, Extent, extent, no_device
from torch_backend import arrays
from torch_backend.dtensor import is_dtensor, local


def platforms() -> set[str]:
    """The kinds of devices from which this framework imports by DLPack: 'cpu', 'gpu' and so on."""
    return {"cpu", "gpu"} if torch.cuda.is_available() else {"cpu"}


def device(name: object) -> torch.device:
    """The device of this name; FuncgaError, which says what there is, if there is none."""
    try:
        return torch.empty(0, device=name).device  # type: ignore[call-overload, no-any-return]
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise no_device(name, "torch", devices()) from error


def devices() -> list[str]:
    """The names of the devices that there are."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", *[f"{accelerator}:{index}" for index in range(torch.accelerator.device_count())]]


def export_array(leaf: torch.Tensor, platforms: set[str]) -> Array:
    """The array as others import it: by DLPack, if it lies on one of their platforms, else as
    NumPy's.
    """
    _check_exportable(leaf)
    # A tensor may be conjugated, or negated, only when it is read.
    tensor = leaf.detach().resolve_conj().resolve_neg()
    # JAX calls both CUDA and ROCm "gpu", and imports only contiguous arrays by DLPack.
    platform = "gpu" if leaf.is_cuda else leaf.device.type
    return tensor.contiguous() if platform in platforms else _as_numpy(tensor)


def _check_exportable(leaf: torch.Tensor) -> None:
    """Raises ExportError for a tensor whose numbers do not lie in one piece of memory, or of a
    dtype of torch alone.
    """
    if is_dtensor(leaf):
        raise ExportError(
            f"a DTensor {arrays.describe(leaf)}, which lies on several devices; x.full_tensor() "
            "does not"
        )
    _check_dtype(_name(leaf.dtype), leaf.shape)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(name: str, shape: Sequence[int]) -> None:
    if name not in _DTYPES:
        raise ExportError(
            f"{name}[{', '.join(map(str, shape))}], of a dtype that torch does not have, or has "
            "alone. Convert it before, to one that all have, such as int8 or float32"
        )


# NumPy has these dtypes from ml_dtypes, and torch does not convert them. They travel as unsigned
# integers of equal width.
_EXTENSIONS = {name for name in dir(torch) if name.startswith("float8_")} | {"bfloat16"}
_DTYPES = _EXTENSIONS | {
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}


def _as_numpy(tensor: torch.Tensor) -> Array:
    """A tensor as NumPy's, in its memory if it is on the CPU."""
    name = _name(tensor.dtype)
    # Without it a tensor only says that it is not available.
    with needs_numpy("this call"):
        import_module("numpy")
    try:
        tensor = tensor.cpu()
        if name not in _EXTENSIONS:
            return tensor.numpy()
        import ml_dtypes

        bits = tensor.view(torch.uint16 if tensor.itemsize == 2 else torch.uint8)
        return bits.numpy().view(vars(ml_dtypes)[name])
    except ModuleNotFoundError as error:
        raise ExportError(
            f"{arrays.describe(tensor)}, which NumPy has with ml_dtypes only: pip install ml_dtypes"
        ) from error
    # Of a running torch.func transform, or of a FakeTensorMode, sparse, or on the meta device.
    except (RuntimeError, TypeError) as error:
        raise ExportError(
            f"{arrays.describe(tensor)} without memory that can be read "
            f"({str(error).splitlines()[0].rstrip('.')}). A tensor inside of a torch.func "
            "transform or of torch.compile has none; convert it outside"
        ) from error


def check_importable(array: Array) -> None:
    """Raises ExportError if this framework cannot have the array of another, or NumPy's, as it
    is.
    """
    if not isinstance(array, torch.Tensor):
        _check_dtype(array.dtype.name, array.shape)


def import_arrays(exports: Sequence[Array], device: torch.device | None) -> list[torch.Tensor]:
    """Exported arrays as this framework's, in the same memory where it can be."""
    tensors = [*map(_imported, exports)]
    return tensors if device is None else [tensor.to(device) for tensor in tensors]


def _imported(array: Array) -> torch.Tensor:
    """The array as a tensor where it lies."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    import numpy as np

    if not isinstance(array, np.ndarray):
        return dlpack.from_dlpack(array)
    # Torch needs memory that it may write to, and strides of whole, positive elements.
    is_strided = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if not (array.flags.writeable and is_strided):
        array = array.copy()
    if array.dtype.name in _EXTENSIONS:
        bits = torch.from_numpy(array.view(f"uint{8 * array.itemsize}"))
        return bits.view(arrays.as_dtype(array.dtype.name))
    return torch.from_numpy(array)


def copies(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arrays in new memory, once that is done."""
    # JAX may reuse the memory of its own as soon as this returns.
    made = [tensor.clone() for tensor in sources]
    for device in {tensor.device for tensor in made if not tensor.is_cpu}:
        torch.accelerator.current_stream(device).synchronize()
    return made


def extents(leaf: torch.Tensor) -> list[Extent]:
    """The addresses of the first byte and of that after the last, of every piece of memory of
    the array.
    """
    return [piece for part in _strided_parts(local(leaf)) for piece in _extent(part)]


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, or those that a sparse one is made of."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (
        [tensor.crow_indices(), tensor.col_indices()]
        if rows
        else [tensor.ccol_indices(), tensor.row_indices()]
    )
    return [*indices, tensor.values()]


def _extent(tensor: torch.Tensor) -> list[Extent]:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a running torch.func transform
        return []
    if storage.device.type == "meta" or not tensor.numel():
        return []
    # Not tensor.data_ptr(), which fake and functional tensors refuse.
    start = storage.data_ptr() + int(tensor.storage_offset()) * tensor.itemsize
    strides = [int(stride) * tensor.itemsize for stride in tensor.stride()]
    return [extent(start, tensor.shape, strides, tensor.itemsize)]


def stored(array: torch.Tensor) -> torch.Tensor:
    """The array as one of numbers, which any file format takes: of random keys, their data."""
    return array  # torch has its generators' states in tensors


def restored(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What was stored of an array like this one."""
    return numbers


def moved_like(array: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The array on the devices of another one of its shape."""
    if like.is_meta:  # it stands for a tensor, and lies nowhere
        return array
    if is_dtensor(like) and not is_dtensor(array):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(like, DTensor)
        moved: torch.Tensor = distribute_tensor(
            array.to(like.device), like.device_mesh, like.placements
        )
    else:
        moved = array.to(like.device)
    return arrays.with_strides_of(moved, like)
