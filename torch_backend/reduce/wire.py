"""The wire: how leaves travel between replicas. Sums go in buckets, each one all_reduce; anything else as bytes.

Sums are accumulated in the memory of the buckets, so nothing is copied before it is sent. Leaves that are no sums, such
as moments or collected rows, are gathered, and combined in the order of the replicas.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from funcga._fold import LeafFold
from funcga._types import Reduced
from torch_backend import trees
from torch_backend.dtensor import local
from torch_backend.engine.buffers import Buffers
from torch_backend.replicas import Channel, as_bytes

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
    is_complex: bool  # then the last axis has the real and the imaginary parts, as not every carrier adds complex ones

    @property
    def end(self) -> int:
        """The element after its last."""
        return self.start + math.prod(self.shape)


class Bucket(NamedTuple):
    """Leaves of one dtype on one device, which are added over the replicas together; `wire` is what they are sent as.

    `length` counts elements. `among` is which of the groups of replicas they are added over, as in a Plan.
    """

    dtype: torch.dtype
    device: torch.device
    wire: torch.dtype
    among: int
    segments: tuple[Segment, ...]
    length: int


class Plan(NamedTuple):
    """How each reduced leaf travels. It follows from what is folded, so it is the same on every replica.

    `converted` has the shapes of leaves that are added as what their monoid makes of them for that, in groups that
    travel together; `gathered` has those of all others that are in no bucket. `among` has the leaves that are merged
    over fewer replicas than the window: over the group of this number, from 1 on.
    """

    buckets: tuple[Bucket, ...]
    gathered: dict[int, tuple[int, ...]]
    converted: tuple[dict[int, tuple[int, ...]], ...] = ()
    among: Mapping[int, int] = MappingProxyType({})

    @property
    def device(self) -> torch.device:
        """Where everything travels from that is in no bucket."""
        return self.buckets[-1].device

    def numbers(self, most: int) -> tuple[int, ...]:
        """All leaves, if they are real scalars on the host, and no more than so many; otherwise none."""
        segments = [segment for bucket in self.buckets for segment in bucket.segments]
        on_host = all(bucket.device.type == "cpu" and bucket.dtype.is_floating_point for bucket in self.buckets)
        if (
            self.gathered
            or self.converted
            or self.among
            or len(segments) > most
            or not on_host
            or any(segment.shape for segment in segments)
        ):
            return ()
        return tuple([segment.leaf for segment in segments])


# The dtype and the device of accumulators, the dtype that they are sent as, and the number of the group of replicas.
_Group = tuple[torch.dtype, torch.device, torch.dtype, int]


def planned(
    folds: Sequence[LeafFold], likes: Mapping[int, torch.Tensor], sums: Collection[int], bucket_bytes: int,
    wire_dtype: torch.dtype | None, among: Mapping[int, int] = MappingProxyType({}),
) -> Plan:  # fmt: skip
    """The Plan for leaves like these, of which `sums` are merged by adding them; `among` as in a Plan."""
    groups = _groups(folds, likes, sums, wire_dtype, among)
    if len(sums) < len(likes):
        # A few counts in a dtype of their own go with what is gathered anyway: a bucket is one collective more.
        groups = {group: leaves for group, leaves in groups.items() if not _are_few_counts(leaves, folds, likes)}
    buckets: list[Bucket] = []
    for group, leaves in groups.items():
        dtype, *_ = group
        segments: list[Segment] = []
        end = 0
        for leaf in leaves:
            segment = _segment(leaf, end, likes[leaf], folds[leaf].accumulator_dtype.is_complex)
            # A leaf that does not fit begins a new bucket, however large it is.
            if segments and segment.end * dtype.itemsize > bucket_bytes:
                buckets.append(Bucket(*group, tuple(segments), end))
                segments, segment = [], segment._replace(start=0)
            segments.append(segment)
            end = segment.end
        buckets.append(Bucket(*group, tuple(segments), end))
    if among:
        # The backward pass completes buckets of several groups in turn: first those whose first leaf is the last one.
        buckets.sort(key=lambda bucket: -min(segment.leaf for segment in bucket.segments))
    if not buckets or buckets[-1].among:  # an empty one, for the mark of an error, which all replicas see
        device = next((like.device for like in likes.values()), torch.device("cpu"))
        buckets.append(Bucket(torch.float32, device, torch.float32, 0, (), 0))
    return Plan(tuple(buckets), *_others(folds, likes, buckets, bucket_bytes, among), among)


def _others(
    folds: Sequence[LeafFold], likes: Mapping[int, torch.Tensor], buckets: Sequence[Bucket], bucket_bytes: int,
    among: Mapping[int, int],
) -> tuple[dict[int, tuple[int, ...]], tuple[dict[int, tuple[int, ...]], ...]]:  # fmt: skip
    """The leaves that are in no bucket: those that are gathered, and the groups of those that are converted."""
    in_buckets = {segment.leaf for bucket in buckets for segment in bucket.segments}
    shapes = {leaf: tuple(likes[leaf].shape) for leaf in sorted(likes) if leaf not in in_buckets}
    converted = {leaf: shape for leaf, shape in shapes.items() if folds[leaf].fold.reducer.monoid.sent is not None}
    gathered = {leaf: shape for leaf, shape in shapes.items() if leaf not in converted}
    return gathered, _grouped(converted, likes, bucket_bytes, among)


def _grouped(
    shapes: Mapping[int, tuple[int, ...]], likes: Mapping[int, torch.Tensor], bucket_bytes: int,
    among: Mapping[int, int],
) -> tuple[dict[int, tuple[int, ...]], ...]:  # fmt: skip
    """The leaves in groups that travel together, over the same replicas, about as large as a bucket."""
    groups: list[dict[int, tuple[int, ...]]] = []
    room, last = 0, 0
    for leaf, shape in sorted(shapes.items(), key=lambda item: among.get(item[0], 0)):
        if not groups or likes[leaf].nbytes > room or among.get(leaf, 0) != last:
            groups.append({})
            room, last = bucket_bytes, among.get(leaf, 0)
        groups[-1][leaf] = shape
        room -= likes[leaf].nbytes
    return tuple(groups)


def _segment(leaf: int, end: int, like: torch.Tensor, is_complex: bool) -> Segment:
    """The Segment for a leaf, in a bucket whose leaves take up its elements until `end`."""
    start = -(-end // _ALIGNED) * _ALIGNED  # rounded up
    if is_complex:
        return Segment(leaf, start, (*like.shape, 2), (*[2 * stride for stride in like.stride()], 1), True)
    return Segment(leaf, start, tuple(like.shape), like.stride(), False)


def _groups(
    folds: Sequence[LeafFold], likes: Mapping[int, torch.Tensor], sums: Collection[int],
    wire_dtype: torch.dtype | None, among: Mapping[int, int],
) -> dict[_Group, list[int]]:  # fmt: skip
    """The leaves that can share a bucket, in the order in which they are sent.

    Autograd has the gradients of the last layer first, so that is the order. Scalars, such as the loss, come last: no
    bucket of gradients waits for them. Scalars and counts are never rounded.
    """
    groups: dict[_Group, list[int]] = {}
    for leaf in sorted(sums, key=lambda leaf: (likes[leaf].ndim == 0, -leaf)):
        dtype: torch.dtype = folds[leaf].accumulator_dtype
        dtype = dtype.to_real() if dtype.is_complex else dtype
        is_exact = likes[leaf].ndim == 0 or not dtype.is_floating_point
        wire = dtype if wire_dtype is None or is_exact else wire_dtype
        groups.setdefault((dtype, likes[leaf].device, wire, among.get(leaf, 0)), []).append(leaf)
    return groups


def _are_few_counts(leaves: list[int], folds: Sequence[LeafFold], likes: Mapping[int, torch.Tensor]) -> bool:
    """Whether these are sums without weights, and take less memory than a collective is worth."""
    elements = sum(likes[leaf].numel() for leaf in leaves)
    return elements <= _FEW and all(folds[leaf].fold.reducer.unweighted for leaf in leaves)


class Sums:
    """The sums of one window in the memory of their buckets, and those buckets that are under way.

    Buckets are sent in the order of the plan, so all replicas send in one order. The last bucket has one more element,
    the mark: its sum is not 0 if any replica has raised an error. A plan without buckets has no mark to send.
    """

    def __init__(self, plan: Plan):
        self.buckets = plan.buckets
        last = len(plan.buckets) - 1
        self._memory = [
            torch.zeros(bucket.length + (index == last), dtype=bucket.dtype, device=bucket.device)
            for index, bucket in enumerate(plan.buckets)
        ]
        # Each view shares the memory of its bucket: what is added to it is in the bucket.
        self.views = {
            segment.leaf: _view(memory, segment)
            for bucket, memory in zip(plan.buckets, self._memory, strict=True)
            for segment in bucket.segments
        }
        self.mark = self._memory[-1][-1] if self._memory else torch.zeros(())
        self._bucket_of = {
            segment.leaf: index for index, bucket in enumerate(plan.buckets) for segment in bucket.segments
        }
        self._incomplete = [{segment.leaf for segment in bucket.segments} for bucket in plan.buckets]
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    @property
    def sent(self) -> int:
        """How many buckets have been sent."""
        return len(self._sent)

    @property
    def left(self) -> int:
        """How many have not."""
        return len(self.buckets) - len(self._sent)

    def complete(self, leaf: int) -> None:
        """Says that nothing more will be added to a leaf."""
        if leaf in self._bucket_of:
            self._incomplete[self._bucket_of[leaf]].discard(leaf)

    @property
    def next_is_complete(self) -> bool:
        """Whether the next bucket can be sent before the window ends. The last one, with the mark, cannot."""
        return self.left > 1 and not self._incomplete[self.sent]

    @property
    def next_bucket(self) -> Bucket:
        """The one that is sent next."""
        return self.buckets[self.sent]

    def send(self, carrier: dist.ProcessGroup, reduced: list[object], weighted: Collection[int], factor: float) -> None:
        """Sends the next bucket with the sums of its leaves. Those that are `weighted` are multiplied by the factor.

        From then on `reduced` has views of the bucket in their place.
        """
        bucket, memory = self.buckets[self.sent], self._memory[self.sent]
        # Whatever was accumulated elsewhere comes into the bucket; a leaf without any value is 0 there.
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
        sent = memory.to(bucket.wire)
        self._sent.append((carrier.allreduce([sent]), sent))

    def wait(self) -> None:
        """Waits for all buckets, which then hold the sums of all replicas."""
        for (work, sent), memory in zip(self._sent, self._memory, strict=True):
            work.wait()
            if sent is not memory:
                memory.copy_(sent)


def _view(memory: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The leaf of a segment, in the memory of its bucket."""
    real = memory.as_strided(segment.shape, segment.stride, segment.start)
    return torch.view_as_complex(real) if segment.is_complex else real


