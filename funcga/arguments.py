"""The arguments of one call: which are split, passed whole or threaded, and how many rows there are."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from funcga.backend import Backend
from funcga.errors import FuncgaError
from funcga.prefixes import Placed, PrefixError, broadcast, leaf_paths, outline


class _Carry:
    """The type of CARRY."""

    def __repr__(self) -> str:
        return "funcga.CARRY"

    def __reduce__(self) -> str:
        return "CARRY"


CARRY = _Carry()
"""In `in_axes`: state that is threaded from one micro-batch to the next; grad_fn returns it where fold is carry()."""


@dataclass(frozen=True)
class Arguments:
    """The positional arguments of a call as leaves, each with its axis: an int, None (whole) or CARRY."""

    leaves: tuple[Any, ...]
    axes: tuple[Placed, ...]
    structure: Any
    names: tuple[str, ...]
    is_split: tuple[bool, ...]  # for each argument: whether any leaf of it has an axis
    backend: Backend

    @property
    def paths(self) -> list[str]:
        """The path of every leaf, for error messages and to match what is carried."""
        trees = self.backend.trees
        args = trees.unflatten(self.structure, list(range(len(self.leaves))))
        return [path for name, arg in zip(self.names, args, strict=True) for path in leaf_paths(arg, trees, name)]

    @property
    def carried(self) -> list[tuple[str, str]]:
        """(root, path) of the leaves that are CARRY: where in_axes says so, and where the leaf is."""
        if not any(placed.value is CARRY for placed in self.axes):
            return []
        return [(root, path) for (axis, root), path in zip(self.axes, self.paths, strict=True) if axis is CARRY]

    @property
    def state(self) -> list[Any]:
        """The leaves that are CARRY."""
        return [leaf for leaf, placed in zip(self.leaves, self.axes, strict=True) if placed.value is CARRY]

    def build(self, leaves: list[Any], state: list[Any]) -> tuple[Any, ...]:
        """The positional arguments with these leaves, and the threaded state in its places."""
        threaded = iter(state)
        filled = [
            next(threaded) if placed.value is CARRY else leaf for leaf, placed in zip(leaves, self.axes, strict=True)
        ]
        args: tuple[Any, ...] = self.backend.trees.unflatten(self.structure, filled)
        return args

    def cut(self, start: Any, size: int, state: list[Any]) -> tuple[Any, ...]:
        """The positional arguments of the micro-batch of `size` rows that begins at row `start`."""
        cut = self.backend.arrays.slice
        leaves = [
            cut(leaf, axis, start, size) if type(axis) is int and leaf is not None else leaf
            for leaf, (axis, _) in zip(self.leaves, self.axes, strict=True)
        ]
        return self.build(leaves, state)

    def split_args(self, args: tuple[Any, ...]) -> list[Any]:
        """Those of a micro-batch's arguments that are split: what `weight` is called with."""
        return [arg for arg, split in zip(args, self.is_split, strict=True) if split]

    def rows(self) -> int:
        """The number of rows that the split leaves have in common.

        Raises FuncgaError if they differ, if there are none, or if a leaf has no such axis.
        """
        split = [i for i, leaf in enumerate(self.leaves) if type(self.axes[i].value) is int and leaf is not None]
        sizes = [_rows(self, i) for i in split]
        if not sizes:
            raise FuncgaError(
                "no argument is split, so there are no rows to make micro-batches of. By default the first argument "
                "is passed whole and every other one is split on axis 0; say otherwise with in_axes, as in vmap: "
                "in_axes=0 splits all of them."
            )
        if any(size != sizes[0] for size in sizes):
            raise _uneven(self, dict(zip(split, sizes, strict=True)))
        if sizes[0] == 0:
            raise FuncgaError(f"the batch has 0 rows (`{self.paths[split[0]]}` is empty): there is nothing to fold.")
        return sizes[0]


def _uneven(arguments: Arguments, sizes: dict[int, int]) -> FuncgaError:
    first = {size: i for i, size in reversed(sizes.items())}  # the first leaf of every number of rows
    listed = "; ".join(
        f"`{arguments.paths[i]}` has {size} (axis {arguments.axes[i].value} of "
        f"{arguments.backend.arrays.describe(arguments.leaves[i])})"
        for size, i in sorted(first.items(), key=lambda pair: pair[1])
    )
    return FuncgaError(
        f"the split arguments have different numbers of rows: {listed}. Micro-batches cut all of them alike. Pass "
        f"what has no rows whole: in_axes with None in its place."
    )


