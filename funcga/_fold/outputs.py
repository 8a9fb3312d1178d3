"""The outputs of grad_fn: how each leaf is folded, and the structure that every micro-batch has
to return.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from funcga._backend import Backend
from funcga._backend.prefixes import (
    PathError,
    PrefixValue,
    broadcast,
    leaf_paths,
    leaves_in_order,
    paths_apart,
)
from funcga._fold import LeafFold, bind, check_shape
from funcga._types import Array, Dtype, Reduced, Structure, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold


@dataclass(frozen=True)
class Outputs:
    """The leaves of grad_fn's output, by how they are folded.

    `folds` has a LeafFold for every array leaf and None for a leaf that is None. A leaf of carry()
    is threaded, one of a growing monoid is collected, every other is reduced in place. `reduced`,
    `collected` and `threads` are the indices of such leaves; `threads[k]` is the leaf that becomes
    the k-th leaf of the CARRY arguments.
    """

    structure: Structure
    folds: tuple[LeafFold | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[Dtype, ...]
    reduced: tuple[int, ...]
    collected: tuple[int, ...]
    threads: tuple[int, ...]
    backend: Backend
    # How many leaves belong to observers. They come first: values are (observed leaves, output).
    before: int = 0
    # The folds of the reduced and of the collected leaves, in order.
    reduced_folds: tuple[LeafFold, ...] = field(init=False, compare=False, repr=False)
    collected_folds: tuple[LeafFold, ...] = field(init=False, compare=False, repr=False)
    # Whether a result may be lost, as that of an exact sum, which has a fixed range.
    may_be_lost: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, leaf_indices in (
            ("reduced_folds", self.reduced),
            ("collected_folds", self.collected),
        ):
            folds = [self.folds[leaf_index] for leaf_index in leaf_indices]
            object.__setattr__(self, name, tuple([fold for fold in folds if fold is not None]))
        may_be_lost = any(fold.fold.normalizer.lost is not None for fold in self.reduced_folds)
        object.__setattr__(self, "may_be_lost", may_be_lost)

    def paths(self, name: str = "output") -> list[str]:
        """The path of every leaf in a tree of this name: for errors, and to match other trees by
        path.
        """
        return ["observe"] * self.before + leaf_paths(
            self.value_of(range(len(self.folds))), self.backend.trees, name
        )

    def identities(self, leaves: Sequence[Any]) -> list[Reduced]:
        """The identity of each leaf's fold."""
        pairs = zip(self.folds, leaves, strict=True)
        return [None if fold is None else fold.identity(leaf) for fold, leaf in pairs]

    def structure_of(self, leaves: Iterable[Any]) -> Tree:
        """The tree of these leaves."""
        return self.backend.trees.unflatten(self.structure, list(leaves))

    def value_of(self, leaves: Iterable[Any]) -> Tree:
        """The tree of these leaves, without those of observers."""
        tree = self.structure_of(leaves)
        return tree[1] if self.before else tree

    @cached_property
    def of_value(self) -> "Outputs":
        """These Outputs without the leaves of observers."""
        if not self.before:
            return self
        leaf_indices = range(self.before, len(self.folds))
        structure = self.backend.trees.flatten(self.value_of(range(len(self.folds))))[1]
        return replace(self.part(leaf_indices, structure), before=0)

    def join(
        self, reduced: Sequence[Any], collected: Sequence[Any], threaded: Sequence[Any]
    ) -> Tree:
        """The result, in the structure of grad_fn's output."""
        # All others are None.
        leaves: list[Any] = [None] * len(self.folds)
        for leaf_indices, values in (
            (self.reduced, reduced),
            (self.collected, collected),
            (self.threads, threaded),
        ):
            for leaf_index, value in zip(leaf_indices, values, strict=True):
                leaves[leaf_index] = value
        return self.backend.trees.unflatten(self.structure, leaves)

    def part(self, leaf_indices: Sequence[int], structure: Structure) -> "Outputs":
        """The Outputs of some leaves, in a structure of their own, to check partial values by."""
        # Threads are indices among these leaves.
        return replace(
            self,
            structure=structure,
            folds=tuple(self.folds[leaf_index] for leaf_index in leaf_indices),
            shapes=tuple(self.shapes[leaf_index] for leaf_index in leaf_indices),
            dtypes=tuple(self.dtypes[leaf_index] for leaf_index in leaf_indices),
            reduced=(),
            collected=(),
            threads=tuple(
                index for index, leaf_index in enumerate(leaf_indices) if leaf_index in self.threads
            ),
        )

    def leaves(self, value: Tree, which: str) -> list[Any]:
        """The leaves of another micro-batch's output, as arrays.

        The order of a dict may differ. Raises FuncgaError if the structure, a shape or a dtype is
        not the first one's.
        """
        try:
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

    def in_order(self, value: Tree, name: str = "output") -> list[Any]:
        """The leaves of another value, in this order; `name` is that of the tree. Raises
        PathError if paths are missing, or new.
        """
        trees = self.backend.trees
        leaves, structure = trees.flatten(value)
        # Another order of keys, or other containers: matched by path.
        if structure == self.structure:
            return leaves
        before, value = value if self.before else ((), value)
        return [*before, *leaves_in_order(value, self.paths(name)[self.before :], trees, name)]

    def _checked(self, leaf_index: int, leaf: Any, which: str) -> Any:
        """A leaf of a later micro-batch as an array. Raises FuncgaError if it does not fit the
        first one.
        """
        # The first one was None, or any object that is threaded.
        if self.folds[leaf_index] is None:
            if leaf is not None and leaf_index not in self.threads:
                raise self._changed(leaf_index, leaf, which)
            return leaf
        if leaf is None:
            raise self._changed(leaf_index, leaf, which)
        leaf = as_leaf(leaf, lambda: self.paths()[leaf_index], self.backend)
        if leaf.dtype != self.dtypes[leaf_index] or not self._has_shape(leaf_index, leaf):
            raise self._changed(leaf_index, leaf, which)
        return leaf

    def _has_shape(self, leaf_index: int, leaf: Array) -> bool:
        """Whether a leaf has the shape of the first one, apart from the axis that is collected
        along.
        """
        fold, shape = self.folds[leaf_index], self.shapes[leaf_index]
        if fold is None or shape is None or leaf.shape == shape:
            return True
        axes = self._axes_that_differ(leaf_index, leaf)
        return fold.axis is not None and axes == [fold.axis % len(shape)]

    def _changed(self, leaf_index: int, leaf: Any, which: str) -> FuncgaError:
        # The first value is not kept, only its shape and dtype.
        before = "None"
        if self.folds[leaf_index] is not None:
            shape = self.shapes[leaf_index]
            sizes = "" if shape is None else f"[{', '.join(map(str, shape))}]"
            before = str(self.dtypes[leaf_index]).removeprefix("torch.") + sizes
        axes = self._axes_that_differ(leaf_index, leaf)
        remedy = (
            "Return one shape and dtype for every micro-batch, or, if it has a row for each "
            "example, fold it with "
            f"funcga.concat({f'axis={axes[0]}' if len(axes) == 1 and axes[0] > 0 else ''})."
        )
        if len(axes) > 1:
            remedy = (
                "Rows of a micro-batch are compared with each other alone. Return what is "
                "compared, such as embeddings, and compare it in the loss_fn of funcga.coupled."
            )
        return FuncgaError(
            f"grad_fn returned {self.paths()[leaf_index]} as {self.backend.arrays.describe(leaf)} "
            f"for {which} and as {before} for the first: the two cannot be combined. {remedy}"
        )

    def _axes_that_differ(self, leaf_index: int, leaf: Any) -> list[int]:
        """The axes along which a leaf has another size than the first one."""
        shape, other = self.shapes[leaf_index], getattr(leaf, "shape", ())
        if shape is None or len(shape) != len(other):
            return []
        return [
            axis
            for axis, (size, first_size) in enumerate(zip(other, shape, strict=True))
            if size != first_size
        ]


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
    in_loop = carried is not None
    threaded = [
        index
        for index, (leaf_fold, _) in enumerate(leaf_values)
        if in_loop and leaf_fold.reducer.carries
    ]
    # Checked first: if carry() is missing, another fold may not fit the state, and that error
    # would mislead.
    if carried and not threaded:
        raise _unmatched([root for root, _ in carried], [])
    folds = _leaf_folds(value, leaves, leaf_values, backend, shaped, name)
    threads: tuple[int, ...] = ()
    if threaded:
        threads = _threads(value, leaf_values, threaded, carried, backend)
    reduced, collected = _reduced_and_collected(folds, threaded, in_loop)
    # None, and threaded objects, have neither shape nor dtype here.
    likes = [
        None if leaf_fold is None else leaf for leaf_fold, leaf in zip(folds, leaves, strict=True)
    ]
    return Outputs(
        structure=structure,
        folds=tuple(folds),
        shapes=tuple([like.shape if shaped and like is not None else None for like in likes]),
        dtypes=tuple([None if like is None else like.dtype for like in likes]),
        reduced=reduced,
        collected=collected,
        threads=threads,
        backend=backend,
    ), leaves


