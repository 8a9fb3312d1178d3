"""Tensors to and from other frameworks: by DLPack or NumPy in the memory where they lie, or in
new memory once.
"""

from typing import Any

import torch
from torch.utils import dlpack

from funcga._backend.dispatch import is_numpy
from funcga._types import Array
from funcga.tools.trees import Extent
from torch_backend import arrays
from torch_backend.dtensor import is_dtensor, local


def platforms() -> set[str]:
    """The kinds of devices from which this framework imports by DLPack: 'cpu', 'gpu' and so on."""
    return {"cpu", "gpu"} if torch.cuda.is_available() else {"cpu"}


def devices() -> list[str]:
    """The names of the devices that there are."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", *[f"{accelerator}:{index}" for index in range(torch.accelerator.device_count())]]


def export_array(leaf: torch.Tensor, platforms: set[str]) -> Array:
    """The array as others import it: by DLPack, if it lies on one of their platforms, else as
    NumPy's.
    """
    if is_dtensor(leaf):
        raise TypeError("it is a DTensor, which lies on several devices; x.full_tensor() does not")
    # A tensor may be conjugated, or negated, only when it is read.
    tensor = leaf.detach().to_dense().resolve_conj().resolve_neg()
    # JAX calls both CUDA and ROCm "gpu", and imports only contiguous arrays by DLPack.
    platform = "gpu" if leaf.is_cuda else leaf.device.type
    return tensor.contiguous() if platform in platforms else _as_numpy(tensor.cpu())


# NumPy has these dtypes from ml_dtypes, and torch does not convert them. They travel as unsigned
# integers of equal width.
_EXTENSIONS = {name for name in dir(torch) if name.startswith("float8_")} | {"bfloat16"}


def _as_numpy(tensor: torch.Tensor) -> Array:
    """A tensor of the CPU as NumPy's, in its memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _EXTENSIONS:
        return tensor.numpy()
    import ml_dtypes

    bits = tensor.view(torch.uint16 if tensor.itemsize == 2 else torch.uint8)
    return bits.numpy().view(vars(ml_dtypes)[name])


def import_array(array: Array) -> torch.Tensor:
    """An exported array as this framework takes it, where it lies if possible."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    if not is_numpy(array):
        return dlpack.from_dlpack(array)
    # Torch needs memory that it may write to, and strides of whole, positive elements.
    is_strided = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if not (array.flags.writeable and is_strided):
        array = array.copy()
    if array.dtype.name in _EXTENSIONS:
        bits = torch.from_numpy(array.view(f"uint{8 * array.itemsize}"))
        return bits.view(arrays.as_dtype(array.dtype.name))
    return torch.from_numpy(array)


def placed(arrays: list[torch.Tensor], device: Any) -> list[torch.Tensor]:
    """Imported arrays as this framework's on a device, in the same memory where it can be."""
    return [array.to(device=device) for array in arrays]


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

    Of a sparse one its values count.
    """
    tensor = local(leaf)
    if tensor.layout is not torch.strided:
        is_coo = tensor.layout is torch.sparse_coo
        tensor = tensor._values() if is_coo else tensor.values()
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a running torch.func transform
        return []
    if storage.device.type == "meta" or not tensor.numel():
        return []
    # Not tensor.data_ptr(), which fake and functional tensors refuse.
    start = storage.data_ptr() + int(tensor.storage_offset()) * tensor.itemsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return [(start, start + int(last + 1) * tensor.itemsize)]


def stored(array: torch.Tensor) -> torch.Tensor:
    """The array as one of numbers, which any file format takes: of random keys, their data."""
    return array  # torch has its generators' states in tensors


def moved_like(array: torch.Tensor, like: Any) -> torch.Tensor:
    """The array, or the random keys that were stored so, on the devices of another one."""
    if like.is_meta:  # it stands for a tensor, and lies nowhere
        return array
    moved = array.to(like.device)
    if is_dtensor(like) and not is_dtensor(array):
        from torch.distributed.tensor import distribute_tensor

        moved = distribute_tensor(moved, like.device_mesh, like.placements)
    return arrays.with_strides_of(moved, like)
