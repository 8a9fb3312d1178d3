"""The window of `multi_steps`: its state, its fold, checks of gradients and params, and what is
dropped.

Design note: docs/concepts/inside_multi_steps.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from funcga._backend import Backend
from funcga._backend.prefixes import PathError, leaf_paths
from funcga._call import Memory
from funcga._fold import Tally, largest, parts_of
from funcga._fold.accumulator import Accumulation
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._replicas import Step
from funcga._tools import load
from funcga._transform.loss_scale import LossScaledState
from funcga._types import Array, Scalar, Structure, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, sum


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

    def __getattr__(self, name: str) -> NoReturn:
        ours = {"mini_step": "offered", "gradient_step": "updates", "inner_opt_state": "inner"}
        here = f", and what optax.MultiSteps calls so is state.{ours[name]}" if name in ours else ""
        raise AttributeError(f"the state of multi_steps has no attribute {name!r}{here}")


class Folding:
    """The fold of gradients, and its cached Outputs. `step` is for replicas. With observers the
    folded value is (what they fold, gradients).
    """

    readings: Any  # those of the tool, for gradients like the last ones

    def __init__(
        self,
        fold: FoldTree,
        step: Step | None,
        observers: Any,
        options: Mapping[str, str],
    ):
        if observers is not None and any(
            each.reducer.monoid.axis is not None for each in observers.folds
        ):
            raise FuncgaError(
                "an observer collects a value of every micro-batch, as dropped() and "
                "gradient_norms() do, and the state of multi_steps cannot grow. How many were "
                "dropped it counts anyway: read state.dropped. Observe what is summed, as "
                "gradient_noise() does; or fold the window in one call, by funcga.accumulate."
            )
        self.fold, self.memory, self.observers = fold, Memory(step, options), observers
        # Of the last call: the types of its gradients, their Outputs, and those of (rejected,
        # gradients).
        self.last: tuple[list[object], Outputs, Outputs] | None = None

    def __reduce__(self) -> Any:
        """Pickled without caches."""
        return Folding, (self.fold, self.memory.step, self.observers, self.memory.options)

    def bound(self, leaves: Sequence[Array], structure: Structure, backend: Backend) -> Outputs:
        """The Outputs of a window with accumulators, or gradients, like these leaves. Raises
        FuncgaError for folds that do not fit.
        """
        kinds = [
            backend,
            structure,
            *[None if leaf is None else (leaf.dtype, leaf.shape) for leaf in leaves],
        ]
        if self.last is not None and self.last[0] == kinds:
            return self.last[1]
        grads = self.gradients_in(backend.trees.unflatten(structure, list(leaves)))
        outputs, _ = bind_outputs(self.fold, grads, backend, name="params")
        for leaf_index, fold in enumerate(outputs.folds):
            # A state cannot grow with every call.
            if fold is not None and fold.axis is not None:
                raise FuncgaError(
                    f"the fold of {outputs.paths('params')[leaf_index]} collects rows, and "
                    "gradients are to become one gradient. Fold them with funcga.mean(), "
                    "funcga.per_weight() or funcga.sum()."
                )
        folds, value = self.fold, self.with_placeholders(grads, backend)
        if self.observers is not None:
            folds = self.observers.folds, self.fold
            outputs = replace(
                bind_outputs(folds, value, backend, name="params")[0], before=len(value[0])
            )
        counted, _ = bind_outputs((sum(), folds), (backend.arrays.integer(0), value), backend)
        self.last = kinds, outputs, replace(counted, before=1)
        return outputs

    def merged(self, window: Accumulation, replicas: Any, updates: Array) -> Accumulation:
        """The window of all replicas, whose states have made so many `updates`. The rejected
        micro-batches are summed as one more leaf.
        """
        # So that the count needs no collective of its own.
        assert self.last is not None
        counted = window._replace(
            outputs=self.last[2], accumulators=[window.rejected, *window.accumulators]
        )
        merged: Accumulation = window.outputs.backend.transforms.merged(
            counted, replicas, self.memory, updates
        )
        rejected, *accumulators = merged.accumulators
        return merged._replace(outputs=window.outputs, accumulators=accumulators, rejected=rejected)

    # --- observers

    def with_placeholders(self, grads: Tree, backend: Backend) -> Tree:
        """The value that a window folds, for gradients like these: with observers, placeholders
        and gradients.
        """
        if self.observers is None:
            return grads
        leaves, structure = backend.trees.flatten(grads)
        numbered = backend.trees.unflatten(structure, [*range(len(leaves))])
        self.readings = load("observe.readings", "observe=").Readings(
            self.observers, self.fold, grads, numbered, backend
        )
        like = next(
            (leaf for leaf in leaves if backend.arrays.is_array(leaf)), backend.arrays.as_array(0.0)
        )
        return self.readings.placeholders(like), grads

    def gradients_in(self, value: Tree) -> Tree:
        """The gradients in a folded value."""
        return value if self.observers is None else value[1]

    def observed(self, value: Tree, inner: Tree = None) -> Tree:
        """The observation of a finished window; `inner` is the state of the wrapped transform."""
        # A loss scale is in the state of loss_scaled, alone or first in a chain.
        while type(inner) is tuple and inner:
            inner = inner[0]
        folded, grads = value
        return self.readings.observation(
            folded, grads, inner.scale if isinstance(inner, LossScaledState) else 1.0
        )

    def nan_observation(self, empty: Accumulation) -> Tree:
        """The observation before the first update: NaN, in the structure and dtypes of later
        ones.
        """
        if self.observers is None:
            return ()
        outputs, backend = empty.outputs, empty.outputs.backend

        def of_nothing() -> Tree:
            folded = backend.sums.finish(outputs.folds, empty.accumulators, empty.tallies, False)
            return self.observed(outputs.structure_of(folded))

        return backend.transforms.unknown(of_nothing)


def matched_grads(grads: Tree, window: Accumulation) -> list[Array]:
    """The leaves of the gradients, in the order of their accumulators.

    Raises FuncgaError, which names the leaves, if the structure, a shape or a kind of dtype
    differs.
    """
    try:
        leaves = window.outputs.in_order(grads, "grads")
    except PathError as error:
        raise _restructured("gradients", error) from None
    _check_leaves("grads", leaves, window)
    return leaves


def matched_params(params: Tree, window: Accumulation) -> tuple[Tree, list[Array]]:
    """The params that the state was made for, and their leaves, in the order of the accumulators.

    In a larger tree, such as a whole module, None takes the place of every other leaf. Raises
    FuncgaError if params have another structure or shapes.
    """
    outputs, trees = window.outputs, window.outputs.backend.trees
    if params is None:
        return params, [None] * len(window.accumulators)
    leaves, structure = trees.flatten(params)
    if structure != outputs.structure:
        paths, trained = leaf_paths(params, trees, "params"), {*outputs.paths("params")}
        matched = [
            leaf if path in trained else None for path, leaf in zip(paths, leaves, strict=True)
        ]
        params = trees.unflatten(structure, matched)
        try:
            leaves = outputs.in_order(params, "params")
        except PathError as error:
            raise _restructured("params", error) from None
    _check_leaves("params", leaves, window)
    return params, leaves


def with_others(after: Tree, params: Tree, backend: Backend) -> Tree:
    """Params after an update, put back into the larger tree that they were matched in."""
    trees = backend.trees
    updated = dict(zip(leaf_paths(after, trees), trees.flatten(after)[0], strict=True))
    leaves, structure = trees.flatten(params)
    paths_and_leaves = zip(leaf_paths(params, trees), leaves, strict=True)
    kept = [leaf if updated.get(path) is None else updated[path] for path, leaf in paths_and_leaves]
    return trees.unflatten(structure, kept)


def _check_leaves(name: str, leaves: Sequence[Array], window: Accumulation) -> None:
    """Raises FuncgaError if a leaf differs from its accumulator in shape, or a gradient in kind
    of dtype.
    """
    arrays, are_grads = window.outputs.backend.arrays, name == "grads"
    for leaf_index, (leaf, accumulator) in enumerate(zip(leaves, window.accumulators, strict=True)):
        # The usual case: the types are equal.
        if type(leaf) is type(accumulator) and (leaf is None or leaf.dtype == accumulator.dtype):
            fits = leaf is None or leaf.shape == accumulator.shape
        elif accumulator is None or not arrays.is_array(leaf):
            fits = not are_grads and (
                accumulator is None or isinstance(leaf, int | float | complex)
            )
        else:
            held = parts_of(accumulator)
            fits = any(part.shape == leaf.shape for part in held)
            fits = fits and not (
                are_grads and arrays.kind(leaf.dtype) != arrays.kind(held[0].dtype)
            )
        if not fits:
            raise _unfit(name, leaf_index, leaf, window)


def _restructured(what: str, error: PathError) -> FuncgaError:
    if what == "gradients" and all(f"`grads.{part}" in str(error) for part in ("fast", "slow")):
        return FuncgaError(
            "the state was made for params.fast and params.slow, as optax.lookahead has them, and "
            "its gradients are those of params.fast alone. Let lookahead be outside, and count "
            "micro-batches: optax.lookahead(funcga.multi_steps(tx, n), n * sync_period, "
            "slow_step_size)."
        )
    return FuncgaError(
        f"the {what} have another structure than the params that the state was made for: {error}. "
        "Give all of these at every call, gradients of zeros where there is nothing to add; or "
        "make a state for what there is: state = tx.init(params)."
    )


def _unfit(name: str, leaf_index: int, leaf: object, window: Accumulation) -> FuncgaError:
    describe, accumulator = window.outputs.backend.arrays.describe, window.accumulators[leaf_index]
    before = describe(None if accumulator is None else largest(accumulator))
    return FuncgaError(
        f"{window.outputs.paths(name)[leaf_index]} is {describe(leaf)}, and the state was made for "
        f"params where it is {before}: the two cannot be combined. Give what belongs to these "
        "params; or make a state for the new ones: state = tx.init(params)."
    )
