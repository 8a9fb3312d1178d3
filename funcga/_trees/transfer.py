"""What passes from one framework to another: arrays on their way, and the files `in_torch.py` and
`in_jax.py` that export and import them.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from funcga._backend import Backend
from funcga._types import Array


class Transfer(NamedTuple):
    """An array on its way to another framework, and why it was copied: None where it is in its
    owner's memory.
    """

    array: Array
    copied: str | None = None


class ExportError(Exception):
    """What an array is, and why another framework cannot have it; the caller knows its path."""


class DLPack(Protocol):
    """How a framework exports its arrays to others, NumPy among them, and imports theirs."""

    def platforms(self) -> set[str]:
        """The kinds of devices from which this framework imports by DLPack: 'cpu', 'gpu' and so
        on.
        """
        ...

    def export_array(self, leaf: Array, platforms: set[str]) -> Transfer:
        """The array as others import it: by DLPack, if it lies on one of their platforms, else
        as NumPy's.
        """
        ...

    def check_importable(self, array: Array) -> None:
        """Raises ExportError if this framework cannot have the array of another, or NumPy's, as
        it is.
        """
        ...

    def import_arrays(self, exports: Sequence[Transfer], device: Any, copy: bool) -> list[Transfer]:
        """Exported arrays as this framework's, in the same memory where it can be; if `copy`,
        all in new memory.
        """
        ...

    def extents(self, leaf: Array) -> list[tuple[int, int]]:
        """The addresses of the first byte and of that after the last, of every piece of memory
        of the array.
        """
        ...


def side(backend: Backend) -> DLPack:
    """How a framework exports and imports arrays."""
    return cast("DLPack", import_module(f"funcga._trees.in_{backend.name}"))


Extent = tuple[int, int]
"""The addresses of the first byte of a piece of memory, and of the one after its last."""


def extent(start: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Extent:
    """The Extent of a strided array whose first element is at `start`; strides are in bytes, and
    may be negative.
    """
    # Along each axis the last element lies this far from the first; with a negative stride, before
    # it.
    spans = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return start + sum(min(span, 0) for span in spans), start + sum(
        max(span, 0) for span in spans
    ) + itemsize
