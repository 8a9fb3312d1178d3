"""The window: what has been folded since the last update, as data that travels in a state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from funcga import tally
from funcga.backend import Arrays, Backend
from funcga.errors import FuncgaError
from funcga.prefixes import leaf_paths
from funcga.tally import Tally


class Window(NamedTuple):
    """What has been folded since the last update, in a state of `multi_steps`.

    `accumulated` has the structure of the gradients: for every leaf an array of its shape, of at least 32 bits, or the
    Parts that its reducer holds. `tally.weight` is two float32 scalars whose sum is exact to 48 bits, or one float64 if
    a gradient is; `tally.steps`, int32, is the number of micro-batches that were folded, and `rejected`, int32, of
    those that were not.
    """

    accumulated: Any
    tally: Tally
    rejected: Any


class Parts(NamedTuple):
    """What a reducer holds of one leaf, where that is several arrays."""

    parts: tuple[Any, ...]


class Dropped(NamedTuple):
    """How many micro-batches have been dropped so far, and how many windows: two 0-d int32 arrays."""

    microbatches: Any
    windows: Any


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`: a tree of arrays that passes through jit, scan, torch.save and checkpoints.

    inner: the state of the wrapped transform. window: what has been folded since the last update. offered: how many
    micro-batches have come since then, folded or not. updates: how many updates there have been. updated: whether the
    last call was one. The counts are 0-d int32 arrays, `updated` is a 0-d bool; in torch they are on the CPU.
    """

    inner: Any
    window: Window
    offered: Any
    updates: Any
    updated: Any
    dropped: Dropped


def _is_parts(node: Any) -> bool:
    return isinstance(node, Parts)


def held_in(accumulated: Any, backend: Backend) -> tuple[list[Any], Any]:
    """What is held of every leaf, as its fold's monoid has it, and the structure of the gradients."""
    leaves, structure = backend.trees.flatten(accumulated, _is_parts)
    return [tuple(leaf.parts) if _is_parts(leaf) else leaf for leaf in leaves], structure


def accumulated_of(held: Sequence[Any], structure: Any, backend: Backend) -> Any:
    """The tree of what is held of every leaf."""
    return backend.trees.unflatten(structure, [Parts(h) if isinstance(h, tuple) else h for h in held])


def marks_of(held: Sequence[Any]) -> list[Any]:
    """For every leaf one of its arrays, which has the dtype of its accumulator."""
    return [h[0] if isinstance(h, tuple) else h for h in held]


def weight_of(weight: Any, held: Sequence[Any], steps: Any, arrays: Arrays) -> Tally:
    """The Tally of a micro-batch of this weight, in the limbs that go with what is held."""
    bits = {"float": 8, "complex": 16}
    dtypes = [mark.dtype for mark in marks_of(held) if mark is not None]
    wide = any(bits.get(arrays.kind(dtype)) == dtype.itemsize for dtype in dtypes)
    return Tally(arrays.addends(weight, wide), arrays.integer(steps))


def counted(tally_: Tally, arrays: Arrays) -> Tally:
    """The Tally as a normalizer takes it: numbers where the host sees them."""
    limbs = [arrays.scalar(limb) for limb in tally_.weight]
    seen = not any(map(arrays.is_array, limbs))
    return Tally((sum(limbs),) if seen else tally_.weight, arrays.scalar(tally_.steps))


def gradients_like(grads: Any, held: list[Any], structure: Any, backend: Backend) -> list[Any]:
    """The leaves of the gradients, in the order of what is held of them.

    Raises FuncgaError, which names the leaves, if their structure, or a shape or kind of dtype, is another.
    """
    leaves, found = backend.trees.flatten(grads)
    if found != structure:
        placed = dict(zip(leaf_paths(grads, backend.trees, "grads"), leaves, strict=True))
        expected = paths_of(structure, "grads", backend)
        check_paths("gradients", list(placed), expected)
        leaves = [placed[path] for path in expected]
    for i, (leaf, own) in enumerate(zip(leaves, held, strict=True)):
        alike = getattr(leaf, "dtype", leaf) == getattr(own, "dtype", None) and leaf.shape == own.shape  # as mostly
        if not alike and not _fits(leaf, own, backend.arrays):
            raise _unfit(paths_of(structure, "grads", backend)[i], leaf, own, backend.arrays)
    return leaves


def paths_of(structure: Any, name: str, backend: Backend) -> list[str]:
    """The path of every leaf in a tree of this structure and name."""
    count = structure.num_leaves
    return leaf_paths(backend.trees.unflatten(structure, range(count)), backend.trees, name)


def check_paths(what: str, found: list[str], expected: list[str]) -> None:
    """Raises FuncgaError if leaves are missing or new."""
    if sorted(found) != sorted(expected):
        missing, new = ([p for p in a if p not in b][:4] for a, b in ((expected, found), (found, expected)))
        raise FuncgaError(
            f"the {what} have another structure than the params that the state was made for: missing "
            f"{', '.join(missing) or 'nothing'}, new {', '.join(new) or 'nothing'}. Give all of these at every call, "
            f"gradients of zeros where there is nothing to add; or make a state for what there is: "
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
        f"combined. Give gradients of these params; or make a state for the new ones: state = tx.init(params)."
    )


def empty(held: list[Any], structure: Any, backend: Backend) -> Window:
    """The window with nothing folded in it, and this held of every leaf."""
    zero = weight_of(0, held, 0, backend.arrays)
    return Window(accumulated_of(held, structure, backend), zero, backend.arrays.integer(0))


def with_more(window: Window, held: list[Any], structure: Any, more: Tally, rejected: Any, backend: Backend) -> Window:
    """The window with one more micro-batch."""
    total = tally.merge(window.tally, more)
    return Window(accumulated_of(held, structure, backend), total, window.rejected + rejected)
