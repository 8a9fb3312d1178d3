"""`totals=`: counts of a whole window, on all replicas, before its first micro-batch is
evaluated.

Counting is a fold like any other: in place of grad_fn it has a function that counts one
micro-batch, under sum(). So it splits, merges and streams as the step itself does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from funcga import monoids
from funcga._accumulate import TotalsFn
from funcga._backend import Backend
from funcga._call import Memory, Program, owner_of
from funcga._call.arguments import CARRY, read_arguments
from funcga._call.supported import MODULE
from funcga._fold import Tally
from funcga._replicas import Step, step_of
from funcga._types import Array, GradFn, Namespace, Reduced, Scalar, Tree
from funcga.errors import FuncgaError, check_callable
from funcga.folds import Fold, sum
from funcga.monoids import Monoid
from funcga.normalizers import Normalizer
from funcga.reducers import Reducer

_LIKE = 'lambda batch: {"tokens": (batch["labels"] != -100).sum(), "rows": len(batch["labels"])}'


def counted(program: Program, totals: TotalsFn) -> Program:
    """The program whose grad_fn gets the totals of a window as a keyword argument. Raises
    FuncgaError if they cannot be called.
    """
    check_callable(totals, "totals", _LIKE)
    program.memory.options["totals="] = "given"
    step = None if program.across is None else step_of(totals)
    epilogues = (*program.epilogues, nan_if_overflown)
    return replace(program, prologue=Totals(totals, step), epilogues=epilogues)


@dataclass(frozen=True, eq=False)
class Totals:
    """A first fold over the batch, which counts it. `step` identifies it across replicas."""

    function: TotalsFn
    step: Step | None

    def program(self, program: Program, backend: Backend) -> Program:
        """The program that counts the totals of a window of `program`, cached there."""
        return program.memory.keep(_Counting, program, backend).program

    def __call__(
        self,
        program: Program,
        backend: Backend,
        fold: Callable[[Program, tuple[Tree, ...]], Tree],
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
    ) -> dict[str, Tree]:
        """The keyword arguments of grad_fn, with the totals of the window; `fold` runs a program
        over it.
        """
        # What is passed whole, such as the parameters, is not counted.
        parts = program.read(args, backend).parts
        split = tuple([part.value if part.axes else None for part in parts])
        return dict(**kwargs, totals=fold(self.program(program, backend), split))

    def of_stream(
        self,
        program: Program,
        backend: Backend,
        leading: tuple[Tree, ...],
        items: Iterator[tuple[Tree, ...]],
        again: Callable[[], Iterator[tuple[Tree, ...]]],
        kwargs: dict[str, Tree],
    ) -> tuple[dict[str, Tree], Iterator[tuple[Tree, ...]]]:
        """(the keyword arguments with the totals of a stream, its micro-batches `again`)."""
        first = _Items(items)
        count = backend.loop.stream(self.program(program, backend), backend)
        kwargs = dict(**kwargs, totals=count(leading, first, {}))
        if program.device is not None:
            items = iter([(kwargs["totals"],)])
            ((kwargs["totals"],),) = backend.loop.moved(items, program.device)
        return kwargs, first.again(again())


class _Items(Iterator[tuple[Any, ...]]):
    """The micro-batches of a stream, which are counted."""

    def __init__(self, items: Iterator[tuple[Any, ...]]):
        self.items, self.count = items, 0

    def __next__(self) -> tuple[Any, ...]:
        item = next(self.items)
        self.count += 1
        return item

    def again(self, items: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """The same micro-batches. Raises FuncgaError at the end if there were more, or fewer."""
        second = _Items(items)
        yield from second
        if second.count != self.count:
            raise FuncgaError(
                f"the window had {self.count} micro-batches when they were counted, for totals=, "
                f"and {second.count} when they were folded. Pass one that stays the same, such as "
                "a list: step(params, list(microbatches))."
            )


class _Counting:
    """Cached by a step: the program that sums totals over a window, split and merged as the step
    is.
    """

    def __init__(self, program: Program, backend: Backend):
        totals: Totals = program.prologue
        in_axes = _without_carry(program.in_axes, backend)
        owner = owner_of(program.grad_fn)
        if owner not in (None, program.grad_fn) and owner.kind != MODULE:
            raise FuncgaError(
                "totals= was given, and grad_fn is a function around the gradient of "
                f"{owner.kind}: called by itself, that averages every micro-batch over the "
                "replicas, where a sum is asked for. Pass the gradient function itself, "
                "accumulate(gradient, n, totals=totals), and keyword arguments to the step."
            )
        across = program.across if owner is None else owner.merged_over(program.across)
        options = {**program.memory.options, "totals=": "given, and counted first"}
        self.program = replace(
            program,
            grad_fn=Count(totals.function, program.grad_fn, in_axes, backend),
            fold=sum() if backend.arrays.as_array(0).dtype.itemsize == 8 else _SUM32,
            # Sums have no weights, and rows of streamed micro-batches need not be countable.
            weight=None if program.n or program.microbatch_size else lambda *_: 1,
            in_axes=in_axes,
            device=None,
            across=across,
            memory=Memory(totals.step, options),
            prologue=None,
            epilogues=(),
            watch=None,
            skip=None,
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
        value = self.totals(*arguments.split_args(args))
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


def nan_if_overflown(
    program: Program, backend: Backend, result: Tree, kwargs: dict[str, Tree], _: object
) -> Tree:
    """The result, with NaN for every float if a total does not fit in its integers."""
    arrays, trees, xp = backend.arrays, backend.trees, backend.arrays.xp
    totals = trees.flatten(kwargs["totals"])[0]
    narrow = [total for total in totals if str(total.dtype) == "int32"]  # JAX's alone
    if not narrow:
        return result
    fits = xp.all(xp.stack(narrow) != OVERFLOWN)
    leaves, structure = trees.flatten(result)
    for index, leaf in enumerate(leaves):
        if arrays.kind(leaf.dtype) in ("float", "complex"):
            leaves[index] = xp.where(fits, leaf, float("nan"))
    return trees.unflatten(structure, leaves)


def _without_carry(in_axes: Tree, backend: Backend) -> Tree:
    """The in_axes with None for CARRY, as threaded state is not counted."""
    leaves, structure = backend.trees.flatten(in_axes)
    return backend.trees.unflatten(structure, [None if axis is CARRY else axis for axis in leaves])
