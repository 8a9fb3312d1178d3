"""How leaves travel between replicas: summed, many in one all_reduce, or gathered as bytes.

Leaves that are no sums, such as moments or collected rows, are combined in the order of the
replicas.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch.nn.functional import pad

from funcga._types import Scalar
from torch_backend import trees
from torch_backend.reduce.agreement import Agreement
from torch_backend.replicas import Replicas, as_bytes
from torch_backend.sums import Sums

# Bytes of a value that is copied out of the memory of its message. As a view it would keep all of
# that alive as long as the caller keeps a loss.
_SMALL = 2**12


class Addition:
    """Adds leaves over the replicas: `begin` the messages, each one all_reduce, and `finish`.

    `counts` are added, too: scalars that only a device knows; 0 stands for any other. Nothing else
    holds the leaves meanwhile.
    """

    def __init__(
        self, sums: Sums, agreement: Agreement, replicas: Replicas, counts: tuple[Scalar, ...]
    ):
        self.sums, self.leaves, self.channel = sums, agreement.summed, replicas.channel
        self.works, totals = list[Any](), list[Any]()
        for leaf in self.leaves:
            total, sent = sums.of[leaf], sums.folding.folds[leaf].fold.reducer.monoid.sent
            totals.append(total if sent is None else sent(torch, total))
            sums.of[leaf] = None
        device = agreement.device
        known = [count if torch.is_tensor(count) else 0.0 for count in counts]
        known = [torch.as_tensor(x, dtype=torch.float64, device=device).clone() for x in known]
        arrays, self.structure = trees.flatten((totals, known))
        # An array of other strides than usual is made anew like one without memory: numbers travel
        # in the order of a contiguous one.
        likes = [None if x.is_contiguous() else torch.empty_like(x, device="meta") for x in arrays]
        self.forms = [(x.dtype, x.shape, like) for x, like in zip(arrays, likes, strict=True)]
        # What is to be sent, and then what has come: real numbers, which every carrier adds.
        self.arrays = [
            torch.view_as_real(array.resolve_conj()) if array.is_complex() else array
            for array in arrays
        ]
        self.dtypes = [_dtype_sent(array, replicas.wire_dtype) for array in arrays]
        self.messages = self._messages(replicas.bucket_bytes)
        # The last message tells an error by a mark. It is copied with all of that one, so that is
        # the smallest.
        last = self.messages[-1]
        self.dtypes.append(self.dtypes[last[0]] if last else torch.float32)
        self.arrays.append(torch.zeros(1, device=self.arrays[last[0]].device if last else device))
        last.append(len(arrays))

    def _messages(self, most: int) -> list[list[int]]:
        """The arrays of each message, by their indices: of one dtype and device, and at most so
        many bytes. The smallest comes last. An array without elements need not travel.
        """
        messages: list[list[int]] = []
        # Of each dtype and device the message that is not full, and the bytes that are left in it.
        latest: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
        for index, (array, dtype) in enumerate(zip(self.arrays, self.dtypes, strict=True)):
            kind, nbytes = (dtype, array.device), array.numel() * dtype.itemsize
            message, room = latest.get(kind, ([], 0))
            if nbytes > room:
                message, room = [], most
                messages.append(message)
            message.append(index)
            latest[kind] = message, room - nbytes
        messages.sort(key=lambda message: -sum([self.arrays[index].numel() for index in message]))
        return messages or [[]]

    def begin(self, has_failed: bool) -> None:
        """Begins all messages that are left; the last one with the mark of an error, if any."""
        for indices in self.messages[len(self.works) :]:
            self.arrays[-1].fill_(has_failed)  # the mark, which the last one sends
            flat = [self.arrays[index].to(self.dtypes[index]).reshape(-1) for index in indices]
            numbers = torch.cat(flat) if flat[1:] else flat[0]  # a single one in its own memory
            pieces = torch.split(numbers, [*map(len, flat)])
            for index, piece in zip(indices, pieces, strict=True):
                self.arrays[index] = piece
            self.works.append(self.channel.carrier(numbers.device).allreduce([numbers]))

    def finish(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Waits for all messages, and takes the sums in; returns (those of the counts, that of the
        mark).
        """
        folding = self.sums.folding
        for work in self.works:
            work.wait()
        *arrays, mark = self.arrays
        self.arrays = []
        totals, counts = trees.unflatten(self.structure, [*map(_restored, arrays, self.forms)])
        for leaf, total in zip(self.leaves, totals, strict=True):
            received = folding.folds[leaf].fold.reducer.monoid.received
            is_small = isinstance(total, torch.Tensor) and total.nbytes <= _SMALL
            if received is not None:
                total = received(torch, total)
            elif is_small and leaf not in folding.grads:
                total = total.clone()
            self.sums.of[leaf] = total
        return counts, mark


