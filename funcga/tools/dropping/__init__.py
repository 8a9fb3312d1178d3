"""What is dropped of a window, by a test of its micro-batches: `drop=` and `drop_if=`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from funcga._accumulate import DropTest
from funcga._backend import Arrays, Backend
from funcga._backend.prefixes import mapped
from funcga._call import Memory
from funcga._fold import as_number, describe, kind
from funcga._fold.accumulator import Accumulation
from funcga._fold.outputs import Outputs
from funcga._tools import load
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.tools.finite import finite


@dataclass(frozen=True)
class Dropping:
    """What is dropped, a "microbatch", a whole "window" or None, and by which test; by default
    what is not finite. `part` gives what that looks at of an output: not the aux of a gradient
    function.
    """

    scope: str | None
    test: DropTest | None
    part: Callable[[Tree], Tree]

    def __post_init__(self) -> None:
        if self.scope not in (None, "microbatch", "window"):
            raise FuncgaError(
                f'drop is {self.scope!r}: write "microbatch" to leave out what is not finite, '
                '"window" to drop a window that has such a micro-batch, or None to pass it on.'
            )
        if self.test is not None and (self.scope is None or not callable(self.test)):
            raise FuncgaError(
                f'drop_if is {self.test!r} and drop is {self.scope!r}: write drop="microbatch" or '
                'drop="window", and a function of what is folded that says whether to drop it: '
                "drop_if=lambda value: norm(value) > 100."
            )

    @property
    def in_torch(self) -> Any:
        """What drops in torch."""
        return load("dropping.in_torch", "drop=")

    @property
    def in_jax(self) -> Any:
        """What drops in JAX."""
        return load("dropping.in_jax", "drop=")

    def tested(self, outputs: Outputs) -> list[int]:
        """The leaves of a step's output that have to be finite. Raises FuncgaError for a fold that
        cannot leave a micro-batch out.
        """
        # Observers collect a row for a dropped micro-batch, too.
        collected = [leaf_index for leaf_index in outputs.collected if leaf_index >= outputs.before]
        if collected:
            raise FuncgaError(
                f"the fold of {outputs.paths()[collected[0]]} collects rows, and with "
                f"drop={self.scope!r} nobody knows how many of them there will be. Fold it with "
                "funcga.mean() or funcga.sum(), or collect it by a step without drop=."
            )
        part = self.part(outputs.value_of(range(len(outputs.folds))))
        indices = outputs.backend.trees.flatten(part)[0]
        dtypes = [(leaf_index, outputs.dtypes[leaf_index]) for leaf_index in indices]
        return [k for k, dtype in dtypes if dtype is not None and kind(dtype)[0] in "fc"]

    def test_of(self, outputs: Outputs) -> Callable[[Sequence[Array], Scalar], bool | Array]:
        """Makes `keeps(leaves, weight)`: whether a micro-batch of these leaves is folded, as a bool
        or a 0-d array that the host does not see.

        One of weight 0 is kept where all that is tested is weighted: it adds nothing, not even a
        NaN, and is not looked at.
        """
        tested, arrays = self.tested(outputs), outputs.backend.arrays
        folds = [fold for fold in map(outputs.folds.__getitem__, tested) if fold is not None]
        are_weighted = all(fold.fold.plain.reducer.linear for fold in folds)

        def keeps(leaves: Sequence[Array], weight: Scalar) -> bool | Array:
            has_no_weight = are_weighted and weight == 0
            if has_no_weight is True:
                return True
            if self.test is None:
                looked_at = [leaves[leaf_index] for leaf_index in tested]
                keep = arrays.scalar(finite(looked_at, outputs.backend))
            else:
                keep = _kept(self.test(outputs.value_of(leaves)), arrays)
            if arrays.is_array(has_no_weight):
                answer = arrays.as_array(keep)
                keep = answer | arrays.as_array(has_no_weight, answer.dtype, answer)
            return keep

        return keeps

    # In `multi_steps`.

    def added(
        self, keep: bool | Array, window: Accumulation, leaves: Sequence[Array], weight: Scalar
    ) -> Accumulation:
        """The window with one more micro-batch if that is kept, else the same one, which counts it
        as rejected.
        """
        backend, without = window.outputs.backend, window._replace(rejected=window.rejected + 1)
        if keep is False:
            return without
        if backend.name == "torch":
            return self.in_torch.added(keep, window, leaves, weight)  # type: ignore[no-any-return]
        return selected(keep, window.add(leaves, weight), without, backend)  # type: ignore[no-any-return]

    def at_the_end(
        self, dropped: Any, steps: Scalar, rejected: Scalar, arrays: Arrays
    ) -> tuple[bool | Array, Any]:
        """(whether a window of `steps` folded and so many `rejected` micro-batches ends with an
        update, the counts with those of this window).
        """
        keep, integer = steps > 0, arrays.xp.int32
        if self.scope == "window":
            keep = keep & (rejected == 0)
        # Without an update the folded ones are dropped, too.
        is_lost = arrays.as_array(~arrays.as_array(keep), integer)
        microbatches = dropped.microbatches + rejected + is_lost * steps
        dropped = dropped._replace(microbatches=microbatches)
        if self.scope == "window":
            # An empty window, flushed inside of jit, does not count.
            is_filled = arrays.as_array(arrays.as_array(steps + rejected > 0), integer)
            dropped = dropped._replace(windows=dropped.windows + is_lost * is_filled)
        return arrays.scalar(keep) if arrays.is_array(keep) else keep, dropped


def _kept(drop: Scalar, arrays: Arrays) -> bool | Array:
    """Whether a micro-batch is kept, from the result of a test. Raises FuncgaError for anything but
    a bool.
    """
    if arrays.is_array(drop) and drop.shape == () and kind(drop.dtype) == "bool":
        return arrays.scalar(~drop)
    # It may be a NumPy bool, as np.isnan(float(loss)) is. Not by truth value: a loss is true
    # unless it is 0.
    if isinstance(as_number(drop), bool):
        return not drop
    raise FuncgaError(
        f"drop_if returned {describe(drop)}: it is asked of a whole micro-batch, for one "
        "bool, or a 0-d array of one. Compare a number, drop_if=lambda output: norm(output) > 100, "
        "and reduce bools by .any()."
    )


def selected(keep: Scalar, after: Tree, before: Tree, backend: Backend) -> Tree:
    """The tree `after` a micro-batch if that is kept, else the one `before`."""
    arrays = backend.arrays
    if not arrays.is_array(keep):
        return after if keep else before

    # `where`, as 0 * NaN is NaN, and what is not chosen may be NaN.
    def select(chosen: Array, otherwise: Array) -> Array:
        if not arrays.is_array(chosen):
            return chosen
        return arrays.xp.where(arrays.as_array(keep, keep.dtype, chosen), chosen, otherwise)

    return mapped(select, backend.trees, after, before)


def dropping(
    drop: str | None, drop_if: DropTest | None, memory: Memory, function: object
) -> Dropping:
    """What a step of this gradient function drops, or a `multi_steps` of this transform."""
    # Replicas compare the options.
    memory.options["drop="] = repr(drop)
    memory.options["drop_if="] = "None" if drop_if is None else "given"
    return Dropping(drop, drop_if, getattr(function, "without_aux", lambda output: output))
