"""Sums: how the accumulator of each leaf is added to, scaled, divided and emptied, in place
where memory is donated.
"""

from collections.abc import Sequence

import torch

from funcga._fold import LeafFold, Tally
from funcga._types import Array, Reduced, Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.arrays import without_overlap
from torch_backend.dtensor import as_dtensor, local, local_tensors
from torch_backend.engine import elementwise

donates = True  # a call may write to memory that it is given


def add(
    folds: Sequence[LeafFold | None],
    accumulators: Sequence[Reduced],
    leaves: Sequence[Array],
    weights: Sequence[Scalar],
    donate: bool,
) -> tuple[list[Reduced], bool]:
    """(the accumulators with one more value, whether they share memory with nothing else)."""
    pure, added = arrays.in_transform(), [*accumulators]
    # Sums are added in one kernel for all leaves of a factor; every other fold is combined leaf by
    # leaf. So is a sum by a weight on a device: that may be 0, and then not even a NaN may be
    # added, which takes a selection.
    groups: dict[float, list[int]] = {}
    is_combined = False
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for leaf_index, (fold, accumulator, leaf, weight) in enumerate(
            zip(folds, accumulators, leaves, weights, strict=True)
        ):
            if fold is None:
                continue
            factor = 1 if fold.adds == "plain" else weight
            if (
                fold.adds is None
                or pure
                or isinstance(factor, torch.Tensor)
                or not _is_addend(accumulator, leaf)
            ):
                is_combined = True
                added[leaf_index] = _combined(fold, accumulator, leaf, weight, pure, donate)
            else:
                groups.setdefault(factor, []).append(leaf_index)
        for factor, group in groups.items():
            sums = [accumulators[leaf_index] for leaf_index in group]
            more = [leaves[leaf_index] for leaf_index in group]
            for leaf_index, total in zip(
                group, add_scaled(sums, more, factor, donate), strict=True
            ):
                added[leaf_index] = total
    # Without donation two things may still be the caller's memory: what a monoid has returned of
    # its arguments, and a sum that nothing was added to.
    return added, donate or (not is_combined and 0 not in groups)


def _combined(
    fold: LeafFold,
    accumulator: Reduced,
    leaf: torch.Tensor,
    weight: Scalar,
    pure: bool,
    donate: bool,
) -> Reduced:
    """The accumulator with one more value; in its memory if that is donated and the fold can."""
    if pure:
        return fold.combine(accumulator, fold.lift(leaf, weight))
    if donate and elementwise.fits(fold, leaf):
        elementwise.combine(fold, accumulator, leaf.detach(), weight)
        return accumulator
    return fold.combine(accumulator, fold.lift(leaf.detach(), weight))


def lifted(
    folds: Sequence[LeafFold | None], leaves: Sequence[Array], weights: Sequence[Scalar]
) -> list[Reduced]:
    """The value of each leaf as it is combined with the accumulator."""
    pure = arrays.in_transform()
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        return [
            None if fold is None else fold.lift(leaf if pure else leaf.detach(), weight)
            for fold, leaf, weight in zip(folds, leaves, weights, strict=True)
        ]


def _is_addend(accumulator: Reduced, leaf: torch.Tensor) -> bool:
    """Whether a leaf can be added to this accumulator by torch itself, without another dtype or
    layout.
    """
    if type(accumulator) is type(leaf) is torch.Tensor and leaf.layout is torch.strided:
        return (
            accumulator.dtype is leaf.dtype
            or torch.promote_types(accumulator.dtype, leaf.dtype) is accumulator.dtype
        )
    return False


def add_scaled(
    accumulators: list[torch.Tensor], leaves: list[torch.Tensor], factor: float, donate: bool
) -> Sequence[torch.Tensor]:
    """The sums with `factor * leaf` added to each."""
    if not accumulators or not factor:  # a weight of 0 adds nothing, not even a NaN
        return accumulators
    if donate:
        torch._foreach_add_(accumulators, leaves, alpha=factor)
        return accumulators
    more: tuple[torch.Tensor, ...] = torch._foreach_add(accumulators, leaves, alpha=factor)
    return more


