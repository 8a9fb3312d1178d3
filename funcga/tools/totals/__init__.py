"""`totals=`: counts of a whole window, on all replicas, before its first micro-batch is
evaluated.

Counting is a fold like any other: in place of grad_fn it has a function that counts one
micro-batch, under sum(). So it splits, merges and streams as the step itself does.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Any

from funcga import monoids
from funcga._backend import Arrays, Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call import Memory, Program, owner_of
from funcga._call.arguments import CARRY, read_arguments
from funcga._fold import Tally
from funcga._replicas import step_of
from funcga._types import Array, GradFn, Namespace, Reduced, Scalar, TotalsFn, Tree
from funcga.errors import FuncgaError, check_callable, refuses_arguments
from funcga.folds import Fold, sum
from funcga.monoids import Monoid
from funcga.normalizers import Normalizer
from funcga.reducers import Reducer

_LIKE = 'lambda batch: {"tokens": (batch["labels"] != -100).sum(), "rows": len(batch["labels"])}'


class Totals:
    """The function that counts a micro-batch of a step, which is merged over replicas or not.

    Raises FuncgaError if it cannot be called, or if grad_fn does not take what it counts.
    """

    def __init__(self, function: TotalsFn, grad_fn: GradFn, is_merged: bool):
        check_callable(function, "totals", _LIKE)
        _check_parameter(grad_fn)
        self.function, self.step = function, step_of(function) if is_merged else None

    def check_call(self, kwargs: dict[str, Tree]) -> None:
        """Raises FuncgaError if a call brings totals of its own."""
        if "totals" in kwargs:
            raise FuncgaError(
                "the call has a keyword argument `totals`, and so has grad_fn from the totals= of "
                "the step. Pass the call's under another name, or leave totals= out."
            )

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
        return {**kwargs, "totals": count(split, {})}


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
        split = arguments.split_args(args, "totals=")
        try:
            value = self.totals(*split)
        except TypeError as error:
            if not refuses_arguments(self.totals, len(split), (), error):
                raise
            raise FuncgaError(
                f"totals is called with each argument that is split, here {len(split)}, and does "
                f"not take so many ({error}). Write it with one parameter for each: totals=lambda "
                "x, y: ..., for micro-batches (x, y)."
            ) from error
        leaves, structure = self.backend.trees.flatten(value)
        if not leaves:
            raise FuncgaError(
                f"totals returned {value!r}, without a number. Return a dict of them: "
                f"totals={_LIKE}."
            )
        # Python numbers go to the device of the arrays, so that all totals are merged together.
        like = next((leaf for leaf in leaves if self.backend.arrays.is_array(leaf)), None)
        return self.backend.trees.unflatten(
            structure,
            [
                self._counted(leaf, like, value, leaf_index)
                for leaf_index, leaf in enumerate(leaves)
            ],
        )

    def _counted(self, leaf: Any, like: Array, value: Tree, leaf_index: int) -> Array:
        """A total as a 0-d array, in a type in which sums of it are exact; a number on the
        device of `like`.
        """
        arrays = self.backend.arrays
        try:
            total = arrays.as_array(leaf)
        except TypeError:
            raise self._no_total(leaf, value, leaf_index, "Return numbers and 0-d arrays") from None
        kind = arrays.kind(total.dtype)
        if total.shape != ():
            raise self._no_total(
                leaf, value, leaf_index, "A total is one number of the micro-batch: write .sum()"
            )
        if kind not in ("bool", "int", "float"):
            raise self._no_total(leaf, value, leaf_index, "Return real numbers")
        # Narrow integers would overflow, and sums of 16-bit floats stop at 256 or 2,048.
        wide = (
            arrays.as_array(0).dtype
            if kind in ("bool", "int")
            else arrays.accumulator_dtype(total.dtype)
        )
        if like is None or arrays.is_array(leaf):
            return arrays.cast(total, wide)
        return arrays.xp.full_like(like, leaf, dtype=wide)

    def _no_total(self, leaf: Any, value: Tree, leaf_index: int, instead: str) -> FuncgaError:
        path = leaf_paths(value, self.backend.trees, "totals")[leaf_index]
        return FuncgaError(
            f"`{path}` of a micro-batch is {self.backend.arrays.describe(leaf)}, which cannot be "
            f"added up to a total. {instead}: totals={_LIKE}."
        )


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


def _check_parameter(grad_fn: GradFn) -> None:
    try:
        parameters = inspect.signature(grad_fn).parameters
    except (TypeError, ValueError):  # a call will show it
        return
    takes = {parameter.kind for parameter in parameters.values()}
    if "totals" not in parameters and inspect.Parameter.VAR_KEYWORD not in takes:
        raise _no_parameter(f"grad_fn takes ({', '.join(parameters)})", _with_totals(grad_fn))


def _with_totals(grad_fn: GradFn) -> str:
    """The parameters of the loss that a user has written, of a module or of its parameters, and
    `totals`.
    """
    loss_fn: Any = grad_fn
    while hasattr(loss_fn, "loss_fn"):
        loss_fn = loss_fn.loss_fn
    parameters = inspect.signature(loss_fn).parameters.values()
    by_position = [p.name for p in parameters if p.kind < p.VAR_POSITIONAL]
    by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    star = next((f"*{p.name}" for p in parameters if p.kind is p.VAR_POSITIONAL), "*")
    return ", ".join([*by_position, star, *by_keyword, "totals"])


def _no_parameter(found: str, parameters: str) -> FuncgaError:
    return FuncgaError(
        f"totals= was given, and {found}: it has no parameter `totals` for what is counted. Add "
        f"it: def loss_fn({parameters})."
    )
