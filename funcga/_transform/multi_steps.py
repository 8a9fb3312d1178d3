"""`multi_steps`: the fold spread over calls, as a transform around an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from funcga._backend.dispatch import backend_of, load_imported
from funcga._backend.prefixes import leaf_paths
from funcga._backend.protocols import Backend
from funcga._fold import tally
from funcga._fold.weight import check_weight
from funcga._grad import uninitialised
from funcga._replicas import step_of
from funcga._transform.binding import Bindings
from funcga._transform.non_finite import Dropping
from funcga._transform.precision import result_folds, widened
from funcga._transform.transform import DonatingTransform, MultiSteps, Transform, is_scaled, read_transform
from funcga._transform.window import Dropped, MultiStepsState
from funcga._transform.window_size import check_target, is_full, target_of
from funcga._transform.windowing import Opened, Windows
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean


def multi_steps(
    tx: Any,
    n: Any,
    *,
    fold: FoldTree = mean(),  # noqa: B008 - a frozen value
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
    fold: a Fold, or a tree prefix of Folds over the gradients. The weight of a micro-batch is 1 unless it is given, as
        its rows are not seen here: with `mean()`, and gradients of a mean loss, weigh it by its rows or tokens if they
        differ, `update(..., weight=tokens)`; with `per_weight()`, and gradients of a sum, always.
    drop: what becomes of a micro-batch whose gradients are not finite. None: it is folded like any other. "microbatch":
        it is left out with its weight, and keeps its place in the window (TargetWeight counts only what was folded).
        "window": the whole window is dropped at its end, and there is no update. `state.dropped` counts both.
        On a CUDA device the host waits once a window to learn what was dropped.
    drop_if: a function of the gradients that returns a bool, or a 0-d array of one, to drop by in place of that: it
        then has to find what is not finite too.
    across: the replicas to merge over, as in `accumulate`: each folds what it is given, and what they hold is merged
        once, for the update. In JAX inside shard_map, with jax_backend.state_specs(tx) as the specs of the state, and
        gradients of each device's own copy, jax.lax.pcast(params, axis, to="varying"). The replicas
        get the same number of calls. Each has its own part of a window: to save a state in the middle of one, save
        `tx.merge(states)` of all of them, and load that on every replica, whatever their number. A TargetWeight is
        that of all of them: each call then sends a scalar. (If the weight is on a CUDA device, the host waits for it
        at every call.)
    donate: in torch, use the memory of the state that is passed in for the one that is returned, as
        jax.jit(donate_argnums=...) does in JAX: no copy is made, and the old state is no more. To use it all the same
        is not noticed. After an error in tx what was folded is there again, to rounding. Updates of a window that is
        not full, zeros, take no memory either: read them, and write to none in place.

    Gradients are accumulated in at least float32. What tx sees, gradients and params, has floats of less than 32 bits
    as float32, and so have its state and the updates. Raises FuncgaError for bad input; the state given is then as good
    as before.
    """
    if callable(fold):
        raise FuncgaError(f"fold= is the function {getattr(fold, '__name__', fold)}. Call it: fold=funcga.mean().")
    read = read_transform(tx)
    if drop is not None and is_scaled(read):
        raise FuncgaError(
            f"drop is {drop!r}, and the wrapped transform is a loss_scaled, which has to see what is not finite: its "
            f"scale would never back off, and no window be an update. Leave drop out: it skips such windows itself."
        )
    backends = load_imported()
    for backend in backends:
        read = backend.transforms.imported(read)
    known = {} if across is None else {"step": step_of(read.update)}
    steps = _Steps(read, check_target(n), Windows(Bindings(fold)), Dropping(drop, drop_if), across, donate, known)
    made: Any = MultiSteps(steps.init, steps.update)
    for backend in backends:
        made = backend.transforms.exported(made)
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class _Steps:
    """The functions of one `multi_steps`, and its choices."""

    tx: Transform
    n: Any
    windows: Windows
    dropping: Dropping
    across: Any
    donate: bool
    known: dict[Any, Any] = field(default_factory=dict, repr=False)  # what a backend works out once, not at every call

    @property
    def scales(self) -> bool:
        """Whether the gradients come multiplied by a loss scale."""
        return is_scaled(self.tx)

    def __deepcopy__(self, memo: Any) -> "_Steps":
        """Itself, as a function is its own copy."""
        return self

    def init(self, params: Any) -> MultiStepsState:
        """The state of nothing folded, for gradients like these params."""
        if hasattr(params, "named_parameters") or hasattr(params, "__next__"):
            raise FuncgaError(
                f"params are of type {type(params).__name__}: a transform takes a tree of arrays. Give a module's by "
                f"name: tx.init(dict(module.named_parameters()))."
            )
        backend = _backend_of(params, "params")
        for place, leaf in enumerate(backend.trees.flatten(params)[0]):
            if hasattr(leaf, "materialize"):
                raise uninitialised(leaf_paths(params, backend.trees, "params")[place])
        if self.donate and backend.name == "jax":
            raise FuncgaError(
                "donate=True is for torch. In JAX give the state away where you compile the step: "
                "jax.jit(step, donate_argnums=...)."
            )
        if backend.name != "jax" and type(self.tx).__module__.split(".")[0] == "optax":
            raise FuncgaError(
                f"params are arrays of {backend.name}, and the wrapped transform is one of optax, which takes JAX's. "
                f"Let it run on tensors: funcga.multi_steps({backend.name}_backend.from_optax(tx), n)."
            )
        wide = widened(backend.transforms.detached(params), backend)
        window = self.windows.begun(wide, backend).closed(self._replicas(backend))
        zero = partial(backend.arrays.integer, 0)  # a new one for each, as one buffer cannot be donated twice
        flag = backend.arrays.as_array(False)
        return MultiStepsState(self.tx.init(wide), window, zero(), zero(), flag, Dropped(zero(), zero()))

    def update(
        self, grads: Any, state: MultiStepsState, params: Any = None, *, weight: Any = 1, **extra: Any
    ) -> tuple[Any, MultiStepsState]:
        """(updates, state): zeros until the window is full, and then the update of what was folded.

        grads: a tree of arrays in the structure of params. weight: of this micro-batch, a number or a 0-d array >= 0.
        params and extra go to the wrapped transform. Raises FuncgaError if the gradients have another structure, or
        the weight is seen to be negative.
        """
        _check_extra(extra)
        backend = _backend_of_state(state)
        opened = self._opened(state, backend)
        params, leaves = opened.restricted(params)
        target = target_of(self.n, state.updates, backend.arrays)  # whatever is refused, is so before anything is added
        opened, state = self._added(grads, opened, state, weight)
        full = is_full(self.n, target, state.offered, partial(self._weight, opened), backend.arrays)
        state = state._replace(window=opened.closed(self._replicas(backend)))
        emit = partial(self._emitted, backend, leaves, self.donate or opened.fresh, True)
        like = params if params is not None else grads
        return backend.transforms.when(  # type: ignore[no-any-return]
            full, emit, state, (params, extra), like, self.donate
        )

    def accumulate(self, grads: Any, state: MultiStepsState, weight: Any) -> MultiStepsState:
        """The state with one more micro-batch in its window."""
        backend = _backend_of_state(state)
        opened, state = self._added(grads, self._opened(state, backend), state, weight)
        return state._replace(window=opened.closed(self._replicas(backend)))

    def flush(self, state: MultiStepsState, params: Any, extra: dict[str, Any]) -> tuple[Any, MultiStepsState]:
        """(updates, state) of what is in the window."""
        _check_extra(extra)
        backend = _backend_of_state(state)
        params, leaves = self._opened(state, backend).restricted(params)
        offered = backend.arrays.scalar(state.offered)
        if not backend.arrays.is_array(offered) and offered == 0:
            raise FuncgaError(
                "the window is empty: nothing was accumulated since the last update, so there is nothing to flush. "
                "After the last window ask first: if state.offered > 0."
            )
        there = offered > 0  # inside of jit it is not known
        return self._emitted(backend, leaves, self.donate, there, state, (params, extra))

    def merge(self, states: Any, replicas: int) -> MultiStepsState:
        """The state of all replicas, from the states that each of them has."""
        states = [*states] if isinstance(states, list | tuple) and not isinstance(states, MultiStepsState) else [states]
        if not states:
            raise FuncgaError("there are no states to merge. Give those of all replicas: tx.merge(states).")
        backend, first = _backend_of_state(states[0]), states[0]
        times = [(int(state.updates), int(state.offered)) for state in states]
        if len({*times}) > 1:
            listed = ", ".join(f"{offered} after update {updates}" for updates, offered in times)
            raise FuncgaError(
                f"the states to merge are not of one moment: they have been given so many micro-batches: {listed}. "
                f"Save them after the same call on every replica."
            )
        window = self.windows.merged([state.window for state in states], backend, replicas)
        return first._replace(window=window)  # type: ignore[no-any-return]

    def has_updated(self, state: MultiStepsState) -> Any:
        """Whether the call that returned the state was an update."""
        return _backend_of_state(state).arrays.scalar(state.updated)

    def _replicas(self, backend: Backend) -> Any:
        return None if self.across is None else backend.replicas.replicas_of(self.across)

    def _opened(self, state: MultiStepsState, backend: Backend) -> Opened:
        return self.windows.opened(state.window, backend, self._replicas(backend))

    def _added(self, grads: Any, opened: Opened, state: MultiStepsState, weight: Any) -> tuple[Opened, MultiStepsState]:
        """The window with one more micro-batch, and the state with what else has changed."""
        arrays, replicas = opened.backend.arrays, self._replicas(opened.backend)
        leaves = opened.matched(grads)
        opened.backend.transforms.check_merged(leaves, partial(opened.paths, "grads"), replicas)
        weight = check_weight(weight, arrays)
        keep = self.dropping.is_kept(grads, leaves, opened.backend)
        opened, rejected = opened.added(leaves, weight, keep, self.donate)
        dropped = state.dropped
        if self.dropping.scope is not None and replicas is None:
            dropped = dropped._replace(microbatches=dropped.microbatches + rejected)
        offered = state.offered + 1
        return opened, state._replace(offered=offered, updated=arrays.as_array(False), dropped=dropped)

    def _weight(self, opened: Opened) -> Any:
        """The weight of the window so far, on all replicas."""
        replicas = self._replicas(opened.backend)
        total = tally.total(opened.seen(opened.tally))
        return total if replicas is None else opened.backend.transforms.summed(total, opened.held, replicas)

    def _emitted(
        self, backend: Backend, likes: list[Any], owned: bool, there: Any, state: MultiStepsState, operands: Any
    ) -> tuple[Any, MultiStepsState]:
        """(updates, state) of what the windows of all replicas hold; they are then empty.

        likes: the leaves of the params, for their dtypes. owned: whether what this window holds may be written to.
        there: whether there is a micro-batch in it.
        """
        transforms, replicas, (params, extra) = backend.transforms, self._replicas(backend), operands
        opened = self._opened(state, backend)
        merged = opened if replicas is None else opened.merged(replicas, self.known)
        total = merged.seen(merged.tally)
        keep = self.dropping.is_emitted(there, total.steps, merged.rejected, backend.arrays)
        folds = result_folds(merged.folds, likes, backend.arrays)
        gradients = backend.sums.finish(folds, merged.held, total, owned or replicas is not None)
        grads = backend.trees.unflatten(opened.structure, gradients)
        progress = state.inner, state.updates, backend.arrays.as_array(False)
        run = partial(self._run, backend)
        try:
            updates, (inner, count, updated) = transforms.when(keep, run, progress, (grads, params, extra), grads)
        except Exception:
            if self.donate and replicas is None:
                _restore(folds, merged.held, gradients, total, backend)
            raise
        window = opened.emptied(owned, (updates, inner)).closed(replicas)
        late = replicas is not None
        dropped = self.dropping.counted(state.dropped, keep, total.steps, merged.rejected, late, backend.arrays)
        return updates, MultiStepsState(inner, window, backend.arrays.integer(0), count, updated, dropped)

    def _run(self, backend: Backend, progress: Any, operands: Any) -> tuple[Any, Any]:
        """(updates, progress) of one update of the wrapped transform."""
        (inner, count, _), (grads, params, extra) = progress, operands
        update = self.tx.donated if self.donate and isinstance(self.tx, DonatingTransform) else self.tx.update
        wide = widened(backend.transforms.detached(params), backend)
        updates, new = update(grads, inner, wide, **extra)
        return updates, (backend.transforms.alike(new, inner), count + 1, backend.arrays.as_array(True))


