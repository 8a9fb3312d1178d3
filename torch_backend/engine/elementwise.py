"""Folds that work element by element, in place and a piece at a time.

Only torch has this file: XLA makes one loop of such a fold, and has no arrays in between.

Between a value and its accumulator such a fold has a dozen arrays. For a large leaf they would take several times its
memory, and every operation would wait for that memory. Pieces of this size stay in the cache, and are large enough for
torch to use all cores.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from funcga._exact import Lift
from funcga._fold import LeafFold, Tally, parts_of
from funcga._types import Reduced, Scalar
from torch_backend import _private
from torch_backend.engine import exact

# Elements. A device has no such cache, and each operation costs a launch.
_PIECE, _PIECE_ON_DEVICE = 2**16, 2**22


def fits(fold: LeafFold, value: object) -> bool:
    """Whether a value is folded here: a plain tensor, by a fold that looks at one element at a time."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter, _private.FAKE)
    return is_plain and fold.fold.is_per_element and not torch.compiler.is_compiling()


def begun(fold: LeafFold, value: torch.Tensor) -> Reduced:
    """What is reduced of nothing, in memory of its own."""
    if isinstance(fold.fold.reducer.lift, Lift) and fold.accumulator_dtype.is_floating_point:
        return exact.zeros(value, fold.accumulator_dtype)
    one = fold.identity(value.new_zeros([1] * value.ndim))
    parts = [torch.empty_like(value, dtype=part.dtype, requires_grad=False).copy_(part) for part in parts_of(one)]
    return tuple(parts) if isinstance(one, tuple) else parts[0]


def combine(fold: LeafFold, reduced: Reduced, value: torch.Tensor, weight: Scalar, donate: bool) -> None:
    """Folds a value into what is reduced, in its memory; `donate`: the value may be written to."""
    parts, lift = parts_of(reduced), fold.fold.reducer.lift
    is_exact = _is_exact(fold, reduced)
    for *before, piece in _pieces([*parts, _like(value, parts[0])]):
        after = _added(before, piece, weight, lift, donate) if is_exact and _is_on_host(value, weight) else None
        if after is None:
            held = exact.narrowed(before) if is_exact else before
            after = fold.combine(tuple(held) if isinstance(reduced, tuple) else held[0], fold.lift(piece, weight))
            after = exact.widened(after) if is_exact and exact.is_wide(before) else parts_of(after)
        for target, part in zip(before, after, strict=True):
            if target is not part:
                target.copy_(part)


def _added(before: exact.Sum, value: torch.Tensor, weight: Scalar, lift: Any, donate: bool) -> exact.Sum | None:
    """An exact sum with one more value, in the form that it has, in its memory; None if a number is not usual."""
    total = exact.widened(before)
    if not exact.add(total, value, float(weight) if lift.is_weighted else 1.0, lift.limit, donate):
        return None
    return total if exact.is_wide(before) else exact.narrowed(total)


def joined(reduced: Sequence[Reduced]) -> Reduced:
    """What is reduced of several leaves, as that of one."""
    parts = [torch.cat([part.reshape(-1) for part in of_all]) for of_all in zip(*map(parts_of, reduced), strict=True)]
    return tuple(parts) if isinstance(reduced[0], tuple) else parts[0]


def parted(whole: Reduced, likes: Sequence[torch.Tensor]) -> list[Reduced]:
    """What is reduced of each of several leaves, which have these shapes, as views of what is `joined`."""
    sizes = [like.numel() for like in likes]
    rows = [
        [row.view(like.shape) for row, like in zip(torch.split(part, sizes), likes, strict=True)]
        for part in parts_of(whole)
    ]
    return [*zip(*rows, strict=True)] if isinstance(whole, tuple) else rows[0]


def settled(fold: LeafFold, reduced: Reduced) -> Reduced:
    """What is reduced, in the form that all others know: an exact sum has one of its own while its window lasts."""
    return tuple(exact.narrowed(reduced)) if _is_exact(fold, reduced) else reduced


def _is_exact(fold: LeafFold, reduced: Reduced) -> bool:
    return isinstance(reduced, tuple) and isinstance(fold.fold.reducer.lift, Lift)


def normalized(fold: LeafFold, reduced: Reduced, tally: Tally) -> Reduced:
    """The result. One array is in the memory of the first one that is reduced, if that has its dtype."""
    finish: Any = fold.fold.normalizer.apply
    parts, is_exact = parts_of(reduced), _is_exact(fold, reduced)
    on_host = is_exact and _is_on_host(parts[0], tally.total)
    result = parts[0] if parts[0].dtype == fold.result_dtype else torch.empty_like(parts[0], dtype=fold.result_dtype)
    for *piece, target in _pieces([*parts, result]):
        number = exact.finish(exact.widened(piece), tally, finish) if on_host else None
        if number is None:
            held = exact.narrowed(piece) if is_exact else piece
            number = fold.normalize(tuple(held) if isinstance(reduced, tuple) else held[0], tally)
        if isinstance(number, tuple):
            return fold.normalize(reduced, tally)
        if number is not piece[0] or result is not parts[0]:
            target.copy_(number)
    return result


def _is_on_host(array: torch.Tensor, scalar: Scalar) -> bool:
    """Whether the numbers of an array may be looked at without waiting for a device, and the scalar is a number."""
    return array.is_cpu and bool(array.numel()) and not isinstance(scalar, torch.Tensor)


def _like(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The value in the strides of an array that is accumulated."""
    return value if value.stride() == part.stride() else torch.empty_like(part, dtype=value.dtype).copy_(value)


def _pieces(arrays: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same pieces of arrays of one shape, as views of their memory."""
    length, size = arrays[0].numel(), _PIECE if arrays[0].is_cpu else _PIECE_ON_DEVICE
    if length <= size:
        yield [*arrays]
        return
    # Arrays without gaps are one row of numbers, if all of them have it in one order.
    if _is_dense(arrays[0]) and len({array.stride() for array in arrays}) == 1:
        rows = [array.as_strided((length,), (1,)) for array in arrays]
        for start in range(0, length, size):
            yield [row[start : start + size] for row in rows]
    else:
        yield [*arrays]


def _is_dense(array: torch.Tensor) -> bool:
    sizes = zip(array.shape, array.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes) == array.numel()
