"""The arguments of one call: which are split, passed whole or threaded, and how many rows there are."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcga._backend.prefixes import Placed, PrefixError, broadcast, leaf_paths, outline
from funcga._backend.protocols import Backend
from funcga._call.examples import Listed, has_list, suspect
from funcga.errors import FuncgaError


class _Carry:
    """The type of CARRY."""

    def __repr__(self) -> str:
        return "funcga.CARRY"

    def __reduce__(self) -> str:
        return "CARRY"


CARRY = _Carry()
"""In `in_axes`: state that is threaded from one micro-batch to the next; grad_fn returns it where fold is carry()."""


class Argument(NamedTuple):
    """One positional argument. What is passed whole has no leaves here."""

    value: Any
    leaves: list[Any]
    axes: list[Placed]  # for each leaf: an int, None (whole) or CARRY
    structure: Any


@dataclass(frozen=True)
class Arguments:
    """The positional arguments of one call of `grad_fn`."""

    parts: tuple[Argument, ...]
    grad_fn: Callable[..., Any]
    backend: Backend
    assumed: bool = False  # whether no in_axes says where the rows are

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """(leaf, axis) of every leaf that is not simply passed whole."""
        return (
            (leaf, placed.value) for part in self.parts for leaf, placed in zip(part.leaves, part.axes, strict=True)
        )

    def paths(self) -> list[tuple[str, str]]:
        """(root, path) of the same leaves: where in_axes speaks of it, and where it is."""
        names = argument_names(self.grad_fn, len(self.parts))
        return [
            (name + placed.root, path)
            for name, part in zip(names, self.parts, strict=True)
            if part.axes
            for placed, path in zip(part.axes, leaf_paths(part.value, self.backend.trees, name), strict=True)
        ]

    def path(self, leaf: int) -> str:
        """Where one of these leaves is."""
        return self.paths()[leaf][1]

    def carried(self) -> list[tuple[str, str]]:
        """(root, path) of the leaves that are CARRY."""
        axes = [axis for _, axis in self]
        if CARRY not in axes:
            return []
        return [place for place, axis in zip(self.paths(), axes, strict=True) if axis is CARRY]

    def state(self) -> list[Any]:
        """The leaves that are CARRY."""
        return [leaf for leaf, axis in self if axis is CARRY]

    def cut(
        self, start: Any, size: int | None, state: list[Any], narrow: Callable[..., Any] | None = None
    ) -> tuple[Any, ...]:
        """The arguments of the micro-batch of `size` rows from row `start` on; with size None, of all rows.

        narrow: `narrow(array, axis, start, size)` takes the rows. Default: those that follow `start`.
        """
        threaded = iter(state)
        narrow, unflatten = narrow or self.backend.arrays.slice, self.backend.trees.unflatten
        args = []
        for part in self.parts:
            if not part.axes:
                args.append(part.value)
                continue
            try:
                pieces = [
                    next(threaded) if axis is CARRY
                    else leaf if axis is None or leaf is None or size is None
                    else narrow(leaf, axis, start, size)
                    for leaf, (axis, _) in zip(part.leaves, part.axes, strict=True)
                ]  # fmt: skip
            except TypeError:
                self._check_cut(narrow, start, size)
                raise
            args.append(unflatten(part.structure, pieces))
        return tuple(args)

    def _check_cut(self, narrow: Callable[..., Any], start: Any, size: Any) -> None:
        """Raises FuncgaError for the first leaf that rows cannot be cut out of, though it has some."""
        for i, (leaf, axis) in enumerate(self):
            if leaf is None or not _is_split(axis):
                continue
            try:
                narrow(leaf, axis, start, size)
            except TypeError as error:
                raise FuncgaError(
                    f"`{self.path(i)}` is {error}, {self.backend.arrays.describe(leaf)}, of which rows cannot be cut. "
                    f"Give it dense and padded; or cut it yourself, and stream the micro-batches: "
                    f"funcga.stream(grad_fn)(params, microbatches)."
                ) from error

    def split_args(self, args: tuple[Any, ...]) -> list[Any]:
        """Those of a micro-batch's arguments that are split: what `weight` is called with."""
        split = [any(_is_split(placed.value) for placed in part.axes) for part in self.parts]
        if not any(split):
            raise FuncgaError(
                "weight= is called with the arguments that are split, and in_axes splits none. Give an argument an "
                "axis: in_axes=(None, 0)."
            )
        return [arg for arg, is_split in zip(args, split, strict=True) if is_split]

    def _check_lists(self, rows: int, even: bool) -> None:
        """Raises FuncgaError for a list whose arrays are examples, not rows of examples."""
        if not any(has_list(part.value, self.backend.trees) for part in self.parts if part.axes):
            return  # as usual
        names = argument_names(self.grad_fn, len(self.parts))
        split = [(name, part.value) for name, part in zip(names, self.parts, strict=True) if part.axes]
        found = suspect(split, rows, even, self.backend)
        if found is not None:
            raise _listed(self, found, names)

    def rows(self, may_be_empty: bool = False) -> int:
        """The number of rows that the split leaves have in common.

        Raises FuncgaError if they differ, if there are none, unless it `may_be_empty`, or if a leaf has no such axis.
        """
        sizes = {
            i: _rows(self, i, leaf, axis) for i, (leaf, axis) in enumerate(self) if _is_split(axis) and leaf is not None
        }
        if not sizes:
            raise FuncgaError(
                "no argument is split, so there are no rows to make micro-batches of. By default the first argument "
                "is passed whole and every other one is split on axis 0; say otherwise with in_axes, as in vmap: "
                "in_axes=0 splits all of them. Keyword arguments are passed whole: pass what is to be split by "
                "position."
            )
        first, rows = next(iter(sizes.items()))
        even = all(size == rows for size in sizes.values())
        if self.assumed:
            self._check_lists(rows, even)
        if not even:
            raise _uneven(self, sizes)
        if rows == 0 and not may_be_empty:
            raise FuncgaError(f"the batch has 0 rows (`{self.path(first)}` is empty): there is nothing to fold.")
        return rows