# ------------------------------------------------------------------------------------------------- what is converted


class Wire(NamedTuple):
    """What arrays on the device travel over, and the channel for what the host knows of them."""

    carrier: dist.ProcessGroup
    device: torch.device
    channel: Channel


def add_converted(buffers: Buffers, plan: Plan, wire_among: Callable[[int], Wire]) -> None:
    """Adds over the replicas the leaves that are added as what their monoid makes of them.

    Two groups are under way at a time, so that what is made takes little memory.
    """
    under_way: deque[Callable[[], None]] = deque()
    for group in plan.converted:
        number = plan.among.get(next(iter(group)), 0)
        under_way.append(_converted(buffers, group, wire_among(number)))
        if len(under_way) > 2:
            under_way.popleft()()
    for receive in under_way:
        receive()


def _converted(buffers: Buffers, group: Mapping[int, tuple[int, ...]], wire: Wire) -> Callable[[], None]:
    """Begins to add the leaves of a group, and returns a function that waits for the sums and takes them in."""
    addends, structure = trees.flatten([_sent(buffers, leaf, shape, wire.device) for leaf, shape in group.items()])
    # One collective for each dtype.
    places: dict[torch.dtype, list[int]] = {}
    for place, addend in enumerate(addends):
        places.setdefault(addend.dtype, []).append(place)
    sent = {
        dtype: torch.cat([addends[at].reshape(-1) for at in here]).to(wire.device) for dtype, here in places.items()
    }
    works = [wire.carrier.allreduce([numbers]) for numbers in sent.values()]
    kinds = [(addend.shape, addend.device) for addend in addends]
    del addends

    def receive() -> None:
        for work in works:
            work.wait()
        sums: list[torch.Tensor] = [torch.empty(0)] * len(kinds)
        for dtype, here in places.items():
            rows = torch.split(sent[dtype], [math.prod(kinds[at][0]) for at in here])
            for at, row in zip(here, rows, strict=True):
                sums[at] = row.view(kinds[at][0]).to(kinds[at][1])
        for leaf, of_leaf in zip(group, trees.unflatten(structure, sums), strict=True):
            received = buffers.folds[leaf].fold.reducer.monoid.received
            assert received is not None
            buffers.reduced[leaf] = received(torch, of_leaf)

    return receive


