"""The outputs of grad_fn: which leaf is folded how, and that every micro-batch returns the same structure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from funcga._backend.prefixes import Placed, PrefixError, broadcast, leaf_paths, outline, paths_apart
from funcga._backend.protocols import Backend
from funcga._fold.leaf import LeafFold, bind, check_shape
from funcga.errors import FuncgaError
from funcga.folds import Fold


@dataclass(frozen=True)
class Outputs:
    """The leaves of grad_fn's output, sorted by what becomes of them.

    `folds` has a LeafFold for every array leaf and None for a leaf that is None. A leaf of carry() is threaded, one of
    a growing monoid is collected, every other is reduced in place. `threads[k]` is the leaf that becomes the k-th
    leaf of the CARRY arguments.
    """

    structure: Any
    folds: tuple[LeafFold | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    dtypes: tuple[Any, ...]
    reduced: tuple[int, ...]
    collected: tuple[int, ...]
    threads: tuple[int, ...]
    backend: Backend

    @property
    def paths(self) -> list[str]:
        """The path of every leaf: for error messages, and to match what comes in another order."""
        return leaf_paths(self.structure_of(range(len(self.folds))), self.backend.trees, "output")

    def structure_of(self, leaves: Iterable[Any]) -> Any:
        """The tree of these leaves."""
        return self.backend.trees.unflatten(self.structure, list(leaves))

    @property
    def reduced_folds(self) -> list[LeafFold]:
        """The folds of the reduced leaves, in order."""
        return self._folds(self.reduced)

    @property
    def collected_folds(self) -> list[LeafFold]:
        """The folds of the collected leaves, in order."""
        return self._folds(self.collected)

    def _folds(self, places: tuple[int, ...]) -> list[LeafFold]:
        found = [self.folds[i] for i in places]
        return [fold for fold in found if fold is not None]

    def part(self, places: Sequence[int], structure: Any) -> "Outputs":
        """The Outputs of these leaves alone, in a structure of their own: to check values that lack the others."""
        return replace(
            self,
            structure=structure,
            folds=tuple(self.folds[i] for i in places),
            shapes=tuple(self.shapes[i] for i in places),
            dtypes=tuple(self.dtypes[i] for i in places),
            reduced=(),
            collected=(),
            threads=tuple(k for k, i in enumerate(places) if i in self.threads),
        )

    def leaves(self, value: Any, which: str) -> list[Any]:
        """The leaves of another micro-batch's output, as arrays.

        The order of a dict may differ. Raises FuncgaError if the structure, a shape or a dtype is not the first one's.
        """
        leaves, structure = self.backend.trees.flatten(value)
        if structure != self.structure:
            leaves = self._reordered(value, leaves, which)
        elif self._is_alike(leaves):
            return leaves
        is_array = self.backend.arrays.is_array
        for i, (fold, leaf) in enumerate(zip(self.folds, leaves, strict=True)):
            if fold is None:
                if leaf is not None and i not in self.threads:
                    raise self._changed(i, leaf, which)
                continue
            if not is_array(leaf):
                if leaf is None:
                    raise self._changed(i, leaf, which)
                leaf = leaves[i] = as_leaf(leaf, partial(self._path, i), self.backend)
            shape = self.shapes[i]
            if leaf.dtype != self.dtypes[i] or (leaf.shape != shape and not self._may_differ(i, leaf)):
                raise self._changed(i, leaf, which)
        return leaves

    def _is_alike(self, leaves: list[Any]) -> bool:
        """Whether these are arrays of the first micro-batch's shapes and dtypes: the usual case, seen at a glance."""
        is_array = self.backend.arrays.is_array
        return all(
            is_array(leaf) and leaf.shape == shape and leaf.dtype == dtype
            for leaf, shape, dtype in zip(leaves, self.shapes, self.dtypes, strict=True)
        )

    def _path(self, i: int) -> str:
        return self.paths[i]

    def _reordered(self, value: Any, leaves: list[Any], which: str) -> list[Any]:
        paths = leaf_paths(value, self.backend.trees, "output")
        if sorted(paths) != sorted(self.paths):
            raise self._restructured(paths, which)
        by_path = dict(zip(paths, leaves, strict=True))
        return [by_path[path] for path in self.paths]

    def _may_differ(self, i: int, leaf: Any) -> bool:
        fold, shape = self.folds[i], self.shapes[i]
        if fold is None or shape is None:
            return True
        axis = fold.fold.reducer.monoid.axis
        if axis is None or len(leaf.shape) != len(shape):
            return False
        return all(a == b or k == axis % len(shape) for k, (a, b) in enumerate(zip(leaf.shape, shape, strict=True)))

    def join(self, reduced: list[Any], collected: list[Any], threaded: list[Any]) -> Any:
        """The result, in the structure of grad_fn's output."""
        leaves: list[Any] = [None] * len(self.folds)
        for places, values in ((self.reduced, reduced), (self.collected, collected), (self.threads, threaded)):
            for i, value in zip(places, values, strict=True):
                leaves[i] = value
        return self.structure_of(leaves)

    def _restructured(self, paths: list[str], which: str) -> FuncgaError:
        missing, new = paths_apart(self.paths, paths)
        return FuncgaError(
            f"grad_fn returned another structure for {which} than for the first: missing {_some(missing)}, "
            f"new {_some(new)}. A fold needs one structure. Return the same keys for every micro-batch, with zeros "
            f"where there is nothing to add."
        )

    def _changed(self, i: int, leaf: Any, which: str) -> FuncgaError:
        describe = self.backend.arrays.describe
        fold, shape = self.folds[i], self.shapes[i]
        before = "None" if fold is None else _spell(self.dtypes[i], shape)
        return FuncgaError(
            f"grad_fn returned {self.paths[i]} as {describe(leaf)} for {which} and as {before} for the first: the two "
            f"cannot be combined. Return one shape and dtype for every micro-batch, or, if it has a row for each "
            f"example, fold it with funcga.concat()."
        )