def _listed(arguments: Arguments, found: Listed, names: list[str]) -> FuncgaError:
    backend = arguments.backend
    entry = backend.trees.flatten(found.value[0])[0][0]
    split = [name for name, part in zip(names, arguments.parts, strict=True) if part.axes]
    axes = tuple(0 if part.axes else None for part in arguments.parts)
    return FuncgaError(
        f"`{found.path}` is a list of {len(found.value)}, the first {backend.arrays.describe(entry)}: axis 0 of each "
        f"would be taken for the rows, and these look like examples. If they are, stack them, or stream micro-batches "
        f"of them with weight=lambda {', '.join(split)}: len({found.path}). If axis 0 is the rows, say so: "
        f"in_axes={axes}."
    )


def _is_split(axis: Any) -> bool:
    return axis is not None and axis is not CARRY


def _uneven(arguments: Arguments, sizes: dict[int, int]) -> FuncgaError:
    first = {size: i for i, size in reversed(sizes.items())}  # the first leaf of every number of rows
    leaves = list(arguments)
    listed = "; ".join(
        f"`{arguments.path(i)}` has {size} (axis {leaves[i][1]} of {arguments.backend.arrays.describe(leaves[i][0])})"
        for size, i in sorted(first.items(), key=lambda pair: pair[1])
    )
    return FuncgaError(
        f"the split arguments have different numbers of rows: {listed}. Micro-batches cut all of them alike. Pass "
        f"what has no rows whole: in_axes with None in its place."
    )


