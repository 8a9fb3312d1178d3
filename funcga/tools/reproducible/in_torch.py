"""Exact sums of many leaves at once.

In eager torch each operation is a kernel of its own, and on a device one of a short leaf takes as
long as one of a million elements. So short leaves are folded as one array. XLA does that by itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from funcga._fold import largest
from funcga._types import Reduced, Scalar
from torch_backend.sums import Sums

# Elements that are folded as one: on the host what stays in its cache, on a device what takes as
# long as launching the kernels. The dozen arrays between a gradient and its sum are as large.
JOINED = 2**16
JOINED_ON_DEVICE = 2**20


def add(sums: Sums, values: Mapping[int, Any], weight: Scalar) -> dict[int, Any]:
    """Folds the leaves of a micro-batch in that have exact sums, and returns the others."""
    of, folds = sums.of, sums.folding.folds
    exact, others = parted(sums, values)
    for begun in (True, False):
        alike = {index: leaf for index, leaf in exact.items() if (of[index] is not None) is begun}
        for indices in groups(sums, alike):
            fold, leaves = folds[indices[0]], [values[index] for index in indices]
            lifted = fold.lift(joined(leaves), weight)
            if begun:
                before = joined([of[index] for index in indices])
            else:
                before = fold.fold.reducer.monoid.identity(torch, lifted)
            of.update(zip(indices, split(fold.combine(before, lifted), leaves), strict=True))
    return others


def normalize(sums: Sums, results: dict[int, Any]) -> dict[int, Any]:
    """Replaces exact sums among the results of a window by what each is normalised to, and returns
    the other ones that are normalised by their folds.
    """
    folds, tally = sums.folding.folds, sums.tally
    exact, others = parted(sums, {index: results[index] for index in sums.folding.normalized})
    shaped = {index: largest(total) for index, total in exact.items()}
    for index, leading in shaped.items():
        if leading.is_cpu:  # elsewhere the host sees nothing of it
            path = lambda index=index: sums.folding.outputs.paths()[index]
            folds[index].check_known(results[index], tally, path)
    for indices in groups(sums, shaped):
        totals = joined([results[index] for index in indices])
        finished = split(folds[indices[0]].normalize(totals, tally), [*map(shaped.get, indices)])
        if len(finished) > 1:  # each in memory of its own
            pieces, finished = finished, [*map(torch.empty_like, finished)]
            torch._foreach_copy_(finished, pieces)
        for index, result in zip(indices, finished, strict=True):
            results[index] = result
    return others


def parted(sums: Sums, leaves: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """(those of the leaves that have exact sums, the others)."""
    exact, others = dict[int, Any](), dict[int, Any]()
    for index, leaf in leaves.items():
        reducer = sums.folding.folds[index].fold.reducer
        (exact if reducer.per_element else others)[index] = leaf
    return exact, others


def groups(sums: Sums, leaves: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """The indices of leaves that are folded as one: those with axes, of one fold, dtype and device,
    as many as are short enough. Any other leaf is alone.
    """
    found: list[list[int]] = []
    latest: dict[object, tuple[list[int], int]] = {}
    for index, leaf in leaves.items():
        fold, most = sums.folding.folds[index], JOINED if leaf.is_cpu else JOINED_ON_DEVICE
        kind = id(fold.fold), fold.result_dtype, leaf.dtype, leaf.device
        # A transform writes to nothing. A loss, without axes, has more digits.
        is_alone = sums.folding.pure or not leaf.ndim or not leaf.is_contiguous()
        group, length = latest.get(kind, ([], most + 1))
        length += leaf.numel()
        if is_alone or length > most:
            group, length = [], leaf.numel()
            found.append(group)
        group.append(index)
        if not is_alone:
            latest[kind] = group, length
    return found


def joined(parts: Sequence[Reduced]) -> Reduced:
    """Leaves, or sums of such, as those of a single leaf."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tuple):
        return tuple(map(joined, zip(*parts, strict=True)))
    return torch.cat([part.reshape(-1) for part in parts])


def split(whole: Reduced, likes: Sequence[Any]) -> list[Reduced]:
    """What was joined, in the shapes of the leaves: views of it."""
    if len(likes) == 1:
        return [whole]
    if isinstance(whole, tuple):
        return [*zip(*[split(part, likes) for part in whole], strict=True)]
    pieces = torch.split(whole, [like.numel() for like in likes])
    return [piece.view(like.shape) for piece, like in zip(pieces, likes, strict=True)]
