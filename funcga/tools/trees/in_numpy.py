"""NumPy's arrays to and from the frameworks. NumPy itself, which torch does not need, need not be
installed.
"""

from collections.abc import Sequence

from funcga._backend.dispatch import is_of_numpy
from funcga._types import Array
from funcga.tools.trees import Extent


def platforms() -> set[str]:
    """The kinds of devices from which arrays are imported by DLPack: none, as NumPy has memory of
    the host alone.
    """
    return set()


def export_array(leaf: Array, platforms: set[str]) -> Array:
    """An array or scalar as a plain array, whose bytes are in this machine's order."""
    if is_of_numpy(leaf, "MaskedArray"):
        raise TypeError("its mask would be lost; x.filled(0) has none")
    array = leaf.__array__()
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def import_array(array: Array) -> Array:
    """An exported array, which is one of NumPy's."""
    return array


def placed(arrays: list[Array], device: None) -> list[Array]:
    """Imported arrays, which have no device."""
    return arrays


def copies(sources: Sequence[Array]) -> list[Array]:
    """The arrays in new memory."""
    return [array.copy() for array in sources]


def extents(leaf: Array) -> list[Extent]:
    """The addresses of the first byte of an array and of that after its last; none of a scalar,
    which cannot be written to.
    """
    if not leaf.size or is_of_numpy(leaf, "generic"):
        return []
    first = last = leaf.__array_interface__["data"][0]
    for size, stride in zip(leaf.shape, leaf.strides, strict=True):
        # With a negative stride the last element of an axis lies before the first.
        span = (size - 1) * stride
        first, last = first + min(span, 0), last + max(span, 0)
    return [(first, last + leaf.itemsize)]


def moved_like(array: Array, like: Array) -> Array:
    """The array, which has no device."""
    return array
