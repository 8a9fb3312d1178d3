"""The facts about arrays of this framework that the mathematics needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torch_backend import _private
from torch_backend.dtensor import is_placed
from torch_backend.engine.recording import is_recorded
from torch_backend.strides import laid_as

xp = torch


def owns(leaf: Any) -> bool:
    """Whether only this framework can have made the leaf."""
    return isinstance(leaf, torch.Tensor)


def is_array(leaf: Any) -> bool:
    """Whether the leaf can be split and folded as it is."""
    return isinstance(leaf, torch.Tensor)


def as_array(leaf: Any) -> torch.Tensor:
    """The leaf as an array: itself, or a number as a 0-d array; TypeError for anything else."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, int | float | complex):
        return torch.as_tensor(leaf)
    raise TypeError(type(leaf).__name__)


def placed(array: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The array where another one of its shape lies."""
    moved: torch.Tensor = laid_as(_moved(array, like), like)
    return moved


def _moved(array: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if is_placed(like) and not is_placed(array):
        from torch.distributed.tensor import distribute_tensor

        own: Any = like
        return distribute_tensor(array.to(own.device), own.device_mesh, own.placements)
    return array.to(like.device)


def describe(leaf: Any) -> str:
    """`float32[8, 3]`, or the type of what is no array."""
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        if is_lazy(leaf) or (leaf.is_nested and leaf.layout is torch.strided):  # which have no shape
            return f"{dtype}[?]"
        return f"{dtype}[{', '.join(map(str, leaf.shape))}]"
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
        return f"a NumPy array {leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
    return "None" if leaf is None else f"of type {type(leaf).__name__}"


def kind(dtype: torch.dtype) -> str:
    """'bool', 'int', 'float', 'complex' or 'other'."""
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex:
        return "complex"
    return "bool" if dtype == torch.bool else "int"


def as_dtype(dtype: Any) -> torch.dtype:
    """The dtype of this name; TypeError if the framework has none."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype {dtype!r}")
    return found


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of this dtype are held in: at least 32 bits."""
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize < 4 else dtype
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize < 8 else dtype
    return torch.int64 if dtype.itemsize < 4 else dtype


def cast(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The array in another dtype."""
    return array.to(dtype)


def slice(array: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """`size` rows from `start` on, along an axis."""
    try:
        return array.narrow(axis, start, size)
    except RuntimeError as error:
        if array.is_nested or array.layout is not torch.strided:
            raise TypeError("a nested tensor" if array.is_nested else "a sparse tensor") from error
        raise


def in_transform() -> bool:
    """Whether what is computed now is differentiated from outside: its tensors must not be written to or detached.

    That is by torch.func, by forward-mode AD, or by a gradient of funcga's, of whose loss it is a part.
    """
    if torch.compiler.is_compiling() and not _TRACES_DEPTH:
        return True  # it cannot be known there, and not to write is right in any case
    return _private.transforms() > 0 or _private.in_forward_mode() or is_recorded()


_TRACES_DEPTH = torch.__version__ >= "2.13"


def scalar(weight: Any) -> Any:
    """A weight as a Python number where the host can see it without waiting for a device, else as it is."""
    if is_placed(weight):
        weight = weight.full_tensor()
    plain = type(weight) is torch.Tensor and weight.device.type == "cpu"
    if not plain or torch.compiler.is_compiling() or in_transform():
        return weight
    return weight.item()


def limbs(weight: Any) -> tuple[Any, ...]:
    """A weight as addends in the widest scalar type: one if that has 53 bits and more, else two."""
    if not isinstance(weight, torch.Tensor):
        return (weight,)
    if not weight.is_floating_point():
        return (weight.to(torch.int64),)
    return (weight.to(torch.float32 if weight.device.type == "mps" else torch.float64),)


def addends(weight: Any, wide: bool) -> tuple[torch.Tensor, ...]:
    """A weight as arrays that it is the sum of: one float64 if `wide`, else two of float32."""
    if not isinstance(weight, torch.Tensor):
        high = torch.tensor(weight, dtype=torch.float64 if wide else torch.float32)
        return (high,) if wide else (high, torch.tensor(weight - high.item(), dtype=torch.float32))
    if wide:
        return (weight.to(torch.float64),)
    high = weight.to(torch.float32)
    if weight.is_floating_point():
        return high, (weight - high.to(weight.dtype)).to(torch.float32)
    whole = weight.to(torch.int64)
    return high, (whole - high.to(torch.int64)).to(torch.float32)


def integer(number: Any) -> torch.Tensor:
    """A count as a 0-d int32 array."""
    return torch.as_tensor(number, dtype=torch.int32)


def owned(array: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The array, or a copy of it where it is one of these others, or a view of one."""
    return array.clone() if any(_memory(array) is _memory(other) for other in others) else array


def _memory(array: torch.Tensor) -> torch.Tensor:
    return array if array._base is None else array._base


def stored(array: Any) -> Any:
    """The array as one of numbers, which any file format takes: of random keys, their data."""
    return array  # torch has its generators' states in tensors


def restored(numbers: Any, like: Any) -> Any:
    """What was stored of an array like this one."""
    return numbers


def count(steps: int) -> int:
    """A number of steps in the type that a loop can carry."""
    return steps