def _restore(folds: Any, held: list[Any], gradients: list[Any], total: Any, backend: Backend) -> None:
    """Takes back the division by the total weight of sums that were divided in place, to rounding."""
    weight = tally.total(total)
    divided = [
        own
        for fold, own, gradient in zip(folds, held, gradients, strict=True)
        if fold is not None and gradient is own and fold.fold.normalizer.divides_by == "weight"
    ]
    if divided and not backend.arrays.is_array(weight) and weight:
        backend.sums.scaled(divided, float(weight), donate=True)


def _check_extra(extra: dict[str, Any]) -> None:
    """Raises FuncgaError for what is nearly `weight`: wrapped transforms may take any other name, and ignore it."""
    for name in get_close_matches("weight", [name for name in extra if name != "weight_decay"], cutoff=0.75):
        raise FuncgaError(f"`{name}` is no argument of a transform. A micro-batch's weight is `weight=...`.")


def _backend_of_state(state: Any) -> Backend:
    """The backend that owns a state, asked of one leaf of it."""
    if not isinstance(state, MultiStepsState):
        raise FuncgaError(
            f"the state is of type {type(state).__module__}.{type(state).__name__}, and this transform's is a "
            f"funcga.MultiStepsState. Pass what init and update return, tx.update(grads, state, params); of an "
            f"optax.chain, the part of its state that is this transform's: state[0]."
        )
    return _backend_of(state.offered, "state")


def _backend_of(tree: Any, name: str) -> Backend:
    """The backend that owns a call; with no arrays at all, as optax's own tools do, that of JAX if it is there."""
    try:
        return backend_of([tree], lambda: [name])
    except FuncgaError:
        loaded = load_imported()
        if loaded and not loaded[-1].trees.flatten(tree)[0]:
            return loaded[-1]
        raise