def _rows(arguments: Arguments, i: int, leaf: Any, axis: int) -> int:
    backend = arguments.backend
    if not backend.arrays.is_array(leaf):
        path = arguments.path(i)
        convert = f"funcga.to_{backend.name}({path.split('[')[0].split('.')[0]})"
        remedy = f"Convert it, `{convert}`, or pass" if hasattr(leaf, "shape") else "Make it a tree of arrays, or pass"
        raise FuncgaError(
            f"`{path}` is {backend.arrays.describe(leaf)}, and in_axes splits it on axis {axis}: only {backend.name} "
            f"arrays can be split. {remedy} it whole: in_axes with None in its place."
        )
    try:
        shape = leaf.shape
    except RuntimeError as error:
        raise FuncgaError(
            f"`{arguments.path(i)}` is {backend.arrays.describe(leaf)}, a tensor without a shape, so its rows cannot "
            f"be counted. Give it dense and padded, or with layout=torch.jagged; or stream micro-batches, with weight=."
        ) from error
    if not shape:
        raise FuncgaError(
            f"`{arguments.path(i)}` is {backend.arrays.describe(leaf)}, a scalar: it has no axis {axis} to split. "
            f"Pass it whole: in_axes with None in its place, or as a keyword argument."
        )
    rank = len(leaf.shape)
    if not -rank <= axis < rank:
        raise FuncgaError(
            f"`{arguments.path(i)}` is {backend.arrays.describe(leaf)}: axis {axis} is out of range. in_axes for it "
            f"lies between {-rank} and {rank - 1}."
        )
    rows: int = leaf.shape[axis]  # or a symbol for one, where a program is exported or compiled for any number
    return rows


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


def read_arguments(
    args: tuple[Any, ...], in_axes: Any, grad_fn: Callable[..., Any], backend: Backend, assumed: bool = False
) -> Arguments:
    """The Arguments of a call; `in_axes` None is the default: the first whole, the others split on axis 0.

    assumed: whether nobody said where the rows are; then a list of examples is refused when they are counted.
    Raises FuncgaError if in_axes is no tree prefix of the arguments.
    """
    parts = []
    for i, (arg, axis) in enumerate(zip(args, _per_argument(in_axes, len(args)), strict=True)):
        if axis is None:
            parts.append(Argument(arg, [], [], None))
            continue
        leaves, structure = backend.trees.flatten(arg)
        try:
            axes = broadcast(axis, arg, len(leaves), _is_axis, backend.trees)
        except PrefixError as error:
            raise _no_prefix(error, argument_names(grad_fn, len(args))[i], backend) from error
        parts.append(Argument(arg, leaves, axes, structure))
    return Arguments(tuple(parts), grad_fn, backend, assumed)


def _no_prefix(error: PrefixError, name: str, backend: Backend) -> FuncgaError:
    trees = backend.trees
    return FuncgaError(
        f"in_axes is no prefix of the arguments: for `{name}{error.path}` it has {outline(error.prefix, trees, repr)}, "
        f"and the argument is {outline(error.tree, trees, backend.arrays.describe)}. Write an axis, None (whole) or "
        f"funcga.CARRY for all that stands below, or a container with the same keys."
    )


def _per_argument(in_axes: Any, count: int) -> tuple[Any, ...]:
    if in_axes is None:
        return ((None,) + (0,) * (count - 1))[:count]
    if _is_axis(in_axes):
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
    return value is None or value is CARRY or (hasattr(value, "__index__") and not isinstance(value, bool))


def groups(rows: int, n: int | None, microbatch_size: int | None) -> list[tuple[int, int]]:
    """(count, size) of the micro-batches in order: at most two sizes.

    `n` micro-batches differ by at most one row; those of `microbatch_size` rows leave a smaller last one.
    Raises FuncgaError if n is more than the rows.
    """
    if microbatch_size is not None:
        found = [(rows // microbatch_size, microbatch_size), (1, rows % microbatch_size)]
    elif n is not None:
        if n > rows:
            raise FuncgaError(
                f"n={n} micro-batches were asked of a batch of {rows} rows: a micro-batch has at least one. Write "
                f"n={rows} or less, or say how large one is: microbatch_size=1."
            )
        size, longer = rows // n, rows % n  # not divmod, which torch.compile lacks for symbolic sizes
        found = [(longer, size + 1), (n - longer, size)]
    return [(count, size) for count, size in found if count and size]


def starts(found: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(first row, rows) of every micro-batch, in order."""
    start = 0
    for count, size in found:
        for _ in range(count):
            yield start, size
            start += size
