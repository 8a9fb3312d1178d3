"""The window of `multi_steps`: its state, its fold, and what is given at a call matched with it.

Design note: docs/concepts/inside_multi_steps.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from funcga._backend import Arrays, Backend
from funcga._backend.prefixes import PathError, leaf_paths
from funcga._call import Memory
from funcga._fold import Tally, largest, parts_of
from funcga._fold.accumulator import Accumulation, empty
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree


class Window(NamedTuple):
    """What has been folded since the last update, in a state of `multi_steps`.

    `accumulated` has the structure of the gradients: for every leaf an array of its shape, of at
    least 32 bits, or the Parts of its reducer. With observers it is (what they fold, that tree).
    `tally.weight` is two float32 scalars whose sum is exact to 48 bits, or one float64 if a
    gradient is; `tally.steps`, int32, is the number of micro-batches that were folded, and
    `rejected`, int32, of those that were not. `part` says in torch, with across=, whose part of the
    window it is: int32[2], the replica and how many there are, or zeros for the window of all
    replicas; elsewhere it is empty. `unit` is what the weights in the sums of means are measured
    in, a power of 16: 1 for total weights from 1 to below 16.
    """

    accumulated: Tree
    tally: Tally
    rejected: Array
    part: Array | tuple[()] = ()
    unit: Scalar = 1.0  # as in states that have none, from earlier versions


class Parts(NamedTuple):
    """What a reducer holds of one leaf, where that is several arrays."""

    parts: tuple[Array, ...]


class Dropped(NamedTuple):
    """How many micro-batches have been dropped so far, and how many windows: two 0-d int32
    arrays.
    """

    microbatches: Array
    windows: Array


class MultiStepsState(NamedTuple):
    """The state of `multi_steps`: a tree of arrays that passes through jit, scan, torch.save and
    checkpoints.

    The counts are 0-d int32 arrays, `updated` is a 0-d bool; in torch they are on the CPU.

    Attributes:
        inner: The state of the wrapped transform.
        window: What has been folded since the last update.
        offered: How many micro-batches have come since then, folded or not.
        updates: How many updates there have been.
        updated: Whether the last call was one.
        dropped: How many micro-batches and windows have been dropped.
        observed: What the observers of `observe=` have said of the last update's window; NaN before
            the first, or 0 under jax_debug_nans, which allows no NaN. Empty without observers.

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


class Folding:
    """The fold of gradients."""

    # A tool that folds more beside gradients says how many leaves stand before theirs. It also has
    # `folded` and `reported`, which make these leaves, and what a state says of them.
    before = 0
    folded: Callable[..., list[Array]]
    reported: Callable[..., Callable[[Scalar, Tree], Tree]]

    def __init__(self, fold: FoldTree, memory: Memory):
        self.fold, self.memory = fold, memory  # the memory is for merges over replicas
        # Set by `_bind`, for the next call: the types of the accumulators, and their Outputs.
        self.last: tuple[list[object], Outputs] | None = None

    def __reduce__(self) -> Any:
        """Pickled without what was cached."""
        return type(self), (self.fold, Memory(self.memory.step, self.memory.options))

    def empty(self, params: Tree, backend: Backend) -> tuple[Accumulation, Tree]:
        """The empty window for gradients like these params, and what a state has as `observed`
        before the first update.
        """
        leaves, structure = backend.trees.flatten(params)
        outputs = self._bind([backend, structure], leaves)
        return empty(outputs, outputs.identities(leaves)), ()

    def opened(self, window: Window, backend: Backend) -> Accumulation:
        """The Accumulation of a window in a state."""
        leaves, structure = backend.trees.flatten(
            window.accumulated, lambda node: type(node) is Parts
        )
        accumulators = [leaf.parts if type(leaf) is Parts else leaf for leaf in leaves]
        likes: list[Array] = [
            largest(leaf) if type(leaf) is tuple else leaf for leaf in accumulators
        ]
        types = [None if like is None else (like.dtype, like.shape) for like in likes]
        key, last = [backend, structure, *types], self.last
        outputs = last[1] if last is not None and last[0] == key else self._bind(key, likes)
        return Accumulation(outputs, accumulators, window.tally, window.unit, window.rejected)

    def _bind(self, key: list[Any], likes: Sequence[Array]) -> Outputs:
        """The Outputs of a window with accumulators like these, kept for the next call. Its key
        begins with a backend and a structure. FuncgaError for folds that do not fit.
        """
        backend, structure, *_ = key
        value = backend.trees.unflatten(structure, [*likes])
        bound = bind_outputs(self.fold, value, backend, name="params")[0]
        outputs = replace(bound, before=self.before)
        for leaf_index, leaf_fold in enumerate(outputs.folds):
            # A state cannot grow with every call.
            if leaf_fold is not None and leaf_fold.axis is not None:
                raise FuncgaError(
                    f"the fold of {outputs.paths('params')[leaf_index]} collects rows, and "
                    "gradients are to become one gradient. Fold them with funcga.mean(), "
                    "funcga.per_weight() or funcga.sum()."
                )
        self.last = key, outputs
        return outputs


