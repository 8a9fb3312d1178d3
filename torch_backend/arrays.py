"""The facts about tensors that the mathematics needs, and whose memory a tensor is in."""

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from funcga._fold import describe as describe
from funcga._types import Dtype, Scalar
from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.dtensor import as_dtensor, is_dtensor, local, local_tensors, redistributed

xp = torch

_IS_CPU, _DTYPE = map(operator.attrgetter, ("is_cpu", "dtype"))


def is_array(leaf: object) -> bool:
    """Whether the leaf can be split and folded as it is."""
    return isinstance(leaf, torch.Tensor)


def as_array(
    leaf: Any, dtype: torch.dtype | None = None, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """The leaf as an array, a number as a 0-d array, in a dtype, and on the device of the one
    beside it; TypeError for anything else.

    Numbers are made on the host, wherever torch makes new tensors by default: there they can be
    read without waiting, and they go together with arrays of any device.
    """
    if isinstance(leaf, torch.Tensor):
        if dtype is None:
            return leaf
        # Operators take a number of the host together with arrays of any device.
        if beside is None or any(each.is_cpu and not each.ndim for each in (leaf, beside)):
            return leaf.to(dtype)
        return leaf.to(beside.device, dtype)
    if dtype is not None:
        # `full` takes half the time of `tensor`, which can read any sequence.
        return torch.full((), leaf, dtype=dtype, device="cpu")
    if isinstance(leaf, int | float | complex):
        return torch.as_tensor(leaf, device="cpu")
    raise TypeError(
        f"{type(leaf).__name__} is no tensor; of a module take torch_backend.trainable(module)"
    )


def as_dtype(dtype: Dtype) -> torch.dtype:
    """The dtype of this name; FuncgaError if the framework has none."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise FuncgaError(f"{dtype!r} is no dtype of torch. Give one by name: dtype='float32'.")
    return named


def slice(array: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """`size` rows from `start` on, along an axis."""
    return array.narrow(axis, start, size)


def strided(array: torch.Tensor) -> torch.Tensor:
    """The array as a dense one. The gradient of an embedding may be sparse, and a sum of several
    hardly is.
    """
    return array if array.layout is torch.strided else array.to_dense()


def scalar(weight: Scalar) -> Scalar:
    """A weight as a Python number where the host can see it without waiting for a device, else
    as it is.
    """
    if type(weight) is not torch.Tensor and is_dtensor(weight):
        weight = weight.full_tensor()
    if type(weight) is _private.FAKE and weight.device.type == "cpu":  # in a plan
        return True if weight.dtype is torch.bool else next(_private.NUMBERS)
    plain = type(weight) is torch.Tensor and weight.is_cpu
    if not plain or torch.compiler.is_compiling() or in_transform():
        return weight
    return weight.item()


def counted(weight: Scalar) -> Scalar:
    """A weight to be added to others: an array in the widest type that counts."""
    if not isinstance(weight, torch.Tensor):
        return weight
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    return weight.to(wide if weight.is_floating_point() else torch.int64)


# --- What is differentiated -----------------------------------------------------------------------


_RECORDED: ContextVar[bool] = ContextVar("recorded", default=False)
# How many losses are being recorded, in all threads. torch.compile can guard a global, but no
# context variable. If the loss is another thread's, the compiled function records a graph that
# nobody needs, and returns the same numbers.
_recordings = 0


def recording() -> AbstractContextManager[object]:
    """A context in which autograd records, and tensors are made that can have a gradient."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return nullcontext() if is_on else torch.inference_mode(False)


@contextmanager
def recording_loss() -> Iterator[None]:
    """The same for a loss, or parts of it that run again: steps inside of it are differentiated."""
    global _recordings
    token = _RECORDED.set(True)
    _recordings += 1
    try:
        with recording():
            yield
    finally:
        _RECORDED.reset(token)
        _recordings -= 1


def is_recorded() -> bool:
    """Whether the present computation is part of a loss that autograd records for funcga."""
    return (
        _recordings > 0 if torch.compiler.is_compiling() else _RECORDED.get()
    ) and torch.is_grad_enabled()


def in_transform() -> bool:
    """Whether what is computed now is differentiated from outside: its tensors must not be written
    to or detached.

    A transform of torch.func may do that, forward-mode AD, or a gradient of funcga's whose loss
    this is a part of.
    """
    return (
        _private.transforms() > 0
        or _private.forward_level() >= 0
        or (_recordings > 0 and is_recorded())
    )


# --- Numbers --------------------------------------------------------------------------------------


# Each DTensor is computed with in the shard that this process has: sums that are Partial, too, so
# that nothing is sent.


def add(sums: list[torch.Tensor], values: list[torch.Tensor], factor: float) -> None:
    """Adds factor * value to each sum, in place."""
    values = local_tensors([*map(redistributed, values, sums)])
    torch._foreach_add_(local_tensors(sums), values, alpha=factor)


def zeros(likes: Any, dtypes: dict[int, torch.dtype]) -> dict[int, torch.Tensor]:
    """Zeros of these dtypes, by index, that lie as the tensors of these indices do."""
    new = _empty(likes, dtypes)
    torch._foreach_zero_(local_tensors([*new.values()]))
    return new


def cast(tensors: Any, dtypes: dict[int, torch.dtype]) -> dict[int, torch.Tensor]:
    """Copies of the tensors of these indices in these dtypes."""
    new = _empty(tensors, dtypes)
    before = local_tensors([tensors[index] for index in dtypes])
    torch._foreach_copy_(local_tensors([*new.values()]), before)
    return new


# On a device one kernel fills all tensors of a dtype.
def _empty(likes: Any, dtypes: dict[int, torch.dtype]) -> dict[int, torch.Tensor]:
    return {
        index: as_dtensor(torch.empty_like(local(likes[index]), dtype=dtype), likes[index])
        for index, dtype in dtypes.items()
    }


def multiply(sums: Sequence[torch.Tensor], factor: float) -> None:
    """Multiplies in place."""
    torch._foreach_mul_(local_tensors(sums), factor)


def divide(
    sums: Sequence[torch.Tensor], total: Scalar, in_place: bool = True
) -> Sequence[torch.Tensor]:
    """The sums, or the shards of this process, divided; zeros if nothing was folded."""
    sums = [*sums] if {*map(type, sums)} == {torch.Tensor} else local_tensors(sums)
    if not in_place:
        if isinstance(total, float) and total:
            return torch._foreach_div(sums, total)
        sums = torch._foreach_mul(sums, 1)
    if isinstance(total, torch.Tensor):
        _divide_by_tensor(sums, total)
    elif not total:
        torch._foreach_zero_(sums)
    elif total != 1:
        # On the CPU torch makes a tensor of the divisor for each sum. One tensor for all of them is
        # faster.
        divisor: Scalar = total
        kinds = {*zip(map(_IS_CPU, sums), map(_DTYPE, sums), strict=True)}
        if kinds in ({(True, torch.float32)}, {(True, torch.float64)}):
            divisor = torch.full((), total, dtype=sums[0].dtype, device="cpu")
        torch._foreach_div_(sums, divisor)
    return sums


def _divide_by_tensor(sums: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """The same by a number that the host does not see; a sum of nothing, by infinity."""
    divisor = torch.where(total == 0, math.inf, total)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for each in sums:
        groups[each.device, each.dtype].append(each)
    for kind, alike in groups.items():
        torch._foreach_div_(alike, divisor.to(*kind))


# --- Memory ---------------------------------------------------------------------------------------


def with_strides_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor in the strides of another one of its shape; itself if it has them, or one of the
    two is sparse.

    A kernel that runs through the memory of several tensors at once, such as those of `fused=True`,
    needs equal strides. Where `like` is expanded or sliced, the strides are those of its clone.
    """
    # DTensors are compared, and copied, by the shards of this process.
    shard, wanted = local_tensors([tensor, like])
    is_dense = shard.layout is torch.strided and wanted.layout is torch.strided
    if not is_dense or shard.shape != wanted.shape or shard.stride() == wanted.stride():
        return tensor
    with torch.no_grad():
        copied = torch.empty_like(wanted, dtype=shard.dtype).copy_(shard)
        return as_dtensor(copied, like)  # type: ignore[no-any-return]


def without_overlap(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """The tensors, ready to be written to: cloned where two of them, or two elements of one, share
    memory.

    None stays None.
    """
    separate: list[Any] = [*tensors]
    extents = []
    for index, shard in enumerate(local_tensors(separate)):
        if shard is None or shard.layout is not torch.strided or not shard.numel():
            continue
        start, nbytes = shard.data_ptr(), shard.nbytes
        end = start + nbytes
        if not shard.is_contiguous():
            steps = map(operator.mul, [size - 1 for size in shard.shape], shard.stride())
            end = start + (sum(steps) + 1) * shard.element_size()
        extents.append((start, end, nbytes, index, shard.device))
    # In the order of addresses, each tensor must begin at or after the end of all earlier ones. If
    # the extent of one is shorter than the bytes of its elements, some of these share memory.
    ends: dict[torch.device, int] = {}
    for start, end, nbytes, index, device in sorted(extents):
        if start < ends.get(device, 0) or end - start < nbytes:
            separate[index] = separate[index].clone()
        else:
            ends[device] = end
    return separate


def represents_exactly(dtype: torch.dtype, number: float) -> bool:
    """Whether this dtype holds a number exactly, or rounds it no more than float32 does."""
    if number == 1 or dtype.itemsize >= 4:
        return True
    return torch.tensor(number, dtype=dtype, device="cpu").item() == number


def in_own_memory(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients; in the place of one whose memory has other owners, or other sizes, a copy."""
    owned = list[torch.Tensor]()
    shards = gradients if {*map(type, gradients)} <= {torch.Tensor} else local_tensors(gradients)
    for gradient, shard in zip(gradients, shards, strict=True):
        if shard.layout is not torch.strided:  # autograd has copied what others hold
            owned.append(gradient)
            continue
        storage = shard.untyped_storage()
        # Two references to the memory are expected: that of the gradient, and `storage`. Memory
        # that is not torch's own, such as a NumPy array's, cannot be resized. Its owner does not
        # count as a reference.
        is_own = _private.use_count(storage._cdata) == 2 and storage.resizable()
        is_own = is_own and storage.nbytes() == shard.nbytes
        owned.append(gradient if is_own else gradient.clone())
    return owned
