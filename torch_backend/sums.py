"""Sums: how the accumulator of each leaf is added to, scaled, divided and emptied, in place
where memory is donated.
"""

from collections.abc import Iterator, Sequence

import torch

from funcga._fold import LeafFold, Tally
from funcga._types import Array, Reduced, Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.arrays import without_overlap
from torch_backend.dtensor import local
from torch_backend.engine import elementwise

donates = True  # a call may write to memory that it is given


def add(
    folds: Sequence[LeafFold | None],
    accumulators: Sequence[Reduced],
    leaves: Sequence[Array],
    weight: Scalar,
    donate: bool,
) -> tuple[list[Reduced], bool]:
    """The accumulators with one more value of this weight, and whether nobody else has their
    memory.
    """
    pure, added = arrays.in_transform(), [*accumulators]
    # A weight on a device may be 0, and then not even a NaN may be added: that takes a selection
    # leaf by leaf.
    factors: dict[str | None, float] = (
        {"plain": 1} if isinstance(weight, torch.Tensor) else {"plain": 1, "weighted": weight}
    )
    # Sums are added in one kernel for all leaves of a kind; every other fold is combined leaf by
    # leaf.
    groups: dict[str | None, list[int]] = {kind: [] for kind in factors}
    is_combined = False
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for leaf_index, (fold, accumulator, leaf) in enumerate(
            zip(folds, accumulators, leaves, strict=True)
        ):
            if fold is None:
                continue
            if _is_addend(accumulator, leaf) and fold.adds in factors and not pure:
                groups[fold.adds].append(leaf_index)
            else:
                is_combined = True
                added[leaf_index] = _combined(fold, accumulator, leaf, weight, pure, donate)
        for kind, group in groups.items():
            _add_group(added, group, leaves, factors[kind], donate)
    # Without donation two things may still be the caller's memory: what a monoid has returned of
    # its arguments, and a sum that nothing was added to.
    owned = not is_combined and all(factors[kind] for kind, group in groups.items() if group)
    return added, donate or owned


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


def _add_group(
    accumulators: list[Reduced],
    group: list[int],
    leaves: Sequence[Array],
    factor: float,
    donate: bool,
) -> None:
    """Puts the sums in the place of the accumulators of some leaves."""
    sums = [accumulators[leaf_index] for leaf_index in group]
    sums = [*add_scaled(sums, [leaves[leaf_index] for leaf_index in group], factor, donate)]
    for leaf_index, accumulator in zip(group, sums, strict=True):
        accumulators[leaf_index] = accumulator


def lifted(
    folds: Sequence[LeafFold | None], leaves: Sequence[Array], weight: Scalar
) -> list[Reduced]:
    """What one value of this weight contributes to the accumulator of each leaf."""
    pure = arrays.in_transform()
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        return [
            None if fold is None else fold.lift(leaf if pure else leaf.detach(), weight)
            for fold, leaf in zip(folds, leaves, strict=True)
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
    folds: Sequence[LeafFold | None], accumulators: Sequence[Reduced], tally: Tally, donate: bool
) -> list[Reduced]:
    """The normalised leaves, in memory of their own; in that of the sums if it is donated."""
    pure = arrays.in_transform()
    total = tally.weight[0]
    # Where the host knows the total weight, all means are divided in one kernel. The others are
    # normalised one by one.
    is_total_on_host = len(tally.weight) == 1 and isinstance(total, int | float) and not pure
    finished: list[Reduced] = [None] * len(accumulators)
    quotients = []
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for leaf_index, (fold, accumulator) in enumerate(zip(folds, accumulators, strict=True)):
            if fold is None:
                continue
            is_mean = is_total_on_host and fold.fold.normalizer.divides_by == "weight"
            if (
                is_mean
                and type(accumulator) is torch.Tensor
                and accumulator.dtype is fold.result_dtype
            ):
                quotients.append(leaf_index)
            else:
                finished[leaf_index] = fold.result(accumulator, tally)
        divided = (
            _divided([accumulators[leaf_index] for leaf_index in quotients], total, donate)
            if quotients
            else []
        )
    for leaf_index, quotient in zip(quotients, divided, strict=True):
        finished[leaf_index] = quotient
    return finished


def _divided(sums: list[torch.Tensor], total: float, donate: bool) -> Sequence[torch.Tensor]:
    """The sums divided by the total weight; zeros if nothing was folded."""
    if not total:
        return [torch.zeros_like(accumulator) for accumulator in sums]
    if donate:
        arrays.divide(sums, float(total))
        return sums
    quotients: tuple[torch.Tensor, ...] = torch._foreach_div(sums, float(total))
    return quotients


def scaled(leaves: Sequence[Array], factor: Scalar, donate: bool) -> list[Array]:
    """The leaves times a factor, in at least 32 bits; in the same memory if that is donated."""
    pure = arrays.in_transform()
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        wide = [
            leaf if leaf is None else leaf.to(arrays.accumulator_dtype(leaf.dtype))
            for leaf in leaves
        ]
        # In place an element that two leaves share would be multiplied twice.
        if donate and not pure:
            wide = without_overlap(wide)
        multiplicands = [leaf for leaf in wide if leaf is not None]
        if donate and not pure and multiplicands:
            torch._foreach_mul_(multiplicands, factor)
            return wide
        products = iter(torch._foreach_mul(multiplicands, factor) if multiplicands else ())
        return [leaf if leaf is None else next(products) for leaf in wide]


def emptied(
    folds: Sequence[LeafFold | None], accumulators: Sequence[Reduced], donate: bool, taken: Tree
) -> list[Reduced]:
    """The accumulators when nothing is folded; in the same memory if that is donated and not
    taken.
    """
    pure = arrays.in_transform()
    kept = {*storages(taken)} if donate and not pure else set()
    empty: list[Reduced] = [None] * len(accumulators)
    zeroed = []
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for leaf_index, (fold, accumulator) in enumerate(zip(folds, accumulators, strict=True)):
            if fold is None:
                continue
            is_sum = (
                fold.fold.reducer.monoid.collective == "sum" and type(accumulator) is torch.Tensor
            )
            if (
                donate
                and not pure
                and is_sum
                and (not kept or kept.isdisjoint(storages(accumulator)))
            ):
                zeroed.append(accumulator)
                empty[leaf_index] = accumulator
            else:
                empty[leaf_index] = fold.fold.reducer.monoid.identity(torch, accumulator)
        if zeroed:
            torch._foreach_zero_(zeroed)
    return empty


def storages(tree: Tree) -> Iterator[int]:
    """The addresses of the memory of the dense tensors in a tree."""
    # The usual containers are walked here, which is much faster than flattening them.
    if isinstance(tree, torch.Tensor):
        shard: torch.Tensor = tree if type(tree) is torch.Tensor else local(tree)
        if shard.layout is torch.strided:
            yield shard.untyped_storage().data_ptr()
    elif isinstance(tree, dict | tuple | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            if child is not None:
                yield from storages(child)
    elif tree is not None and trees.children(tree) is not None:
        for leaf in trees.flatten(tree)[0]:
            yield from storages(leaf)
