"""The wire: how leaves travel between replicas. Sums go in buckets, each one all_reduce; anything
else as bytes.

Sums are accumulated in the memory of the buckets, so nothing is copied before it is sent. Leaves
that are no sums, such as moments or collected rows, are gathered, and combined in the order of the
replicas.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from funcga._fold import LeafFold
from funcga._types import Array, Reduced
from torch_backend import trees
from torch_backend.dtensor import local
from torch_backend.engine.buffers import Buffers
from torch_backend.replicas import Channel, as_bytes

# Waits for a message that has begun, and takes in what the others have sent.
Receive = Callable[[], None]

# So few elements are not worth a bucket of their own.
_FEW = 8
# Each leaf begins at a multiple of so many elements: kernels are faster on aligned memory.
_ALIGNED = 16


class Segment(NamedTuple):
    """Where a bucket holds a leaf; `leaf` is its index among those that are reduced."""

    leaf: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    # then the last axis has the real and the imaginary parts, as not every carrier adds complex
    # ones
    is_complex: bool


class Kind(NamedTuple):
    """What leaves have in common that are added over the replicas together.

    The dtype and the device of their accumulators, what they are sent as, and which of the groups
    of replicas they are added over, as in a Plan.
    """

    dtype: torch.dtype
    device: torch.device
    wire: torch.dtype
    among: int


class Bucket(NamedTuple):
    """Leaves of a kind in one memory, of so many elements."""

    kind: Kind
    segments: tuple[Segment, ...]
    length: int


Shapes = dict[int, tuple[int, ...]]


class Plan(NamedTuple):
    """How each reduced leaf travels. It follows from what is folded, so it is the same on every
    replica.

    `converted` has the shapes of leaves that are added as what their monoid makes of them for that,
    in groups that travel together; `gathered` has those of all others that are in no bucket.
    `among` has the leaves that are merged over fewer replicas than the window: over the group of
    this number, from 1 on.
    """

    buckets: tuple[Bucket, ...]
    gathered: Shapes
    converted: tuple[Shapes, ...] = ()
    among: Mapping[int, int] = MappingProxyType({})

    @property
    def device(self) -> torch.device:
        """Where everything travels from that is in no bucket."""
        return self.buckets[-1].kind.device

    def numbers(self, most: int) -> tuple[int, ...]:
        """All leaves, if they are real scalars on the host, and no more than so many; otherwise
        none.
        """
        kinds = [bucket.kind for bucket in self.buckets]
        segments = [segment for bucket in self.buckets for segment in bucket.segments]
        on_host = all(kind.device.type == "cpu" and kind.dtype.is_floating_point for kind in kinds)
        others = (
            self.gathered
            or self.converted
            or self.among
            or any(segment.shape for segment in segments)
        )
        return (
            tuple([segment.leaf for segment in segments])
            if on_host and len(segments) <= most and not others
            else ()
        )


def planned(
    folds: Sequence[LeafFold],
    likes: Mapping[int, torch.Tensor],
    sums: Collection[int],
    bucket_bytes: int,
    wire_dtype: torch.dtype | None,
    among: Mapping[int, int] = MappingProxyType({}),
) -> Plan:
    """The Plan for leaves like these, of which `sums` are merged by adding them; `among` as in a
    Plan.
    """
    kinds: dict[Kind, list[int]] = {}
    for leaf in sorted(sums):
        kinds.setdefault(
            _kind_of(folds[leaf], likes[leaf], wire_dtype, among.get(leaf, 0)), []
        ).append(leaf)
    if len(sums) < len(likes):
        # A few counts in a dtype of their own go with what is gathered anyway: a bucket is one
        # collective more.
        kinds = {
            kind: leaves
            for kind, leaves in kinds.items()
            if not _are_few_counts(leaves, folds, likes)
        }
    in_buckets = {leaf for leaves in kinds.values() for leaf in leaves}
    others = [leaf for leaf in sorted(likes) if leaf not in in_buckets]
    converted = _converted_together(others, folds, likes, bucket_bytes, among)
    gathered = {*others}.difference(*converted)
    shapes = {leaf: tuple(likes[leaf].shape) for leaf in others}
    return Plan(
        _buckets(kinds, folds, likes, bucket_bytes),
        {leaf: shapes[leaf] for leaf in others if leaf in gathered},
        tuple([{leaf: shapes[leaf] for leaf in leaves} for leaves in converted]),
        among,
    )


def _buckets(
    kinds: Mapping[Kind, list[int]],
    folds: Sequence[LeafFold],
    likes: Mapping[int, torch.Tensor],
    bucket_bytes: int,
) -> tuple[Bucket, ...]:
    """The buckets of sums. All replicas see the last one, which has the mark of an error."""
    buckets = []
    for kind, leaves in sorted(kinds.items(), key=lambda item: not item[0].among):
        nbytes = {leaf: likes[leaf].numel() * kind.dtype.itemsize for leaf in leaves}
        buckets += [
            _bucket(kind, together, folds, likes)
            for together in _parts(leaves, nbytes, bucket_bytes)
        ]
    if not buckets or buckets[-1].kind.among:
        device = next((like.device for like in likes.values()), torch.device("cpu"))
        buckets.append(Bucket(Kind(torch.float32, device, torch.float32, 0), (), 0))
    return tuple(buckets)


def _converted_together(
    leaves: Sequence[int],
    folds: Sequence[LeafFold],
    likes: Mapping[int, torch.Tensor],
    bucket_bytes: int,
    among: Mapping[int, int],
) -> list[list[int]]:
    """Of these leaves those that are converted, in groups that travel together."""
    groups: dict[int, list[int]] = {}
    for leaf in leaves:
        if folds[leaf].fold.reducer.monoid.sent is not None:
            groups.setdefault(among.get(leaf, 0), []).append(leaf)
    nbytes = {leaf: likes[leaf].nbytes for leaf in leaves}
    return [
        together for group in groups.values() for together in _parts(group, nbytes, bucket_bytes)
    ]


def _kind_of(
    fold: LeafFold, like: torch.Tensor, wire_dtype: torch.dtype | None, among: int
) -> Kind:
    """The Kind of a sum. Scalars, such as the loss, and counts are never rounded."""
    dtype: torch.dtype = fold.accumulator_dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype
    is_exact = like.ndim == 0 or not dtype.is_floating_point
    return Kind(dtype, like.device, dtype if wire_dtype is None or is_exact else wire_dtype, among)


def _are_few_counts(
    leaves: list[int], folds: Sequence[LeafFold], likes: Mapping[int, torch.Tensor]
) -> bool:
    """Whether these are sums without weights, and take less memory than a collective is worth."""
    elements = sum(likes[leaf].numel() for leaf in leaves)
    return elements <= _FEW and all(folds[leaf].fold.reducer.unweighted for leaf in leaves)


def _parts(leaves: list[int], nbytes: Mapping[int, int], most: int) -> list[list[int]]:
    """The leaves in groups of at most so many bytes. One that is larger is a group of its own."""
    parts: list[list[int]] = []
    room = 0
    for leaf in leaves:
        if not parts or nbytes[leaf] > room:
            parts.append([])
            room = most
        parts[-1].append(leaf)
        room -= nbytes[leaf]
    return parts


def _bucket(
    kind: Kind, leaves: Sequence[int], folds: Sequence[LeafFold], likes: Mapping[int, torch.Tensor]
) -> Bucket:
    segments: list[Segment] = []
    end = 0
    for leaf in leaves:
        start, like = -(-end // _ALIGNED) * _ALIGNED, likes[leaf]  # rounded up
        if folds[leaf].accumulator_dtype.is_complex:
            stride = (*[2 * stride for stride in like.stride()], 1)
            segments.append(Segment(leaf, start, (*like.shape, 2), stride, True))
        else:
            segments.append(Segment(leaf, start, tuple(like.shape), like.stride(), False))
        end = start + math.prod(segments[-1].shape)
    return Bucket(kind, tuple(segments), end)


class Sums:
    """The sums of one window in the memory of their buckets.

    Buckets are sent in the order of the plan, so all replicas send in one order. The last bucket
    has one more element, the mark: its sum is not 0 if any replica has raised an error. A plan
    without buckets has no mark to send.
    """

    def __init__(self, plan: Plan):
        self.buckets, last = plan.buckets, len(plan.buckets) - 1
        self._memory = [
            torch.zeros(
                bucket.length + (index == last), dtype=bucket.kind.dtype, device=bucket.kind.device
            )
            for index, bucket in enumerate(plan.buckets)
        ]
        # Each view shares the memory of its bucket: what is added to it is in the bucket.
        self.views = {
            segment.leaf: _view(memory, segment)
            for bucket, memory in zip(plan.buckets, self._memory, strict=True)
            for segment in bucket.segments
        }
        self.mark = self._memory[-1][-1] if self._memory else torch.zeros(())
        self.sent = 0  # buckets

    def send(
        self,
        index: int,
        carrier: dist.ProcessGroup,
        reduced: list[object],
        weighted: Collection[int],
        factor: float,
    ) -> Receive:
        """Begins to add a bucket with the sums of its leaves. Those that are `weighted` are
        multiplied by the factor.

        From then on `reduced` has views of the bucket in their place.
        """
        bucket, memory = self.buckets[index], self._memory[index]
        # Whatever was accumulated elsewhere comes into the bucket; a leaf without any value is 0
        # there.
        views = {segment.leaf: self.views[segment.leaf] for segment in bucket.segments}
        for leaf, view in views.items():
            accumulated = local(reduced[leaf])
            if isinstance(accumulated, torch.Tensor) and accumulated is not view:
                view.copy_(accumulated)
            reduced[leaf] = view
        to_scale = [view for leaf, view in views.items() if leaf in weighted]
        if factor != 1 and to_scale:
            torch._foreach_mul_(to_scale, factor)
        # The memory itself, unless the wire has another dtype.
        sent = memory.to(bucket.kind.wire)
        work = carrier.allreduce([sent])
        self.sent += 1

        def receive() -> None:
            work.wait()
            if sent is not memory:
                memory.copy_(sent)

        return receive


def _view(memory: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The leaf of a segment, in the memory of its bucket."""
    real = memory.as_strided(segment.shape, segment.stride, segment.start)
    return torch.view_as_complex(real) if segment.is_complex else real


