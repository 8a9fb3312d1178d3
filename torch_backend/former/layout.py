"""What becomes of each leaf of an output: decided once, the same for every window with outputs of
one kind.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold import LeafFold
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction
from funcga._types import Structure, Tree
from torch_backend import arrays, trees
from torch_backend.dtensor import is_dtensor
from torch_backend.former.inputs import Leaves
from torch_backend.sums import added_as


class Added(NamedTuple):
    """A sum that autograd adds to: where its leaf stands among those of the backward pass, and how
    it is added.

    `plain`: added whatever the weight. `wide`: the dtype of the sum where the gradients have
    another one, otherwise None.
    """

    position: int
    leaf_index: int
    plain: bool
    wide: torch.dtype | None


class Quotients(NamedTuple):
    """Sums that are divided by one number in the end: by the total weight, or by the number of
    micro-batches.
    """

    indices: list[int]
    by: str  # "weight" or "steps"
    weighted: bool  # whether the sums are in units of weight


class InBackward:
    """The leaves that a backward pass leaves gradients in, by their leaf indices in the output;
    None for a leaf that is None.

    `scaled`: whether the loss comes multiplied by a scale.
    """

    def __init__(self, layout: "Layout", leaves: Mapping[int, torch.Tensor | None], scaled: bool):
        self.leaf_indices = [*leaves]
        self.added: list[Added] = []
        self.dtensors: list[int] = []  # sums that are added on their mesh, and not by autograd
        self.not_sums: list[int] = []  # folds that are no sums
        present = {leaf_index: leaf for leaf_index, leaf in leaves.items() if leaf is not None}
        self.present = [*present]
        for position, (leaf_index, leaf) in enumerate(present.items()):
            self._sort(layout, position, leaf_index, leaf)
        self.added_sums = [added.leaf_index for added in self.added]
        self.widens = any(added.wide is not None for added in self.added)
        self.sums = {*self.dtensors, *self.added_sums}
        # The cotangent can be a weight only if every gradient is to be multiplied by that weight.
        # In float16, and in dtypes of 8 bits, a gradient times a weight overflows too early, and so
        # it does if it has a scale already.
        kinds = {layout.kinds[leaf_index] for leaf_index in self.sums}
        self.only_weighted = "plain" not in kinds and not self.not_sums
        is_narrow = any(
            leaf.dtype.itemsize == 1 or leaf.dtype is torch.float16 for leaf in present.values()
        )
        is_kept_apart = self.dtensors or scaled or is_narrow
        self.takes_weights = self.only_weighted and not is_kept_apart

    def _sort(self, layout: "Layout", position: int, leaf_index: int, leaf: torch.Tensor) -> None:
        """Notes who adds the gradient of a leaf, which stands at this position among those that
        are there.
        """
        kind = layout.kinds[leaf_index]
        if kind is None:
            self.not_sums.append(leaf_index)
        elif is_dtensor(leaf):
            self.dtensors.append(leaf_index)
        else:
            dtype = layout.folds[leaf_index].accumulator_dtype
            wide = None if dtype == leaf.dtype else dtype
            self.added.append(Added(position, leaf_index, kind == "plain", wide))


class Rest:
    """The other leaves, which `Buffers.add` adds: `indices` are those that are reduced.

    `structure` is theirs in an output that has leaves of a backward pass, too; `head` the Outputs
    of them alone, to check values by.
    """

    def __init__(self, layout: "Layout", structure: Structure):
        outputs, in_backward = layout.outputs, {*layout.backward.leaf_indices}
        self.leaf_indices = [
            leaf_index for leaf_index in range(len(outputs.folds)) if leaf_index not in in_backward
        ]
        self.head = outputs if structure is None else outputs.part(self.leaf_indices, structure)
        self.indices = [
            leaf_index for leaf_index in outputs.reduced if leaf_index not in in_backward
        ]
        self.weighted, self.plain, self.others = (
            [leaf_index for leaf_index in self.indices if layout.kinds[leaf_index] == kind]
            for kind in ("weighted", "plain", None)
        )
        self.collected = [
            leaf_index for leaf_index in outputs.collected if leaf_index not in in_backward
        ]
        # In the common case the loss is the only other leaf, beside those of observers.
        is_last = self.leaf_indices[outputs.before :] == [outputs.before]
        is_sum = outputs.before in (*self.weighted, *self.plain)
        self.is_loss_alone = is_last and is_sum and not outputs.threads


class Layout:
    """How each leaf of an output is folded, and who adds it: sums in place, every other fold leaf
    by leaf.

    `leaves` are what a backward pass leaves gradients in, by their leaf indices in the output. All
    other leaves of the output are the rest, whose `structure` in it is to be given where there are
    both. `scaled`: whether the loss comes multiplied by a scale. `pure`: whether nothing may be
    written to, so that what is computed can be differentiated and vmapped.
    """

    def __init__(
        self,
        outputs: Outputs,
        leaves: Mapping[int, torch.Tensor | None] | None = None,
        structure: Structure = None,
        scaled: bool = False,
        pure: bool | None = None,
    ):
        self.outputs = outputs
        # Of the leaves that are reduced, by their leaf indices.
        self.folds = dict(zip(outputs.reduced, outputs.reduced_folds, strict=True))
        self.pure = arrays.in_transform() if pure is None else pure
        # How each leaf is added in place: "weighted", "plain", or None if it is not.
        self.kinds = [
            None
            if self.pure or leaf_index not in self.folds
            else added_as(self.folds[leaf_index], dtype)
            for leaf_index, dtype in enumerate(outputs.dtypes)
        ]
        self.weighted, self.plain = (
            [leaf_index for leaf_index, kind in enumerate(self.kinds) if kind == wanted]
            for wanted in ("weighted", "plain")
        )
        self.backward = InBackward(self, {} if leaves is None else leaves, scaled)
        self.rest = Rest(self, structure)
        self.quotients = [
            *_quotients(self.folds, self.weighted, weighted=True),
            *_quotients(self.folds, self.plain, weighted=False),
        ]
        divided = {*chain.from_iterable(group.indices for group in self.quotients)}
        # All other leaves. Of these the weighted sums are taken out of their unit.
        self.undivided = sorted({*self.folds} - divided)
        self.undivided_weighted = sorted({*self.weighted} - divided)
        self.cast = [
            leaf_index
            for leaf_index, fold in self.folds.items()
            if fold.accumulator_dtype != fold.result_dtype
        ]


def _quotients(
    folds: Mapping[int, LeafFold], indices: Sequence[int], weighted: bool
) -> list[Quotients]:
    """These sums by what divides them, as one kernel divides a whole group."""
    groups: dict[str, list[int]] = {"weight": [], "steps": []}
    for index in indices:
        by = folds[index].fold.normalizer.divides_by
        if by is not None:
            groups[by].append(index)
    return [Quotients(group, by, weighted) for by, group in groups.items() if group]


# What the fold of a leaf depends on. Only a DTensor has placements.
_KINDS: list[Callable[[Any], object]] = [
    operator.attrgetter(name) for name in ("shape", "dtype", "layout")
]


def _kind_of(leaf: torch.Tensor | None) -> object:
    return (
        None
        if leaf is None
        else ([look(leaf) for look in _KINDS], getattr(leaf, "placements", None))
    )


_KINDS_OF_OTHERS: list[Callable[[Any], object]] = [_kind_of]


class StepCache:
    """What a step keeps from one window to the next: its last layout, for outputs of a `key`; and
    which arguments are differentiated, by how many there are.
    """

    def __init__(self) -> None:
        self.indices_of: dict[int, tuple[int, ...]] = {}
        self.key: object = None
        self.kinds: list[list[object]] = []  # of the leaves, in columns
        self.layout: Layout | None = None

    def layout_of(
        self,
        program: Program,
        arguments: Arguments,
        gradient: GradientFunction,
        value: tuple[torch.Tensor, Tree],
        leaves: Mapping[int, Leaves],
        whole: Collection[int],
        check: Callable[[Outputs], None],
    ) -> Layout:
        """The layout of outputs of a `value`, the loss and its aux, and gradients like these
        leaves.

        That of the last window if it fits. The backward pass adds the gradients of the arguments
        that are `whole`. `check` raises FuncgaError for Outputs that cannot be.
        """
        loss = value[0]
        in_window = [leaf for argnum in leaves if argnum in whole for leaf in leaves[argnum].leaves]
        key, kinds = None, list[list[object]]()
        if len(whole) == len(leaves) and not (gradient.has_aux or arguments.state):
            # Then the loss and the leaves alone tell what the output is.
            is_plain = {*map(type, in_window)} <= {torch.Tensor, nn.Parameter}
            looks = _KINDS if is_plain else _KINDS_OF_OTHERS
            key = (
                type(loss),
                loss.dtype,
                [argument.structure for argument in leaves.values()],
                len(in_window),
                is_plain,
            )
            # One by one: a list of shapes would be thousands of objects for the garbage collector
            # to go through.
            if self.layout is not None and self.key == key:
                columns = zip(looks, self.kinds, strict=True)
                if all(
                    all(map(operator.eq, known, map(look, in_window))) for look, known in columns
                ):
                    return self.layout
            kinds = [[*map(look, in_window)] for look in looks]
        # Before the first backward pass there are no gradients. The leaves stand in for them: they
        # are alike.
        like = gradient.compose(*value, [argument.tree for argument in leaves.values()])
        outputs, output_leaves = program.bind(like, arguments)
        check(outputs)
        in_backward, rest = _parted(gradient, leaves, whole, len(output_leaves))
        structure = trees.flatten(gradient.compose(*value, rest))[1]
        self.layout = Layout(outputs, in_backward, structure, gradient.scaled, pure=False)
        self.key, self.kinds = key, kinds
        return self.layout


def _parted(
    gradient: GradientFunction, leaves: Mapping[int, Leaves], whole: Collection[int], count: int
) -> tuple[dict[int, torch.Tensor | None], list[Tree]]:
    """(the leaves in the backward pass by their leaf indices, the trees of the other arguments), in
    an output of `count` leaves.

    The gradients follow the value, argument by argument; where there is none, they come first.
    """
    start = gradient.leaves_before
    if gradient.with_value:
        start = count - sum(len(argument.leaves) for argument in leaves.values())
    in_backward: dict[int, torch.Tensor | None] = {}
    for argnum, argument in leaves.items():
        if argnum in whole:
            in_backward |= enumerate(argument.leaves, start)
        start += len(argument.leaves)
    return in_backward, [() if argnum in whole else leaves[argnum].tree for argnum in leaves]