def _spell(dtype: Any, shape: tuple[int, ...] | None) -> str:
    return str(dtype).removeprefix("torch.") + ("" if shape is None else f"[{', '.join(map(str, shape))}]")


def _some(paths: list[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths[:4]) + (", ..." if len(paths) > 4 else "") if paths else "nothing"


def as_leaf(leaf: Any, where: Callable[[], str], backend: Backend) -> Any:
    """The leaf at the path `where()` as an array. Raises FuncgaError for what is neither an array nor a number."""
    try:
        return backend.arrays.as_array(leaf)
    except TypeError as error:
        raise FuncgaError(
            f"{where()} of grad_fn is {backend.arrays.describe(leaf)}, which cannot be folded. Return arrays "
            f"or numbers; convert others with funcga.to_{backend.name}(...)."
        ) from error


def place(fold: Any, value: Any, leaves: int, backend: Backend) -> list[Placed]:
    """The Fold of every leaf of grad_fn's output, from a tree prefix of Folds.

    Raises FuncgaError if the tree of folds is no prefix of the output.
    """
    try:
        return broadcast(fold, value, leaves, lambda f: isinstance(f, Fold), backend.trees, "output")
    except PrefixError as error:
        if not isinstance(fold, Fold) and backend.trees.children(fold) is None:
            raise FuncgaError(f"fold= is {fold!r}. Pass a Fold, such as funcga.mean(), or a tree of them.") from error
        trees, describe = backend.trees, backend.arrays.describe
        folds = outline(error.prefix, trees, lambda leaf: "Fold" if isinstance(leaf, Fold) else repr(leaf))
        raise FuncgaError(
            f"the tree of folds is no prefix of what grad_fn returns: at {error.path}, fold= has {folds} and grad_fn "
            f"returned {outline(error.tree, trees, describe)}. Give one Fold for all that stands below, such as "
            f"funcga.mean(), or a container with the same keys."
        ) from error


def bind_outputs(fold: Any, value: Any, backend: Backend, shaped: bool = True) -> Outputs:
    """The Outputs for values like this one, every leaf of them reduced, carry() and concat() as the monoids they are.

    `value` has arrays, or structs with a shape and a dtype; with `shaped` False only the dtypes count. Raises
    FuncgaError for folds that do not fit.
    """
    leaves, structure = backend.trees.flatten(value)
    return _bind(value, leaves, structure, place(fold, value, len(leaves), backend), backend, shaped)


def _bind(
    value: Any, leaves: list[Any], structure: Any, placed: list[Placed], backend: Backend, shaped: bool = True
) -> Outputs:
    """The Outputs; replaces the numbers among the leaves by arrays."""
    folds: list[LeafFold | None] = [None] * len(leaves)
    known: dict[Any, LeafFold] = {}  # there are few kinds of leaves, and many of each
    is_array = backend.arrays.is_array
    for i, ((fold, _), leaf) in enumerate(zip(placed, leaves, strict=True)):
        if not is_array(leaf):
            if leaf is None or _is_carry(fold):
                continue  # what is carried may be any object; what is folded must be an array
            leaf = leaves[i] = as_leaf(leaf, partial(leaf_path, value, i, backend), backend)
        kind = (id(fold), leaf.dtype)
        if kind not in known:
            known[kind] = bind(fold, leaf, partial(leaf_path, value, i, backend), backend.arrays)
        folds[i] = known[kind]
        if shaped and (fold.reducer.monoid.axis is not None or fold.reducer.stacked is not None):
            check_shape(fold, leaf, partial(leaf_path, value, i, backend), backend.arrays)
    return Outputs(
        structure=structure,
        folds=tuple(folds),
        shapes=tuple([None if f is None or not shaped else leaf.shape for f, leaf in zip(folds, leaves, strict=True)]),
        dtypes=tuple([None if f is None else leaf.dtype for f, leaf in zip(folds, leaves, strict=True)]),
        reduced=tuple([i for i, f in enumerate(folds) if f is not None]),
        collected=(),
        threads=(),
        backend=backend,
    )


def _is_carry(fold: Fold) -> bool:
    return fold.reducer.carries


def leaf_path(value: Any, i: int, backend: Backend) -> str:
    """Where the i-th leaf of grad_fn's output is."""
    return leaf_paths(value, backend.trees, "output")[i]


def sort_outputs(fold: Any, value: Any, carried: list[tuple[str, str]], backend: Backend) -> tuple[Outputs, list[Any]]:
    """The Outputs of a first micro-batch in a loop, which threads what is carried and collects what grows; its leaves.

    `carried` has (root, path) for every leaf of the CARRY arguments. Raises FuncgaError if they do not match the leaves
    of carry(), and for leaves without the axis that concat() collects along.
    """
    leaves, structure = backend.trees.flatten(value)
    placed = place(fold, value, len(leaves), backend)
    carries = [placed_fold for placed_fold, _ in placed if _is_carry(placed_fold)]
    if carried and not carries:  # before the folds that stand there instead are found not to fit
        raise _unmatched([root for root, _ in carried], [])
    outputs = _bind(value, leaves, structure, placed, backend)
    kinds = {id(leaf_fold): leaf_fold for leaf_fold, _ in placed}.values()
    if not carried and all(not _is_carry(kind) and kind.reducer.monoid.axis is None for kind in kinds):
        return outputs, leaves
    threaded = [i for i, (leaf_fold, _) in enumerate(placed) if _is_carry(leaf_fold)]
    growing = [i for i, f in enumerate(outputs.folds) if f is not None and f.fold.reducer.monoid.axis is not None]
    paths = outputs.paths
    return replace(
        outputs,
        reduced=tuple(sorted(set(outputs.reduced) - {*threaded, *growing})),
        collected=tuple(growing),
        threads=_match([(placed[i].root, paths[i]) for i in threaded], threaded, carried),
    ), leaves


def _match(returned: list[tuple[str, str]], places: list[int], carried: list[tuple[str, str]]) -> tuple[int, ...]:
    """For every carried leaf, the output leaf that replaces it: k-th CARRY to k-th carry(), below it by path."""
    inputs = _by_root(carried)
    outputs = _by_root(returned)
    where = dict(zip((path for _, path in returned), places, strict=True))
    if len(inputs) != len(outputs):
        raise _unmatched(inputs, outputs)
    threads = []
    for (root, below), (out_root, out_below) in zip(inputs.items(), outputs.items(), strict=True):
        if sorted(below) != sorted(out_below):
            missing = [root + p for p in below if p not in out_below]
            new = [out_root + p for p in out_below if p not in below]
            raise FuncgaError(
                f"the carried argument `{root}` and what grad_fn returns for it, `{out_root}`, have different "
                f"structures: missing {_some(missing)}, new {_some(new)}. Return the state in the structure it came in."
            )
        threads += [where[out_root + p] for p in below]
    return tuple(threads)


def _unmatched(inputs: Iterable[str], outputs: Iterable[str]) -> FuncgaError:
    ins = ", ".join(f"`{root}`" for root in dict.fromkeys(inputs)) or "no argument"
    outs = ", ".join(f"`{root}`" for root in outputs) or "no output"
    return FuncgaError(
        f"{ins} is funcga.CARRY in in_axes, and {outs} has the fold funcga.carry(): each carried argument needs the "
        f"output that replaces it. Write both, as in accumulate(grad_fn, n, in_axes=(None, funcga.CARRY, 0), "
        f"fold=(funcga.mean(), funcga.carry()))."
    )


def _by_root(placed: list[tuple[str, str]]) -> dict[str, list[str]]:
    roots: dict[str, list[str]] = {}
    for root, path in placed:
        roots.setdefault(root, []).append(path[len(root) :])
    return roots
