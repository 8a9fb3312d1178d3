"""How leaves travel between replicas: summed, many in one all_reduce, or gathered as bytes.

Leaves that are no sums, such as moments or collected rows, are combined in the order of the
replicas.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from torch_backend import trees
from torch_backend.dtensor import as_dtensor, local, spec_of
from torch_backend.reduce.agreement import Agreement
from torch_backend.replicas import Replicas, as_bytes
from torch_backend.sums import Sums

# Bytes of a value that is copied out of the memory of its message. As a view it would keep all of
# that alive as long as the caller keeps a loss.
_SMALL = 2**12


class Addition:
    """Adds leaves over the replicas: `begin` each message, which is one all_reduce, and `finish`.

    `counts` are scalars that are added, too. Nothing else holds the leaves meanwhile.
    """

    def __init__(
        self, sums: Sums, agreement: Agreement, replicas: Replicas, counts: Sequence[torch.Tensor]
    ):
        self.sums, self.leaves, self.channel = sums, agreement.summed, replicas.channel
        self.specs, self.works = [spec_of(sums.of[leaf]) for leaf in self.leaves], list[Any]()
        addends = list[Any]()
        for leaf in self.leaves:
            total, sent = local(sums.of[leaf]), sums.folding.folds[leaf].fold.reducer.monoid.sent
            sums.of[leaf] = None
            addends.append(total if sent is None else sent(torch, total))
        arrays, self.structure = trees.flatten((addends, [*counts]))
        self.forms = [(array.dtype, _strides(array)) for array in arrays]
        # What is sent, and from then on what has come.
        self.arrays = [_as_sent(array, replicas.wire_dtype) for array in arrays]
        self.messages = _messages(self.arrays, replicas.bucket_bytes)
        # The last message tells an error by a mark. It is copied with all of that one, so that is
        # the smallest.
        last = self.messages[-1]
        like = self.arrays[last[0]] if last else torch.empty((), device=agreement.device)
        last.append(len(self.arrays))
        self.arrays.append(like.new_zeros(1))

    def begin(self, has_failed: bool) -> bool:
        """Begins the next message; whether there was one."""
        if len(self.works) == len(self.messages):
            return False
        self.arrays[-1].fill_(has_failed)
        indices = self.messages[len(self.works)]
        sent = [self.arrays[index] for index in indices]
        flat = [array.reshape(-1) for array in sent]
        numbers = torch.cat(flat) if flat[1:] else flat[0]  # a single one in its own memory
        parts = torch.split(numbers, [*map(len, flat)])
        for index, array, part in zip(indices, sent, parts, strict=True):
            self.arrays[index] = part.view(array.shape)
        self.works.append(self.channel.carrier(numbers.device).allreduce([numbers]))
        return True

    def finish(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Waits for all messages, and takes the sums in; returns (those of the counts, that of the
        mark).
        """
        of, folding = self.sums.of, self.sums.folding
        for work in self.works:
            work.wait()
        *arrays, mark = self.arrays
        self.arrays = []
        totals, counts = trees.unflatten(self.structure, [*map(_restored, arrays, self.forms)])
        for leaf, spec, total in zip(self.leaves, self.specs, totals, strict=True):
            received = folding.folds[leaf].fold.reducer.monoid.received
            if received is not None:
                total = received(torch, total)
            elif leaf not in folding.grads and total.nbytes <= _SMALL:
                total = total.clone()
            of[leaf] = as_dtensor(total, spec)
        return counts, mark


def _strides(array: torch.Tensor) -> torch.Tensor | None:
    """A tensor without memory that has the strides of an array; None for the usual ones."""
    # Numbers travel in the order of a contiguous array.
    return None if array.is_contiguous() else torch.empty_like(array, device="meta")