# -------------------------------------------------------------------------------- what is converted


class Wire(NamedTuple):
    """What arrays on the device travel over, and the channel for what the host knows of them."""

    carrier: dist.ProcessGroup
    device: torch.device
    channel: Channel


def add_converted(buffers: Buffers, shapes: Shapes, wire: Wire) -> Receive:
    """Begins to add leaves of these shapes over the replicas, as what their monoid makes of them
    for that.
    """
    addends, structure = trees.flatten(
        [_converted(buffers, leaf, shape, wire.device) for leaf, shape in shapes.items()]
    )
    kinds = [(addend.shape, addend.dtype, addend.device) for addend in addends]
    # One collective for each dtype.
    sent = {
        dtype: torch.cat([addend.reshape(-1) for addend in addends if addend.dtype == dtype]).to(
            wire.device
        )
        for dtype in dict.fromkeys(addend.dtype for addend in addends)
    }
    works = [wire.carrier.allreduce([numbers]) for numbers in sent.values()]
    del addends

    def receive() -> None:
        for work in works:
            work.wait()
        rows = {
            dtype: iter(
                torch.split(numbers, [shape.numel() for shape, of, _ in kinds if of == dtype])
            )
            for dtype, numbers in sent.items()
        }
        sums = [next(rows[dtype]).view(shape).to(device) for shape, dtype, device in kinds]
        for leaf, of_leaf in zip(shapes, trees.unflatten(structure, sums), strict=True):
            received = buffers.folds[leaf].fold.reducer.monoid.received
            assert received is not None
            buffers.reduced[leaf] = received(torch, of_leaf)

    return receive