def finish(
    folds: Sequence[LeafFold | None],
    accumulators: Sequence[Reduced],
    tallies: Sequence[Tally],
    donate: bool,
) -> list[Reduced]:
    """The normalised leaves, in memory of their own, or in that of donated sums."""
    pure = arrays.in_transform()
    finished: list[Reduced] = [None] * len(folds)
    # Where the host knows the total weight, all means are divided in one kernel. The others are
    # normalised one by one.
    groups: dict[float, list[int]] = {}
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for leaf_index, (fold, accumulator, tally) in enumerate(
            zip(folds, accumulators, tallies, strict=True)
        ):
            if fold is None:
                continue
            total = tally.weight[0]
            if (
                isinstance(total, float)
                and not pure
                and fold.fold.normalizer.divides_by == "weight"
                and type(accumulator) is torch.Tensor
                and accumulator.dtype is fold.result_dtype
            ):
                groups.setdefault(total, []).append(leaf_index)
            else:
                finished[leaf_index] = fold.result(accumulator, tally)
        for total, group in groups.items():
            quotients = [accumulators[leaf_index] for leaf_index in group]
            if donate:
                arrays.divide(quotients, total)
            elif total:
                quotients = [*torch._foreach_div(quotients, total)]
            else:
                quotients = [*map(torch.zeros_like, quotients)]
            for leaf_index, quotient in zip(group, quotients, strict=True):
                finished[leaf_index] = quotient
    return finished


def scaled(leaves: Sequence[Array], factor: Scalar, donate: bool) -> list[Array]:
    """The leaves times a factor; in the same memory if that is donated."""
    pure = arrays.in_transform()
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        donate = donate and not pure
        # In place an element that two leaves share would be multiplied twice.
        separate = without_overlap(leaves) if donate else [*leaves]
        multiplicands = local_tensors([leaf for leaf in separate if leaf is not None])
        if not multiplicands:
            return separate
        if isinstance(factor, torch.Tensor):  # of the device of each leaf, and under vmap
            multiply = torch.Tensor.mul_ if donate else torch.mul
            factors = [arrays.cast(factor, leaf.dtype, leaf) for leaf in multiplicands]
            products = [*map(multiply, multiplicands, factors)]
        elif donate:
            torch._foreach_mul_(multiplicands, factor)
        else:
            products = [*torch._foreach_mul(multiplicands, factor)]
        if donate:
            return separate
        rest = iter(products)
        return [leaf if leaf is None else as_dtensor(next(rest), leaf) for leaf in separate]


def emptied(
    folds: Sequence[LeafFold | None], accumulators: Sequence[Reduced], donate: bool, in_use: Tree
) -> list[Reduced]:
    """The accumulators of an empty window; in the same memory if that is donated and not in use."""
    pure = arrays.in_transform()
    in_place = donate and not pure
    kept = storages(in_use) if in_place else set()
    empty: list[Reduced] = [None] * len(accumulators)
    zeroed = []
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for leaf_index, (fold, accumulator) in enumerate(zip(folds, accumulators, strict=True)):
            if fold is None:
                continue
            monoid = fold.fold.reducer.monoid
            is_sum = monoid.collective == "sum" and type(accumulator) is torch.Tensor
            if in_place and is_sum and kept.isdisjoint(storages(accumulator)):
                zeroed.append(accumulator)
                empty[leaf_index] = accumulator
            else:
                empty[leaf_index] = monoid.identity(torch, accumulator)
        if zeroed:
            torch._foreach_zero_(zeroed)
    return empty


def storages(tree: Tree) -> set[int]:
    """The addresses of the memory of the dense tensors in a tree."""
    addresses = set()
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        # The usual containers are walked here, which is much faster than flattening them.
        if isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, tuple | list):
            nodes += node
        elif isinstance(node, torch.Tensor):
            shard: torch.Tensor = node if type(node) is torch.Tensor else local(node)
            if shard.layout is torch.strided:
                addresses.add(shard.untyped_storage().data_ptr())
        elif node is not None and trees.children(node) is not None:
            nodes += trees.flatten(node)[0]
    return addresses
