"""`multi_steps`: the fold spread over calls, as a transform around an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from funcga import window as windows
from funcga.backend import Backend, backend_of, load_imported
from funcga.errors import FuncgaError
from funcga.folds import mean, sum
from funcga.outputs import Outputs, bind_outputs
from funcga.prefixes import leaf_paths
from funcga.targets import check_target, is_full
from funcga.transforms import DonatingTransform, MultiSteps, Transform, read_transform
from funcga.weights import check_weight
from funcga.window import Dropped, MultiStepsState


def multi_steps(
    tx: Any,
    n: Any,
    *,
    fold: Any = mean(),  # noqa: B008 - a frozen value
    drop: Literal["microbatch", "window"] | None = None,
    drop_if: Callable[[Any], Any] | None = None,
    across: Any = None,
    donate: bool = False,
) -> MultiSteps:
    """A transform that folds the gradients of n calls and then lets tx make one update of them.

    >>> tx = funcga.multi_steps(optax.adamw(1e-3), 8)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(grads, state, params)  # zeros, but for every 8th call

    `tx.update(grads, state, params, weight=1, **extra) -> (updates, state)`; `extra` goes to the wrapped transform.
    `tx.accumulate(grads, state, weight=1) -> state` and `tx.flush(state, params) -> (updates, state)` are its two
    halves, for whoever knows when a window ends, and for the last, partial one, which is exact. `tx.has_updated(state)`
    says whether the last call was an update; `state.updates` counts them. Schedules and decay of the wrapped transform
    count updates, as it runs for these alone.

    tx: any pair of functions (init, update): optax's transforms, torch_backend.from_optimizer, your own.
    n: the micro-batches of a window, at least 1; a schedule, a function of the number of updates so far (an int, in JAX
        a 0-d array); or funcga.TargetWeight(w): as many as weigh w.
    fold: a Fold, or a tree prefix of Folds over the gradients. With `mean()`, and gradients of a mean loss, weigh each
        micro-batch by its rows or tokens, `update(..., weight=tokens)`, if they differ.
    drop: what becomes of a micro-batch whose gradients are not finite. None: it is folded like any other. "microbatch":
        it is left out with its weight, and keeps its place in the window (TargetWeight counts only what was folded).
        "window": the whole window is dropped at its end, and there is no update. `state.dropped` counts both.
    drop_if: a function of the gradients that returns a bool, or a 0-d array of one, to drop by in place of that.
    across: the replicas to merge over, as in `accumulate`: each folds what it is given, and what they hold is merged
        once, for the update. In JAX inside shard_map, with jax_backend.state_specs(tx) as the specs of the state. The
        replicas get the same number of calls. A TargetWeight is that of all of them: each call then sends a scalar.
    donate: in torch, use the memory of the state that is passed in for the one that is returned, as
        jax.jit(donate_argnums=...) does in JAX: no copy is made, and the old state is no more.

    Gradients are accumulated in at least float32. What tx sees, gradients and params, has floats of less than 32 bits
    as float32, and so have its state and the updates. Raises FuncgaError for bad input; the state given is then as good
    as before.
    """
    if drop not in (None, "microbatch", "window"):
        raise FuncgaError(
            f'drop is {drop!r}: write "microbatch" to leave out what is not finite, "window" to make no update of a '
            f"window that has such a micro-batch, or None to pass it on."
        )
    if drop_if is not None and (drop is None or not callable(drop_if)):
        raise FuncgaError(
            f'drop_if is {drop_if!r} and drop is {drop!r}: write drop="microbatch" or drop="window", and a function of '
            f"the gradients that says whether to drop them: drop_if=lambda grads: global_norm(grads) > 100."
        )
    read = read_transform(tx)
    backends = load_imported()
    for backend in backends:
        read = backend.transforms.adopted(read)
    steps = _Steps(read, check_target(n), fold, drop, drop_if, across, donate)
    made: Any = MultiSteps(steps.init, steps.update)
    for backend in backends:
        made = backend.transforms.offered(made)
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Steps:
    """The functions of one `multi_steps`, and its choices."""

    tx: Transform
    n: Any
    fold: Any
    drop: str | None
    drop_if: Callable[[Any], Any] | None
    across: Any
    donate: bool
    known: dict[Any, Any] = field(default_factory=dict, repr=False)  # what is worked out once, not at every call

    def init(self, params: Any) -> MultiStepsState:
        """The state of nothing folded, for gradients like these params."""
        backend = _backend_of([params], ["params"])
        if self.donate and backend.name == "jax":
            raise FuncgaError(
                "donate=True is for torch. In JAX give the state away where you compile the step: "
                "jax.jit(step, donate_argnums=...)."
            )
        arrays, replicas = backend.arrays, self._replicas(backend)
        wide = _widened(params, backend)
        leaves, structure = backend.trees.flatten(wide)
        outputs = self._bound(leaves, structure, backend)
        pairs = zip(outputs.folds, leaves, strict=False)
        held = [fold.identity(leaf) if fold else None for fold, leaf in pairs]
        window = windows.empty(held, structure, backend)
        inner = self.tx.init(wide)
        zero = partial(arrays.integer, 0)  # a new one for each, as one buffer cannot be donated twice
        if replicas is not None:
            window = backend.transforms.parted(window, replicas)
        return MultiStepsState(inner, window, zero(), zero(), arrays.as_array(False), Dropped(zero(), zero()))

    def update(
        self, grads: Any, state: MultiStepsState, params: Any = None, *, weight: Any = 1, **extra: Any
    ) -> tuple[Any, MultiStepsState]:
        """(updates, state): zeros until the window is full, and then the update of what was folded.

        grads: a tree of arrays in the structure of params. weight: of this micro-batch, a number or a 0-d array >= 0.
        params and extra go to the wrapped transform. Raises FuncgaError if the gradients have another structure, or
        the weight is seen to be negative.
        """
        backend = self._backend(state, grads, params)
        params = self._own(state, params, backend)
        state = self._added(grads, state, weight, backend)
        full = is_full(self.n, state.updates, state.offered, partial(self._weight, state, backend), backend.arrays)
        emit = partial(self._emitted, backend)
        like = params if params is not None else grads
        return backend.transforms.when(full, emit, state, (params, extra), like)  # type: ignore[no-any-return]

    def accumulate(self, grads: Any, state: MultiStepsState, weight: Any) -> MultiStepsState:
        """The state with one more micro-batch in its window."""
        return self._added(grads, state, weight, self._backend(state, grads))

    def flush(self, state: MultiStepsState, params: Any, extra: dict[str, Any]) -> tuple[Any, MultiStepsState]:
        """(updates, state) of what is in the window."""
        backend = self._backend(state, params)
        params = self._own(state, params, backend)
        offered = backend.arrays.scalar(state.offered)
        if not backend.arrays.is_array(offered) and offered == 0:
            raise FuncgaError(
                "the window is empty: nothing was accumulated since the last update, so there is nothing to flush. "
                "After the last window ask first: if state.offered > 0."
            )
        return self._emitted(backend, state, (params, extra))

    def has_updated(self, state: MultiStepsState) -> Any:
        """Whether the call that returned the state was an update."""
        _check_state(state)
        return _backend_of([state.updated], ["state"]).arrays.scalar(state.updated)

    def _backend(self, state: Any, *others: Any) -> Backend:
        _check_state(state)
        names = ["state", "grads", "params"] if len(others) == 2 else ["state", "grads or params"]
        return _backend_of([state, *others], names)

    def _replicas(self, backend: Backend) -> Any:
        return None if self.across is None else backend.replicas.replicas_of(self.across)

    def _bound(self, leaves: list[Any], structure: Any, backend: Backend) -> Outputs:
        """The folds of the gradients and, last, of the number of micro-batches that were rejected."""
        dtypes = tuple(getattr(leaf, "dtype", None) for leaf in leaves)
        known = self.known.get("outputs")
        if known is None or known[0] != dtypes or known[1] != structure or known[2] is not backend:
            tree = backend.trees.unflatten(structure, leaves)
            count = backend.arrays.integer(0)
            outputs = bind_outputs((self.fold, sum()), (tree, count), backend, shaped=False)
            _check_folds(outputs)
            self.known["outputs"] = known = (dtypes, structure, backend, outputs)
        return known[3]

    def _added(self, grads: Any, state: MultiStepsState, weight: Any, backend: Backend) -> MultiStepsState:
        arrays, transforms, replicas = backend.arrays, backend.transforms, self._replicas(backend)
        window = state.window if replicas is None else transforms.part(state.window)
        held, structure = windows.held_in(window.accumulated, backend)
        outputs = self._bound(windows.marks_of(held), structure, backend)
        leaves = windows.gradients_like(grads, held, structure, backend)
        weight = check_weight(weight, arrays)
        keep = True if self.drop is None else self._is_kept(grads, leaves, arrays)
        rejected: Any = 0
        if keep is False:
            rejected, more = 1, windows.weight_of(0, held, 0, arrays)
        else:
            more = windows.weight_of(weight, held, 1, arrays)
            added = transforms.add(outputs.folds[:-1], held, leaves, weight, self.donate and keep is True)
            if keep is not True:
                added, more = _selected(keep, (added, more), (held, windows.weight_of(0, held, 0, arrays)), backend)
                rejected = arrays.integer(1) - more.steps
            held = added
        window = windows.with_more(window, held, structure, more, rejected, backend)
        dropped = state.dropped
        if replicas is not None:
            window = transforms.parted(window, replicas)
        elif self.drop is not None:
            dropped = dropped._replace(microbatches=dropped.microbatches + rejected)
        return state._replace(window=window, offered=state.offered + 1, updated=arrays.as_array(False), dropped=dropped)

    def _is_kept(self, grads: Any, leaves: list[Any], arrays: Any) -> Any:
        if self.drop_if is not None:
            drop = self.drop_if(grads)
            drop = arrays.scalar(drop) if arrays.is_array(drop) else drop
            return ~drop if arrays.is_array(drop) else not drop
        finite = [arrays.xp.isfinite(leaf).all() for leaf in leaves if leaf is not None]
        kept = True
        for one in finite:
            kept = one & kept
        return arrays.scalar(kept) if arrays.is_array(kept) else kept

    def _weight(self, state: MultiStepsState, backend: Backend) -> Any:
        """The weight of the window so far, on all replicas."""
        replicas = self._replicas(backend)
        window = state.window if replicas is None else backend.transforms.part(state.window)
        limbs = windows.counted(window.tally, backend.arrays).weight
        total = limbs[0] if len(limbs) == 1 else limbs[0] + limbs[1]
        return total if replicas is None else backend.transforms.summed(total, replicas)

    def _emitted(self, backend: Backend, state: MultiStepsState, operands: Any) -> tuple[Any, MultiStepsState]:
        """(updates, state) of what the windows of all replicas hold; they are then empty."""
        arrays, transforms, replicas = backend.arrays, backend.transforms, self._replicas(backend)
        window = state.window if replicas is None else transforms.part(state.window)
        held, structure = windows.held_in(window.accumulated, backend)
        outputs = self._bound(windows.marks_of(held), structure, backend)
        reduced, total, rejected = [*held], window.tally, window.rejected
        if replicas is not None:
            reduced, total = transforms.merged(outputs, [*held, rejected], total, replicas, self.known)
            rejected = reduced.pop()
        total = windows.counted(total, arrays)
        keep = self._is_emitted(total.steps, rejected, arrays)
        params, extra = operands
        folds = _result_folds(outputs.folds[:-1], params, backend)
        gradients = transforms.finish(folds, reduced, total, self.donate)
        grads = backend.trees.unflatten(structure, gradients)
        progress = state.inner, state.updates, arrays.as_array(False)
        run = partial(self._run, backend)
        updates, (inner, count, updated) = transforms.when(keep, run, progress, (grads, params, extra), grads)
        emptied = windows.empty(transforms.emptied(folds, held, self.donate, updates), structure, backend)
        if replicas is not None:
            emptied = transforms.parted(emptied, replicas)
        dropped = self._dropped(state.dropped, keep, total.steps, rejected, backend)
        return updates, MultiStepsState(inner, emptied, arrays.integer(0), count, updated, dropped)

    def _is_emitted(self, steps: Any, rejected: Any, arrays: Any) -> Any:
        """Whether there is an update at the end of a window: True, unless something was dropped."""
        if self.drop is None:
            return True
        keep = (steps > 0) & (rejected == 0) if self.drop == "window" else steps > 0
        return arrays.scalar(keep) if arrays.is_array(keep) else keep

    def _run(self, backend: Backend, progress: Any, operands: Any) -> tuple[Any, Any]:
        """(updates, progress) of one update of the wrapped transform."""
        (inner, count, _), (grads, params, extra) = progress, operands
        update = self.tx.donated if self.donate and isinstance(self.tx, DonatingTransform) else self.tx.update
        updates, new = update(grads, inner, _widened(params, backend), **extra)
        return updates, (backend.transforms.alike(new, inner), count + 1, backend.arrays.as_array(True))

    def _dropped(self, dropped: Dropped, keep: Any, steps: Any, rejected: Any, backend: Backend) -> Dropped:
        """The counts of what has been dropped, at the end of a window."""
        arrays, replicas = backend.arrays, self._replicas(backend)
        microbatches, lost = dropped
        if self.drop is not None and replicas is not None:  # else they were counted as they came
            microbatches = microbatches + rejected
        if self.drop == "window":
            counts = arrays.xp.where(arrays.as_array(keep), arrays.integer(0), arrays.integer(steps))
            microbatches = microbatches + counts
            lost = lost + arrays.xp.where(arrays.as_array(keep), arrays.integer(0), arrays.integer(1))
        return Dropped(microbatches, lost)

    def _own(self, state: MultiStepsState, params: Any, backend: Backend) -> Any:
        """The params that the state was made for; of a whole module, None in the place of all else.

        Raises FuncgaError if the params have another structure.
        """
        expected = windows.held_in(state.window.accumulated, backend)[1]
        leaves, found = backend.trees.flatten(params)
        if params is None or found == expected:
            return params
        paths, known = leaf_paths(params, backend.trees, "params"), windows.paths_of(expected, "params", backend)
        own = [leaf if path in known else None for path, leaf in zip(paths, leaves, strict=True)]
        params = backend.trees.unflatten(found, own)
        if backend.trees.flatten(params)[1] != expected:
            windows.check_paths("params", paths, known)
        return params


def _check_state(state: Any) -> None:
    if not isinstance(state, MultiStepsState):
        raise FuncgaError(
            f"the state is of type {type(state).__name__}, and this transform's is a MultiStepsState. Pass what init "
            f"and update return, tx.update(grads, state, params); of an optax.chain, the part of its state that is "
            f"this transform's: state[0]."
        )


def _backend_of(trees: list[Any], names: list[str]) -> Backend:
    """The backend that owns a call; with no arrays at all, as optax's own tools do, that of JAX if it is there."""
    loaded = load_imported()
    if loaded and not loaded[-1].trees.flatten(trees)[0]:
        return loaded[-1]
    return backend_of(trees, lambda: names)


