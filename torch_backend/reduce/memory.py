"""The memory of arrays of any dtype, as bytes that one collective can send.

Only torch has this file; what does the same in JAX is `bits`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Field(NamedTuple):
    """What stands at a place: an array of this shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.shape.numel() * self.dtype.itemsize


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """The memory of an array, uint8[nbytes]."""
    whole = array.detach().resolve_conj().resolve_neg().contiguous()
    # torch calls an array of one element contiguous, or of none, whatever its strides
    flat = whole.as_strided((whole.numel(),), (1,))
    return (torch.view_as_real(flat).flatten() if flat.is_complex() else flat).view(torch.uint8)


def from_bytes(data: torch.Tensor, field: Field) -> torch.Tensor:
    """The array that has this memory, which becomes its own."""
    real = field.dtype.to_real() if field.dtype.is_complex else field.dtype
    flat = data.clone().view(real)
    return (torch.view_as_complex(flat.view(-1, 2)) if field.dtype.is_complex else flat).view(field.shape)


def split(data: torch.Tensor, fields: Sequence[Field]) -> list[torch.Tensor]:
    """The arrays that stand one after the other in uint8[bytes]."""
    found, start = [], 0
    for field in fields:
        found.append(from_bytes(data[start : start + field.nbytes], field))
        start += field.nbytes
    return found
