"""Windowing: a window opened to be worked on, with the fold bound to the leaves of the gradients."""

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from funcga._backend.prefixes import leaf_paths, paths_apart
from funcga._backend.protocols import Arrays, Backend
from funcga._fold import tally
from funcga._fold.leaf import LeafFold
from funcga._fold.tally import Tally
from funcga._fold.weight import check_narrow
from funcga._transform.binding import Binding, Bindings
from funcga._transform.window import Parts, Window
from funcga.errors import FuncgaError


@dataclass(frozen=True)
class Windows:
    """The windows of one transform: begun, and opened to be worked on, with its fold bound to the gradients' leaves."""

    bindings: Bindings

    def begun(self, params: Any, backend: Backend) -> "Opened":
        """An empty window, for gradients like these params."""
        leaves, structure = backend.trees.flatten(params)
        binding = self.bindings.of(leaves, structure, backend)
        folds = binding.outputs.folds[:-1]
        held = [None if fold is None else fold.identity(leaf) for fold, leaf in zip(folds, leaves, strict=True)]
        zero = Tally(backend.arrays.addends(0, binding.wide), backend.arrays.integer(0))
        return Opened(held, zero, backend.arrays.integer(0), binding, is_empty=True)

    def opened(self, window: Window, backend: Backend, replicas: Any) -> "Opened":
        """The window of a state."""
        parts = [window]
        if replicas is not None or type(window.part) is not tuple:
            parts = backend.transforms.parts(window, replicas)
        found = [self._read(part, backend) for part in parts]
        return reduce(Opened.plus, found) if found else self._read(window, backend).emptied(False, None)

    def merged(self, windows: Sequence[Window], backend: Backend, replicas: int) -> Window:
        """The window of all replicas, of which these are the parts, for as many replicas to go on from."""
        found = reduce(Opened.plus, [self._read(part, backend) for part in backend.transforms.in_order(windows)])
        empty = found.emptied(False, None).closed(None)
        return backend.transforms.unparted([found.closed(None), *[empty] * (replicas - 1)])  # type: ignore[no-any-return]

    def _read(self, window: Window, backend: Backend) -> "Opened":
        leaves, structure = backend.trees.flatten(window.accumulated, _is_parts)
        held = [tuple(leaf.parts) if type(leaf) is Parts else leaf for leaf in leaves]
        binding = self.bindings.of([max(h, key=_rank) if type(h) is tuple else h for h in held], structure, backend)
        return Opened(held, window.tally, window.rejected, binding)


def _is_parts(node: Any) -> bool:
    return type(node) is Parts


def _rank(array: Any) -> int:
    return len(array.shape)


