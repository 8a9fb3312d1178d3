"""The tail of a bucket: a few bytes of every replica, gathered by the all_reduce that adds the rest of the bucket.

Only torch has this file; what does the same in JAX is `bits`.

Each replica has a row, and leaves those of the others zero. Any dtype, bfloat16 too, holds the numbers 0 to 255
exactly, so what is added up is what was written: counts past 2**24, weights in float64, and whatever is no sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Field(NamedTuple):
    """What a row holds at a place: an array of this shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.shape.numel() * self.dtype.itemsize


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """The memory of an array, uint8[nbytes]."""
    flat = array.detach().contiguous().flatten()
    return (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).view(torch.uint8)


def from_bytes(data: torch.Tensor, field: Field) -> torch.Tensor:
    """The array that has this memory, which becomes its own."""
    real = field.dtype.to_real() if field.dtype.is_complex else field.dtype
    flat = data.clone().view(real)
    return (torch.view_as_complex(flat.view(-1, 2)) if field.dtype.is_complex else flat).view(field.shape)


def write(tail: torch.Tensor, rank: int, values: Sequence[torch.Tensor]) -> None:
    """Writes the row of one replica; `tail` is [replicas, bytes], of the bucket's dtype."""
    tail[rank] = torch.cat([as_bytes(value) for value in values]).to(tail.device)


def split(data: torch.Tensor, fields: Sequence[Field]) -> list[torch.Tensor]:
    """The arrays that stand one after the other in uint8[bytes]."""
    found, start = [], 0
    for field in fields:
        found.append(from_bytes(data[start : start + field.nbytes], field))
        start += field.nbytes
    return found


def read(tail: torch.Tensor, fields: Sequence[Field]) -> list[list[torch.Tensor]]:
    """The values of each row."""
    return [split(row, fields) for row in tail.to(torch.uint8)]