def _as_sent(array: torch.Tensor, wire_dtype: torch.dtype | None) -> torch.Tensor:
    """The array as real numbers, in the dtype that gradients are sent in."""
    # Scalars, such as the loss, and counts are never rounded.
    is_rounded = array.ndim > 0 and (array.is_floating_point() or array.is_complex())
    if array.is_complex():  # which not every carrier adds
        array = torch.view_as_real(array.resolve_conj())
    return array.to(wire_dtype) if is_rounded and wire_dtype else array


def _restored(total: torch.Tensor, form: tuple[torch.dtype, torch.Tensor | None]) -> torch.Tensor:
    """What has come of an array, in its dtype and strides."""
    dtype, strides = form
    total = total.to(dtype.to_real())
    if dtype.is_complex:
        total = torch.view_as_complex(total)
    return total if strides is None else torch.empty_like(strides, device=total.device).copy_(total)


def _messages(arrays: Sequence[torch.Tensor], most: int) -> list[list[int]]:
    """The arrays of each message, by their indices: of one dtype and device, and at most so many
    bytes. The smallest comes last.
    """
    messages: list[list[int]] = []
    open_ones: dict[object, tuple[list[int], int]] = {}  # of each kind the last one, and its room
    for index, array in enumerate(arrays):
        kind = array.dtype, array.device
        message, room = open_ones.get(kind, ([], -1))
        if array.nbytes > room:
            message, room = [], most
            messages.append(message)
        message.append(index)
        open_ones[kind] = message, room - array.nbytes
    messages.sort(key=lambda message: -sum([arrays[index].numel() for index in message]))
    return messages or [[]]


def gather(sums: Sums, agreement: Agreement, replicas: Replicas) -> Callable[[], None]:
    """Begins to gather the leaves that are no sums, and collected rows, in one all_gather.

    The function that it returns waits for them, and combines or joins them in the order of the
    replicas.
    """
    outputs, device = sums.folding.outputs, agreement.device
    values = [local(sums.of[leaf]) for leaf in agreement.gathered]
    for leaf, fold in zip(outputs.collected, outputs.collected_folds, strict=True):
        axis = fold.axis or 0
        none = agreement.likes[leaf].narrow(
            axis, 0, 0
        )  # the rows of a replica that has folded nothing
        values.append(torch.cat([none, *sums.collected[leaf]], dim=axis))
    # All arrays of this replica in one list, whose order is the same on all replicas.
    arrays, structure = trees.flatten(values)
    forms = [torch.empty_like(array, device="meta") for array in arrays]
    # Numbers of rows may differ, so the replicas first tell each other theirs.
    of_ranks = [forms] * replicas.channel.count
    if outputs.collected:
        of_ranks = replicas.channel.all_gather(forms)
    # An all_gather takes equally many bytes from each replica, so all are padded to the longest.
    sizes = [[form.nbytes for form in forms] for forms in of_ranks]
    data = [as_bytes(array).to(device) for array in arrays]
    missing = max(map(sum, sizes)) - sum(map(len, data))
    sent = torch.cat([*data, torch.zeros(missing, dtype=torch.uint8, device=device)])
    received = [torch.empty_like(sent) for _ in of_ranks]
    work = replicas.channel.carrier(device).allgather([received], [sent])

    def combine() -> None:
        work.wait()
        told = []
        for numbers, lengths, forms in zip(received, sizes, of_ranks, strict=True):
            # An array may begin at any byte. A copy is aligned for its dtype.
            parts = torch.split(numbers[: sum(lengths)], lengths)
            pairs = zip(parts, forms, strict=True)
            arrays = [part.clone().view(form.dtype).view(form.shape) for part, form in pairs]
            told.append(trees.unflatten(structure, arrays))
        leaves = [*agreement.gathered, *outputs.collected]
        for leaf, *of_leaf in zip(leaves, *told, strict=True):
            if leaf in outputs.collected:
                sums.collected[leaf] = of_leaf
                continue
            combined = reduce(sums.folding.folds[leaf].combine, of_leaf)
            sums.of[leaf] = as_dtensor(combined, spec_of(sums.of[leaf]))

    return combine
