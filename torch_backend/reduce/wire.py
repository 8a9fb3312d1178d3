"""How leaves travel between replicas: summed, many in one all_reduce, or gathered as bytes.

Leaves that are no sums, such as moments or collected rows, are combined in the order of the
replicas.
"""

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch

from funcga._fold import LeafFold
from funcga._types import Reduced
from torch_backend import trees
from torch_backend.dtensor import local
from torch_backend.reduce.header import ROOM
from torch_backend.replicas import Replicas, as_bytes
from torch_backend.sums import Folding, Sums

# Waits for a message that has begun, and takes in what the others have sent. Returns the sum of the
# marks that came with it, None if none did.
Receive = Callable[[], torch.Tensor | None]
# The shape and the dtype of an array.
Form = tuple[tuple[int, ...], torch.dtype]

# So few elements are not worth a message of their own.
_FEW = 8
# Bytes of a value that is copied out of the memory of its message. As a view it would keep all of
# that alive as long as the caller keeps a loss.
_SMALL = 2**12


class Route(NamedTuple):
    """How each reduced leaf travels, by its index. It follows from what is folded, so it is the
    same on every replica.

    Leaves of a bucket are added together; others are `gathered`, or are `numbers` in the header.
    `likes`: the shape of each, and where it lies. `device`: where anything travels from that is no
    sum.
    """

    buckets: list[list[int]]
    gathered: list[int]
    numbers: list[int]
    likes: Mapping[int, tuple[torch.Size, torch.device]]
    device: torch.device


def route_of(
    folding: Folding, likes: Mapping[int, torch.Tensor], replicas: Replicas, may_be_numbers: bool
) -> Route:
    """The Route for leaves like these. If all are numbers on the host, and few, and
    `may_be_numbers` says so, they travel in the header.
    """
    forms = {leaf: (like.shape, like.device) for leaf, like in likes.items()}
    device = next((like.device for like in likes.values()), torch.device("cpu"))
    folds = folding.folds
    added = {leaf for leaf, like in likes.items() if _is_added(folding, leaf, like)}
    numbers = {leaf for leaf in added if _is_number(likes[leaf], folds[leaf])}
    if may_be_numbers and len(numbers) == len(likes) <= ROOM:
        return Route([], [], sorted(likes), forms, torch.device("cpu"))
    summed = added.union([leaf for leaf in likes if folds[leaf].fold.reducer.monoid.sent])
    if len(summed) < len(likes):
        summed -= {leaf for leaf in added if _is_few_counts(likes[leaf], folds[leaf])}
    buckets = _buckets({leaf: likes[leaf] for leaf in summed}, replicas.bucket_bytes)
    return Route(buckets, sorted({*likes} - summed), [], forms, device)


def _is_few_counts(like: torch.Tensor, fold: LeafFold) -> bool:
    """Whether a sum goes with what is gathered, if anything is: in a dtype of its own it would be
    one collective more.
    """
    return like.numel() <= _FEW and fold.fold.reducer.unweighted


