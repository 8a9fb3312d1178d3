"""States between calls: how their sums are added to, divided and emptied; the part of a window
that each replica has, and their merge.

What funcga's mathematics says leaf by leaf is one kernel here for all leaves that are treated
alike.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from funcga._call import Memory
from funcga._fold import Tally, addends, largest, parts_of
from funcga._fold.accumulator import Accumulation, AccumulatorState
from funcga._types import Across, Array, Reduced, Scalar
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend._private import pytree, storage_key
from torch_backend.arrays import without_overlap
from torch_backend.dtensor import as_dtensor, local_tensors
from torch_backend.reduce import Reduction
from torch_backend.replicas import replicas_of
from torch_backend.sums import Folding, Sums

# -- sums


def add(
    window: Accumulation, leaves: Sequence[Array], weights: Sequence[Scalar], donate: bool
) -> list[Reduced]:
    """The accumulators of a window with the value of one more micro-batch.

    Those of one dtype that are equally weighted are added in one kernel.
    """
    pure = arrays.in_transform()  # nothing is written to, and all stays in its graph
    steps, sums = arrays.scalar(window.tally.steps), [*window.accumulators]
    # Those that torch adds to, by the factor of what is added, the dtypes and the device.
    groups: dict[Any, list[int]] = defaultdict(list)
    rows = zip(window.outputs.folds, leaves, weights, strict=True)
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for index, (fold, value, weight) in enumerate(rows):
            if fold is None:
                continue
            total, adds = sums[index], None if pure else fold.adds
            # Torch adds to the sum where both are dense, and the sum has as many bits.
            is_dense = adds and type(value) is type(total) is torch.Tensor
            is_dense = is_dense and value.layout is torch.strided
            if is_dense and torch.promote_types(value.dtype, total.dtype) is total.dtype:
                factor = 1 if adds == "plain" else weight
                groups[factor, value.dtype, total.dtype, total.device].append(index)
            else:
                combined = window.combined(index, fold.lift(value, weight))
                # A monoid of the user's may return its argument, whose memory belongs to grad_fn.
                sums[index] = combined.clone() if combined is value else combined
        for (factor, *_), group in groups.items():
            values = [leaves[index] for index in group]
            totals = _added([sums[index] for index in group], values, factor, steps, donate)
            for index, total in zip(group, totals, strict=True):
                sums[index] = total
    return sums


def _added(
    before: list[torch.Tensor],
    values: list[torch.Tensor],
    factor: Scalar,
    steps: Scalar,
    donate: bool,
) -> Iterable[torch.Tensor]:
    """The sums with factor * value added to each; in their memory if `donate`. After no `steps`
    they are zeros without memory. All sums are alike, and so are the values.
    """
    is_first, dtype = isinstance(steps, int) and steps == 0, before[0].dtype
    is_same = values[0].dtype == dtype
    if isinstance(factor, torch.Tensor):
        number = factor.to(before[0].device, dtype)
        if is_same:
            products = [*torch._foreach_mul(values, number)]
        else:
            products = [torch.empty_like(value, dtype=dtype) for value in values]
            torch._foreach_copy_(products, values)
            torch._foreach_mul_(products, number)
        clear_if_zero(number, products)  # of a weight of 0 not even a NaN is added
        if is_first:
            return products
        if not donate:  # the products have memory of their own
            before, products = products, before
        torch._foreach_add_(before, products)
        return before
    if factor == 1:
        factor = 1  # no float: sums of integers may be among these
    if not factor:  # adds nothing, not even a NaN
        return map(torch.zeros_like, before) if is_first else before
    if is_first and is_same and not before[0].is_cpu:
        # On a device it is one kernel, where adding to zeros without memory is one for each.
        return torch._foreach_mul(values, factor)
    if donate:
        torch._foreach_add_(before, values, alpha=factor)
        return before
    return torch._foreach_add(before, values, alpha=factor)


def clear_if_zero(number: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes zeros to tensors of one dtype, also over NaN, if a number on a device is 0."""
    # 0 * NaN is NaN. But the bits of a float, taken as an integer, times 1 are the same, and times
    # 0 are those of 0. So it is one kernel for all tensors, where `torch.where` is one for each.
    reals = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
    integer = _INTEGERS[reals[0].dtype.itemsize]
    keep = (number != 0).to(reals[0].device, integer)
    torch._foreach_mul_([each.view(integer) for each in reals], keep)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def counted(window: Accumulation, weight: Scalar) -> tuple[Tally, Scalar, Scalar]:
    """(the tally with one more value, its weight as one scalar, the unit of the sums), where the
    host does not see the weights.

    The unit stays, as to follow such a total would be a pass over the sums in every call.
    """
    first, *rest = window.tally.weight
    total = sum([*rest, weight], arrays.counted(first))
    tally = Tally(addends(total, not rest, arrays), window.tally.steps + 1)
    return tally, weight, arrays.scalar(window.unit)


