"""How leaves travel between replicas: summed, many in one all_reduce, or gathered as bytes.

Leaves that are no sums, such as moments or collected rows, are combined in the order of the
replicas.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from funcga._types import Scalar
from torch_backend import trees
from torch_backend.dtensor import as_dtensor, local, spec_of
from torch_backend.reduce.agreement import Agreement
from torch_backend.replicas import Replicas, as_bytes
from torch_backend.sums import Sums

# Bytes of a value that is copied out of the memory of its message. As a view it would keep all of
# that alive as long as the caller keeps a loss.
_SMALL = 2**12


class Addition:
    """Adds leaves over the replicas: `begin` the messages, each one all_reduce, and `finish`.

    Of `counts`, scalars, those are added that only a device knows. Nothing else holds the leaves
    meanwhile.
    """

    def __init__(
        self, sums: Sums, agreement: Agreement, replicas: Replicas, counts: Sequence[Scalar]
    ):
        self.sums, self.leaves, self.channel = sums, agreement.summed, replicas.channel
        self.specs, self.works = [spec_of(sums.of[leaf]) for leaf in self.leaves], list[Any]()
        addends = list[Any]()
        for leaf in self.leaves:
            total, sent = local(sums.of[leaf]), sums.folding.folds[leaf].fold.reducer.monoid.sent
            sums.of[leaf] = None
            addends.append(total if sent is None else sent(torch, total))
        # Counts that the host knows are in the headers.
        known = torch.zeros(len(counts), dtype=torch.float64, device=agreement.device)
        for count, number in zip(counts, known, strict=True):
            if isinstance(count, torch.Tensor):
                number.copy_(count)
        arrays, self.structure = trees.flatten((addends, [*known]))
        self.forms = [(array.dtype, _strides(array)) for array in arrays]
        # What is to be sent, and then what has come: real numbers, which every carrier adds.
        self.arrays = [
            torch.view_as_real(array.resolve_conj()) if array.is_complex() else array
            for array in arrays
        ]
        self.dtypes = [_dtype_sent(array, replicas.wire_dtype) for array in arrays]
        self.messages = self._messages(replicas.bucket_bytes)
        # The last message tells an error by a mark. It is copied with all of that one, so that is
        # the smallest.
        last, device = self.messages[-1], agreement.device
        self.dtypes.append(self.dtypes[last[0]] if last else torch.float32)
        self.arrays.append(torch.zeros(1, device=self.arrays[last[0]].device if last else device))
        last.append(len(arrays))

    def _messages(self, most: int) -> list[list[int]]:
        """The arrays of each message, by their indices: of one dtype and device, and at most so
        many bytes. The smallest comes last.
        """
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, (array, dtype) in enumerate(zip(self.arrays, self.dtypes, strict=True)):
            groups.setdefault((dtype, array.device), []).append(index)
        messages: list[list[int]] = []
        for (dtype, _), group in groups.items():
            room = -1  # the first array begins a message even if it has no elements
            for index in group:
                nbytes = self.arrays[index].numel() * dtype.itemsize
                if nbytes > room:
                    messages.append([])
                    room = most
                messages[-1].append(index)
                room -= nbytes
        messages.sort(key=lambda message: -sum([self.arrays[index].numel() for index in message]))
        return messages or [[]]

    def begin(self, has_failed: bool) -> None:
        """Begins all messages that are left; the last one with the mark of an error, if any."""
        for indices in self.messages[len(self.works) :]:
            self.arrays[-1].fill_(has_failed)  # the mark, which the last one sends
            sent = [self.arrays[index].to(self.dtypes[index]) for index in indices]
            flat = [array.reshape(-1) for array in sent]
            numbers = torch.cat(flat) if flat[1:] else flat[0]  # a single one in its own memory
            parts = torch.split(numbers, [*map(len, flat)])
            for index, array, part in zip(indices, sent, parts, strict=True):
                self.arrays[index] = part.view(array.shape)
            self.works.append(self.channel.carrier(numbers.device).allreduce([numbers]))

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
            elif isinstance(total, torch.Tensor) and leaf not in folding.grads:
                total = total.clone() if total.nbytes <= _SMALL else total
            of[leaf] = as_dtensor(total, spec)
        return counts, mark


def _strides(array: torch.Tensor) -> torch.Tensor | None:
    """A tensor without memory that has the strides of an array; None for the usual ones."""
    # Numbers travel in the order of a contiguous array.
    return None if array.is_contiguous() else torch.empty_like(array, device="meta")


def _dtype_sent(array: torch.Tensor, wire_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that an array travels in."""
    # Scalars, such as the loss, and counts are never rounded.
    is_rounded = array.ndim > 0 and (array.is_floating_point() or array.is_complex())
    return wire_dtype if is_rounded and wire_dtype else array.dtype.to_real()


def _restored(total: torch.Tensor, form: tuple[torch.dtype, torch.Tensor | None]) -> torch.Tensor:
    """What has come of an array, in its dtype and strides."""
    dtype, strides = form
    total = total.to(dtype.to_real())
    if dtype.is_complex:
        total = torch.view_as_complex(total)
    return total if strides is None else torch.empty_like(strides, device=total.device).copy_(total)


def gather(sums: Sums, agreement: Agreement, replicas: Replicas) -> Callable[[], None]:
    """Begins to gather the leaves that are no sums, and collected rows, in one all_gather.

    The function that it returns waits for them, and combines or joins them in the order of the
    replicas.
    """
    outputs, device = sums.folding.outputs, agreement.device
    values = [local(sums.of[leaf]) for leaf in agreement.gathered]
    for leaf, fold in outputs.collected.items():
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