def _buckets(likes: Mapping[int, torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Leaves that are added together, by at most so many bytes; the smallest last."""
    buckets: list[list[int]] = []
    # Complex numbers come first: a view of pairs has to begin at an even element. The first leaf
    # begins a bucket even if it has no elements.
    room = -1
    order = lambda leaf: (not likes[leaf].is_complex(), likes[leaf].ndim == 0, leaf)
    for leaf in sorted(likes, key=order):
        if likes[leaf].nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(leaf)
        room -= likes[leaf].nbytes
    # The mark of an error is copied with all of the last one.
    buckets.sort(key=lambda bucket: -sum([likes[leaf].numel() for leaf in bucket]))
    return buckets or [[]]


def _is_added(folding: Folding, leaf: int, like: torch.Tensor) -> bool:
    """Whether a leaf's sum is one array of its shape, and is merged by adding it."""
    fold, is_usual = folding.folds[leaf], folding.kinds[leaf] is not None
    if is_usual or fold.fold.reducer.monoid.collective != "sum":
        return is_usual
    identity = fold.identity(torch.zeros_like(like, requires_grad=False))
    kind = like.shape, fold.accumulator_dtype
    return isinstance(identity, torch.Tensor) and (identity.shape, identity.dtype) == kind


def _is_number(like: torch.Tensor, fold: LeafFold) -> bool:
    """Whether a float64 in the header can be a leaf's sum."""
    return like.is_cpu and like.ndim == 0 and bool(fold.accumulator_dtype.is_floating_point)


# --- what is added


def add(
    sums: Sums, route: Route, bucket: list[int], replicas: Replicas, mark: float | None
) -> Receive:
    """Begins to add the leaves of a bucket over the replicas, in one all_reduce for each dtype.

    Nothing holds the leaves meanwhile. A mark that is not 0 tells the others of an error.
    """
    layouts = [_layout(sums.of[leaf]) for leaf in bucket]
    addends = [_addend(sums, route, leaf, replicas.wire_dtype) for leaf in bucket]
    arrays, structure = trees.flatten(addends)
    kinds = [(array.dtype, array.device) for array in arrays]
    if mark is not None:
        dtype, device = kinds[-1] if kinds else (torch.float32, route.device)
        kinds.append((dtype, device))
        arrays.append(torch.full((1,), mark, dtype=dtype, device=device))
    shapes = [array.shape for array in arrays]
    groups: dict[object, list[int]] = {}
    for k, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(k)
    sent = [_joined([arrays[k] for k in group]) for group in groups.values()]
    del addends, arrays
    works = [replicas.channel.carrier(numbers.device).allreduce([numbers]) for numbers in sent]

    def receive() -> torch.Tensor | None:
        received: list[Any] = [None] * len(shapes)
        for group, work in zip(groups.values(), works, strict=True):
            work.wait()
            parts = torch.split(sent.pop(0), [shapes[k].numel() for k in group])
            for k, part in zip(group, parts, strict=True):
                received[k] = part.view(shapes[k])
        marks = None if mark is None else received.pop()
        for leaf, layout, total in zip(
            bucket, layouts, trees.unflatten(structure, received), strict=True
        ):
            sums.of[leaf] = _total(sums, leaf, layout, total)
        return marks

    return receive


def _layout(accumulator: Reduced) -> torch.Tensor | None:
    """A tensor without memory that has the strides of an accumulator; None for the usual ones."""
    # Numbers travel in the order of a contiguous array.
    is_usual = not isinstance(accumulator, torch.Tensor) or local(accumulator).is_contiguous()
    return None if is_usual else torch.empty_like(local(accumulator), device="meta")


def _joined(arrays: list[torch.Tensor]) -> torch.Tensor:
    """The elements of these arrays; a single one in its own memory."""
    flat = [array.reshape(-1) for array in arrays]
    return torch.cat(flat) if flat[1:] else flat[0]


def _addend(sums: Sums, route: Route, leaf: int, wire_dtype: torch.dtype | None) -> Reduced:
    """What this replica adds of a leaf, as real numbers, in place of which nothing is held
    meanwhile.
    """
    fold, lifted = sums.folding.folds[leaf], _lifted(sums, route, leaf)
    sums.of[leaf] = None
    sent = fold.fold.reducer.monoid.sent
    if sent is not None:
        return sent(torch, lifted)
    total = lifted.to(fold.accumulator_dtype)
    # Scalars, such as the loss, and counts are never rounded.
    is_rounded = total.ndim > 0 and (total.is_floating_point() or total.is_complex())
    if total.is_complex():  # which not every carrier adds
        total = torch.view_as_real(total.resolve_conj())
    return total.to(wire_dtype) if is_rounded and wire_dtype else total


def _total(sums: Sums, leaf: int, layout: torch.Tensor | None, total: Reduced) -> Reduced:
    """A leaf as the window has it, of what was added."""
    fold = sums.folding.folds[leaf]
    received, dtype = fold.fold.reducer.monoid.received, fold.accumulator_dtype
    if received is not None:
        return received(torch, total)
    total = total.to(dtype.to_real())
    if dtype.is_complex:
        total = torch.view_as_complex(total)
    if layout is not None:
        return torch.empty_like(layout, device=total.device).copy_(total)
    is_kept = total.nbytes > _SMALL or leaf in sums.folding.grads
    return total if is_kept else total.clone()


# --- what is gathered


def gather(sums: Sums, route: Route, replicas: Replicas) -> Receive:
    """Begins to gather the leaves that are no sums, and collected rows, in one all_gather.

    The function that it returns waits for them, and combines and joins them in the order of the
    replicas.
    """
    collected = sums.folding.outputs.collected
    lifted = [_lifted(sums, route, leaf) for leaf in route.gathered]
    rows = [_rows(sums, leaf, route.device) for leaf in collected]
    # All arrays of this replica in one list, whose order is the same on all replicas.
    arrays, structure = trees.flatten((lifted, rows))
    forms = [(tuple(array.shape), array.dtype) for array in arrays]
    # Numbers of rows may differ, so the replicas first tell each other theirs.
    of_ranks = replicas.channel.all_gather(forms) if rows else [forms] * replicas.count
    # An all_gather takes equally many bytes from each replica, so all are padded to the longest.
    empty = torch.empty(0, dtype=torch.uint8, device=route.device)
    packed = torch.cat([empty, *[as_bytes(array).to(route.device) for array in arrays]])
    padded = packed.new_zeros(max([sum(map(_nbytes, forms)) for forms in of_ranks]))
    padded[: len(packed)] = packed
    received = [torch.empty_like(padded) for _ in of_ranks]
    work = replicas.channel.carrier(route.device).allgather([received], [padded])

    def combine() -> None:
        work.wait()
        pairs = zip(received, of_ranks, strict=True)
        told = [trees.unflatten(structure, _unpacked(data, forms)) for data, forms in pairs]
        for position, leaf in enumerate(route.gathered):
            of_leaf = [lifted[position] for lifted, _ in told]
            sums.of[leaf] = reduce(sums.folding.folds[leaf].combine, of_leaf)
        for position, leaf in enumerate(collected):
            sums.collected[leaf] = [rows[position] for _, rows in told]

    return combine


def _lifted(sums: Sums, route: Route, leaf: int) -> Reduced:
    """What this replica has folded of a leaf. Where that is nothing it is the identity: all send
    the same shapes.
    """
    if sums.of[leaf] is not None:
        return local(sums.of[leaf])
    shape, device = route.likes[leaf]
    like = torch.zeros(shape, dtype=sums.folding.outputs.dtypes[leaf], device=device)
    return sums.folding.folds[leaf].identity(like)


def _rows(sums: Sums, leaf: int, device: torch.device) -> torch.Tensor:
    """What this replica has collected of a leaf: no rows, if it has folded nothing."""
    outputs = sums.folding.outputs
    fold, shape = outputs.folds[leaf], [*(outputs.shapes[leaf] or ())]
    axis = 0 if fold is None else fold.axis or 0
    shape[axis] = 0
    empty = torch.zeros(shape, dtype=outputs.dtypes[leaf], device=device)
    return torch.cat([empty, *sums.collected[leaf]], dim=axis)


def _nbytes(form: Form) -> int:
    shape, dtype = form
    return math.prod(shape) * dtype.itemsize


def _unpacked(data: torch.Tensor, forms: list[Form]) -> list[torch.Tensor]:
    """The arrays of these forms that uint8[nbytes] holds, in memory of their own."""
    sizes = [*map(_nbytes, forms)]
    pairs = zip(torch.split(data[: sum(sizes)], sizes), forms, strict=True)
    # In `data` an array may begin at any byte. A copy is aligned for its dtype.
    return [part.clone().view(dtype).view(shape) for part, (shape, dtype) in pairs]