def packed(window: Accumulation, replicas: Any = None, is_empty: bool = False) -> Window:
    """The window as it is in a state, with replicas as the part of this one; `is_empty` if nothing
    is folded.
    """
    structure, backend = window.outputs.structure, window.outputs.backend
    leaves = [Parts(leaf) if isinstance(leaf, tuple) else leaf for leaf in window.accumulators]
    tree = backend.trees.unflatten(structure, leaves)
    whole = Window(tree, window.tally, window.rejected, unit=window.unit)
    if replicas is None:
        return whole
    return backend.states.as_part([whole], replicas, is_empty)  # type: ignore[no-any-return]


# -- what is given at a call, matched with the accumulators


def matched(name: str, tree: Tree, window: Accumulation) -> tuple[Tree, list[Array]]:
    """The "grads", or the "params" that the state was made for, and their leaves in the order of
    their accumulators. In a larger tree of params, such as a whole module, None takes the place of
    every other leaf.

    Raises FuncgaError, which names the leaves, if the structure, a shape or a kind of dtype
    differs.
    """
    outputs, trees = window.outputs.of_value, window.outputs.backend.trees
    leaves, structure = trees.flatten(tree)
    if structure != outputs.structure:
        if name == "params":
            trained = {*outputs.paths(name)}
            pairs = zip(leaf_paths(tree, trees, name), leaves, strict=True)
            kept = [leaf if path in trained else None for path, leaf in pairs]
            tree = trees.unflatten(structure, kept)
        try:
            leaves = outputs.in_order(tree, name)
        except PathError as error:
            raise FuncgaError(
                f"the {'gradients' if name == 'grads' else name} have another structure than the "
                f"params that the state was made for: {error}. Give all of these at every call, "
                "gradients of zeros where there is nothing to add; or make a state for what there "
                "is: state = tx.init(params)."
            ) from None
    accumulators = window.accumulators[window.outputs.before :]
    for leaf_index, (leaf, accumulator) in enumerate(zip(leaves, accumulators, strict=True)):
        # The usual case: an array of the same type.
        if type(leaf) is type(accumulator) and (
            leaf is None or (leaf.shape == accumulator.shape and leaf.dtype == accumulator.dtype)
        ):
            continue
        if not _fits(name, leaf, accumulator, outputs.backend.arrays):
            describe = outputs.backend.arrays.describe
            before = describe(None if accumulator is None else largest(accumulator))
            raise FuncgaError(
                f"{outputs.paths(name)[leaf_index]} is {describe(leaf)}, and the state was made "
                f"for params where it is {before}: the two cannot be combined. Give what belongs "
                "to these params; or make a state for the new ones: state = tx.init(params)."
            )
    return tree, leaves


def _fits(name: str, leaf: object, accumulator: Reduced, arrays: Arrays) -> bool:
    """Whether a leaf of grads or params belongs to an accumulator."""
    if accumulator is None or not arrays.is_array(leaf):
        is_number = isinstance(leaf, int | float | complex)
        return name == "params" and (accumulator is None or is_number)
    array: Array = leaf
    held = parts_of(accumulator)
    is_same_kind = arrays.kind(array.dtype) == arrays.kind(held[0].dtype)
    has_shape = any(part.shape == array.shape for part in held)
    return has_shape and (name == "params" or is_same_kind)


def with_others(after: Tree, params: Tree, backend: Backend) -> Tree:
    """Params after an update, put back into the larger tree that they were matched in."""
    is_none = lambda leaf: leaf is None
    leaves, structure = backend.trees.flatten(params, is_none)
    pairs = zip(backend.trees.flatten(after, is_none)[0], leaves, strict=True)
    return backend.trees.unflatten(structure, [old if new is None else new for new, old in pairs])