def finish(window: Accumulation, tallies: Sequence[Tally], donate: bool) -> list[Reduced]:
    """The leaves of a window, each normalised by its tally; in memory of their own, or in that of
    donated sums.
    """
    finished, pure = [*window.accumulators], arrays.in_transform()
    # All of one dtype that one weight divides are divided in one kernel. The others are normalised
    # one by one.
    groups: dict[Any, list[int]] = defaultdict(list)
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for index, (fold, tally) in enumerate(zip(window.outputs.folds, tallies, strict=True)):
            if fold is None:
                continue
            reduced, total = finished[index], tally.weight[0]
            is_divided = fold.fold.normalizer.divides_by == "weight"
            is_same = type(reduced) is torch.Tensor and reduced.dtype is fold.result_dtype
            if is_divided and is_same and not pure:
                groups[total, reduced.dtype, reduced.device].append(index)
            else:
                shared = {*map(storage_key, parts_of(reduced))}
                own = lambda x, shared=shared: x.clone() if storage_key(x) in shared else x
                result = fold.normalize(reduced, tally)
                finished[index] = pytree.tree_map_only(torch.Tensor, own, result)
        for (total, *_), group in groups.items():
            quotients = arrays.divide([finished[index] for index in group], total, donate)
            if isinstance(total, torch.Tensor):
                clear_if_zero(total, quotients)  # in plain sums there may be a NaN
            for index, quotient in zip(group, quotients, strict=True):
                finished[index] = quotient
    return finished


def scaled(leaves: Sequence[Array], factor: Scalar, donate: bool) -> list[Array]:
    """The leaves times a factor; in the same memory if that is donated."""
    pure = arrays.in_transform()
    donate = donate and not pure
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        # In place an element that two leaves share would be multiplied twice.
        separate = without_overlap(leaves) if donate else [*leaves]
        shards = local_tensors(separate)
        by: Any = factor
        if isinstance(factor, torch.Tensor):
            by = [arrays.as_array(factor, shard.dtype, shard) for shard in shards]
        if donate:
            torch._foreach_mul_(shards, by)
            return separate
        return [*map(as_dtensor, torch._foreach_mul(shards, by), separate)]


def emptied(window: Accumulation) -> list[Reduced]:
    """The accumulators of an empty window like this one."""
    # Sums take no memory before their first value.
    empty = zeros_like(window.accumulators, views=True)
    for index, fold in enumerate(window.outputs.folds):
        if fold is not None and not (fold.adds and isinstance(empty[index], torch.Tensor)):
            empty[index] = fold.fold.reducer.monoid.identity(torch, window.accumulators[index])
    return empty


def zeros_like(
    leaves: Sequence[Any], dtypes: Mapping[torch.dtype, torch.dtype] | None = None, *, views: bool
) -> list[Any]:
    """Zeros in the shapes of tensors, where `dtypes` names another in that dtype; all else as it
    is. With `views` those of a dtype and device are views of a single 0, so that nobody can write
    to them.
    """
    zeros: list[Any] = [*leaves]
    shared: dict[Any, torch.Tensor] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            dtype = (dtypes or {}).get(leaf.dtype, leaf.dtype)
            if views and type(leaf) in trees.PLAIN and leaf.numel() > 1:
                kind = dtype, leaf.device
                if kind not in shared:
                    shared[kind] = torch.zeros((), dtype=dtype, device=leaf.device)
                zeros[index] = shared[kind].expand(leaf.shape)
            else:
                zeros[index] = torch.zeros_like(leaf, dtype=dtype)
    return zeros


# -- over replicas


