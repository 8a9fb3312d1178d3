"""Folds that work element by element, in place and a piece at a time.

Only torch has this file: XLA makes one loop of such a fold, and has no arrays in between.

Between a value and its accumulator such a fold has a dozen arrays. For a large leaf they would take
several times its memory, and every operation would wait for that memory. Pieces of this size stay
in the cache, and are large enough for torch to use all cores.
"""

from collections.abc import Iterator, Sequence

import torch

from funcga._exact import MOST, Finish, Lift, format_of, rounded, unit_of
from funcga._fold import LeafFold, Tally, parts_of
from funcga._types import Reduced, Scalar
from torch_backend import _private, arrays

# Elements. A device has no such cache, and each operation costs a launch.
_PIECE, _PIECE_ON_DEVICE = 2**16, 2**22


def fits(fold: LeafFold, value: object) -> bool:
    """Whether a value is folded here: a plain tensor, by a fold that looks at one element at a
    time.
    """
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter, _private.FAKE)
    return is_plain and fold.fold.is_per_element and not torch.compiler.is_compiling()


def begun(fold: LeafFold, value: torch.Tensor) -> Reduced:
    """What is reduced of nothing, in memory of its own."""
    one = fold.identity(value.new_zeros([1] * value.ndim))
    parts = [
        torch.empty_like(value, dtype=part.dtype, requires_grad=False).copy_(part)
        for part in parts_of(one)
    ]
    return tuple(parts) if isinstance(one, tuple) else parts[0]


def _is_added_exactly(
    fold: LeafFold, total: Sequence[torch.Tensor], value: torch.Tensor, weight: Scalar
) -> bool:
    """Adds to an exact sum on the host what funcga._exact says, in fewer passes; False, and
    nothing, if it cannot.

    Usually every term is below the limit, and eager kernels contract nothing.
    """
    (leading, *digits), lift = total, fold.fold.reducer.lift
    if not (digits and isinstance(lift, Lift) and value.is_cpu and value.numel()) or isinstance(
        weight, torch.Tensor
    ):
        return False
    form = format_of(torch, leading.dtype)
    unit, mask = unit_of(leading.ndim, lift.limit, form), (1 << form.digit) - 1
    term = lift.lift(torch, value.to(form.floats), float(weight))
    least, greatest = torch.aminmax(term)
    limit = unit * 2.0**form.mantissa / MOST
    if arrays.scalar((least > -limit) & (greatest < limit)) is not True:
        return False
    rest = term * (1 / unit)
    whole = rest.round()
    leading.add_(whole)
    for digit in digits:
        rest.sub_(whole).mul_(2.0**form.digit)
        digit.add_(torch.round(rest, out=whole).to(form.integers))
    for digit, above in zip(digits[::-1], (*digits[-2::-1], leading), strict=True):
        above.add_(digit >> form.digit)
        digit.bitwise_and_(mask)
    return True


def combine(fold: LeafFold, reduced: Reduced, value: torch.Tensor, weight: Scalar) -> None:
    """Folds a value into what is reduced, in its memory."""
    parts = parts_of(reduced)
    for *before, piece in _pieces([*parts, _like(value, parts[0])]):
        if _is_added_exactly(fold, before, piece, weight):
            continue
        held = tuple(before) if isinstance(reduced, tuple) else before[0]
        after = parts_of(fold.combine(held, fold.lift(piece, weight)))
        for target, part in zip(before, after, strict=True):
            if target is not part:
                target.copy_(part)


def _exact_quotient(
    fold: LeafFold, total: Sequence[torch.Tensor], tally: Tally
) -> torch.Tensor | None:
    """The result of an exact sum on the host, which divides correctly; None if it may be below
    the normal numbers.
    """
    (leading, *digits), finish = total, fold.fold.normalizer.apply
    if not (digits and isinstance(finish, Finish) and leading.is_cpu):
        return None
    form = format_of(torch, leading.dtype)
    divisor = {"weight": tally.total, "steps": tally.steps, None: 1}[finish.divides_by]
    last = unit_of(leading.ndim, finish.limit, form) * 2.0 ** (-form.digit * len(digits))
    if isinstance(divisor, torch.Tensor) or not 0 < divisor < last / torch.finfo(form.floats).tiny:
        return None
    number: torch.Tensor = rounded(torch, total, finish.limit)
    return number.div_(divisor)


def normalized(fold: LeafFold, reduced: Reduced, tally: Tally) -> Reduced:
    """The result. One array is in the memory of the first one that is reduced, if that has its
    dtype.
    """
    parts = parts_of(reduced)
    result = (
        parts[0]
        if parts[0].dtype == fold.result_dtype
        else torch.empty_like(parts[0], dtype=fold.result_dtype)
    )
    for *piece, target in _pieces([*parts, result]):
        number: Reduced = _exact_quotient(fold, piece, tally)
        if number is None:
            number = fold.normalize(tuple(piece) if isinstance(reduced, tuple) else piece[0], tally)
        if isinstance(number, tuple):
            return fold.normalize(reduced, tally)
        if number is not piece[0] or result is not parts[0]:
            target.copy_(number)
    return result


def _like(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The value in the strides of an array that is accumulated."""
    return (
        value
        if value.stride() == part.stride()
        else torch.empty_like(part, dtype=value.dtype).copy_(value)
    )


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
