"""Buckets: the sums of a window in a few pieces of memory, each of which is one all_reduce.

Only torch has this file: XLA lays out what a collective sends.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torch_backend.engine.buffers import Layout

_SMALL = 64  # bytes of sums in another dtype than most that are worth no bucket of their own
_ALIGNED = 16  # elements: larger leaves begin at such an element, as kernels like


class Slot(NamedTuple):
    """Where a bucket holds a leaf: `place` is the leaf's among what is reduced."""

    place: int
    start: int
    length: int


class Bucket(NamedTuple):
    """Leaves of one dtype on one device, that are added over the replicas together."""

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    length: int


class Plan(NamedTuple):
    """How each reduced leaf travels: sums in buckets, all others gathered together.

    It is the same on every replica, as it follows from what is folded.
    """

    buckets: tuple[Bucket, ...]
    others: tuple[int, ...]

    def bucket_of(self) -> dict[int, int]:
        """The bucket of each leaf that has one, by their places."""
        return {slot.place: i for i, bucket in enumerate(self.buckets) for slot in bucket.slots}


def planned(layout: Layout, likes: Mapping[int, torch.Tensor], sums: Collection[int], bucket_bytes: int) -> Plan:
    """The Plan for leaves like these, by their places; `sums` are those that are merged by adding them.

    Gradients come ready from the last layer to the first, so that is the order; scalars, as the loss, come last.
    """
    groups: dict[Any, list[int]] = {}
    others = []
    lengths = {k: _elements(like, layout.folds[k].accumulator_dtype) for k, like in likes.items()}
    for k in sorted(likes, key=lambda k: (likes[k].ndim == 0, -k)):
        if k in sums:
            groups.setdefault((_real(layout.folds[k].accumulator_dtype), likes[k].device), []).append(k)
        else:
            others.append(k)
    sizes = {key: sum(lengths[k] for k in places) for key, places in groups.items()}
    main = sorted(groups, key=lambda key: -sizes[key] * key[0].itemsize)
    for key in main[1:]:
        if sizes[key] * key[0].itemsize <= _SMALL:
            others += groups.pop(key)
    buckets = [b for key in main if key in groups for b in _cut(key, groups[key], layout, lengths, bucket_bytes)]
    if not buckets:
        buckets = [Bucket(torch.float32, next((like.device for like in likes.values()), torch.device("cpu")), (), 0)]
    return Plan(tuple(buckets), tuple(sorted(others)))


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _elements(like: torch.Tensor, dtype: torch.dtype) -> int:
    return like.numel() * (2 if dtype.is_complex else 1)


def _cut(
    key: Any, places: list[int], layout: Layout, lengths: Mapping[int, int], bucket_bytes: int
) -> Iterator[Bucket]:
    dtype, device = key
    slots: list[Slot] = []
    end = 0
    for k in places:
        length = lengths[k]
        if slots and (end + length) * dtype.itemsize > bucket_bytes:
            yield Bucket(dtype, device, tuple(slots), end)
            slots, end = [], 0
        if length >= 64 * _ALIGNED or layout.folds[k].accumulator_dtype.is_complex:
            end = -(-end // _ALIGNED) * _ALIGNED
        slots.append(Slot(k, end, length))
        end += length
    yield Bucket(dtype, device, tuple(slots), end)


def view(flat: torch.Tensor, slot: Slot, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """The leaf of a slot, in the memory of its bucket."""
    found = flat.narrow(0, slot.start, slot.length)
    return (found.view(dtype) if dtype.is_complex else found).as_strided(shape, stride)
