"""Sums: the accumulators of an output, and how they are added to, scaled, divided and emptied; in
place where that is allowed.

What funcga's mathematics says leaf by leaf is one kernel here for all leaves that are treated
alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from funcga._fold import LeafFold, Tally
from funcga._types import Array, Reduced, Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.arrays import without_overlap
from torch_backend.dtensor import as_dtensor, local, local_tensors

# The values that are added, by the indices of their leaves in the output.
Values = Mapping[int, torch.Tensor] | Sequence[torch.Tensor]


@dataclass(eq=False)
class Sums:
    """The accumulator of each leaf in a state between calls.

    `folds` are those of the leaves that are reduced, by leaf index. `accumulators` has None for one
    that is not reduced. `in_place`: whether the accumulators may be written to; otherwise new ones
    take their place.
    """

    folds: Mapping[int, LeafFold]
    accumulators: list[Reduced]
    in_place: bool = True
    # A weight that only a device knows, and for each device and dtype that it was asked for: the
    # weight, whether it is not 0, and a 0.
    factors_of: torch.Tensor | None = field(default=None, init=False)
    factors: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, init=False
    )

    def add(self, leaf_indices: Sequence[int], values: Values, factor: float) -> None:
        """Adds factor * value to each of these sums, which are dense. A factor of 0 adds nothing,
        not even a NaN.
        """
        if not factor:
            return
        accumulators = [self.accumulators[leaf_index] for leaf_index in leaf_indices]
        addends = [values[leaf_index] for leaf_index in leaf_indices]
        if self.in_place:
            torch._foreach_add_(accumulators, addends, alpha=factor)
            return
        totals = torch._foreach_add(accumulators, addends, alpha=factor)
        for leaf_index, total in zip(leaf_indices, totals, strict=True):
            self.accumulators[leaf_index] = total

    def add_masked(self, leaf_index: int, value: torch.Tensor, weight: torch.Tensor) -> None:
        """Adds weight * value to a dense sum, for a weight on a device."""
        accumulator, dtype = self.accumulators[leaf_index], self.folds[leaf_index].accumulator_dtype
        factor, counts, zero = self._factor(weight, value.device, dtype)
        # `where` selects: of a weight of 0 not even a NaN is added.
        more = torch.where(counts, value.to(dtype), zero)
        if self.in_place:
            accumulator.addcmul_(more, factor)
        else:  # the sum may be the caller's
            self.add([leaf_index], {leaf_index: more * factor}, 1)

    def _factor(
        self, weight: torch.Tensor, *kind: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weight on a device and in a dtype, whether it is not 0, and a 0 to select."""
        if weight is not self.factors_of:
            self.factors_of, self.factors = weight, {}
        if kind not in self.factors:
            here = weight.to(kind[0])
            factor = here.to(kind[1])
            self.factors[kind] = factor, here != 0, torch.zeros_like(factor)
        return self.factors[kind]

    def combine(self, leaf_index: int, value: torch.Tensor, weight: Scalar) -> None:
        """Folds a value into a leaf whose fold is no sum, or which cannot be added by torch."""
        fold, before = self.folds[leaf_index], self.accumulators[leaf_index]
        combined = fold.combine(before, fold.lift(value, weight))
        # A monoid of the user's may return its argument, whose memory belongs to grad_fn.
        self.accumulators[leaf_index] = combined.clone() if combined is value else combined


def added_as(fold: LeafFold, dtype: torch.dtype) -> Literal["weighted", "plain"] | None:
    """How values of this dtype are added to the sum of a fold by torch; None if they are combined
    by the fold.
    """
    if dtype == fold.accumulator_dtype:
        return fold.adds
    is_half = dtype in (torch.bfloat16, torch.float16) and fold.accumulator_dtype.is_floating_point
    return fold.adds if is_half else None


# --- what a state between calls is changed by: the verbs of funcga's `Sums` protocol

donates = True  # a call may write to memory that it is given


def add(
    folds: Sequence[LeafFold | None],
    accumulators: Sequence[Reduced],
    leaves: Sequence[Array],
    weights: Sequence[Scalar],
    donate: bool,
) -> tuple[list[Reduced], bool]:
    """(the accumulators with one more value, whether they share memory with nothing else)."""
    pure = arrays.in_transform()
    dense = None if pure else (torch.Tensor, torch.Tensor, torch.strided)
    bound = {leaf_index: fold for leaf_index, fold in enumerate(folds) if fold is not None}
    sums = Sums(bound, [*accumulators], donate and not pure)
    groups: dict[float, list[int]] = {}  # sums by the factor that they are added with
    is_combined = False
    with torch.set_grad_enabled(pure and torch.is_grad_enabled()):
        for leaf_index, fold in bound.items():
            value, weight = leaves[leaf_index], weights[leaf_index]
            # Only a dense tensor is added to its sum by torch.
            kinds = type(value), type(accumulators[leaf_index]), value.layout
            how = added_as(fold, value.dtype) if kinds == dense else None
            factor = 1 if how == "plain" else weight
            if how is None:
                is_combined = True
                sums.combine(leaf_index, value if pure else value.detach(), weight)
            elif isinstance(factor, torch.Tensor):
                sums.add_masked(leaf_index, value, factor)
            else:
                groups.setdefault(factor, []).append(leaf_index)
        for factor, group in groups.items():
            sums.add(group, leaves, factor)
    # Without donation two things may still be the caller's memory: what a monoid has returned of
    # its arguments, and a sum that nothing was added to.
    return sums.accumulators, donate or not (is_combined or 0 in groups)


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