class Opened(NamedTuple):
    """A window as it is worked on. `held` has what each leaf's monoid holds; `fresh` says that nobody else has that.

    `is_empty` says that it has just been begun or emptied.
    """

    held: list[Any]
    tally: Tally
    rejected: Any
    binding: Binding
    fresh: bool = False
    is_empty: bool = False

    @property
    def backend(self) -> Backend:
        """The framework's backend."""
        return self.binding.backend

    @property
    def structure(self) -> Any:
        """The structure of the gradients."""
        return self.binding.structure

    @property
    def folds(self) -> tuple[LeafFold | None, ...]:
        """The fold of every leaf of the gradients."""
        return self.binding.outputs.folds[:-1]

    def closed(self, replicas: Any) -> Window:
        """The window as a state has it."""
        leaves = [Parts(h) if type(h) is tuple else h for h in self.held]
        window = Window(self.backend.trees.unflatten(self.structure, leaves), self.tally, self.rejected)
        return window if replicas is None else self.backend.transforms.parted(window, replicas, self.is_empty)

    def plus(self, other: "Opened") -> "Opened":
        """The window of what both have folded."""
        held = [
            None if fold is None else fold.combine(own, more)
            for fold, own, more in zip(self.folds, self.held, other.held, strict=True)
        ]
        return self._replace(
            held=held, tally=tally.merge(self.tally, other.tally), rejected=self.rejected + other.rejected
        )

    def added(self, leaves: list[Any], weight: Any, keep: Any, donate: bool) -> tuple["Opened", Any]:
        """The window with one more micro-batch, if `keep` says so, and how many were rejected: 0 or 1."""
        arrays, wide = self.backend.arrays, self.binding.wide
        if keep is False:
            return self._replace(rejected=self.rejected + 1, is_empty=False), 1
        if not wide:
            check_narrow(weight)
        held, fresh = self.backend.sums.add(self.folds, self.held, leaves, weight, donate and keep is True)
        if keep is True:
            more = Tally(arrays.addends(weight, wide), arrays.integer(1))
            return self._replace(held=held, tally=tally.merge(self.tally, more), fresh=fresh, is_empty=False), 0
        xp = arrays.xp
        chosen = [_selected(xp, keep, a, b) for a, b in zip(held, self.held, strict=True)]
        limbs = tuple(_selected(xp, keep, limb, xp.zeros_like(limb)) for limb in arrays.addends(weight, wide))
        step = arrays.cast(keep, self.rejected.dtype)
        total = tally.merge(self.tally, Tally(limbs, step))
        rejected = self.rejected + (1 - step)
        return self._replace(held=chosen, tally=total, rejected=rejected, fresh=True, is_empty=False), 1 - step

    def merged(self, replicas: Any, known: dict[Any, Any]) -> "Opened":
        """The window of all replicas."""
        transforms, outputs = self.backend.transforms, self.binding.outputs
        held, total = transforms.merged(outputs, [*self.held, self.rejected], self.tally, replicas, known)
        return self._replace(held=held[:-1], rejected=held[-1], tally=total)

    def emptied(self, owned: bool, taken: Any) -> "Opened":
        """The empty window; in the same memory if that is owned, and not `taken` by what was made of it."""
        arrays = self.backend.arrays
        zero = Tally(arrays.addends(0, self.binding.wide), arrays.integer(0))
        held = self.backend.sums.emptied(self.folds, self.held, owned, taken)
        return self._replace(held=held, tally=zero, rejected=arrays.integer(0), is_empty=True)

    def seen(self, total: Tally) -> Tally:
        """A Tally as a normalizer takes it: numbers where the host sees them."""
        arrays = self.backend.arrays
        limbs = [arrays.scalar(limb) for limb in total.weight]
        known = not any(map(arrays.is_array, limbs))
        return Tally((builtins.sum(limbs),) if known else total.weight, arrays.scalar(total.steps))

    def matched(self, grads: Any) -> list[Any]:
        """The leaves of the gradients, in the order of what is held of them.

        Raises FuncgaError, which names the leaves, if their structure, or a shape or kind of dtype, is another.
        """
        leaves, found = self.backend.trees.flatten(grads)
        if found != self.structure:
            placed = dict(zip(leaf_paths(grads, self.backend.trees, "grads"), leaves, strict=True))
            expected = self.paths("grads")
            _check_paths("gradients", list(placed), expected)
            leaves = [placed[path] for path in expected]
        for i, (leaf, own) in enumerate(zip(leaves, self.held, strict=True)):
            dtype = getattr(leaf, "dtype", None)
            alike = dtype is not None and dtype == getattr(own, "dtype", None) and leaf.shape == own.shape  # as usual
            if not alike and not _fits(leaf, own, self.backend.arrays):
                raise _unfit(self.paths("grads")[i], leaf, own, self.backend.arrays)
        return leaves

    def restricted(self, params: Any) -> tuple[Any, list[Any]]:
        """The params that the state was made for; of a whole module, None in the place of all else. And their leaves.

        The leaves are in the order of what is held. Raises FuncgaError if params have another structure or shapes.
        """
        trees = self.backend.trees
        leaves, found = trees.flatten(params)
        if params is None:
            return params, [None] * len(self.held)
        if found != self.structure:
            paths, known = leaf_paths(params, trees, "params"), self.paths("params")
            placed = dict(zip(paths, leaves, strict=True))
            own = {*known}
            params = trees.unflatten(found, [leaf if p in own else None for p, leaf in placed.items()])
            if trees.flatten(params)[1] != self.structure:
                _check_paths("params", paths, known)
            leaves = [placed[path] for path in known]
        for i, (leaf, held) in enumerate(zip(leaves, self.held, strict=True)):
            alike = type(leaf) is type(held) and getattr(leaf, "shape", ()) == getattr(held, "shape", None)  # as usual
            if held is not None and not alike and not self._is_like(leaf, held):
                raise _unfit(self.paths("params")[i], leaf, held, self.backend.arrays)
        return params, leaves

    def _is_like(self, leaf: Any, held: Any) -> bool:
        """Whether a parameter is one of those of which this is held."""
        if not self.backend.arrays.is_array(leaf) and not isinstance(leaf, int | float | complex):
            return False
        shape = getattr(leaf, "shape", ())
        return any(part.shape == shape for part in (held if type(held) is tuple else (held,)))

    def paths(self, name: str) -> list[str]:
        """The path of every leaf, in the order of what is held, below this name."""
        count = self.structure.num_leaves
        return leaf_paths(self.backend.trees.unflatten(self.structure, range(count)), self.backend.trees, name)


def _selected(xp: Any, keep: Any, kept: Any, other: Any) -> Any:
    if type(kept) is tuple:
        return tuple(_selected(xp, keep, a, b) for a, b in zip(kept, other, strict=True))
    return None if kept is None else xp.where(keep, kept, other)


def _check_paths(what: str, found: list[str], expected: list[str]) -> None:
    """Raises FuncgaError if leaves are missing or new."""
    missing, new = paths_apart(expected, found)
    if missing or new:
        raise FuncgaError(
            f"the {what} have another structure than the params that the state was made for: missing "
            f"{', '.join(missing[:4]) or 'nothing'}, new {', '.join(new[:4]) or 'nothing'}. Give all of these at every "
            f"call, gradients of zeros where there is nothing to add; or make a state for what there is: "
            f"state = tx.init(params)."
        )


def _fits(leaf: Any, held: Any, arrays: Arrays) -> bool:
    if held is None or not arrays.is_array(leaf):
        return held is None and leaf is None
    parts = held if isinstance(held, tuple) else (held,)
    return any(p.shape == leaf.shape for p in parts) and arrays.kind(leaf.dtype) == arrays.kind(parts[0].dtype)


def _unfit(path: str, leaf: Any, held: Any, arrays: Arrays) -> FuncgaError:
    before = arrays.describe(max(held, key=lambda part: part.ndim) if isinstance(held, tuple) else held)
    return FuncgaError(
        f"{path} is {arrays.describe(leaf)}, and the state was made for params where it is {before}: the two cannot be "
        f"combined. Give what belongs to these params; or make a state for the new ones: state = tx.init(params)."
    )
