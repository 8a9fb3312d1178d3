"""The arguments of one call: which are split, passed whole or threaded, and how many rows there
are.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcga._backend import Backend, Trees
from funcga._backend.prefixes import PrefixValue, broadcast, leaf_paths
from funcga._fold import describe
from funcga._types import Args, Array, GradFn, Structure, Tree
from funcga.errors import FuncgaError


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
    state: list[Any] = field(default_factory=list)  # the leaves that are CARRY

    def __iter__(self) -> Iterator[tuple[Any, Axis]]:
        """(leaf, axis) of every leaf of the arguments that are not passed whole."""
        return (
            (leaf, axis)
            for part in self.parts
            for leaf, axis in zip(part.leaves, part.axes, strict=True)
        )

    def rows(self, may_be_empty: bool = False) -> int:
        """The common number of rows of the split leaves.

        Raises FuncgaError if they differ, if there are none (unless `may_be_empty`), or if a
        leaf lacks the axis.
        """
        sizes, arrays = dict[int, int](), self.backend.arrays  # by the index of the leaf
        for leaf_index, (leaf, axis) in enumerate(self):
            if not isinstance(axis, int) or leaf is None:
                continue
            try:
                shape = leaf.shape if arrays.is_array(leaf) else ()
                sizes[leaf_index] = shape[axis]
            except (IndexError, RuntimeError):  # nested tensors of the old kind have no shape
                raise FuncgaError(
                    f"`{self.path(leaf_index)}` is {describe(leaf)}: it has no axis {axis} "
                    f"to split. Only {self.backend.name} arrays are split: convert it, make it a "
                    "tree of arrays, or pass it whole: in_axes with None in its place, or by "
                    "keyword. A DataLoader is folded by stream."
                ) from None
        if not sizes:
            raise FuncgaError(
                "no argument is split, so there are no rows to make micro-batches of. By default "
                "the first argument is passed whole and every other one is split on axis 0; say "
                "otherwise with in_axes, as in vmap: in_axes=0 splits all of them. Keyword "
                "arguments are passed whole: pass what is to be split by position."
            )
        first, rows = next(iter(sizes.items()))
        for leaf_index, size in sizes.items():
            if size != rows:
                raise FuncgaError(
                    f"the split arguments have different numbers of rows: `{self.path(first)}` has "
                    f"{rows} and `{self.path(leaf_index)}` has {size}; micro-batches cut all of "
                    "them alike. Pass what has no rows whole: in_axes with None in its place."
                )
        if any(len(part.leaves) > 1 for part in self.parts):
            self._check_examples(rows)
        if rows == 0 and not may_be_empty:
            raise FuncgaError(
                f"the batch has 0 rows (`{self.path(first)}` is empty): there is nothing to fold."
            )
        return rows

    def _check_examples(self, rows: int) -> None:
        """Raises FuncgaError if lists of arrays, or dicts of them, are examples, as a collate
        function for images of several sizes makes them: axis 0 of these is not the rows.
        """
        flatten, split = self.backend.trees.flatten, [part for part in self.parts if part.axes]
        if not all(isinstance(part.in_axes, int) for part in split):
            return  # the user has said what is split
        nodes = [node for part in split for node in flatten(part.value, _is_list)[0]]
        lists = [node for node in nodes if node is not None]
        is_alone = all(map(_is_list, lists))  # else another array has these rows
        for examples in filter(_is_list, lists):
            if is_alone:
                # A DataLoader makes its argument a list of the parts of a batch, which may be
                # alike.
                is_argument = any(examples is part.value for part in split)
                are_examples = _look_alike(
                    flatten(examples)[0], len(examples), rows if is_argument else None
                )
            else:  # a dict for each row, as the targets of detection are
                are_examples = len(examples) == rows > 1 and isinstance(examples[0], Mapping)
            if are_examples:
                raise FuncgaError(
                    f"a list of {len(examples)} arrays is split: axis 0 of each would be taken for "
                    "the rows, and these look like examples. If they are, stack them, or stream "
                    "micro-batches with weight=. If axis 0 is the rows, make it a tuple."
                )

    def cut(
        self,
        start: Any,
        size: int | None,
        state: list[Any],
        narrow: Callable[..., Array] | None = None,
    ) -> Args:
        """The arguments of the micro-batch of `size` rows from row `start` on; with size None,
        of all rows. state: the values of the leaves that are CARRY. narrow: `narrow(array, axis,
        start, size)` slices the rows; by default those that follow `start`, as indexing does.
        """
        # The leaves that are CARRY take what is in the state, in order.
        threaded = iter(state)
        narrow, unflatten = narrow or _sliced, self.backend.trees.unflatten
        args = []
        for part in self.parts:
            if not part.axes:
                args.append(part.value)
                continue
            pieces = [
                next(threaded)
                if axis is CARRY
                else narrow(leaf, axis, start, size)
                if isinstance(axis, int) and not (leaf is None or size is None)
                else leaf
                for leaf, axis in zip(part.leaves, part.axes, strict=True)
            ]
            args.append(unflatten(part.structure, pieces))
        return tuple(args)

    def are_split(self) -> list[bool]:
        """Whether each argument is split: what `weight=` and `totals=` are called with."""
        # In JAX None has no leaf. It counts as split all the same, as in torch.
        return [
            isinstance(part.in_axes, int) or any(isinstance(axis, int) for axis in part.axes)
            for part in self.parts
        ]

    def split_args(self, args: Args) -> list[Any]:
        """The split arguments of a micro-batch, for the functions of `weight=` and `totals=`."""
        pairs = zip(args, self.are_split(), strict=True)
        return [arg for arg, is_split in pairs if is_split]

    def paths(self) -> list[tuple[str, str]]:
        """(root, path) of the leaves, in the order of iteration: the path of the in_axes entry,
        and that of the leaf.
        """
        trees, paths = self.backend.trees, list[tuple[str, str]]()
        names = argument_names(self.grad_fn, len(self.parts))
        for name, part in zip(names, self.parts, strict=True):
            if part.axes:
                axes = _axes_below(part.in_axes, part.value, trees, name)
                of_leaves = zip(axes, leaf_paths(part.value, trees, name), strict=True)
                paths += [(axis.root, path) for axis, path in of_leaves]
        return paths

    def path(self, leaf_index: int) -> str:
        """The path of one of these leaves."""
        return self.paths()[leaf_index][1]

    def carried(self) -> list[tuple[str, str]]:
        """(root, path) of the leaves that are CARRY."""
        return [paths for paths, (_, axis) in zip(self.paths(), self, strict=True) if axis is CARRY]


def read_arguments(args: Args, in_axes: Tree, grad_fn: GradFn, backend: Backend) -> Arguments:
    """The Arguments of a call; `in_axes` None is the default: the first whole, the others split on
    axis 0.

    Raises FuncgaError if in_axes is no tree prefix of the arguments.
    """
    count, parts, state = len(args), [], []
    # in_axes has one entry for each argument, as in vmap; each entry is a prefix, with one axis for
    # each leaf below it.
    if in_axes is None:
        in_axes = (None, *[0] * (count - 1))[:count]
    elif _is_axis(in_axes):
        in_axes = (in_axes,) * count
    elif not isinstance(in_axes, tuple | list) or len(in_axes) != count:
        raise FuncgaError(
            f"in_axes is {in_axes!r}, and the call has {count} positional arguments. Give an axis "
            f"for all of them, or one entry each, such as in_axes={(None,) + (0,) * (count - 1)}: "
            "an axis, None (whole), funcga.CARRY, or a tree of these. Keyword arguments are never "
            "split."
        )
    for arg_index, (arg, axis) in enumerate(zip(args, in_axes, strict=True)):
        # An argument that is passed whole may be any object, so it is not even flattened.
        if axis is None:
            parts.append(Argument(arg, [], [], None))
            continue
        leaves, structure = backend.trees.flatten(arg)
        # The usual entry, a number, needs no broadcast.
        if type(axis) is int:
            axes: list[Axis] = [axis] * len(leaves)
        else:
            name = argument_names(grad_fn, count)[arg_index]
            below = _axes_below(axis, arg, backend.trees, name)
            axes = [
                axis if axis is None or axis is CARRY else operator.index(axis) for axis, _ in below
            ]
            pairs = zip(leaves, axes, strict=True)
            state += [leaf for leaf, axis_of_leaf in pairs if axis_of_leaf is CARRY]
        parts.append(Argument(arg, leaves, axes, structure, axis))
    return Arguments(tuple(parts), grad_fn, backend, state)


def _axes_below(axis: Tree, arg: Tree, trees: Trees, name: str) -> list[PrefixValue]:
    what = "in_axes is no prefix of the arguments"
    return broadcast(axis, arg, _is_axis, trees, name, what)


def _sliced(array: Array, axis: int, start: int, size: int) -> Array:
    """`size` rows from `start` on, along an axis."""
    return array.swapaxes(0, axis)[start : start + size].swapaxes(0, axis)


def _is_list(node: object) -> bool:
    return type(node) is list


def _look_alike(leaves: list[Array], count: int, rows: int | None) -> bool:
    """Whether so many arrays, or trees of them, are alike; with `rows`, and are more than these."""
    kinds = {(leaf.dtype, len(leaf.shape)) for leaf in leaves if leaf is not None}
    is_long = rows is None or (1 < rows < count and max(axes for _, axes in kinds) > 2)
    return len(kinds) == 1 < count and is_long


def _is_axis(value: object) -> bool:
    return (
        value is None
        or value is CARRY
        or (hasattr(value, "__index__") and not isinstance(value, bool))
    )


def argument_names(function: Callable[..., object], count: int) -> list[str]:
    """The names of the first `count` positional parameters, for error messages."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    # From *args on there are no names.
    names = [each.name for each in parameters if each.kind < each.VAR_POSITIONAL]
    return [*names, *[f"args[{arg_index}]" for arg_index in range(len(names), count)]][:count]


class Split(NamedTuple):
    """How a batch is split: into n micro-batches, or into micro-batches of so many rows.

    `n` micro-batches, or one for each row if these are fewer, differ by at most one row; those of
    `microbatch_size` rows leave a smaller last one.
    """

    n: int | None = None
    microbatch_size: int | None = None

    def groups(self, rows: int, devices: int = 1) -> list[tuple[int, int]]:
        """(count, size) of the micro-batches of so many rows in order: at most two sizes.

        `devices`: over how many a micro-batch lies, of which each has the same rows.
        """
        if self.microbatch_size is not None:
            size = max(1, self.microbatch_size // devices)
            sizes = [(rows // size, size), (1, rows % size)]
        elif self.n is not None:
            n = min(self.n, rows)
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
