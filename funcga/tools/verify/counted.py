"""Counts: the expressions of a batch that losses divide by, such as the unmasked tokens."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import Array
from funcga.tools.verify.probe import Probe, Rows


class Count(NamedTuple):
    """A count of rows, and its expression: the body of a lambda with these parameters."""

    parameters: str
    expression: str
    of: Callable[[Rows], float]

    @property
    def line(self) -> str:
        """The option for a loss that divides by this count."""
        if self.is_of_rows:
            return "weight=None"
        return f"weight=lambda {self.parameters}: {self.expression}"

    @property
    def is_of_rows(self) -> bool:
        """Whether it is the number of rows, which is the default weight."""
        return self.of is len


def counts(probe: Probe) -> Iterator[Count]:
    """The usual counts of every leaf that is split: the rows, then those of labels, then all
    others, simplest first.

    Labels come first, since they say which items a loss is a mean over. An attention mask may count
    the same items in this batch and others in the next one.
    """
    leaves = [*_split_leaves(probe)]
    first = leaves[0]
    rows = f"{first.name}.shape[{first.axis}]" if first.axis else f"len({first.name})"
    yield Count(first.parameters, rows, len)
    is_other = lambda leaf: not re.search("label|target", leaf.name, re.IGNORECASE)
    for leaf in sorted(leaves, key=is_other):
        for expression, counted in _expressions(leaf):
            total = lambda rows, counted=counted: float(counted[[*rows]].sum())
            yield Count(leaf.parameters, expression, total)


def form(probe: Probe) -> Count:
    """An example of a count, for a loss whose count was not found: of labels, if the batch seems
    to have any.
    """
    leaves = [*_split_leaves(probe)]
    leaf = next((leaf for leaf in leaves if _is_whole(leaf.values)), leaves[-1])
    return Count(leaf.parameters, f"({leaf.name} != -100).sum()", lambda rows: 0)


class _Leaf(NamedTuple):
    """A leaf that is split: its values, with the rows on axis 0, and its name in the body of a
    lambda with these parameters.
    """

    values: Array
    name: str
    axis: int
    parameters: str


def _split_leaves(probe: Probe) -> Iterator[_Leaf]:
    # weight= is called with every argument that is split, so these are the parameters of the
    # lambda.
    arguments, names = probe.arguments, argument_names(probe.grad_fn, len(probe.args))
    names = as_parameters(arguments.split_args(tuple(names)))
    for name, part in zip(names, arguments.split_args(arguments.parts), strict=True):
        paths = leaf_paths(part.value, probe.backend.trees, name)
        for path, values, axis in zip(paths, probe.numbers(part.value), part.axes, strict=True):
            if isinstance(axis, int):
                # What holds no numbers, such as keys, has an empty array in its place.
                rows_first = np.moveaxis(values, axis, 0) if values.size else values
                yield _Leaf(rows_first, path, axis % values.ndim, ", ".join(names))


def _is_whole(values: Array) -> bool:
    return bool(np.equal(values, np.round(values)).all())


def _expressions(leaf: _Leaf) -> Iterator[tuple[str, Array]]:
    """Pairs of an expression and the array whose sum it is."""
    values, name = leaf.values, leaf.name
    if not values.size or np.iscomplexobj(values):
        return
    # Numbers that are not whole are weights themselves, or masks of some kind.
    if not _is_whole(values):
        if (values >= 0).all():
            yield f"{name}.sum()", values
            yield f"({name} != 0).sum()", values != 0
        yield f"({name} ** 2).sum()", values**2
        return
    shifted = [(name, values)]
    # A language model counts from the second token on, or up to the last but one.
    if leaf.axis == 0 and values.ndim > 1 and values.shape[1] > 1:
        shifted += [(f"{name}[:, 1:]", values[:, 1:]), (f"{name}[:, :-1]", values[:, :-1])]
    for spelled, part in shifted:
        unique, frequency = np.unique(part, return_counts=True)
        if (part >= 0).all():
            yield f"{spelled}.sum()", part
        # The sum of a mask is what it counts already, unless it is one of padding.
        if {*unique} <= {0, 1}:
            yield f"({spelled} == 0).sum()", part == 0
            continue
        # The usual values of what is ignored, then the most frequent one and the largest, which
        # padding may be.
        for ignored in dict.fromkeys((-100, 0, -1, unique[frequency.argmax()], unique[-1])):
            if ignored in unique:
                yield f"({spelled} != {int(ignored)}).sum()", part != ignored
        if (part < 0).any():
            yield f"({spelled} >= 0).sum()", part >= 0
        yield f"({spelled} > 0).sum()", part > 0


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
