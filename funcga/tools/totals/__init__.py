"""`totals=`: counts of a whole window, on all replicas, before its first micro-batch is
evaluated.

Counting is a fold like any other: in place of grad_fn it has a function that counts one
micro-batch, under sum(). So it splits, merges and streams as the step itself does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from itertools import chain
from itertools import count as counter
from typing import Any

from funcga import monoids, reducers
from funcga._accumulate import TotalsFn
from funcga._backend import Arrays, Backend
from funcga._backend.prefixes import mapped
from funcga._call import Memory, OwningGradient, Program, backend_of_call, owner_of
from funcga._call.arguments import CARRY, Arguments, read_arguments
from funcga._call.supported import MODULE
from funcga._fold import accumulator_dtype, kind
from funcga._fold.outputs import Outputs
from funcga._replicas import step_of
from funcga._tools import load
from funcga._types import Args, Array, Kwargs, Namespace, Reduced, Tree, TreeFn
from funcga.errors import FuncgaError, check_callable
from funcga.folds import Fold, sum
from funcga.normalizers import Normalizer


def counting(program: Program, totals: TotalsFn) -> "Counting":
    """The program that counts a window of `program`, whose grad_fn gets the totals as a keyword
    argument. Raises FuncgaError if they cannot be counted.
    """
    like = 'lambda batch: {"tokens": (batch["labels"] != -100).sum(), "rows": len(batch["labels"])}'
    check_callable(totals, "totals", like)
    owner = owner_of(program.grad_fn)
    if owner not in (None, program.grad_fn) and owner.kind != MODULE:
        raise FuncgaError(
            "totals= was given, and grad_fn is a function around the gradient of "
            f"{owner.kind}: called by itself, that averages every micro-batch over the "
            "replicas, where a sum is asked for. Pass the gradient function itself, "
            "accumulate(gradient, n, totals=totals), and keyword arguments to the step."
        )
    memory, across = program.memory, program.across
    memory.options["totals="] = "given"
    # What wraps a module says itself what is merged over, one after the other.
    wrapper = getattr(owner, "wrapper", None)
    if wrapper is not None:
        across = wrapper.replicas(across) or None
    # It has the names of grad_fn's parameters, for messages.
    count = partial(_count, totals, program.in_axes, owner)
    return Counting(
        update_wrapper(count, program.grad_fn, (), ()),
        sum(),
        in_axes=program.in_axes,
        split=program.split,
        across=across,
        memory=Memory(memory.step and step_of(totals), memory.options),
        function=totals,
    )


class _Memory(Memory):
    """What is cached of the count that belongs to a program."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Counting(Program):
    """A first fold over the batch of a program, split and merged as that is, by `function`."""

    function: TotalsFn

    def read(self, args: Args, backend: Backend) -> Arguments:
        """The arguments, of which threaded state is passed whole: it is not counted."""
        arguments = super().read(args, backend)
        parts = [
            part._replace(axes=[None if axis is CARRY else axis for axis in part.axes])
            for part in arguments.parts
        ]
        return replace(arguments, parts=tuple(parts), state=[])

    def bind(self, value: Tree, arguments: Arguments) -> tuple[Outputs, list[Any]]:
        """The Outputs for a first micro-batch with these totals, and its leaves."""
        has_long_integers = arguments.backend.arrays.as_array(0).dtype.itemsize == 8
        program = self if has_long_integers else replace(self, fold=_SUM)
        return Program.bind(program, value, arguments)

    def accumulate(self, program: Program, backend: Backend) -> TreeFn:
        """f(args, kwargs): the fold of the program over a batch, once that is counted."""
        counting, fold = self, backend.loop.accumulate(program, backend)
        if program.split != self.split:  # of a search, which has a program for each n
            memory = program.memory.keep(_Memory)
            counting = replace(self, split=program.split, memory=memory)
        return counting.before(fold, backend)

    def before(self, fold: TreeFn, backend: Backend) -> TreeFn:
        """f(args, kwargs): what `fold` returns for a batch, which is counted first."""
        count = backend.loop.accumulate(self, backend)
        return lambda args, kwargs: fold(args, dict(**kwargs, totals=count(args, {})))

    def of_stream(
        self,
        backend: Backend,
        leading: Args,
        items: Iterator[Any],
        again: Callable[[], Iterator[Any]],
        kwargs: Kwargs,
        device: object,
    ) -> tuple[Kwargs, Iterator[Any]]:
        """(the keyword arguments with the totals of a stream, its micro-batches `again`)."""
        first, second = counter(), counter()
        fold = backend.loop.stream(self, backend)
        totals = fold(leading, _numbered(items, first), {})
        if device is not None:
            convert = getattr(load("trees", "device="), f"to_{backend.name}")
            totals = convert(totals, copy=None, device=device)
        items = chain(_numbered(again(), second), _check_same(next(first), second))
        return dict(**kwargs, totals=totals), items


def _numbered(items: Iterator[Any], numbers: Iterator[int]) -> Iterator[Any]:
    """The items, each of which takes one of the numbers. No reference to one stays here."""
    return map(lambda item, _: item, items, numbers)


def _check_same(counted: int, numbers: Iterator[int]) -> Iterator[Any]:
    """No items. Raises FuncgaError if there were not as many as were counted."""
    folded = next(numbers)
    if folded != counted:
        raise FuncgaError(
            f"the window had {counted} micro-batches when they were counted, for totals=, and "
            f"{folded} when they were folded. Pass one that stays the same, such as a list: "
            "step(params, list(microbatches))."
        )
    yield from ()


def _count(totals: TotalsFn, in_axes: Tree, owner: OwningGradient | None, *args: Tree) -> Tree:
    """The totals of one micro-batch, 0-d arrays in types in which sums of them are exact."""
    backend = backend_of_call(totals, args, {}, owner)
    arguments = read_arguments(args, in_axes, totals, backend)
    total = partial(_total, arrays=backend.arrays)
    return mapped(total, backend.trees, totals(*arguments.split_args(args)))


def _total(leaf: Any, arrays: Arrays) -> Array:
    """What a leaf counts, the sum of an array. Narrow integers would overflow, and sums of 16-bit
    floats stop at 256 or 2,048.
    """
    total = arrays.as_array(leaf)
    is_integer = kind(total.dtype) in ("bool", "int")
    wide = arrays.as_array(0).dtype if is_integer else accumulator_dtype(total.dtype, arrays)
    total = arrays.as_array(total, wide)
    return total.sum() if total.shape else total


def _joined(xp: Namespace, reduced: Reduced, tally: object) -> Array:
    # The halves of an integer, which come as floats.
    return reduced[0] * 65536.0 + reduced[1] if isinstance(reduced, tuple) else reduced


# The sum where integers have 32 bits, which counts may exceed: of their halves, and then a float.
_HALVES = replace(monoids.counts, collective="sum")
_SUM = Fold(replace(reducers.pairs, monoid=_HALVES, stacked=None), Normalizer(_joined, wide=True))
