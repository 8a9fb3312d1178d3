"""`drop=` and `drop_if=` of a step: which of its micro-batches are folded, and which are left
out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from funcga._fold.dropping import Dropping
from funcga._fold.outputs import Outputs
from funcga._reproducible import plain
from funcga._types import Array, GradFn, Scalar, Tree
from funcga.errors import FuncgaError

DropScope = Literal["microbatch", "window"]
DropTest = Callable[[Tree], object]


def read_dropping(
    drop: DropScope | None, drop_if: DropTest | None, grad_fn: GradFn
) -> "DroppingStep | None":
    """What a step of grad_fn drops; None if it drops nothing. Raises FuncgaError for no scope,
    or no test.
    """
    dropping = DroppingStep(drop, drop_if, getattr(grad_fn, "without_aux", _whole))
    return None if drop is None else dropping


def _whole(output: Tree) -> Tree:
    return output


class Tested(NamedTuple):
    """The leaves of an output that a test looks at, and whether a micro-batch of weight 0 adds
    nothing to them.
    """

    leaf_indices: list[int]
    are_weighted: bool


@dataclass(frozen=True)
class DroppingStep(Dropping):
    """What a step drops. `part` is what of an output has to be finite: not the aux of a gradient
    function.
    """

    part: Callable[[Tree], Tree] = _whole

    def tested(self, outputs: Outputs) -> Tested:
        """What is looked at in such outputs. Raises FuncgaError for a fold that cannot leave a
        micro-batch out.
        """
        # What observers collect has a row for what is dropped, too.
        collected = [leaf_index for leaf_index in outputs.collected if leaf_index >= outputs.before]
        if collected:
            raise FuncgaError(
                f"the fold of {outputs.paths()[collected[0]]} collects rows, and with "
                f"drop={self.scope!r} nobody knows how many of them there will be. Fold it with "
                "funcga.mean() or funcga.sum(), or collect it by a step without drop=."
            )
        kind = outputs.backend.arrays.kind
        looked_at = outputs.backend.trees.flatten(
            self.part(outputs.value_of(range(len(outputs.folds))))
        )[0]
        tested = [
            leaf_index
            for leaf_index in looked_at
            if outputs.dtypes[leaf_index] is not None
            and kind(outputs.dtypes[leaf_index]) in ("float", "complex")
        ]
        folds = [outputs.folds[leaf_index] for leaf_index in tested]
        return Tested(
            tested, all(fold is not None and plain(fold.fold).reducer.linear for fold in folds)
        )

    def keeps(
        self, outputs: Outputs, tested: Tested, leaves: Sequence[Array], weight: Scalar
    ) -> bool | Array:
        """Whether a micro-batch is folded: a bool, or a 0-d array of one that the host does not
        see.
        """
        backend = outputs.backend
        is_on_host = not backend.arrays.is_array(weight)
        # What weighs nothing adds nothing, not even a NaN, as where all is masked.
        if tested.are_weighted and is_on_host and not weight:
            return True
        value = None if self.test is None else outputs.value_of(leaves)
        keep = self.is_kept(
            value, [leaves[leaf_index] for leaf_index in tested.leaf_indices], backend
        )
        if tested.are_weighted and not is_on_host:
            keep = backend.arrays.as_array(keep)
            keep = backend.arrays.xp.logical_or(
                keep, backend.arrays.cast(weight == 0, keep.dtype, keep)
            )
        return keep
