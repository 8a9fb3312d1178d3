"""The window of `multi_steps`: its states, the gradients that fit into it, and those that are dropped."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, NoReturn

from funcga._backend import Arrays, Backend
from funcga._backend.prefixes import PathError, check_paths, leaf_paths
from funcga._fold import Tally, largest, parts_of
from funcga._fold.accumulator import Accumulation
from funcga._fold.dropping import Dropping
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError


class Window(NamedTuple):
    """What has been folded since the last update, in a state of `multi_steps`.

    `accumulated` has the structure of the gradients: for every leaf an array of its shape, of at least 32 bits, or the
    Parts that its reducer holds. With observers it is a pair of what they have folded and that. `tally.weight` is two
    float32 scalars whose sum is exact to 48 bits, or one float64 if a gradient is; `tally.steps`, int32, is the number
    of micro-batches that were folded, and `rejected`, int32, of those that were not. `part` says in torch, with
    across=, whose part of the window it is: int32[2], the replica and how many there are, or zeros for the window of
    all replicas; elsewhere it is empty.
    """

    accumulated: Tree
    tally: Tally
    rejected: Array
    part: Array | tuple[()] = ()


class Parts(NamedTuple):
    """What a reducer holds of one leaf, where that is several arrays."""

    parts: tuple[Array, ...]


class Dropped(NamedTuple):
    """How many micro-batches have been dropped so far, and how many windows: two 0-d int32 arrays."""

    microbatches: Array
    windows: Array


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`: a tree of arrays that passes through jit, scan, torch.save and checkpoints.

    The counts are 0-d int32 arrays, `updated` is a 0-d bool; in torch they are on the CPU.

    Attributes:
        inner: The state of the wrapped transform.
        window: What has been folded since the last update.
        offered: How many micro-batches have come since then, folded or not.
        updates: How many updates there have been.
        updated: Whether the last call was one.
        dropped: How many micro-batches and windows have been dropped.
        observed: What the observers of `observe=` have said of the last update's window; NaN before the first. Empty
            without observers.

    Example:
        >>> params = {"w": jnp.ones(2)}
        >>> tx = funcga.multi_steps(optax.sgd(0.1), 8)
        >>> state = tx.accumulate({"w": jnp.ones(2)}, tx.init(params))
        >>> if state.offered > 0:  # after the last epoch: the window that is not full
        ...     updates, state = tx.flush(state, params)
        >>> int(state.updates)
        1
    """

    inner: Tree
    window: Window
    offered: Array
    updates: Array
    updated: Array
    dropped: Dropped
    observed: Tree = ()

    def __getattr__(self, name: str) -> NoReturn:
        ours = {"mini_step": "offered", "gradient_step": "updates", "inner_opt_state": "inner"}
        here = f", and what optax.MultiSteps calls so is state.{ours[name]}" if name in ours else ""
        raise AttributeError(f"the state of multi_steps has no attribute {name!r}{here}")


def matched_grads(grads: Tree, window: Accumulation) -> list[Array]:
    """The leaves of the gradients, in the order of their accumulators.

    Raises FuncgaError, which names the leaves, if their structure, or a shape or kind of dtype, is another.
    """
    arrays = window.outputs.backend.arrays
    try:
        leaves = window.outputs.in_order(grads, "grads")
    except PathError as error:
        raise _restructured("gradients", error) from None
    for leaf_index, (leaf, accumulator) in enumerate(zip(leaves, window.accumulators, strict=True)):
        # A gradient like its accumulator is the usual case, and needs no closer look.
        if leaf is None or accumulator is None:
            fits = leaf is accumulator
        elif type(leaf) is type(accumulator) and leaf.dtype == accumulator.dtype and leaf.shape == accumulator.shape:
            continue
        else:
            fits = _has_shape(leaf, accumulator, arrays)
            fits = fits and arrays.kind(leaf.dtype) == arrays.kind(parts_of(accumulator)[0].dtype)
        if not fits:
            raise _unfit("grads", leaf_index, leaf, window)
    return leaves