def _converted(
    buffers: Buffers, leaf: int, shape: tuple[int, ...], device: torch.device
) -> Reduced:
    """What this replica sends of a leaf, in place of which nothing is held meanwhile."""
    sent, lifted = (
        buffers.folds[leaf].fold.reducer.monoid.sent,
        _lifted(buffers, leaf, shape, device),
    )
    buffers.reduced[leaf] = None
    assert sent is not None  # or it is gathered
    return sent(torch, lifted)


# --------------------------------------------------------------------------------- what is gathered


def gather(buffers: Buffers, plan: Plan, wire: Wire, members: Sequence[Sequence[int]]) -> Receive:
    """Begins to gather the leaves that are in no bucket, and collected rows.

    The function that it returns waits for them, and combines and joins them in the order of the
    replicas. `members` has for each group of replicas which of those of the window they are: it
    takes the leaves of these alone.
    """
    lifted = [_lifted(buffers, leaf, shape, wire.device) for leaf, shape in plan.gathered.items()]
    rows = [_rows(buffers, leaf_index, wire.device) for leaf_index in buffers.outputs.collected]
    # All arrays of this replica in one list, whose order is the same on all replicas.
    arrays, structure = trees.flatten((lifted, rows))
    received = _gathered(arrays, bool(rows), wire)

    def combine() -> None:
        of_ranks = [trees.unflatten(structure, arrays) for arrays in received()]
        for position, leaf in enumerate(plan.gathered):
            lifted = [
                of_ranks[replica][0][position] for replica in members[plan.among.get(leaf, 0)]
            ]
            buffers.reduced[leaf] = reduce(buffers.folds[leaf].combine, lifted)
        for position, leaf_index in enumerate(buffers.outputs.collected):
            buffers.collected[leaf_index] = [rows[position] for _, rows in of_ranks]

    return combine