def _reduced_and_collected(
    folds: Sequence[LeafFold | None], threaded: list[int], in_loop: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The leaves that are reduced, and those that are collected; None and threads are neither."""
    bound = [
        (leaf_index, fold)
        for leaf_index, fold in enumerate(folds)
        if fold is not None and leaf_index not in threaded
    ]
    collected = tuple([index for index, fold in bound if in_loop and fold.axis is not None])
    return tuple([index for index, _ in bound if index not in collected]), collected


def broadcast_folds(
    fold: Tree, value: Tree, leaves: int, backend: Backend, name: str = "output"
) -> list[PrefixValue]:
    """The Fold of every leaf of grad_fn's output, or of another tree of this name, from a tree
    prefix of Folds.

    Raises FuncgaError if the tree of folds is no prefix of it.
    """
    of = "what grad_fn returns" if name == "output" else f"the {name}"
    what = f"fold= is no Fold, and the tree of folds is no prefix of {of}"
    is_fold = lambda node: isinstance(node, Fold)
    return broadcast(fold, value, leaves, is_fold, backend.trees, name, what)


def _leaf_folds(
    value: Tree,
    leaves: list[Any],
    leaf_values: list[PrefixValue],
    backend: Backend,
    shaped: bool,
    name: str,
) -> list[LeafFold | None]:
    """The bound fold of every leaf, None for None; numbers among the leaves are replaced by
    arrays.
    """
    folds: list[LeafFold | None] = []
    # Each kind of leaf is bound once, as a model has many leaves and few kinds. Keyed by the
    # `id` of a fold, which the caller keeps alive.
    bound: dict[tuple[int, Dtype], LeafFold] = {}
    for leaf_index, (fold, _) in enumerate(leaf_values):
        leaf, where = leaves[leaf_index], partial(leaf_path, value, leaf_index, backend, name)
        if not backend.arrays.is_array(leaf):
            # Carried leaves may be any object.
            if leaf is None or fold.reducer.carries:
                folds.append(None)
                continue
            leaf = leaves[leaf_index] = as_leaf(leaf, where, backend)
        kind = (id(fold), leaf.dtype)
        if kind not in bound:
            bound[kind] = bind(fold, leaf, where, backend.arrays, name)
        folds.append(bound[kind])
        if shaped and (fold.reducer.monoid.axis is not None or fold.reducer.stacked is not None):
            check_shape(fold, leaf, where, backend.arrays)
    return folds


def as_leaf(leaf: Any, where: Callable[[], str], backend: Backend) -> Array:
    """The leaf at the path `where()` as an array. Raises FuncgaError if it is neither an array
    nor a number.
    """
    try:
        return backend.arrays.as_array(leaf)
    except TypeError as error:
        raise FuncgaError(
            f"{where()} of grad_fn is {backend.arrays.describe(leaf)}, which cannot be folded. "
            f"Return arrays or numbers; convert others with funcga.to_{backend.name}(...)."
        ) from error


def leaf_path(value: Tree, leaf_index: int, backend: Backend, name: str = "output") -> str:
    """Where a leaf of grad_fn's output, or of another tree of this name, is."""
    return leaf_paths(value, backend.trees, name)[leaf_index]


def _threads(
    value: Tree,
    leaf_values: list[PrefixValue],
    threaded: list[int],
    carried: list[tuple[str, str]] | None,
    backend: Backend,
) -> tuple[int, ...]:
    """For every carried leaf, (root, path), the output leaf that replaces it, one of `threaded`.

    The first CARRY argument is matched with the first carry() of the output, the second with the
    second, and so on. Below these the leaves are matched by path, so the order of a dict does not
    matter.
    """
    paths = leaf_paths(value, backend.trees, "output")
    index_of = {paths[leaf_index]: leaf_index for leaf_index in threaded}
    inputs = _by_root(carried or [])
    outputs = _by_root(
        [(leaf_values[leaf_index].root, paths[leaf_index]) for leaf_index in threaded]
    )
    if len(inputs) != len(outputs):
        raise _unmatched(inputs, outputs)
    threads = []
    for (in_root, in_paths), (out_root, out_paths) in zip(
        inputs.items(), outputs.items(), strict=True
    ):
        missing, new = paths_apart(in_paths, out_paths)
        if missing or new:
            difference = PathError(
                [in_root + path for path in missing], [out_root + path for path in new]
            )
            raise FuncgaError(
                f"the carried argument `{in_root}` and what grad_fn returns for it, `{out_root}`, "
                f"have different structures: {difference}. Return the state in the structure it "
                "came in."
            )
        threads += [index_of[out_root + path] for path in in_paths]
    return tuple(threads)


def _by_root(leaves: list[tuple[str, str]]) -> dict[str, list[str]]:
    """The paths below each root, of (root, path) pairs."""
    paths_below: dict[str, list[str]] = {}
    for root, path in leaves:
        # Relative to the root, so that two trees under different names have the same paths.
        paths_below.setdefault(root, []).append(path[len(root) :])
    return paths_below


def _unmatched(inputs: Iterable[str], outputs: Iterable[str]) -> FuncgaError:
    ins = ", ".join(f"`{root}`" for root in dict.fromkeys(inputs)) or "no argument"
    outs = ", ".join(f"`{root}`" for root in outputs) or "no output"
    return FuncgaError(
        f"{ins} is funcga.CARRY in in_axes, and {outs} has the fold funcga.carry(): each carried "
        "argument needs the output that replaces it. Write both, as in accumulate(grad_fn, n, "
        "in_axes=(None, funcga.CARRY, 0), fold=(funcga.mean(), funcga.carry()))."
    )