def _sent(buffers: Buffers, leaf: int, shape: tuple[int, ...], device: torch.device) -> Reduced:
    """What this replica sends of a leaf."""
    sent = buffers.folds[leaf].fold.reducer.monoid.sent
    assert sent is not None  # or it is gathered
    return sent(torch, _lifted(buffers, leaf, shape, device))


# -------------------------------------------------------------------------------------------------- what is gathered


def gather(buffers: Buffers, plan: Plan, wire: Wire, members: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Begins to gather the leaves that are in no bucket, and collected rows.

    The function that it returns waits for them, and combines and joins them in the order of the replicas. `members` has
    for each group of replicas which of those of the window they are: it takes the leaves of these alone.
    """
    lifted = [_lifted(buffers, leaf, shape, wire.device) for leaf, shape in plan.gathered.items()]
    rows = [_rows(buffers, leaf_index, wire.device) for leaf_index in buffers.outputs.collected]
    # All arrays of this replica in one list, whose order is the same on all replicas.
    arrays, structure = trees.flatten((lifted, rows))
    received = _gathered(arrays, bool(rows), wire)

    def combine() -> None:
        of_ranks = [trees.unflatten(structure, arrays) for arrays in received()]
        for position, leaf in enumerate(plan.gathered):
            lifted = [of_ranks[replica][0][position] for replica in members[plan.among.get(leaf, 0)]]
            buffers.reduced[leaf] = reduce(buffers.folds[leaf].combine, lifted)
        for position, leaf_index in enumerate(buffers.outputs.collected):
            buffers.collected[leaf_index] = [rows[position] for _, rows in of_ranks]

    return combine


def _lifted(buffers: Buffers, leaf: int, shape: tuple[int, ...], device: torch.device) -> Reduced:
    """What this replica has folded of a leaf. Where that is nothing it is the identity: all send the same shapes."""
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


def _gathered(arrays: Sequence[torch.Tensor], have_rows: bool, wire: Wire) -> Callable[[], list[list[torch.Tensor]]]:
    """Begins one all_gather, and returns a function that waits for the arrays of each replica.

    Where they `have_rows`, shapes may differ between replicas, which first tell each other their own.
    """
    kinds = [(tuple(array.shape), array.dtype) for array in arrays]
    kinds_of_ranks: list[list[Kind]] = wire.channel.gathered(kinds) if have_rows else [kinds] * wire.channel.count
    # An all_gather takes equally many bytes from each replica, so all are padded to the longest.
    packed = pack(arrays, wire.device)
    padded = packed.new_zeros(max(map(nbytes, kinds_of_ranks)))
    padded[: packed.numel()] = packed
    data_of_ranks = [torch.empty_like(padded) for _ in kinds_of_ranks]
    work = wire.carrier.allgather([data_of_ranks], [padded])

    def received() -> list[list[torch.Tensor]]:
        work.wait()
        return [unpack(data, kinds) for data, kinds in zip(data_of_ranks, kinds_of_ranks, strict=True)]

    return received


def carried(state: list[Any], source: int, wire: Wire) -> list[Any]:
    """The state of the replica `source`: its arrays and numbers. Any other object stays each replica's own."""
    is_source = wire.channel.rank == source
    # The hosts first exchange numbers, and the kinds of arrays, so that the others can make room for the broadcast.
    said: list[Any] = wire.channel.gathered([_said_of(leaf) for leaf in state] if is_source else None)[source]
    kinds: list[Kind] = [theirs for theirs in said if isinstance(theirs, tuple)]
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


def _said_of(leaf: object) -> "Kind | bool | float | complex | str | None":
    """What is said of a leaf of the state: the kind of an array, a number itself, None of any other object."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, bool | int | float | complex | str) else None


# ------------------------------------------------------------------------------------------------- arrays as bytes

# The shape and the dtype of an array.
Kind = tuple[tuple[int, ...], torch.dtype]


def nbytes(kinds: Sequence[Kind]) -> int:
    """How long arrays of these kinds are together."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)


def pack(arrays: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of the arrays, one after the other, on the device."""
    return torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *[as_bytes(a).to(device) for a in arrays]])


def unpack(data: torch.Tensor, kinds: Sequence[Kind]) -> list[torch.Tensor]:
    """The arrays of these kinds that uint8[nbytes] holds, in memory of their own."""
    arrays, start = [], 0
    for kind in kinds:
        end = start + nbytes([kind])
        shape, dtype = kind
        # In `data` an array may begin at any byte. A copy is aligned for its dtype.
        arrays.append(data[start:end].clone().view(dtype).view(shape))
        start = end
    return arrays