def matched_params(params: Tree, window: Accumulation) -> tuple[Tree, list[Array]]:
    """The params that the state was made for, and their leaves, in the order of the accumulators.

    In a larger tree, such as a whole module, None takes the place of every other leaf. Raises FuncgaError if params
    have another structure or shapes.
    """
    trees, arrays = window.outputs.backend.trees, window.outputs.backend.arrays
    if params is None:
        return params, [None] * len(window.accumulators)
    leaves, structure = trees.flatten(params)
    if structure != window.outputs.structure:
        expected = window.outputs.paths("params")
        by_path = dict(zip(leaf_paths(params, trees, "params"), leaves, strict=True))
        trained_paths = {*expected}
        params = trees.unflatten(structure, [leaf if path in trained_paths else None for path, leaf in by_path.items()])
        if trees.flatten(params)[1] != window.outputs.structure:
            try:
                check_paths(expected, [*by_path])
            except PathError as error:
                raise _restructured("params", error) from None
        leaves = [by_path[path] for path in expected]
    for leaf_index, (leaf, accumulator) in enumerate(zip(leaves, window.accumulators, strict=True)):
        if accumulator is None or (type(leaf) is type(accumulator) and leaf.shape == accumulator.shape):
            continue
        if not (_has_shape(leaf, accumulator, arrays) or isinstance(leaf, int | float | complex)):
            raise _unfit("params", leaf_index, leaf, window)
    return params, leaves


def restored_params(params: Tree, matched: Tree, after: Tree, backend: Backend) -> Tree:
    """The params after an update, in the larger tree that was `matched`, whose other leaves are as they were."""
    if matched is params:
        return after
    trees = backend.trees
    updated = dict(zip(leaf_paths(after, trees), trees.flatten(after)[0], strict=True))
    leaves, structure = trees.flatten(params)
    kept = [
        leaf if updated.get(path) is None else updated[path]
        for path, leaf in zip(leaf_paths(params, trees), leaves, strict=True)
    ]
    return trees.unflatten(structure, kept)


def _has_shape(leaf: Array, accumulator: Reduced, arrays: Arrays) -> bool:
    """Whether a leaf is an array of the shape that its accumulator was made for."""
    return arrays.is_array(leaf) and any(part.shape == leaf.shape for part in parts_of(accumulator))


def _restructured(what: str, error: PathError) -> FuncgaError:
    if what == "gradients" and all(f"`grads.{part}" in str(error) for part in ("fast", "slow")):
        return FuncgaError(
            "the state was made for params.fast and params.slow, as optax.lookahead has them, and its gradients are "
            "those of params.fast alone. Let lookahead be outside, and count micro-batches: "
            "optax.lookahead(funcga.multi_steps(tx, n), n * sync_period, slow_step_size)."
        )
    return FuncgaError(
        f"the {what} have another structure than the params that the state was made for: {error}. Give all of these at "
        f"every call, gradients of zeros where there is nothing to add; or make a state for what there is: "
        f"state = tx.init(params)."
    )


def _unfit(name: str, leaf_index: int, leaf: object, window: Accumulation) -> FuncgaError:
    describe, accumulator = window.outputs.backend.arrays.describe, window.accumulators[leaf_index]
    before = describe(None if accumulator is None else largest(accumulator))
    return FuncgaError(
        f"{window.outputs.paths(name)[leaf_index]} is {describe(leaf)}, and the state was made for params where it is "
        f"{before}: the two cannot be combined. Give what belongs to these params; or make a state for the new ones: "
        f"state = tx.init(params)."
    )


@dataclass(frozen=True)
class DroppingUpdates(Dropping):
    """What is dropped of the windows of `multi_steps`, and when these end with an update."""

    of_window: ClassVar[str] = "make no update of"
    of_test: ClassVar[tuple[str, str]] = "the gradients", "grads"

    def is_emitted(self, steps: Scalar, rejected: Scalar, arrays: Arrays) -> bool | Array:
        """Whether a window ends with an update, if `steps` micro-batches were folded and `rejected` were not."""
        emitted = (steps > 0) & (rejected == 0) if self.scope == "window" else steps > 0
        return arrays.scalar(emitted) if arrays.is_array(emitted) else emitted

    def counted(
        self, dropped: Dropped, emitted: bool | Array, steps: Scalar, rejected: Scalar, arrays: Arrays
    ) -> Dropped:
        """The counts at the end of a window. Those rejected in it are counted already."""
        if self.scope != "window":
            return dropped
        # In a window without an update, what was folded is dropped as well. An empty window, which may be flushed
        # inside of jit, does not count as dropped.
        zero, emitted = arrays.integer(0), arrays.as_array(emitted)
        is_filled = arrays.as_array(steps + rejected > 0)
        microbatches = arrays.xp.where(emitted, zero, arrays.integer(steps))
        windows = arrays.xp.where(emitted, zero, arrays.cast(is_filled, zero.dtype))
        return Dropped(dropped.microbatches + microbatches, dropped.windows + windows)