def _lifted(buffers: Buffers, leaf: int, shape: tuple[int, ...], device: torch.device) -> Reduced:
    """What this replica has folded of a leaf. Where that is nothing it is the identity: all send
    the same shapes.
    """
    if buffers.reduced[leaf] is not None:
        return local(buffers.reduced[leaf])
    dtype = buffers.outputs.dtypes[buffers.outputs.reduced[leaf]]
    return buffers.folds[leaf].identity(torch.zeros(shape, dtype=dtype, device=device))


def _rows(buffers: Buffers, leaf_index: int, device: torch.device) -> torch.Tensor:
    """What this replica has collected of a leaf: no rows, if it has folded nothing."""
    fold, shape = buffers.outputs.folds[leaf_index], [*(buffers.outputs.shapes[leaf_index] or ())]
    assert fold is not None
    axis = fold.fold.reducer.monoid.axis or 0
    shape[axis] = 0
    empty = torch.zeros(shape, dtype=buffers.outputs.dtypes[leaf_index], device=device)
    return torch.cat([empty, *buffers.collected[leaf_index]], dim=axis)


def _gathered(
    arrays: Sequence[torch.Tensor], have_rows: bool, wire: Wire
) -> Callable[[], list[list[torch.Tensor]]]:
    """Begins one all_gather, and returns a function that waits for the arrays of each replica.

    Where they `have_rows`, shapes may differ between replicas, which first tell each other their
    own.
    """
    kinds = [(tuple(array.shape), array.dtype) for array in arrays]
    kinds_of_ranks: list[list[Form]] = (
        wire.channel.gathered(kinds) if have_rows else [kinds] * wire.channel.count
    )
    # An all_gather takes equally many bytes from each replica, so all are padded to the longest.
    packed = pack(arrays, wire.device)
    padded = packed.new_zeros(max(map(nbytes, kinds_of_ranks)))
    padded[: packed.numel()] = packed
    data_of_ranks = [torch.empty_like(padded) for _ in kinds_of_ranks]
    work = wire.carrier.allgather([data_of_ranks], [padded])

    def received() -> list[list[torch.Tensor]]:
        work.wait()
        return [
            unpack(data, kinds) for data, kinds in zip(data_of_ranks, kinds_of_ranks, strict=True)
        ]

    return received


def carried(state: list[Array], source: int, wire: Wire) -> list[Array]:
    """The state of the replica `source`: its arrays and numbers. Any other object stays each
    replica's own.
    """
    is_source = wire.channel.rank == source
    # The hosts first exchange numbers, and the kinds of arrays, so that the others can make room
    # for the broadcast.
    said: list[Array] = wire.channel.gathered(
        [_said_of(leaf) for leaf in state] if is_source else None
    )[source]
    kinds: list[Form] = [theirs for theirs in said if isinstance(theirs, tuple)]
    if is_source:
        data = pack([leaf for leaf in state if isinstance(leaf, torch.Tensor)], wire.device)
    else:
        data = torch.zeros(nbytes(kinds), dtype=torch.uint8, device=wire.device)
    if kinds:
        wire.carrier.broadcast(data, source).wait()
    arrays = iter(unpack(data, kinds))
    return [
        next(arrays) if isinstance(theirs, tuple) else leaf if theirs is None else theirs
        for theirs, leaf in zip(said, state, strict=True)
    ]


def _said_of(leaf: object) -> "Form | bool | float | complex | str | None":
    """What is said of a leaf of the state: the kind of an array, a number itself, None of any
    other object.
    """
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, bool | int | float | complex | str) else None


# ---------------------------------------------------------------------------------- arrays as bytes

# The shape and the dtype of an array.
Form = tuple[tuple[int, ...], torch.dtype]


def nbytes(kinds: Sequence[Form]) -> int:
    """How long arrays of these kinds are together."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)


def pack(arrays: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of the arrays, one after the other, on the device."""
    return torch.cat(
        [
            torch.empty(0, dtype=torch.uint8, device=device),
            *[as_bytes(a).to(device) for a in arrays],
        ]
    )


def unpack(data: torch.Tensor, kinds: Sequence[Form]) -> list[torch.Tensor]:
    """The arrays of these kinds that uint8[nbytes] holds, in memory of their own."""
    arrays, start = [], 0
    for kind in kinds:
        end = start + nbytes([kind])
        shape, dtype = kind
        # In `data` an array may begin at any byte. A copy is aligned for its dtype.
        arrays.append(data[start:end].clone().view(dtype).view(shape))
        start = end
    return arrays