def _dtype_sent(array: torch.Tensor, wire_dtype: torch.dtype | None) -> torch.dtype:
    """The real dtype that an array travels in."""
    # Scalars, such as the loss, and counts are never rounded.
    real = array.dtype.to_real()
    return (wire_dtype or real) if array.ndim and real.is_floating_point else real


def _restored(
    numbers: torch.Tensor, form: tuple[torch.dtype, torch.Size, torch.Tensor | None]
) -> torch.Tensor:
    """What has come of an array, in its dtype, shape and strides."""
    dtype, shape, strides = form
    numbers = numbers.to(dtype.to_real())
    if dtype.is_complex:
        # A view of pairs begins at an even element, as that of a copy does.
        numbers = torch.view_as_complex(numbers.clone().view(-1, 2))
    total = numbers.view(shape)
    return total if strides is None else torch.empty_like(strides, device=total.device).copy_(total)


def gather(sums: Sums, agreement: Agreement, replicas: Replicas) -> Callable[[], None]:
    """Begins to gather the leaves that are no sums, and collected rows, in one all_gather.

    The function that it returns waits for them, and combines or joins them in the order of the
    replicas.
    """
    outputs, device, channel = sums.folding.outputs, agreement.device, replicas.channel
    values = [sums.of[leaf] for leaf in agreement.gathered]
    for leaf, fold in outputs.collected.items():
        axis = fold.axis or 0
        no_rows = agreement.likes[leaf].narrow(axis, 0, 0)  # where nothing was folded
        values.append(torch.cat([no_rows, *sums.collected[leaf]], dim=axis))
    # All arrays of this replica in one list, whose order is the same on all replicas.
    arrays, structure = trees.flatten(values)
    forms = [torch.empty_like(array, device="meta") for array in arrays]
    # Numbers of rows may differ, so the replicas first tell each other theirs.
    of_ranks = channel.all_gather(forms) if outputs.collected else [forms] * channel.count
    # An all_gather takes equally many bytes from each replica, so all are padded to the longest.
    sizes = [[form.nbytes for form in forms] for forms in of_ranks]
    data = torch.cat([as_bytes(array).to(device) for array in arrays])
    sent = pad(data, (0, max(map(sum, sizes)) - len(data)))
    received = channel.gather(sent)

    def combine() -> None:
        told = []
        for numbers, lengths, forms in zip(received(), sizes, of_ranks, strict=True):
            # An array may begin at any byte. A copy is aligned for its dtype.
            pieces = torch.split(numbers[: sum(lengths)], lengths)
            pairs = zip(pieces, forms, strict=True)
            arrays = [piece.clone().view(form.dtype).view(form.shape) for piece, form in pairs]
            told.append(trees.unflatten(structure, arrays))
        leaves = [*agreement.gathered, *outputs.collected]
        for leaf, *of_leaf in zip(leaves, *told, strict=True):
            if leaf in outputs.collected:
                sums.collected[leaf] = of_leaf
            else:
                sums.of[leaf] = reduce(sums.folding.folds[leaf].combine, of_leaf)

    return combine
