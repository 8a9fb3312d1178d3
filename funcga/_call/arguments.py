"""The arguments of one call: which are split, passed whole or threaded, and how many rows there
are.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcga._backend import Backend
from funcga._backend.prefixes import PrefixError, broadcast, leaf_paths
from funcga._call.examples import Examples, find_examples
from funcga._types import Array, GradFn, Structure, Tree
from funcga.errors import FuncgaError, streamable


class Carry:
    """The type of CARRY, which marks an argument as threaded state; `carry()` marks the output.

    Example:
        >>> f = lambda params, seen, x: (params * x.mean(), seen + len(x))  # (value, state)
        >>> fold = (funcga.mean(), funcga.carry())
        >>> step = funcga.accumulate(f, 3, in_axes=(None, funcga.CARRY, 0), fold=fold)
        >>> step(torch.tensor(2.0), torch.tensor(0), torch.arange(7.0))
        (tensor(6.), tensor(7))
    """

    def __repr__(self) -> str:
        return "funcga.CARRY"

    def __reduce__(self) -> str:
        return "CARRY"


CARRY = Carry()
"""Marks an argument, in `in_axes`, as state that is threaded from one micro-batch to the next. The
output that is this state is marked by `fold=`, with `carry()`.
"""

# For one leaf: an int splits it along that axis, None passes it whole, CARRY threads it.
Axis = int | None | Carry


class Argument(NamedTuple):
    """One positional argument. An argument that is passed whole has no leaves here, and no axes."""

    value: Tree
    leaves: list[Any]
    axes: list[Axis]  # one for each leaf
    structure: Structure
    in_axes: Tree = None  # the prefix that the axes come from


@dataclass(frozen=True)
class Arguments:
    """The positional arguments of one call of `grad_fn`."""

    parts: tuple[Argument, ...]
    grad_fn: GradFn
    backend: Backend
    assumed: bool = False  # whether in_axes was left at its default
    state: list[Any] = field(default_factory=list)  # the leaves that are CARRY

    def __iter__(self) -> Iterator[tuple[Any, Axis]]:
        """(leaf, axis) of every leaf of the arguments that are not passed whole."""
        return (
            (leaf, axis)
            for part in self.parts
            for leaf, axis in zip(part.leaves, part.axes, strict=True)
        )

    def rows(self, may_be_empty: bool = False, streamed: bool = False) -> int:
        """The common number of rows of the split leaves. `streamed`: the number is used as the
        weight, which affects only the messages of errors.

        Raises FuncgaError if they differ, if there are none (unless `may_be_empty`), or if a
        leaf lacks the axis.
        """
        # Keyed by the index of the leaf, so that an error can name it.
        sizes = {
            leaf_index: _row_count(self, leaf_index, leaf, axis, streamed)
            for leaf_index, (leaf, axis) in enumerate(self)
            if isinstance(axis, int) and leaf is not None
        }
        if not sizes:
            if streamed:
                raise _weightless(self, "it has no array")
            if not self.parts:
                raise FuncgaError(
                    "the call has keyword arguments alone, so there are no rows to make "
                    "micro-batches of. Keyword arguments are passed whole: pass what is to be "
                    "split by position. Write step(x, y), or step(batch) in place of step(**batch)."
                )
            raise FuncgaError(
                "no argument is split, so there are no rows to make micro-batches of. By default "
                "the first argument is passed whole and every other one is split on axis 0; say "
                "otherwise with in_axes, as in vmap: in_axes=0 splits all of them. Keyword "
                "arguments are passed whole: pass what is to be split by position, step(params, "
                "batch) in place of step(params, **batch)."
            )
        first, rows = next(iter(sizes.items()))
        even = all(size == rows for size in sizes.values())
        # First, as it explains why arrays differ in length.
        if self.assumed:
            _check_lists(self, rows, even)
        if not even:
            raise _uneven(self, sizes, streamed)
        if rows == 0 and not may_be_empty:
            raise FuncgaError(
                f"the batch has 0 rows (`{self.path(first)}` is empty): there is nothing to fold."
            )
        return rows

    def cut(
        self,
        start: Any,
        size: int | None,
        state: list[Any],
        narrow: Callable[..., Array] | None = None,
    ) -> tuple[Any, ...]:
        """The arguments of the micro-batch of `size` rows from row `start` on; with size None,
        of all rows. state: the values of the leaves that are CARRY. narrow: `narrow(array, axis,
        start, size)` slices the rows; by default those that follow `start`.
        """
        # The leaves that are CARRY take what is in the state, in order.
        threaded = iter(state)
        narrow, unflatten = narrow or self.backend.arrays.slice, self.backend.trees.unflatten
        args = []
        for part in self.parts:
            if not part.axes:
                args.append(part.value)
                continue
            # Checking each leaf before is slow, so a failure is explained afterwards.
            try:
                pieces = [
                    next(threaded)
                    if axis is CARRY
                    else narrow(leaf, axis, start, size)
                    if isinstance(axis, int) and not (leaf is None or size is None)
                    else leaf
                    for leaf, axis in zip(part.leaves, part.axes, strict=True)
                ]
            except TypeError:
                _check_cut(self, narrow, start, size)
                raise
            args.append(unflatten(part.structure, pieces))
        return tuple(args)

    def are_split(self) -> list[bool]:
        """Whether each argument is split: what `weight=` and `totals=` are called with."""
        # In JAX None has no leaf. It counts as split all the same, as in torch.
        return [
            any(isinstance(axis, int) for axis in part.axes)
            if part.axes
            else isinstance(part.in_axes, int)
            for part in self.parts
        ]

    def split_args(self, args: tuple[Any, ...], option: str = "weight=") -> list[Any]:
        """The split arguments of a micro-batch, for the function that was given as `option`."""
        split = self.are_split()
        if not any(split):
            raise FuncgaError(
                f"{option} is called with the arguments that are split, and in_axes splits none. "
                "Give an argument an axis: in_axes=(None, 0)."
            )
        return [arg for arg, is_split in zip(args, split, strict=True) if is_split]

    def paths(self) -> list[tuple[str, str]]:
        """(root, path) of the leaves, in the order of iteration: the path of the in_axes entry,
        and that of the leaf.
        """
        trees, paths = self.backend.trees, []
        for name, part in zip(
            argument_names(self.grad_fn, len(self.parts)), self.parts, strict=True
        ):
            if part.axes:
                axis_values = broadcast(
                    part.in_axes, part.value, len(part.leaves), _is_axis, trees, name
                )
                roots = [root for _, root in axis_values]
                paths += list(zip(roots, leaf_paths(part.value, trees, name), strict=True))
        return paths

    def path(self, leaf_index: int) -> str:
        """The path of one of these leaves."""
        return self.paths()[leaf_index][1]

    def carried(self) -> list[tuple[str, str]]:
        """(root, path) of the leaves that are CARRY."""
        return [paths for paths, (_, axis) in zip(self.paths(), self, strict=True) if axis is CARRY]


def read_arguments(
    args: tuple[Any, ...], in_axes: Tree, grad_fn: GradFn, backend: Backend, assumed: bool = False
) -> Arguments:
    """The Arguments of a call; `in_axes` None is the default: the first whole, the others split on
    axis 0.

    assumed: whether in_axes was left at its default. Then lists of examples are refused when
    rows are counted. Raises FuncgaError if in_axes is no tree prefix of the arguments.
    """
    count, parts, state = len(args), [], []
    # in_axes has one entry for each argument, as in vmap; each entry is a prefix, with one axis for
    # each leaf below it.
    entries = (
        (None, *[0] * (count - 1))[:count] if in_axes is None else _per_argument(in_axes, count)
    )
    for arg_index, (arg, axis) in enumerate(zip(args, entries, strict=True)):
        # An argument that is passed whole may be any object, so it is not even flattened.
        if axis is None:
            parts.append(Argument(arg, [], [], None))
            continue
        leaves, structure = backend.trees.flatten(arg)
        # The usual entry, a number, needs no broadcast.
        if type(axis) is int:
            axes: list[Axis] = [axis] * len(leaves)
        else:
            try:
                axis_values = broadcast(axis, arg, len(leaves), _is_axis, backend.trees)
            except PrefixError as error:
                raise error.refusal(
                    "in_axes is no prefix of the arguments",
                    "Write an axis, None (whole) or funcga.CARRY for all that stands below, or a "
                    "container with the same keys.",
                    backend.trees,
                    backend.arrays.describe,
                    root=argument_names(grad_fn, count)[arg_index],
                ) from error
            axes = [
                value if value is None or value is CARRY else operator.index(value)
                for value, _ in axis_values
            ]
            state += [
                leaf
                for leaf, axis_of_leaf in zip(leaves, axes, strict=True)
                if axis_of_leaf is CARRY
            ]
        parts.append(Argument(arg, leaves, axes, structure, axis))
    return Arguments(tuple(parts), grad_fn, backend, assumed, state)


def _per_argument(in_axes: Tree, count: int) -> tuple[Any, ...]:
    if _is_axis(in_axes):
        return (in_axes,) * count
    if not isinstance(in_axes, tuple | list):
        raise FuncgaError(
            f"in_axes is {in_axes!r}. Give an axis for all arguments, or a tuple with one entry "
            f"for each of the {count}: an axis, None (whole), funcga.CARRY, or a tree of these."
        )
    if len(in_axes) != count:
        raise FuncgaError(
            f"in_axes has {len(in_axes)} entries and the call has {count} positional arguments. "
            f"Give one entry each, such as in_axes={(None,) + (0,) * (count - 1)}; pass keyword "
            "arguments by keyword, they are never split."
        )
    return tuple(in_axes)


def _is_axis(value: object) -> bool:
    return (
        value is None
        or value is CARRY
        or (hasattr(value, "__index__") and not isinstance(value, bool))
    )


def _row_count(arguments: Arguments, leaf_index: int, leaf: Any, axis: int, streamed: bool) -> int:
    """How many rows a leaf has along its axis."""
    backend = arguments.backend
    if not backend.arrays.is_array(leaf):
        path = arguments.path(leaf_index)
        has_shape = hasattr(leaf, "shape")
        if streamed and not has_shape:
            raise _weightless(arguments, f"`{path}` is {backend.arrays.describe(leaf)}")
        convert = f"funcga.to_{backend.name}({path.split('[')[0].split('.')[0]})"
        make = (
            f"Convert it, `{convert}`,"
            if has_shape
            else "Make it a tree of arrays, such as a dict or a dataclass,"
        )
        remedy = streamable([leaf]) or f"{make} or pass it whole: in_axes with None in its place."
        raise FuncgaError(
            f"`{path}` is {backend.arrays.describe(leaf)}, and in_axes splits it on axis {axis}: "
            f"only {backend.name} arrays can be split. {remedy}"
        )
    try:
        shape = leaf.shape
    except RuntimeError as error:
        raise FuncgaError(
            f"`{arguments.path(leaf_index)}` is {backend.arrays.describe(leaf)}, a tensor without "
            "a shape, so its rows cannot be counted. Give it dense and padded; or stream "
            "micro-batches, with layout=torch.jagged or with weight=."
        ) from error
    rank = len(shape)
    if not shape:
        described = f"`{arguments.path(leaf_index)}` is {backend.arrays.describe(leaf)}"
        if streamed:
            raise _weightless(arguments, f"{described}, a scalar")
        scalar = f"{described}, a scalar: it has no axis {axis} to split."
        if backend.arrays.kind(leaf.dtype) == "other":  # a random key of JAX
            raise FuncgaError(f"{scalar} {_KEYS}")
        raise FuncgaError(
            f"{scalar} Pass it whole: in_axes with None in its place, or as a keyword argument."
            f"{_params_first(arguments)}"
        )
    if not -rank <= axis < rank:
        raise FuncgaError(
            f"`{arguments.path(leaf_index)}` is {backend.arrays.describe(leaf)}: axis {axis} is "
            f"out of range. in_axes for it lies between {-rank} and {rank - 1}."
        )
    # A symbol, if a program is exported or compiled for any number of rows.
    rows: int = shape[axis]
    return rows


_KEYS = (
    "Give each row a key of its own, jax.random.split(key, rows), or thread one key with "
    "funcga.CARRY: passed whole, it would draw the same noise in every micro-batch."
)


def _check_lists(arguments: Arguments, rows: int, even: bool) -> None:
    """Raises FuncgaError for a list whose arrays are single examples, not batches."""
    backend = arguments.backend
    # The usual arguments, bare arrays, are no lists.
    if all(
        len(part.leaves) == 1 and part.leaves[0] is part.value
        for part in arguments.parts
        if part.axes
    ):
        return
    names = argument_names(arguments.grad_fn, len(arguments.parts))
    split = {
        name: part.value
        for name, part, is_split in zip(names, arguments.parts, arguments.are_split(), strict=True)
        if is_split
    }
    examples: Examples | None = find_examples(split, rows, even, backend)
    if examples is None:
        return
    entry = backend.trees.flatten(examples.entries[0])[0][0]
    axes = tuple(0 if part.axes else None for part in arguments.parts)
    parameters = as_parameters([*split])
    # The same path in the body of a lambda with these parameters.
    counted = next(
        parameter + examples.path[len(name) :]
        for name, parameter in zip(split, parameters, strict=True)
        if examples.path.startswith(name)
    )
    raise FuncgaError(
        f"`{examples.path}` is a list of {len(examples.entries)}, the first "
        f"{backend.arrays.describe(entry)}: axis 0 of each would be taken for the rows, and these "
        "look like examples. If they are, stack them, or stream micro-batches of them with "
        f"weight=lambda {', '.join(parameters)}: len({counted}). If axis 0 is the rows, say so: "
        f"in_axes={axes}."
    )


def _weightless(arguments: Arguments, reason: str) -> FuncgaError:
    """The error for a streamed micro-batch whose rows, which are its weight, cannot be counted."""
    names = argument_names(arguments.grad_fn, len(arguments.parts))
    split = [name for name, is_split in zip(names, arguments.are_split(), strict=True) if is_split]
    is_array = arguments.backend.arrays.is_array
    leaves = zip(arguments.paths(), arguments, strict=True)
    # Whose rows it could be.
    paths = [path for (_, path), (leaf, _) in leaves if is_array(leaf) and leaf.shape]
    has_names = split and all(map(str.isidentifier, split))
    takes = ", ".join(split) if has_names else "*item"
    weight = f"len({paths[0]})" if paths and has_names else "1"
    other = "1 where all weigh alike" if weight != "1" else "where they do not weigh alike"
    return FuncgaError(
        "the rows of a micro-batch are its weight unless weight= says it, and they cannot be "
        f"counted: {reason}. Write stream(grad_fn, weight=lambda {takes}: {weight}), or with what "
        f"else a micro-batch weighs, {other}."
    )


def _uneven(arguments: Arguments, sizes: dict[int, int], streamed: bool) -> FuncgaError:
    """The error for leaves with these numbers of rows, by the index of the leaf."""
    describe, leaves = arguments.backend.arrays.describe, list(arguments)
    # The first leaf of each size: reversed, as the last one in a dict wins.
    first = {size: leaf_index for leaf_index, size in reversed(sizes.items())}
    listed = "; ".join(
        f"`{arguments.path(leaf_index)}` has {size} (axis {leaves[leaf_index][1]} of "
        f"{describe(leaves[leaf_index][0])})"
        for size, leaf_index in sorted(first.items(), key=lambda pair: pair[1])
    )
    if streamed:
        return _weightless(arguments, listed)
    for leaf_index in sizes:
        leaf = leaves[leaf_index][0]
        if str(leaf.dtype) == "uint32" and leaf.ndim <= 2 and leaf.shape[-1] == 2:
            return FuncgaError(
                f"the split arguments have different numbers of rows: {listed}. "
                f"`{arguments.path(leaf_index)}` looks like random keys of JAX. {_KEYS}"
            )
    return FuncgaError(
        f"the split arguments have different numbers of rows: {listed}; micro-batches cut all of "
        f"them alike. Pass what has no rows whole: in_axes with None in its place."
        f"{_params_first(arguments)}"
    )


def _params_first(arguments: Arguments) -> str:
    """The line to write if params and batch may have been swapped, as the default takes it."""
    if not arguments.assumed or len(arguments.parts) < 2:
        return ""
    axes = (*(0,) * (len(arguments.parts) - 1), None)
    return (
        f" Parameters come first, step(params, *batch); where grad_fn takes them last, write "
        f"in_axes={axes}."
    )


def _check_cut(
    arguments: Arguments, narrow: Callable[..., Array], start: Any, size: int | None
) -> None:
    """Raises FuncgaError for the first leaf that cannot be sliced."""
    for leaf_index, (leaf, axis) in enumerate(arguments):
        if leaf is None or not isinstance(axis, int):
            continue
        try:
            narrow(leaf, axis, start, size)
        except TypeError as error:
            raise FuncgaError(
                f"`{arguments.path(leaf_index)}` is {error}, "
                f"{arguments.backend.arrays.describe(leaf)}, of which rows cannot be cut. Give it "
                "dense and padded; or cut it yourself, and stream the micro-batches: "
                "funcga.stream(grad_fn)(params, microbatches)."
            ) from error


def as_parameters(names: Sequence[str]) -> list[str]:
    """The names of arguments, as parameters of a lambda: those of *args, which have none, are x0,
    x1 and so on.
    """
    spelled = list[str]()
    for arg_index, name in enumerate(names):
        if not name.isidentifier():
            name = f"x{arg_index}"
            while name in names or name in spelled:
                name += "_"
        spelled.append(name)
    return spelled


def argument_names(function: Callable[..., object], count: int) -> list[str]:
    """The names of the first `count` positional parameters, for error messages."""
    names: list[str] = []
    try:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
            # From *args on there are no names.
            elif parameter.kind is parameter.VAR_POSITIONAL:
                break
    except (TypeError, ValueError):
        pass
    return (names + [f"args[{arg_index}]" for arg_index in range(len(names), count)])[:count]


def groups(rows: int, n: int | None, microbatch_size: int | None) -> list[tuple[int, int]]:
    """(count, size) of the micro-batches in order: at most two sizes.

    `n` micro-batches, or one for each row if these are fewer, differ by at most one row; those of
    `microbatch_size` rows leave a smaller last one.
    """
    if microbatch_size is not None:
        sizes = [(rows // microbatch_size, microbatch_size), (1, rows % microbatch_size)]
    elif n is not None:
        n = min(n, rows)
        # Not divmod, which torch.compile lacks for symbolic sizes. The first ones have one row
        # more, as in numpy.array_split.
        size, longer = rows // n, rows % n
        sizes = [(longer, size + 1), (n - longer, size)]
    # If the rows divide evenly there is one size.
    return [(count, size) for count, size in sizes if count and size]


def starts(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first row, rows) of every micro-batch, in order."""
    microbatches, start = [], 0
    for count, size in sizes:
        for _ in range(count):
            microbatches.append((start, size))
            start += size
    return microbatches
