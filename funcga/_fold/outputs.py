"""The outputs of grad_fn: how each leaf is folded, and the structure that every micro-batch has
to return.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from funcga._backend import Backend
from funcga._backend.prefixes import (
    PathError,
    PrefixValue,
    broadcast,
    leaf_paths,
    leaves_in_order,
)
from funcga._fold import LeafFold, bind, check_shape, describe
from funcga._types import Array, Dtype, Structure, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold


@dataclass(frozen=True)
class Outputs:
    """The leaves of grad_fn's output, by how they are folded.

    `folds` has a LeafFold for every array leaf and None for a leaf that is None. In a loop, a leaf
    of carry() is threaded, and one of a growing monoid is collected; every other is reduced in
    place. `threads[k]` is the leaf that becomes the k-th leaf of the CARRY arguments.
    """

    structure: Structure
    folds: tuple[LeafFold | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[Dtype, ...]
    threads: tuple[int, ...]
    is_loop: bool
    backend: Backend
    # How many leaves a tool folds beside. They come first: values are (these leaves, output).
    before: int = 0

    @cached_property
    def collected(self) -> dict[int, LeafFold]:
        """The folds of the leaves whose values are collected, by leaf index."""
        folds = enumerate(self.folds if self.is_loop else ())
        return {index: fold for index, fold in folds if fold is not None and fold.axis is not None}

    @cached_property
    def reduced(self) -> dict[int, LeafFold]:
        """The folds of the leaves that are reduced in place, by leaf index."""
        others = {*self.threads, *self.collected}
        folds = enumerate(self.folds)
        return {index: fold for index, fold in folds if fold is not None and index not in others}

    def paths(self, name: str = "output") -> list[str]:
        """The path of every leaf in a tree of this name: for errors, and to match other trees by
        path.
        """
        return ["measured"] * self.before + leaf_paths(
            self.value_of(range(len(self.folds))), self.backend.trees, name
        )

    def structure_of(self, leaves: Iterable[Any]) -> Tree:
        """The tree of these leaves."""
        return self.backend.trees.unflatten(self.structure, list(leaves))

    def value_of(self, leaves: Iterable[Any]) -> Tree:
        """The tree of these leaves, without those that come before."""
        tree = self.structure_of(leaves)
        return tree[1] if self.before else tree

    @cached_property
    def of_value(self) -> "Outputs":
        """These Outputs without the leaves that come before."""
        if not self.before:
            return self
        leaf_indices = range(self.before, len(self.folds))
        structure = self.backend.trees.flatten(self.value_of(range(len(self.folds))))[1]
        return replace(self.part(leaf_indices, structure), before=0)

    def join(
        self, reduced: Sequence[Any], collected: Sequence[Any], threaded: Sequence[Any]
    ) -> Tree:
        """The result, in the structure of grad_fn's output."""
        indices = [*self.reduced, *self.collected, *self.threads]
        leaves = dict(zip(indices, [*reduced, *collected, *threaded], strict=True))
        all_leaves = [*map(leaves.get, range(len(self.folds)))]  # others are None
        return self.backend.trees.unflatten(self.structure, all_leaves)

    def part(self, leaf_indices: Sequence[int], structure: Structure) -> "Outputs":
        """The Outputs of some leaves, in a structure of their own, to check partial values by."""
        # Threads are indices among these leaves.
        return replace(
            self,
            structure=structure,
            folds=tuple(self.folds[leaf_index] for leaf_index in leaf_indices),
            shapes=tuple(self.shapes[leaf_index] for leaf_index in leaf_indices),
            dtypes=tuple(self.dtypes[leaf_index] for leaf_index in leaf_indices),
            threads=tuple(
                index for index, leaf_index in enumerate(leaf_indices) if leaf_index in self.threads
            ),
        )

    def leaves(self, value: Tree, which: str) -> list[Any]:
        """The leaves of another micro-batch's output, as arrays.

        The order of a dict may differ. Raises FuncgaError if the structure, a shape or a dtype is
        not the first one's.
        """
        leaves, structure = self.backend.trees.flatten(value)
        try:
            if structure != self.structure:
                leaves = self.in_order(value)
        except PathError as error:
            raise FuncgaError(
                f"grad_fn returned another structure for {which} than for the first: {error}. A "
                "fold needs one structure. Return the same keys for every micro-batch, with zeros "
                "where there is nothing to add."
            ) from None
        # The usual case first: arrays of the same shapes and dtypes. Numbers, None and collected
        # rows are checked below.
        is_array = self.backend.arrays.is_array
        if all(
            is_array(leaf) and leaf.shape == shape and leaf.dtype == dtype
            for leaf, shape, dtype in zip(leaves, self.shapes, self.dtypes, strict=True)
        ):
            return leaves
        return [self._checked(leaf_index, leaf, which) for leaf_index, leaf in enumerate(leaves)]

    def in_order(self, value: Tree) -> list[Any]:
        """The leaves of another value, in this order. Raises PathError if paths are missing, or
        new.
        """
        trees = self.backend.trees
        leaves, structure = trees.flatten(value)
        # Another order of keys, or other containers: matched by path.
        if structure == self.structure:
            return leaves
        before, value = value if self.before else ((), value)
        return [*before, *leaves_in_order(value, self.paths()[self.before :], trees, "output")]

    def _checked(self, leaf_index: int, leaf: Any, which: str) -> Any:
        """A leaf of a later micro-batch as an array. Raises FuncgaError if it does not fit the
        first one.
        """
        fold, shape, dtype = (
            self.folds[leaf_index],
            self.shapes[leaf_index],
            self.dtypes[leaf_index],
        )
        # The first one was None, or any object that is threaded.
        if fold is None and (leaf is None or leaf_index in self.threads):
            return leaf
        if fold is not None and leaf is not None:
            leaf = as_leaf(leaf, lambda: self.paths()[leaf_index], self.backend)
            if leaf.dtype == dtype and _has_shape(leaf, shape, fold.axis):
                return leaf
        # The first value is not kept, only its shape and dtype.
        first = "None" if fold is None else f"{dtype}{[*(shape or ())]}".removeprefix("torch.")
        raise FuncgaError(
            f"grad_fn returned {self.paths()[leaf_index]} as "
            f"{describe(leaf)} for {which} and as "
            f"{first} for the first: the two cannot be combined. Return one shape and dtype for "
            "every micro-batch; fold what has a row for each example with funcga.concat(), or "
            "concat(axis=1) if that is axis 1; compare rows with each other in the loss_fn of "
            "funcga.coupled."
        )