def _widened(params: Any, backend: Backend) -> Any:
    """The params with floats of less than 32 bits as float32."""
    arrays = backend.arrays
    leaves, structure = backend.trees.flatten(params)
    leaves = [arrays.as_array(leaf) if isinstance(leaf, int | float | complex) else leaf for leaf in leaves]
    wide = [_wide(leaf, arrays) if arrays.is_array(leaf) else leaf for leaf in leaves]
    return backend.trees.unflatten(structure, wide)


def _wide(leaf: Any, arrays: Any) -> Any:
    if arrays.kind(leaf.dtype) not in ("float", "complex") or leaf.dtype == arrays.accumulator_dtype(leaf.dtype):
        return leaf
    return arrays.cast(leaf, arrays.accumulator_dtype(leaf.dtype))


def _result_folds(folds: Any, params: Any, backend: Backend) -> list[Any]:
    """The folds, whose results are in the dtypes of the params that the wrapped transform sees."""
    if params is None:
        return list(folds)
    likes = backend.trees.flatten(_widened(params, backend))[0]
    return [
        fold if fold is None or fold.fold.normalizer.dtype is not None else replace(fold, result_dtype=like.dtype)
        for fold, like in zip(folds, likes, strict=True)
    ]


def _selected(keep: Any, kept: Any, other: Any, backend: Backend) -> Any:
    """The one tree or the other, by an array of a bool."""
    xp, trees = backend.arrays.xp, backend.trees
    leaves, structure = trees.flatten(kept)
    chosen = [None if a is None else xp.where(keep, a, b) for a, b in zip(leaves, trees.flatten(other)[0], strict=True)]
    return trees.unflatten(structure, chosen)


def _check_folds(outputs: Outputs) -> None:
    """Raises FuncgaError if what a fold holds grows with every call."""
    for fold, path in zip(outputs.folds, outputs.paths, strict=True):
        if fold is not None and fold.fold.reducer.monoid.axis is not None:
            raise FuncgaError(
                f"the fold of {path} collects rows, and gradients are to become one gradient. Fold them with "
                f"funcga.mean(), funcga.per_weight() or funcga.sum()."
            )
