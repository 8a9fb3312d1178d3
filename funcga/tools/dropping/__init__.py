"""What is dropped of a window, by a test of its micro-batches: `drop=` and `drop_if=`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from funcga._accumulate import DropTest
from funcga._backend import Arrays, Backend
from funcga._call import Memory, Program
from funcga._fold import LeafFold, as_number
from funcga._fold.accumulator import Accumulation
from funcga._fold.outputs import Outputs
from funcga._tools import load
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.tools.finite import finite


@dataclass(frozen=True)
class Dropping:
    """What is dropped, a "microbatch", a whole "window" or None, and by which test; by default
    what is not finite.
    """

    scope: str | None
    test: DropTest | None

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

    def is_kept(
        self,
        value: Tree,
        leaves: Sequence[Array],
        weight: Scalar,
        are_weighted: bool,
        backend: Backend,
    ) -> bool | Array:
        """Whether a micro-batch is folded: a bool, or a 0-d array that the host does not see.

        `value` is for the user's test; without one the `leaves` have to be finite. One of weight 0
        is kept where all `are_weighted`: it adds nothing, not even a NaN, and is not looked at.
        """
        arrays = backend.arrays
        is_on_host = not arrays.is_array(weight)
        if are_weighted and is_on_host and not weight:
            return True
        # If the host sees the answer, it is a bool, and nothing is computed for what is dropped.
        if self.test is None:
            keep = arrays.scalar(finite(leaves, backend))
        else:
            drop = _as_bool(self.test(value), arrays)
            keep = arrays.xp.logical_not(drop) if arrays.is_array(drop) else not drop
        if are_weighted and not is_on_host:
            keep = arrays.as_array(keep)
            keep = arrays.xp.logical_or(keep, arrays.cast(weight == 0, keep.dtype, keep))
        return keep


def _as_bool(drop: Scalar, arrays: Arrays) -> bool | Array:
    """The result of a test, as a bool or a 0-d array that the host does not see. Raises
    FuncgaError for anything else.
    """
    if arrays.is_array(drop) and drop.shape == () and arrays.kind(drop.dtype) == "bool":
        return arrays.scalar(drop)
    # It may be a NumPy bool, as np.isnan(float(loss)) is. Not by truth value: a loss is true
    # unless it is 0.
    if isinstance(as_number(drop), bool):
        return bool(drop)
    raise FuncgaError(
        f"drop_if returned {arrays.describe(drop)}: it is asked of a whole micro-batch, for one "
        "bool, or a 0-d array of one. Compare a number, drop_if=lambda output: norm(output) > 100, "
        "and reduce bools by .any()."
    )


def dropping(program: Program, drop: str | None, drop_if: DropTest | None) -> Program:
    """The program that leaves micro-batches out, or a window."""
    part = getattr(program.grad_fn, "without_aux", lambda output: output)
    program.memory.options["drop="] = repr(drop)
    if drop_if is not None:
        program.memory.options["drop_if="] = "given"
    return replace(program, skip=DroppingStep(drop, drop_if, part))


@dataclass(frozen=True)
class DroppingStep(Dropping):
    """What a step drops. `part` gives what has to be finite of an output: not the aux of a gradient
    function.
    """

    part: Callable[[Tree], Tree]

    @property
    def in_torch(self) -> Any:
        """What drops in torch."""
        return load("dropping.in_torch", "drop=")

    @property
    def in_jax(self) -> Any:
        """What drops in JAX."""
        return load("dropping.in_jax", "drop=")

    def test_of(self, outputs: Outputs) -> Callable[[Sequence[Array], Scalar], bool | Array]:
        """What tells by the leaves and the weight of a micro-batch whether it is folded: a bool, or
        a 0-d array that the host does not see. Raises FuncgaError for a fold that cannot leave one
        out.
        """
        # Observers collect a row for a dropped micro-batch, too.
        collected = [leaf_index for leaf_index in outputs.collected if leaf_index >= outputs.before]
        if collected:
            raise FuncgaError(
                f"the fold of {outputs.paths()[collected[0]]} collects rows, and with "
                f"drop={self.scope!r} nobody knows how many of them there will be. Fold it with "
                "funcga.mean() or funcga.sum(), or collect it by a step without drop=."
            )
        backend, dtypes = outputs.backend, outputs.dtypes
        part = self.part(outputs.value_of(range(len(dtypes))))
        tested = [
            leaf_index
            for leaf_index in backend.trees.flatten(part)[0]
            if dtypes[leaf_index] is not None
            and backend.arrays.kind(dtypes[leaf_index]) in ("float", "complex")
        ]
        folds = [outputs.folds[leaf_index] for leaf_index in tested]
        are_weighted = all(fold is not None and _is_linear(fold) for fold in folds)

        def keeps(leaves: Sequence[Array], weight: Scalar) -> bool | Array:
            value = None if self.test is None else outputs.value_of(leaves)
            looked_at = [leaves[leaf_index] for leaf_index in tested]
            return self.is_kept(value, looked_at, weight, are_weighted, backend)

        return keeps


def _is_linear(fold: LeafFold) -> bool:
    return fold.fold.plain.reducer.linear


class DroppingUpdates(Dropping):
    """What `multi_steps` drops, and whether a window ends with an update."""

    def keeps(
        self, grads: Tree, leaves: Sequence[Array], weight: Scalar, outputs: Outputs
    ) -> bool | Array:
        """Whether gradients are folded: a bool, or a 0-d array that the host does not see."""
        are_weighted = all(map(_is_linear, outputs.of_value.reduced.values()))
        return self.is_kept(grads, leaves, weight, are_weighted, outputs.backend)

    def left_out(
        self, keep: bool | Array, window: Accumulation, after: Accumulation
    ) -> Accumulation:
        """The window `after` a micro-batch if it is kept, else the one before, which counts it as
        rejected.
        """
        without = window._replace(rejected=window.rejected + 1)
        return without if keep is False else _where(keep, after, without)

    def at_the_end(
        self, dropped: Any, steps: Scalar, rejected: Scalar, arrays: Arrays
    ) -> tuple[bool | Array, Any]:
        """(whether a window of `steps` folded and so many `rejected` micro-batches ends with an
        update, the counts with those of this window).
        """
        microbatches, windows = dropped.microbatches + rejected, dropped.windows
        keep = steps > 0
        if self.scope == "window":
            # Without an update the folded ones are dropped, too. An empty window, flushed inside
            # of jit, does not count.
            keep, is_filled = keep & (rejected == 0), arrays.as_array(steps + rejected > 0)
            emitted, integer = arrays.as_array(keep), arrays.xp.int32
            zero, steps = arrays.cast(0, integer), arrays.cast(steps, integer)
            microbatches = microbatches + arrays.xp.where(emitted, zero, steps)
            windows = windows + arrays.xp.where(emitted, zero, arrays.cast(is_filled, integer))
        return arrays.scalar(keep) if arrays.is_array(keep) else keep, dropped._replace(
            microbatches=microbatches, windows=windows
        )


def _where(keep: Array, after: Accumulation, before: Accumulation) -> Accumulation:
    """The window `after` a micro-batch if the 0-d array is true, else the one before."""
    arrays, trees = after.outputs.backend.arrays, after.outputs.backend.trees

    # `where`, as 0 * NaN is NaN, and what is not chosen may be NaN.
    def select(chosen: Array, otherwise: Array) -> Array:
        if not arrays.is_array(chosen):
            return chosen
        return arrays.xp.where(arrays.cast(keep, keep.dtype, chosen), chosen, otherwise)

    (chosen, structure), (otherwise, _) = trees.flatten(after), trees.flatten(before)
    window: Accumulation = trees.unflatten(structure, [*map(select, chosen, otherwise)])
    return window


def dropping_updates(
    scope: str | None, test: DropTest | None, scales: bool, memory: Memory
) -> DroppingUpdates:
    """What a `multi_steps` drops; `scales`: it wraps a loss_scaled. The options go into the memory,
    as replicas compare them.
    """
    if scope is not None and scales:
        raise FuncgaError(
            f"drop is {scope!r}, and the wrapped transform is a loss_scaled, which has to see what "
            "is not finite: its scale would never back off, and no window be an update. Leave drop "
            "out: it skips such windows itself."
        )
    memory.options["drop="] = repr(scope)
    memory.options["drop_if="] = "None" if test is None else "given"
    return DroppingUpdates(scope, test)