def _has_shape(leaf: Array, shape: tuple[int, ...] | None, axis: int | None) -> bool:
    """Whether a leaf has this shape, apart from the axis that is collected along."""
    if shape is None or leaf.shape == shape:
        return True
    if axis is None or len(shape) != len(leaf.shape):
        return False
    sizes = [*leaf.shape]
    sizes[axis] = shape[axis]
    return tuple(sizes) == shape


def bind_outputs(
    fold: Tree,
    value: Tree,
    backend: Backend,
    *,
    carried: list[tuple[str, str]] | None = None,
    shaped: bool = True,
    name: str = "output",
) -> tuple[Outputs, list[Any]]:
    """The Outputs for values like this one, and its leaves, the numbers among them as arrays.

    In a loop, whose CARRY arguments have the leaves `carried`, (root, path), leaves of carry()
    are threaded, and those of concat() collected. Elsewhere (None) every leaf is reduced by its
    monoid.

    `value` has arrays, or structs with a shape and a dtype; unless `shaped`, only dtypes count.
    `name`: "output" or "params", for errors. Raises FuncgaError for folds that do not fit, and
    for leaves of carry() that do not match the carried ones.
    """
    leaves, structure = backend.trees.flatten(value)
    leaf_values = broadcast_folds(fold, value, len(leaves), backend, name)
    carries = [index for index, (fold, _) in enumerate(leaf_values) if fold.reducer.carries]
    # Checked first: if carry() is missing, another fold may not fit the state, and that error
    # would mislead.
    threads = tuple[int, ...]()
    if carried is not None and (carried or carries):
        threads = _threads(value, leaf_values, carries, carried, backend)
    # Each kind of leaf is bound once, as a model has many leaves and few kinds. Keyed by the
    # `id` of a fold, which the caller keeps alive.
    bound: dict[tuple[int, Dtype], LeafFold] = {}
    # None, and threaded objects, have neither fold nor shape nor dtype here.
    folds: list[LeafFold | None] = [None] * len(leaves)
    shapes, dtypes = list[Any](folds), list[Any](folds)
    for leaf_index, (fold, _) in enumerate(leaf_values):
        leaf = leaves[leaf_index]
        where = lambda leaf_index=leaf_index: leaf_paths(value, backend.trees, name)[leaf_index]
        if not backend.arrays.is_array(leaf):
            if leaf is None or leaf_index in carries:  # carried leaves may be any object
                continue
            leaf = leaves[leaf_index] = as_leaf(leaf, where, backend)
        kind = id(fold), leaf.dtype
        if kind not in bound:
            bound[kind] = bind(fold, leaf, where, backend.arrays)
        folds[leaf_index], dtypes[leaf_index] = bound[kind], leaf.dtype
        if shaped:
            shapes[leaf_index] = leaf.shape
            if bound[kind].axis is not None or fold.reducer.stacked is not None:
                check_shape(fold, leaf, where, backend.arrays)
    outputs = Outputs(
        structure,
        tuple(folds),
        tuple(shapes),
        tuple(dtypes),
        threads,
        carried is not None,
        backend,
    )
    return outputs, leaves


