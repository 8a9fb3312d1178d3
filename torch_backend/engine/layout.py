"""What becomes of each leaf of an output: decided once, the same for every window with outputs of one kind.

Two indices: a `leaf_index` counts all leaves of grad_fn's output, an `index` only those that are reduced.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from funcga._fold.outputs import Outputs
from funcga._types import Structure
from torch_backend import arrays
from torch_backend.dtensor import is_dtensor


class Added(NamedTuple):
    """A sum that autograd adds to: where its leaf stands among those of the backward pass, and how it is added.

    `sum_index`: its index among what is reduced. `plain`: added whatever the weight. `wide`: the dtype of the sum where
    the gradients have another one, otherwise None.
    """

    position: int
    leaf_index: int
    sum_index: int
    plain: bool
    wide: torch.dtype | None


class Quotients(NamedTuple):
    """Sums that are divided by one number in the end: by the total weight, or by the number of micro-batches."""

    indices: list[int]
    by: str  # "weight" or "steps"
    weighted: bool  # whether the sums are in units of weight


class Layout:
    """How each leaf of an output is folded, and who adds it: sums in place, every other fold leaf by leaf.

    `leaves` are what a backward pass leaves gradients in, by their leaf indices in the output; None for a leaf that is
    None. All other leaves of the output are the rest, whose `structure` in it is to be given where there are both.
    `scaled`: whether the loss comes multiplied by a scale. `pure`: whether nothing may be written to, so that what is
    computed can be differentiated and vmapped.
    """

    def __init__(
        self,
        outputs: Outputs,
        leaves: Mapping[int, torch.Tensor | None] | None = None,
        structure: Structure = None,
        scaled: bool = False,
        pure: bool | None = None,
    ):
        self.outputs, self.folds = outputs, outputs.reduced_folds
        self.pure = arrays.in_transform() if pure is None else pure
        self.index_of = {leaf_index: index for index, leaf_index in enumerate(outputs.reduced)}
        # How each reduced leaf is added in place: "weighted", "plain", or None if it is not.
        self.kinds = [None if self.pure else _kind(outputs, leaf_index) for leaf_index in outputs.reduced]
        self.weighted = [index for index, kind in enumerate(self.kinds) if kind == "weighted"]
        self.plain = [index for index, kind in enumerate(self.kinds) if kind == "plain"]
        self._plan_backward({} if leaves is None else leaves, scaled)
        self._plan_rest(structure)
        self._plan_end()

    def _plan_backward(self, leaves: Mapping[int, torch.Tensor | None], scaled: bool) -> None:
        """Sorts the leaves that the backward pass adds. All but `added` are known by their leaf indices."""
        self.in_backward = [*leaves]
        self.added: list[Added] = []
        self.dtensors: list[int] = []  # sums that are added on their mesh, and not by autograd
        self.others: list[int] = []  # folds that are no sums
        present = {leaf_index: leaf for leaf_index, leaf in leaves.items() if leaf is not None}
        for position, (leaf_index, leaf) in enumerate(present.items()):
            index = self.index_of.get(leaf_index)
            kind = None if index is None else self.kinds[index]
            if index is None or kind is None:
                self.others.append(leaf_index)
            elif is_dtensor(leaf):
                self.dtensors.append(leaf_index)
            else:
                dtype = self.folds[index].accumulator_dtype
                wide = None if dtype == leaf.dtype else dtype
                self.added.append(Added(position, leaf_index, index, kind == "plain", wide))
        self.sums_in_backward = {*self.dtensors, *(added.leaf_index for added in self.added)}
        kinds = {self.kinds[self.index_of[leaf_index]] for leaf_index in self.sums_in_backward}
        # The cotangent can be a weight only if every gradient is to be multiplied by that weight. In float16, and in
        # dtypes of 8 bits, a gradient times a weight overflows too early, and so it does if it has a scale already.
        self.only_weighted = "plain" not in kinds and not self.others
        narrow = {leaf.dtype for leaf in present.values() if leaf.dtype.itemsize == 1 or leaf.dtype is torch.float16}
        self.takes_seeds = self.only_weighted and not (self.dtensors or scaled or narrow)

    def _plan_rest(self, structure: Structure) -> None:
        """Sorts the leaves that `Buffers.add` adds, by their indices in `Buffers.reduced`."""
        in_backward = {*self.in_backward}
        # All leaves of the rest, by their leaf indices, and the Outputs of them alone, to check values by.
        leaf_indices = range(len(self.outputs.folds))
        self.rest_leaves = [leaf_index for leaf_index in leaf_indices if leaf_index not in in_backward]
        self.head = self.outputs if structure is None else self.outputs.part(self.rest_leaves, structure)
        self.rest = [index for leaf_index, index in self.index_of.items() if leaf_index not in in_backward]
        self.rest_weighted = [index for index in self.rest if self.kinds[index] == "weighted"]
        self.rest_plain = [index for index in self.rest if self.kinds[index] == "plain"]
        self.rest_others = [index for index in self.rest if self.kinds[index] is None]
        self.rest_collected = [leaf_index for leaf_index in self.outputs.collected if leaf_index not in in_backward]
        # Usually a weighted sum is all the rest: that of the loss.
        self.is_loss_alone = self.rest_leaves == [0] and self.rest_weighted == [0] and not self.outputs.threads

    def _plan_end(self) -> None:
        """Groups the sums by what divides them, as one kernel divides a whole group; and the results that are cast."""
        self.quotients: list[Quotients] = []
        for summed, weighted in ((self.weighted, True), (self.plain, False)):
            for by in ("weight", "steps"):
                indices = [index for index in summed if self.folds[index].fold.normalizer.divides_by == by]
                if indices:
                    self.quotients.append(Quotients(indices, by, weighted))
        self.cast = [index for index, fold in enumerate(self.folds) if fold.accumulator_dtype != fold.result_dtype]


def _kind(outputs: Outputs, leaf_index: int) -> Literal["weighted", "plain"] | None:
    """How a reduced leaf is added in place; None if its fold is no sum, or its sum in a dtype of another kind."""
    fold, dtype = outputs.folds[leaf_index], outputs.dtypes[leaf_index]
    assert fold is not None
    is_half = dtype in (torch.bfloat16, torch.float16) and fold.accumulator_dtype.is_floating_point
    return fold.adds if is_half or dtype == fold.accumulator_dtype else None
