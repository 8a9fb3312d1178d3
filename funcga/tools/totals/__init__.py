"""`totals=`: counts of a whole window, on all replicas, before its first micro-batch is
evaluated.

Counting is a fold like any other: in place of grad_fn it has a function that counts one
micro-batch, under sum(). So it splits, merges and streams as the step itself does.
"""

from dataclasses import dataclass, replace
from typing import Any

from funcga import monoids
from funcga._backend import Arrays, Backend
from funcga._call import Memory, Program, owner_of
from funcga._call.arguments import CARRY, read_arguments
from funcga._fold import Tally
from funcga._replicas import step_of
from funcga._types import Array, GradFn, Namespace, Reduced, Scalar, TotalsFn, Tree
from funcga.errors import FuncgaError, check_callable
from funcga.folds import Fold, sum
from funcga.monoids import Monoid
from funcga.normalizers import Normalizer
from funcga.reducers import Reducer

_LIKE = 'lambda batch: {"tokens": (batch["labels"] != -100).sum(), "rows": len(batch["labels"])}'


class Totals:
    """The function that counts a micro-batch of a step, which is merged over replicas or not.

    Raises FuncgaError if it cannot be called.
    """

    def __init__(self, function: TotalsFn, is_merged: bool):
        check_callable(function, "totals", _LIKE)
        self.function, self.step = function, step_of(function) if is_merged else None

    def counting(self, program: Program, backend: Backend) -> Program:
        """The program that counts the totals of a window of `program`, cached there."""
        return program.memory.keep(_Counting, program, backend).program

    def counted(
        self, program: Program, backend: Backend, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> dict[str, Tree]:
        """The keyword arguments of grad_fn, with the totals of the window."""
        # What is passed whole, such as the parameters, is not counted.
        parts = program.read(args, backend).parts
        split = tuple([part.value if part.axes else None for part in parts])
        count = backend.loop.accumulate(self.counting(program, backend), backend)
        return dict(**kwargs, totals=count(split, {}))


class _Counting:
    """Cached by a step: the program that sums totals over a window, split and merged as the step
    is.
    """

    def __init__(self, program: Program, backend: Backend):
        totals: Totals = program.totals
        in_axes = _without_carry(program.in_axes, backend)
        owner = owner_of(program.grad_fn)
        if owner is not None:
            owner.check_counted(program.grad_fn)
        across = program.across if owner is None else owner.merged_over(program.across)
        options = {**program.memory.options, "totals=": "given, and counted first"}
        self.program = replace(
            program,
            grad_fn=Count(totals.function, program.grad_fn, in_axes, backend),
            fold=exact_sum(backend.arrays),
            # Sums have no weights, and rows of streamed micro-batches need not be countable.
            weight=None if program.n or program.microbatch_size else lambda *_: 1,
            in_axes=in_axes,
            device=None,
            across=across,
            memory=Memory(totals.step, options),
            totals=None,
            observers=None,
            dropping=None,
        )


@dataclass(frozen=True, eq=False)
class Count:
    """The totals of one micro-batch, as a function of grad_fn's positional arguments."""

    totals: TotalsFn
    grad_fn: GradFn
    in_axes: Tree
    backend: Backend

    @property
    def __wrapped__(self) -> GradFn:
        return self.grad_fn  # for the names of its parameters in messages

    def __call__(self, *args: Tree) -> Tree:
        """The tree of totals, of 0-d arrays in the types that count."""
        arguments = read_arguments(args, self.in_axes, self.grad_fn, self.backend)
        value = self.totals(*arguments.split_args(args, "totals="))
        leaves, structure = self.backend.trees.flatten(value)
        # Python numbers go to the device of the arrays, so that all totals are merged together.
        like = next((leaf for leaf in leaves if self.backend.arrays.is_array(leaf)), None)
        return self.backend.trees.unflatten(
            structure, [self._counted(leaf, like) for leaf in leaves]
        )

    def _counted(self, leaf: Any, like: Array) -> Array:
        """A total as a 0-d array, in a type in which sums of it are exact; a number on the
        device of `like`.
        """
        arrays = self.backend.arrays
        total = arrays.as_array(leaf)
        kind = arrays.kind(total.dtype)
        if total.shape != () or kind not in ("bool", "int", "float"):
            raise FuncgaError(
                f"totals returned {arrays.describe(leaf)}, which cannot be added up to a total: "
                f"that is one real number of the micro-batch, totals={_LIKE}."
            )
        # Narrow integers would overflow, and sums of 16-bit floats stop at 256 or 2,048.
        wide = (
            arrays.as_array(0).dtype
            if kind in ("bool", "int")
            else arrays.accumulator_dtype(total.dtype)
        )
        if like is None or arrays.is_array(leaf):
            return arrays.cast(total, wide)
        return arrays.xp.full_like(like, leaf, dtype=wide)


# --- integers of 32 bits, which sums of counts may not fit in

# Marks a sum that int32 cannot hold.
OVERFLOWN = -(2**31)


def exact_sum(arrays: Arrays) -> Fold:
    """The fold of totals: a sum, OVERFLOWN if it does not fit in the framework's integers."""
    return sum() if arrays.as_array(0).dtype.itemsize == 8 else _SUM32


def _limbs(xp: Namespace, value: Array, weight: Scalar) -> Reduced:
    """An integer as its upper and lower 16 bits, whose sums have room; a float as it is."""
    return value if "float" in str(value.dtype) else (value >> 16, value & 0xFFFF)


def _add(xp: Namespace, a: Reduced, b: Reduced) -> Reduced:
    return _carried(a[0] + b[0], a[1] + b[1]) if isinstance(a, tuple) else a + b


def _carried(upper: Array, lower: Array) -> Reduced:
    """The limbs of the same number, the lower one of 16 bits again."""
    return upper + (lower >> 16), lower & 0xFFFF


def _joined(xp: Namespace, reduced: Reduced, tally: Tally) -> Array:
    if not isinstance(reduced, tuple):
        return reduced
    upper, lower = _carried(*reduced)  # over replicas the limbs were added as they are
    fits = (upper >= -(2**15)) & (upper < 2**15)
    return xp.where(fits, (upper << 16) | lower, OVERFLOWN)


_SUM32 = Fold(
    Reducer(_limbs, Monoid(monoids.sum.identity, _add, collective="sum"), unweighted=True),
    Normalizer(_joined),
)


def _without_carry(in_axes: Tree, backend: Backend) -> Tree:
    """The in_axes with None for CARRY, as threaded state is not counted."""
    leaves, structure = backend.trees.flatten(in_axes)
    return backend.trees.unflatten(structure, [None if axis is CARRY else axis for axis in leaves])