def merged(window: Accumulation, memory: Memory, updates: Array, donate: bool) -> Accumulation:
    """The window merged over its replicas, whose states have made so many `updates`; in the same
    memory if that is donated.
    """
    reduction = Reduction(memory, replicas_of(window.across), arrays.scalar(updates))
    # What merges has all weighted sums in one unit, which the host knows.
    if isinstance(arrays.scalar(window.unit), torch.Tensor) or any(
        fold.adds == "weighted" and not fold.is_mean for fold in window.outputs.reduced.values()
    ):
        window = window.in_unit(1.0)
    # The merge of a window of one call does the rest, in place: these accumulators become its sums.
    sums = Sums(Folding(window.outputs))
    sums.total = arrays.scalar(sum(map(arrays.counted, window.tally.weight)))
    sums.steps, sums.rejected = map(arrays.scalar, (window.tally.steps, window.rejected))
    has_any = (sums.steps > 0) is not False  # also where only a device knows
    sums.unit = arrays.scalar(window.unit) if has_any else None
    accumulators = window.accumulators
    if not (donate and has_any):
        accumulators = pytree.tree_map_only(torch.Tensor, torch.clone, [*accumulators])
    sums.of.update(enumerate(accumulators))
    reduction.propose(sums, dict(enumerate(map(largest, accumulators))))
    del accumulators
    reduction.merge()
    return Accumulation(
        window.outputs, [*sums.of.values()], sums.tally, sums.unit or 1.0, sums.rejected
    )


def own_parts(windows: Sequence[AccumulatorState], across: Across) -> list[AccumulatorState]:
    """The parts of a state's window that belong to this replica; without across= all, of several
    states.

    Raises FuncgaError if a part is missing, or is another replica's.
    """
    marks = [_mark(window) for window in windows]
    if across is None:
        return [*windows] if marks == [None] else _parts_of_all(windows, marks)
    [window], [mark], own = windows, marks, _own_mark(across)
    if mark not in (None, _WHOLE, own):
        raise _incomplete(marks)
    # The first replica goes on from the window of all; an empty one is the same for everybody.
    is_empty = not (int(window.tally.steps) or int(window.rejected))
    return [window] if mark == own or own[0] == 0 or is_empty else []


def _parts_of_all(
    windows: Sequence[AccumulatorState], marks: Sequence[tuple[int, int] | None]
) -> list[AccumulatorState]:
    """The parts that the states of all replicas have, in the order of these, on the devices of the
    first: each has saved its window on its own.
    """
    # A replica that has added nothing to the window still has what all began with. The first goes
    # on from that, so it is counted once, unless the part of the first has it.
    parts = dict(zip(marks, windows, strict=True))
    began_with, count = parts.pop(_WHOLE, None), len(windows)
    owners = [(rank, count) for rank in range(count)]
    if not {*parts} <= {*owners} or len(parts) + marks.count(_WHOLE) != count:
        raise _incomplete(marks)
    if began_with is not None:
        parts.setdefault(owners[0], began_with)
    first, *rest = [parts[owner] for owner in owners if owner in parts]
    moved = lambda one, other: one.to(other.device) if arrays.is_array(one) else one
    return [first, *(pytree.tree_map(moved, window, first) for window in rest)]


_WHOLE = (0, 0)


def _mark(window: AccumulatorState) -> tuple[int, int] | None:
    """(rank, count) of the replica whose part a window is; _WHOLE for the window of all, None of a
    state without replicas.
    """
    return None if isinstance(window.part, tuple) else tuple(window.part.tolist())


def _own_mark(across: Across) -> tuple[int, int]:
    """(rank, count) of this replica."""
    channel = replicas_of(across).channel
    return channel.rank, channel.count


def _incomplete(marks: Sequence[tuple[int, int] | None]) -> FuncgaError:
    return FuncgaError(
        "the state was saved in the middle of a window, as the part of replica (rank, number of "
        f"replicas) {marks}, (0, 0) for that of all, and None without across=: an update takes the "
        "state of every replica, each once, and a replica its own. Merge the states of all "
        "replicas, state = tx.merge(states), and load that one on every replica, whatever their "
        "number. Gather them when you save: torch.distributed.all_gather_object(states, state). "
        "Without across= save one state, tx.merge([state]): each is a window of its own."
    )


def as_part(
    windows: Sequence[AccumulatorState], across: Across, is_empty: bool
) -> AccumulatorState:
    """A window as this replica's part of a state; without across= the whole of all parts."""
    # Asked for also where nothing is folded, as across= may name no replicas.
    own = _WHOLE if across is None else _own_mark(across)
    part = _WHOLE if is_empty else own
    return windows[0]._replace(part=torch.tensor(part, dtype=torch.int32, device="cpu"))