def broadcast_folds(
    fold: Tree, value: Tree, leaves: int, backend: Backend, name: str = "output"
) -> list[PrefixValue]:
    """The Fold of every leaf of grad_fn's output, or of another tree of this name, from a tree
    prefix of Folds.

    Raises FuncgaError if the tree of folds is no prefix of it.
    """
    if isinstance(fold, Fold):  # the usual case: one for all leaves
        return [PrefixValue(fold, name)] * leaves
    of = "what grad_fn returns" if name == "output" else f"the {name}"
    what = f"fold= is no Fold, and the tree of folds is no prefix of {of}"
    is_fold = lambda node: isinstance(node, Fold)
    return broadcast(fold, value, is_fold, backend.trees, name, what)


def as_leaf(leaf: Any, where: Callable[[], str], backend: Backend) -> Array:
    """The leaf at the path `where()` as an array. Raises FuncgaError if it is neither an array
    nor a number.
    """
    try:
        return backend.arrays.as_array(leaf)
    except TypeError as error:
        raise FuncgaError(
            f"{where()} of grad_fn is {describe(leaf)}, which cannot be folded. "
            f"Return arrays or numbers; convert others with funcga.to_{backend.name}(...)."
        ) from error


def _threads(
    value: Tree,
    leaf_values: list[PrefixValue],
    threaded: list[int],
    carried: list[tuple[str, str]],
    backend: Backend,
) -> tuple[int, ...]:
    """For every carried leaf, (root, path), the output leaf that replaces it, one of `threaded`.

    The first CARRY argument is matched with the first carry() of the output, the second with the
    second, and so on. Below these the leaves are matched by path, so the order of a dict does not
    matter.
    """
    paths = leaf_paths(value, backend.trees, "output")
    returned = _by_place([(leaf_values[index].root, paths[index]) for index in threaded])
    given = _by_place(carried)
    if {*given} != {*returned}:
        difference = PathError(
            [carried[leaf][1] for place, leaf in given.items() if place not in returned],
            [paths[threaded[leaf]] for place, leaf in returned.items() if place not in given],
        )
        raise FuncgaError(
            "the arguments that are funcga.CARRY in in_axes, and what grad_fn returns with the "
            f"fold funcga.carry(), have different structures: {difference}. Here each carried "
            "argument needs the output that replaces it, in the structure it came in: "
            "accumulate(grad_fn, n, in_axes=(None, funcga.CARRY, 0), fold=(funcga.mean(), "
            "funcga.carry()))."
        )
    return tuple([threaded[returned[place]] for place in given])


def _by_place(leaves: list[tuple[str, str]]) -> dict[tuple[int, str], int]:
    """The index of each leaf, (root, path), by the number of its root and its path below that."""
    roots = [*dict.fromkeys(root for root, _ in leaves)]
    return {
        (roots.index(root), path[len(root) :]): index for index, (root, path) in enumerate(leaves)
    }