def _rows(arguments: Arguments, i: int) -> int:
    leaf, axis, backend = arguments.leaves[i], arguments.axes[i].value, arguments.backend
    if not backend.arrays.is_array(leaf):
        path = arguments.paths[i]
        convert = f"funcga.to_{backend.name}({path.split('[')[0].split('.')[0]})"
        raise FuncgaError(
            f"`{path}` is {backend.arrays.describe(leaf)}, and in_axes splits it on axis {axis}: only {backend.name} "
            f"arrays can be split. Convert it, `{convert}`, or pass it whole: in_axes with None in its place."
        )
    shape = leaf.shape
    if not shape:
        raise FuncgaError(
            f"`{arguments.paths[i]}` is {backend.arrays.describe(leaf)}, a scalar: it has no axis {axis} to split. "
            f"Pass it whole: in_axes with None in its place, or as a keyword argument."
        )
    if not -len(shape) <= axis < len(shape):
        raise FuncgaError(
            f"`{arguments.paths[i]}` is {backend.arrays.describe(leaf)}: axis {axis} is out of range. in_axes for it "
            f"lies between {-len(shape)} and {len(shape) - 1}."
        )
    return int(shape[axis])


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional parameters, for error messages."""
    names: list[str] = []
    try:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                break
    except (TypeError, ValueError):
        pass
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def read_arguments(args: tuple[Any, ...], in_axes: Any, names: list[str], backend: Backend) -> Arguments:
    """The Arguments of a call; `in_axes` None is the default: the first whole, the others split on axis 0.

    Raises FuncgaError if in_axes is no tree prefix of the arguments.
    """
    per_argument = _per_argument(in_axes, len(args))
    flatten = backend.trees.flatten
    leaves: list[Any] = []
    axes: list[Placed] = []
    is_split = []
    for arg, axis, name in zip(args, per_argument, names, strict=True):
        own, _ = flatten(arg)
        placed = _place(arg, axis, name, len(own), backend)
        leaves += own
        axes += placed
        is_split.append(any(type(p.value) is int for p in placed))
    return Arguments(tuple(leaves), tuple(axes), flatten(args)[1], tuple(names), tuple(is_split), backend)


def _per_argument(in_axes: Any, count: int) -> tuple[Any, ...]:
    if in_axes is None:
        return (None,) + (0,) * (count - 1)
    if type(in_axes) is int or in_axes is CARRY:
        return (in_axes,) * count
    if not isinstance(in_axes, tuple | list):
        raise FuncgaError(
            f"in_axes is {in_axes!r}. Give an axis for all arguments, or a tuple with one entry for each of the "
            f"{count}: an axis, None (whole), funcga.CARRY, or a tree of these."
        )
    if len(in_axes) != count:
        raise FuncgaError(
            f"in_axes has {len(in_axes)} entries and the call has {count} positional arguments. Give one entry each, "
            f"such as in_axes={(None,) + (0,) * (count - 1)}; pass keyword arguments by keyword, they are never split."
        )
    return tuple(in_axes)


def _is_axis(value: Any) -> bool:
    return value is None or value is CARRY or type(value) is int


def _place(arg: Any, axis: Any, name: str, count: int, backend: Backend) -> list[Placed]:
    if axis is None:
        return [Placed(None, name)] * count  # also where None is not a leaf but no tree at all
    try:
        return broadcast(axis, arg, _is_axis, backend.trees, name)
    except PrefixError as error:
        trees = backend.trees
        raise FuncgaError(
            f"in_axes is no prefix of the arguments: for `{error.path}` it has {outline(error.prefix, trees, repr)}, "
            f"and the argument is {outline(error.tree, trees, backend.arrays.describe)}. Write an axis, None (whole) "
            f"or funcga.CARRY for all that stands below, or a container with the same keys."
        ) from error


def groups(rows: int, n: int | None, microbatch_size: int | None) -> list[tuple[int, int]]:
    """(count, size) of the micro-batches in order: at most two sizes.

    `n` micro-batches differ by at most one row; those of `microbatch_size` rows leave a smaller last one.
    Raises FuncgaError if n is more than the rows.
    """
    if n is None:
        size = microbatch_size or rows
        found = [(rows // size, size), (1, rows % size)]
    else:
        if n > rows:
            raise FuncgaError(
                f"n={n} micro-batches were asked of a batch of {rows} rows: a micro-batch has at least one. Write "
                f"n={rows} or less, or say how large one is: microbatch_size=1."
            )
        size, longer = divmod(rows, n)
        found = [(longer, size + 1), (n - longer, size)]
    return [(count, size) for count, size in found if count and size]


def starts(found: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of every micro-batch, in order."""
    start = 0
    for count, size in found:
        for _ in range(count):
            yield start, size
            start += size
