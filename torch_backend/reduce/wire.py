"""The wire: how leaves travel between replicas. Sums are added, many in one all_reduce; anything
else is gathered as bytes.

Leaves that are no sums, such as moments or collected rows, are combined in the order of the
replicas.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from funcga._fold import LeafFold
from funcga._types import Reduced
from torch_backend import trees
from torch_backend.dtensor import local
from torch_backend.engine.sums import Sums
from torch_backend.replicas import Channel, as_bytes

# Waits for a message that has begun, and takes in what the others have sent.
Receive = Callable[[], None]

# So few elements are not worth a message of their own.
_FEW = 8
# Bytes of a value that is copied out of the memory of its message. As a view it would keep all of
# that alive as long as the caller keeps a loss.
_SMALL = 2**12


class MessageKind(NamedTuple):
    """What leaves have in common that are added over the replicas together.

    `dtype`: of their accumulators, as real numbers; None if their monoid makes of them what is
    added. `wire`: what they are sent as.
    """

    dtype: torch.dtype | None
    device: torch.device
    wire: torch.dtype | None


class Sum(NamedTuple):
    """A message: leaves of a kind, by their indices among those that are reduced."""

    kind: MessageKind
    leaves: tuple[int, ...]


class Plan(NamedTuple):
    """How each reduced leaf travels. It follows from what is folded, so it is the same on every
    replica.

    `sums` and `gathered` have all leaves, unless `numbers` has them: these travel in the header.
    `shapes` are those of all leaves. `device`: where anything travels from
    that is no sum.
    """

    sums: tuple[Sum, ...]
    gathered: tuple[int, ...]
    numbers: tuple[int, ...]
    shapes: Mapping[int, tuple[int, ...]]
    device: torch.device


def plan_of(
    folds: Mapping[int, LeafFold],
    likes: Mapping[int, torch.Tensor],
    added: Collection[int],
    bucket_bytes: int,
    wire_dtype: torch.dtype | None,
    most_numbers: int = 0,
) -> Plan:
    """The Plan for leaves like these, of which `added` are merged by adding them.

    If all are numbers on the host, and `most_numbers` at most, they travel in the header.
    """
    kinds: dict[MessageKind, list[int]] = {}
    for leaf, like in sorted(likes.items()):
        kind = _message_kind_of(folds[leaf], like, leaf in added, wire_dtype)
        if kind is not None:
            kinds.setdefault(kind, []).append(leaf)
    shapes = {leaf: tuple(like.shape) for leaf, like in likes.items()}
    are_few_scalars = most_numbers >= max(1, len(likes)) and not any(shapes.values())
    if len(added) < len(likes):
        # A few counts in a dtype of their own go with what is gathered anyway: a message is one
        # collective more.
        kinds = {
            kind: leaves
            for kind, leaves in kinds.items()
            if kind.dtype is None or not _are_few_counts(leaves, folds, likes)
        }
    elif are_few_scalars and all(map(_fits_the_header, kinds)):
        return Plan((), (), tuple(sorted(added)), shapes, torch.device("cpu"))
    sums = _messages(kinds, likes, bucket_bytes)
    gathered = {*likes}.difference(*kinds.values())
    return Plan(sums, tuple(sorted(gathered)), (), shapes, sums[-1].kind.device)


def _message_kind_of(
    fold: LeafFold, like: torch.Tensor, is_added: bool, wire_dtype: torch.dtype | None
) -> MessageKind | None:
    """The MessageKind of a leaf; None if it is gathered. Scalars, such as the loss, and counts are
    never rounded.
    """
    if not is_added:
        is_sent = fold.fold.reducer.monoid.sent is not None
        return MessageKind(None, like.device, None) if is_sent else None
    dtype: torch.dtype = fold.accumulator_dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype
    is_exact = like.ndim == 0 or not dtype.is_floating_point
    return MessageKind(dtype, like.device, dtype if wire_dtype is None or is_exact else wire_dtype)


def _are_few_counts(
    leaves: list[int], folds: Mapping[int, LeafFold], likes: Mapping[int, torch.Tensor]
) -> bool:
    """Whether these are sums without weights, and take less memory than a collective is worth."""
    elements = sum(likes[leaf].numel() for leaf in leaves)
    return elements <= _FEW and all(folds[leaf].fold.reducer.unweighted for leaf in leaves)


def _fits_the_header(kind: MessageKind) -> bool:
    is_float = kind.dtype is not None and kind.dtype.is_floating_point
    return is_float and kind.device.type == "cpu"


def _is_of_one_dtype(message: Sum) -> bool:
    """Whether it has numbers of one dtype, and so may have the mark of an error."""
    return message.kind.dtype is not None


def _messages(
    kinds: Mapping[MessageKind, list[int]], likes: Mapping[int, torch.Tensor], bucket_bytes: int
) -> tuple[Sum, ...]:
    """The messages of sums. All replicas see the last one, which has the mark of an error."""
    messages: list[Sum] = []
    for kind, leaves in kinds.items():
        # Leaves of at most so many bytes go together. One that is larger is a message of its own.
        # The first leaf begins a message even if it has no elements.
        room = -1
        for leaf in leaves:
            nbytes = likes[leaf].numel() * (kind.dtype or likes[leaf].dtype).itemsize
            if nbytes > room:
                messages.append(Sum(kind, ()))
                room = bucket_bytes
            messages[-1] = Sum(kind, (*messages[-1].leaves, leaf))
            room -= nbytes
    # The mark is copied with all of its message, so the smallest one of all replicas comes last.
    messages.sort(key=lambda message: -sum([likes[leaf].numel() for leaf in message.leaves]))
    messages.sort(key=_is_of_one_dtype)
    if not messages or not _is_of_one_dtype(messages[-1]):
        device = next((like.device for like in likes.values()), torch.device("cpu"))
        messages.append(Sum(MessageKind(torch.float32, device, torch.float32), ()))
    return tuple(messages)


# --------------------------------------------------------------------------------- what is added


class Wire(NamedTuple):
    """What arrays on the device travel over, and the channel for what the host knows of them."""

    carrier: dist.ProcessGroup
    device: torch.device
    channel: Channel


def add(window: Sums, plan: Plan, message: Sum, wire: Wire, mark: torch.Tensor | None) -> Receive:
    """Begins to add the leaves of a message over the replicas, in one all_reduce for each dtype.

    Nothing holds the leaves meanwhile. A mark travels with them, and is then the sum of all marks.
    """
    addends, structure = trees.flatten(
        [_addend(window, leaf, plan, message.kind) for leaf in message.leaves]
    )
    forms = [(a.shape, a.dtype, a.device, _axes_in_memory(a)) for a in addends]
    # Not every carrier adds complex numbers.
    parts = [
        torch.view_as_real(addend.resolve_conj()) if addend.is_complex() else addend
        for addend in addends
    ]
    parts += [] if mark is None else [mark.clone()]
    flat: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        flat.setdefault(part.dtype, []).append(part.reshape(-1).to(wire.device))
    del addends, parts
    # A single array is sent in its own memory.
    sent = {
        dtype: (torch.cat(arrays) if arrays[1:] else arrays[0]).to(message.kind.wire or dtype)
        for dtype, arrays in flat.items()
    }
    del flat
    works = [wire.carrier.allreduce([numbers]) for numbers in sent.values()]

    def receive() -> None:
        for work in works:
            work.wait()
        received = {dtype: numbers.to(dtype) for dtype, numbers in sent.items()}
        sent.clear()
        starts = dict.fromkeys(received, 0)
        sums = []
        for shape, dtype, device, axes in forms:
            real, width = (dtype.to_real(), 2) if dtype.is_complex else (dtype, 1)
            start, starts[real] = starts[real], starts[real] + width * shape.numel()
            numbers = received[real][start : starts[real]]
            if dtype.is_complex:
                # In a view the pairs have to begin at an even element; behind an odd number of
                # reals only a copy does.
                is_even = numbers.storage_offset() % 2 == 0
                pairs = (numbers if is_even else numbers.clone()).view(-1, 2)
                numbers = torch.view_as_complex(pairs)
            total = numbers.view(shape).to(device)
            # Numbers travel in the order of a contiguous array.
            if axes != sorted(axes):
                like = torch.empty_permuted(shape, axes, dtype=dtype, device=device)
                total = like.copy_(total)
            sums.append(total)
        if mark is not None:
            mark.copy_(received[mark.dtype][-1:])
        for leaf, total in zip(message.leaves, trees.unflatten(structure, sums), strict=True):
            window.of[leaf] = _as_reduced(window, leaf, total, message.kind)

    return receive


def _addend(window: Sums, leaf: int, plan: Plan, kind: MessageKind) -> Reduced:
    """What this replica adds of a leaf, in place of which nothing is held meanwhile."""
    fold, lifted = window.folding.folds[leaf], _lifted(window, plan, leaf, kind.device)
    window.of[leaf] = None
    if kind.dtype is not None:
        return lifted.to(fold.accumulator_dtype)
    assert fold.fold.reducer.monoid.sent is not None
    return fold.fold.reducer.monoid.sent(torch, lifted)


def _axes_in_memory(array: torch.Tensor) -> list[int]:
    """The axes in the order of their strides: 0, 1, ... if the array is contiguous."""
    strides = array.stride()
    return sorted(range(array.ndim), key=lambda axis: -strides[axis])


def _as_reduced(window: Sums, leaf: int, total: Reduced, kind: MessageKind) -> Reduced:
    """A leaf as its window have it, of what was added."""
    if kind.dtype is None:
        received = window.folding.folds[leaf].fold.reducer.monoid.received
        assert received is not None
        return received(torch, total)
    is_gradient = leaf in window.folding.grads
    return total.clone() if total.nbytes <= _SMALL and not is_gradient else total


# --------------------------------------------------------------------------------- what is gathered


def gather(window: Sums, plan: Plan, wire: Wire) -> Receive:
    """Begins to gather the leaves that are no sums, and collected rows.

    The function that it returns waits for them, and combines and joins them in the order of the
    replicas.
    """
    lifted = [_lifted(window, plan, leaf, wire.device) for leaf in plan.gathered]
    rows = [
        _rows(window, leaf_index, wire.device) for leaf_index in window.folding.outputs.collected
    ]
    # All arrays of this replica in one list, whose order is the same on all replicas.
    arrays, structure = trees.flatten((lifted, rows))
    received = _gathered(arrays, bool(rows), wire)

    def combine() -> None:
        of_ranks = [trees.unflatten(structure, arrays) for arrays in received()]
        for position, leaf in enumerate(plan.gathered):
            lifted = [of_rank[0][position] for of_rank in of_ranks]
            window.of[leaf] = reduce(window.folding.folds[leaf].combine, lifted)
        for position, leaf_index in enumerate(window.folding.outputs.collected):
            window.collected[leaf_index] = [rows[position] for _, rows in of_ranks]

    return combine


def _lifted(window: Sums, plan: Plan, leaf: int, device: torch.device) -> Reduced:
    """What this replica has folded of a leaf. Where that is nothing it is the identity: all send
    the same shapes.
    """
    if window.of[leaf] is not None:
        return local(window.of[leaf])
    dtype = window.folding.outputs.dtypes[leaf]
    return window.folding.folds[leaf].identity(
        torch.zeros(plan.shapes[leaf], dtype=dtype, device=device)
    )


def _rows(window: Sums, leaf_index: int, device: torch.device) -> torch.Tensor:
    """What this replica has collected of a leaf: no rows, if it has folded nothing."""
    fold, shape = (
        window.folding.outputs.folds[leaf_index],
        [*(window.folding.outputs.shapes[leaf_index] or ())],
    )
    assert fold is not None
    axis = fold.axis or 0
    shape[axis] = 0
    empty = torch.zeros(shape, dtype=window.folding.outputs.dtypes[leaf_index], device=device)
    return torch.cat([empty, *window.collected[leaf_index]], dim=axis)


def _gathered(
    arrays: Sequence[torch.Tensor], have_rows: bool, wire: Wire
) -> Callable[[], list[list[torch.Tensor]]]:
    """Begins one all_gather, and returns a function that waits for the arrays of each replica.

    Where they `have_rows`, shapes may differ between replicas, which first tell each other their
    own.
    """
    forms = [(tuple(array.shape), array.dtype) for array in arrays]
    of_ranks: list[list[Form]] = (
        wire.channel.all_gather(forms) if have_rows else [forms] * wire.channel.count
    )
    # An all_gather takes equally many bytes from each replica, so all are padded to the longest.
    packed = pack(arrays, wire.device)
    padded = packed.new_zeros(max(map(nbytes, of_ranks)))
    padded[: packed.numel()] = packed
    data_of_ranks = [torch.empty_like(padded) for _ in of_ranks]
    work = wire.carrier.allgather([data_of_ranks], [padded])

    def received() -> list[list[torch.Tensor]]:
        work.wait()
        return [unpack(data, forms) for data, forms in zip(data_of_ranks, of_ranks, strict=True)]

    return received


# ---------------------------------------------------------------------------------- arrays as bytes

# The shape and the dtype of an array.
Form = tuple[tuple[int, ...], torch.dtype]


def nbytes(forms: Sequence[Form]) -> int:
    """How long arrays of these forms are together."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)


def pack(arrays: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The bytes of the arrays, one after the other, on the device."""
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return torch.cat([empty, *[as_bytes(array).to(device) for array in arrays]])


def unpack(data: torch.Tensor, forms: Sequence[Form]) -> list[torch.Tensor]:
    """The arrays of these forms that uint8[nbytes] holds, in memory of their own."""
    chunks = torch.split(data[: nbytes(forms)], [nbytes([form]) for form in forms])
    # In `data` an array may begin at any byte. A copy is aligned for its dtype.
    return [
        chunk.clone().view(dtype).view(shape)
        for chunk, (shape, dtype) in zip(chunks, forms, strict=True)
    ]
