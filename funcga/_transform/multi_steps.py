"""`multi_steps`: the fold spread over calls, as a transform around an optimizer."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial, reduce
from typing import Any, Literal

from funcga._backend import Arrays, Backend
from funcga._backend.dispatch import backend_of, load_imported
from funcga._backend.prefixes import leaf_paths
from funcga._fold import LeafFold, Tally, check_narrow, check_weight, largest
from funcga._fold.accumulator import Accumulation, nothing
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._grad import is_uninitialised, uninitialised
from funcga._observe import Observers, ObserverTree
from funcga._replicas import Memory, check_one_for_all, step_of
from funcga._transform import (
    DonatingTransform,
    Transform,
    UpdateFunction,
    is_scaled,
    leaves_gradients,
    libraries,
    takes_weight,
    wrapped_transform,
)
from funcga._transform.apply import applied, check_donates
from funcga._transform.observing import ObservingUpdates, selected
from funcga._transform.window import (
    Dropped,
    DroppingUpdates,
    MultiStepsState,
    Parts,
    Window,
    matched_grads,
    matched_params,
    restored_params,
)
from funcga._transform.window_size import WindowSize, check_target, is_full, target_of
from funcga._types import Array, Dtype, Reduced, Scalar, Structure, Tree
from funcga.errors import FuncgaError, explains_arguments
from funcga.folds import FoldTree, mean, sum


class MultiSteps(Transform):
    """What `multi_steps` returns: a transform (init, update), and the same in two halves, `accumulate` and `flush`.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params, weight=1, **extra) -> (updates, state)`.

    Example:
        >>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
        >>> tx = funcga.multi_steps(optax.sgd(0.1), 8)
        >>> state = tx.accumulate(grads, tx.init(params), weight=12)
        >>> updates, state = tx.flush(state, params)
        >>> updates
        {'w': Array([-0.1, -0.1], dtype=float32)}
    """

    __slots__ = ()

    update: "MultiStepsUpdate"

    def accumulate(self, grads: Tree, state: MultiStepsState, *, weight: Scalar = 1) -> MultiStepsState:
        """The state with one more micro-batch's gradients in its window. It only adds; nothing else is touched.

        Args:
            grads: The gradients, in the structure of the params.
            state: What `init` or an earlier call returned.
            weight: The weight of the micro-batch, a number or a 0-d array >= 0.

        Returns:
            The new state.

        Raises:
            FuncgaError: As `update` does.

        Example:
            >>> state = tx.accumulate(grads, state, weight=12)
        """
        return self.update.accumulate(grads, state, weight)

    def flush(self, state: MultiStepsState, params: Tree = None, **extra: Any) -> tuple[Tree, MultiStepsState]:
        """The update of the micro-batches that are in the window, however few they are; the window is then empty.

        Inside of jit an empty window goes unnoticed: then the updates are zeros, and no update is counted. It is the
        same with `drop` if every micro-batch was dropped.

        Args:
            state: What `init` or an earlier call returned.
            params: The parameters, for the wrapped transform.
            **extra: Further arguments of the wrapped transform.

        Returns:
            (updates, state).

        Raises:
            FuncgaError: The window is empty.

        Example:
            >>> updates, state = tx.flush(state, params)
        """
        return self.update.flush(state, params, extra)

    def has_updated(self, state: MultiStepsState) -> bool | Array:
        """Whether the call that returned this state was an update.

        Args:
            state: What `init` or an earlier call returned.

        Returns:
            A bool, or in JAX a 0-d array of one.

        Example:
            >>> bool(tx.has_updated(state))
            True
        """
        return _backend_of_state(state).arrays.scalar(state.updated)

    def merge(self, states: Sequence[MultiStepsState], *, replicas: int = 1) -> MultiStepsState:
        """One state of what all replicas hold, to be saved: each can go on from it, whatever their number.

        In torch each replica has a state of its own: gather them, or load what each has saved. In JAX one state has
        the parts of all devices, and goes on as it is on as many, or on a number that divides theirs; for any other
        number of devices write tx.merge([state], replicas=number), outside of shard_map.

        Args:
            states: The states of all replicas after the same call.
            replicas: In JAX, on how many devices the state goes on.

        Returns:
            The state of the whole window.

        Raises:
            FuncgaError: A replica's state is missing or there twice, the states are not of one moment, or there are
                several without across=.

        Example:
            >>> tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD), 8, across=dist.group.WORLD)
            >>> state = tx.accumulate({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}))
            >>> states = [None] * dist.get_world_size()
            >>> dist.all_gather_object(states, state)
            >>> torch.save(tx.merge(states), "state.pt")  # load it on every replica, then go on: tx.update(...)
        """
        return self.update.merge(states, replicas)

    @property
    def across(self) -> Any:
        """The replicas that an update merges over, as they were given."""
        return self.update.across


@explains_arguments
def multi_steps(
    tx: Any,
    n: WindowSize,
    *,
    fold: FoldTree = mean(),  # noqa: B008 - a frozen value
    drop: Literal["microbatch", "window"] | None = None,
    drop_if: Callable[[Any], Any] | None = None,
    across: Any = None,
    observe: ObserverTree | None = None,
    donate: bool = False,
) -> MultiSteps:
    """A transform that folds the gradients of n calls and then lets tx make one update of them.

    `tx.update(grads, state, params, weight=1, **extra) -> (updates, state)`; `extra` goes to the wrapped transform.
    `tx.accumulate(grads, state, weight=1) -> state` and `tx.flush(state, params) -> (updates, state)` are its two
    halves, for code that knows when a window ends, and for the last, partial one, which is exact.
    `tx.has_updated(state)` says whether the last call was an update; `state.updates` counts them. Schedules and decay
    of the wrapped transform count updates, as it runs for these alone.

    Gradients are accumulated in at least float32. What tx sees, gradients and params, has floats of less than 32 bits
    as float32, and so have its state and the updates.

    Args:
        tx: Any pair of functions (init, update): optax's transforms, torch_backend.from_optimizer, your own. If its
            update has a parameter named weight, it gets the weight of the window, of all replicas.
        n: The micro-batches of a window, at least 1; a schedule, a function of the number of updates so far (an int, in
            JAX a 0-d array); or funcga.TargetWeight(w): as many as weigh w.
        fold: A Fold, or a tree prefix of Folds over the gradients. The weight of a micro-batch is 1 unless it is given,
            as its rows are not seen here: with `mean()`, and gradients of a mean loss, weigh it by its rows or tokens
            if they differ, `update(..., weight=tokens)`; with `per_weight()`, and gradients of a sum, always.
        drop: What becomes of a micro-batch whose gradients are not finite. None: it is folded like any other.
            "microbatch": it is left out with its weight, and keeps its place in the window (TargetWeight counts only
            what was folded). "window": the whole window is dropped at its end, and there is no update.
            `state.dropped` counts both. On a CUDA device the host waits once a window to learn what was dropped.
        drop_if: A function of the gradients that returns a bool, or a 0-d array of one, to drop by in place of that: it
            then has to find what is not finite too.
        across: The replicas to merge over, as in `accumulate`: each folds what it is given, and what they hold is
            merged once, for the update. In JAX inside shard_map, with jax_backend.state_specs(tx) as the specs of the
            state, and gradients of each device's own copy, jax.lax.pcast(params, axis, to="varying"). The replicas
            get the same number of calls. Each has its own part of a window: to save a state in the middle of one, save
            `tx.merge(states)` of all of them, and load that on every replica, whatever their number. A TargetWeight is
            that of all of them: each call then sends a scalar. (If the weight is on a CUDA device, the host waits for
            it at every call.)
        observe: As in `accumulate`: what a window says of its gradients, `gradient_noise()` for instance. It is in
            `state.observed` after each update, and stays there until the next. Not with gradient_norms(), whose list
            would grow in the state.
        donate: In torch, use the memory of the state that is passed in for the one that is returned, as
            jax.jit(donate_argnums=...) does in JAX: no copy is made, and the old state is no more. Using it all the
            same goes unnoticed. After an error in tx what was folded is there again, to rounding. Updates of a window
            that is not full, zeros, take no memory either: read them, and write to none in place. In JAX, return what
            you donate in the order of the arguments, as JAX matches the two in order: for step(params, state, batch) ->
            (params, state, loss) that is jax.jit(step, donate_argnums=(0, 1)).

    Returns:
        A transform (init, update) with `accumulate`, `flush`, `has_updated` and `merge`.

    Raises:
        FuncgaError: The input is bad. The state given to a call that raises it is as good as before.

    Example:
        >>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
        >>> tx = funcga.multi_steps(optax.sgd(0.1), 2)
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(grads, state, params)
        ...     print(updates["w"])  # zeros, but for every second call
        [0. 0.]
        [-0.1 -0.1]
    """
    if callable(fold):
        raise FuncgaError(f"fold= is the function {getattr(fold, '__name__', fold)}. Call it: fold=funcga.mean().")
    read = wrapped_transform(tx)
    if drop is not None and is_scaled(read):
        raise FuncgaError(
            f"drop is {drop!r}, and the wrapped transform is a loss_scaled, which has to see what is not finite: its "
            f"scale would never back off, and no window be an update. Leave drop out: it skips such windows itself."
        )
    observing = None if observe is None else ObservingUpdates(Observers(observe), fold)
    binding = _Binding(Memory(None if across is None else step_of(read.update)), takes_weight(read.update))
    dropping = DroppingUpdates(drop, drop_if)
    update = MultiStepsUpdate(read, check_target(n), fold, dropping, across, donate, binding, observing)
    # Out in the type that the library's own combinators take, as it came in.
    transform = MultiSteps(update.init, update)
    for library in libraries():
        transform = library.exported(transform)
    return transform


@dataclass(eq=False)
class _Binding:
    """What a transform keeps from one call to the next, so as not to work it out again.

    `outputs` is its fold bound to gradients in a `structure`, with dtypes and shapes, their `kinds`. `counted` is the
    same with the number of rejected micro-batches as one more leaf, for `merging` over replicas. `tells_weight`:
    whether the wrapped transform gets the weight of a window.
    """

    merging: Memory
    tells_weight: bool
    kinds: list[tuple[Dtype, object]] | None = None
    structure: Structure = None
    outputs: Outputs | None = None
    counted: Outputs | None = None


@dataclass(frozen=True, eq=False)
class MultiStepsUpdate(UpdateFunction):
    """The `update` of one `multi_steps`, with its choices, and the other functions that need them."""

    tx: Transform
    n: WindowSize
    fold: FoldTree
    dropping: DroppingUpdates
    across: Any
    donate: bool
    binding: _Binding = field(repr=False)
    observing: ObservingUpdates | None = None

    @property
    def scales(self) -> bool:
        """Whether the gradients come multiplied by a loss scale."""
        return is_scaled(self.tx)

    def __reduce__(self) -> Any:
        """How it is pickled: what is kept between calls can be worked out again."""
        binding = _Binding(Memory(self.binding.merging.step), self.binding.tells_weight)
        observing = None if self.observing is None else ObservingUpdates(self.observing.observers, self.fold)
        choices = self.tx, self.n, self.fold, self.dropping, self.across, self.donate, binding, observing
        return MultiStepsUpdate, choices

    def init(self, params: Tree) -> MultiStepsState:
        """The state of nothing folded, for gradients like these params."""
        # A module itself, or the iterator that module.parameters() returns.
        if hasattr(params, "named_parameters") or isinstance(params, Iterator):
            raise FuncgaError(
                f"params are of type {type(params).__name__}: a transform takes a tree of arrays. Give a module's by "
                f"name: tx.init(torch_backend.trainable(module))."
            )
        backend = _backend_of(params, "params")
        self._check_params(params, backend)
        # The window is made for gradients as wide as the params that the wrapped transform sees.
        arrays, wide = backend.arrays, backend.transforms.widened(params)
        leaves, structure = backend.trees.flatten(
            wide if self.observing is None else self.observing.with_room(wide, backend)
        )
        outputs = self._bound(leaves, structure, backend)
        # Every count is an array of its own, since one buffer cannot be donated twice.
        zero = partial(arrays.integer, 0)
        empty = Accumulation(outputs, outputs.identities(leaves), nothing(outputs), zero())
        window = self._closed(empty, self._replicas(backend), is_empty=True)
        observed: Tree = ()
        if self.observing is not None:
            observed = self.observing.unobserved(empty, wide)
        return MultiStepsState(
            self.tx.init(wide), window, zero(), zero(), arrays.as_array(False), Dropped(zero(), zero()), observed
        )

    def _check_params(self, params: Tree, backend: Backend) -> None:
        """Raises FuncgaError for params that are not there yet, and for choices that are another framework's."""
        for leaf_index, leaf in enumerate(backend.trees.flatten(params)[0]):
            if is_uninitialised(leaf):
                raise uninitialised(leaf_paths(params, backend.trees, "params")[leaf_index])
        if self.donate:
            check_donates(backend)
        for other in load_imported():
            if other is not backend and other.optimizers is not None and other.optimizers.owns(self.tx):
                raise FuncgaError(
                    f"params are arrays of {backend.name}, and the wrapped transform is one of optax, which takes "
                    f"JAX's. Let it run on tensors: "
                    f"funcga.multi_steps({backend.name}_backend.from_optax(tx), n)."
                )

    def __call__(
        self, grads: Tree, state: MultiStepsState, params: Tree = None, *, weight: Scalar = 1, **extra: Any
    ) -> tuple[Tree, MultiStepsState]:
        """(updates, state): zeros until the window is full, and then the update of what was folded.

        grads: a tree of arrays in the structure of params. weight: of this micro-batch, a number or a 0-d array >= 0.
        params and extra go to the wrapped transform. Raises FuncgaError if the gradients have another structure, or
        the weight is seen to be negative.
        """
        backend, param_leaves, owned, full, trained, state = self._filled(grads, state, params, weight, extra)
        # A Python branch where the host sees whether the window is full, else a conditional of the program.
        emit = partial(self._emitted, backend, param_leaves, owned, True)
        like = trained if trained is not None else grads
        updates, state, _ = backend.transforms.when(full, emit, state, (trained, extra), like, self.donate)
        return updates, state

    def applied(
        self, donate: bool, /, grads: Tree, state: MultiStepsState, params: Tree, *, weight: Scalar = 1, **extra: Any
    ) -> tuple[Tree, MultiStepsState]:
        """(params, state): as they are until the window is full, and then after the update of what was folded."""
        if donate and not self.donate:
            return self._donating(state).applied(donate, grads, state, params, weight=weight, **extra)
        backend, param_leaves, owned, full, trained, state = self._filled(grads, state, params, weight, extra)
        emit = partial(self._emitted_into, backend, param_leaves, owned, True, donate)
        _, (trained_after, state), _ = backend.transforms.when(full, emit, (trained, state), extra, ())
        return restored_params(params, trained, trained_after, backend), state

    def _donating(self, state: MultiStepsState) -> "MultiStepsUpdate":
        """The same transform, which is given its states and gradients away."""
        check_donates(_backend_of_state(state))
        return replace(self, donate=True)

    def _filled(
        self, grads: Tree, state: MultiStepsState, params: Tree, weight: Scalar, extra: dict[str, Any]
    ) -> tuple[Backend, list[Array], bool, bool | Array, Tree, MultiStepsState]:
        """The state with one more micro-batch, whether its window is full, and what an update of it needs.

        (backend, leaves of the params, whether the accumulators may be written to, full, params of the state, state)
        """
        if extra:
            _check_extra(extra)
        backend = _backend_of_state(state)
        replicas = self._replicas(backend)
        window = self._opened(state.window, backend, replicas)
        params, param_leaves = matched_params(params, window if self.observing is None else window.of_value())
        # All checks come before anything is added, so that after an error the state is as good as before.
        target = self.n if type(self.n) is int else target_of(self.n, state.updates, backend.arrays)
        window, state = self._added(grads, window, state, weight, replicas)
        # The usual n, a number, spares the host all questions to a schedule.
        if type(target) is int and type(self.n) is int:
            full = state.offered >= target
        else:
            full = is_full(self.n, target, state.offered, partial(_total_weight, window, replicas), backend.arrays)
        state = state._replace(window=self._closed(window, replicas))
        return backend, param_leaves, self.donate or window.owned, full, params, state

    def accumulate(self, grads: Tree, state: MultiStepsState, weight: Scalar) -> MultiStepsState:
        """The state with one more micro-batch in its window."""
        backend = _backend_of_state(state)
        replicas = self._replicas(backend)
        window, state = self._added(grads, self._opened(state.window, backend, replicas), state, weight, replicas)
        return state._replace(window=self._closed(window, replicas))

    def flush(self, state: MultiStepsState, params: Tree, extra: dict[str, Any]) -> tuple[Tree, MultiStepsState]:
        """(updates, state) of what is in the window."""
        backend, leaves, trained, has_any = self._flushed(state, params, extra)
        return self._emitted(backend, leaves, self.donate, has_any, state, (trained, extra))

    def _flushed(
        self, state: MultiStepsState, params: Tree, extra: dict[str, Any]
    ) -> tuple[Backend, list[Array], Tree, bool | Array]:
        """(backend, leaves of the params, params of the state, whether anything is in the window)."""
        _check_extra(extra)
        backend = _backend_of_state(state)
        window = self._opened(state.window, backend, self._replicas(backend))
        params, leaves = matched_params(params, window if self.observing is None else window.of_value())
        offered = backend.arrays.scalar(state.offered)
        if not backend.arrays.is_array(offered) and offered == 0:
            raise FuncgaError(
                "the window is empty: nothing was accumulated since the last update, so there is nothing to flush. "
                "After the last window ask first: if state.offered > 0."
            )
        # Inside of jit it is not known here whether the window is empty; then `offered > 0` decides in the program.
        return backend, leaves, params, offered > 0

    def merge(self, states: Sequence[MultiStepsState], replicas: int) -> MultiStepsState:
        """The state of all replicas, from the states that each of them has."""
        if isinstance(states, MultiStepsState):
            states = [states]
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
        if backend.replicas.names_leaves(self.across):
            raise _of_different_experts()
        # One replica goes on from all that was folded, and the others from empty windows: the sum is the same.
        parts = backend.transforms.in_order([state.window for state in states])
        whole = reduce(Accumulation.merge, [self._read(part, backend) for part in parts])
        empty = self._closed(_emptied(whole, False, None), None)
        window = backend.transforms.rejoined([self._closed(whole, None), *[empty] * (replicas - 1)])
        return first._replace(window=window)

    def _replicas(self, backend: Backend) -> Any:
        replicas = None if self.across is None else backend.replicas.replicas_of(self.across)
        if self.observing is not None or self.dropping.scope is not None:
            check_one_for_all(
                replicas,
                "the transform has observe=, drop= or drop_if=: the gradient of such a leaf has what the micro-batches "
                "of several replicas add to it, and cannot be told apart",
                "Leave them out.",
            )
        return replicas

    def _bound(self, leaves: Sequence[Array], structure: Structure, backend: Backend) -> Outputs:
        """The fold bound to gradients with such leaves; that of the last call, if its leaves were alike.

        Raises FuncgaError for folds that do not fit.
        """
        binding = self.binding
        kinds = [(None, None) if leaf is None else (leaf.dtype, leaf.shape) for leaf in leaves]
        last = binding.outputs
        if last is not None and last.backend is backend and binding.kinds == kinds and binding.structure == structure:
            return last
        value = backend.trees.unflatten(structure, list(leaves))
        if self.observing is None:
            outputs, _ = bind_outputs(self.fold, value, backend, name="params")
        else:
            outputs = self.observing.bound(value[1], backend)
        for leaf_index, fold in enumerate(outputs.folds):
            # What is collected grows with every call, and a state cannot.
            if fold is not None and fold.fold.reducer.monoid.axis is not None:
                raise FuncgaError(
                    f"the fold of {outputs.paths('params')[leaf_index]} collects rows, and gradients are to become one "
                    f"gradient. Fold them with funcga.mean(), funcga.per_weight() or funcga.sum()."
                )
        binding.kinds, binding.structure, binding.outputs, binding.counted = kinds, structure, outputs, None
        return outputs

    def _opened(self, window: Window, backend: Backend, replicas: Any) -> Accumulation:
        """What this replica has folded of the window of a state."""
        # Without replicas, and in a state that has never been divided among any, the window is whole.
        if replicas is None and isinstance(window.part, tuple):
            return self._read(window, backend)
        parts = [self._read(part, backend) for part in backend.transforms.parts(window, replicas)]
        if len(parts) > 1 and replicas.leaves is not None:
            raise _of_different_experts()
        # Saved on another number of replicas, the window may have several parts for one, or none.
        return reduce(Accumulation.merge, parts) if parts else _emptied(self._read(window, backend), False, None)

    def _read(self, window: Window, backend: Backend) -> Accumulation:
        leaves, structure = backend.trees.flatten(window.accumulated, _is_parts)
        accumulators = [tuple(leaf.parts) if type(leaf) is Parts else leaf for leaf in leaves]
        likes = [largest(leaf) if type(leaf) is tuple else leaf for leaf in accumulators]
        outputs = self._bound(likes, structure, backend)
        return Accumulation(outputs, accumulators, window.tally, window.rejected)

    def _closed(self, window: Accumulation, replicas: Any, is_empty: bool = False) -> Window:
        """The window as a state has it; `is_empty` if nothing is folded."""
        leaves = [
            Parts(accumulator) if isinstance(accumulator, tuple) else accumulator for accumulator in window.accumulators
        ]
        closed = Window(window.outputs.structure_of(leaves), window.tally, window.rejected)
        return closed if replicas is None else window.outputs.backend.transforms.parted(closed, replicas, is_empty)

    def _added(
        self, grads: Tree, window: Accumulation, state: MultiStepsState, weight: Scalar, replicas: Any
    ) -> tuple[Accumulation, MultiStepsState]:
        """The window with one more micro-batch, and the state with what else has changed."""
        backend = window.outputs.backend
        of_value = window if self.observing is None else window.of_value()
        leaves = matched_grads(grads, of_value)
        backend.transforms.check_merged(leaves, partial(of_value.outputs.paths, "grads"), replicas)
        weight = _checked_weight(weight, window, replicas)
        drops = self.dropping.scope is not None
        keep = not drops or self.dropping.is_kept(grads, leaves, backend)
        if self.observing is not None:
            leaves = [*self.observing.readings.told(leaves, weight), *leaves]
        without = window._replace(rejected=window.rejected + 1) if drops else window
        after = without
        if keep is not False:
            # Where the host does not see whether to keep it, both windows are needed: nothing is written in place.
            after = window.add(leaves, weight, donate=self.donate and keep is True)
            after = after if keep is True else after.where(keep, without)
        dropped = state.dropped
        # With replicas the counts are summed at the end of the window.
        if drops and replicas is None:
            dropped = dropped._replace(microbatches=dropped.microbatches + (after.rejected - window.rejected))
        return after, _offered(state, dropped, backend)

    def _emitted(
        self, backend: Backend, param_leaves: Sequence[Array], owned: bool, has_any: bool | Array,
        state: MultiStepsState, operands: tuple[Tree, dict[str, Any]],
    ) -> tuple[Tree, MultiStepsState]:  # fmt: skip
        """(updates, state) of what the windows of all replicas hold; they are then empty.

        param_leaves: for their dtypes. owned: whether the accumulators may be written to. has_any: whether there is a
        micro-batch in the window.
        """
        params, extra = operands
        run = partial(self._run, backend)
        tells = self.binding.tells_weight
        update = lambda keep, grads, total: backend.transforms.when(
            keep, run, state.inner, (grads, params, {**extra, "weight": total.total} if tells else extra), grads
        )
        return self._ended(backend, param_leaves, owned, has_any, state, update)

    def _emitted_into(
        self, backend: Backend, param_leaves: Sequence[Array], owned: bool, has_any: bool | Array, donate: bool,
        carried: tuple[Tree, MultiStepsState], extra: dict[str, Any],
    ) -> tuple[tuple[()], tuple[Tree, MultiStepsState]]:  # fmt: skip
        """The same with (params, state) in the place of a state, and no updates."""
        params, state = carried
        run = partial(self._run_into, backend, donate)

        def update(keep: bool | Array, grads: Tree, total: Tally) -> tuple[Tree, Tree, Scalar]:
            told = {**extra, "weight": total.total} if self.binding.tells_weight else extra
            _, (after, inner), updated = backend.transforms.when(keep, run, (params, state.inner), (grads, told), ())
            return after, inner, updated

        return (), self._ended(backend, param_leaves, owned, has_any, state, update)

    def _ended(
        self, backend: Backend, param_leaves: Sequence[Array], owned: bool, has_any: bool | Array,
        state: MultiStepsState, update: Callable[[bool | Array, Tree, Tally], tuple[Tree, Tree, Scalar]],
    ) -> tuple[Tree, MultiStepsState]:  # fmt: skip
        """What an update returned, and the state with empty windows; `update(keep, grads, total)` makes both."""
        # First the windows of all replicas become one.
        arrays, replicas = backend.arrays, self._replicas(backend)
        window = self._opened(state.window, backend, replicas)
        merged = window if replicas is None else self._merged(window, replicas)
        # Then it shows whether there is an update at all, and what is dropped if there is none.
        total, dropped, keep = _seen(merged), state.dropped, has_any
        if self.dropping.scope is not None:
            keep = self.dropping.is_emitted(total.steps, merged.rejected, arrays)
            # What each replica rejected is known only now.
            if replicas is not None:
                dropped = dropped._replace(microbatches=dropped.microbatches + merged.rejected)
            dropped = self.dropping.counted(dropped, keep, total.steps, merged.rejected, arrays)
        # The sums are divided by what was folded, and the wrapped transform makes an update of them.
        if merged.outputs.may_be_lost:
            merged.check_known("grads")
        folds = _result_folds(merged.outputs.folds, [*[None] * merged.outputs.before, *param_leaves], arrays)
        gradients = backend.sums.finish(folds, merged.accumulators, total, owned or replicas is not None)
        observed = state.observed
        if self.observing is not None:
            # In the state of loss_scaled is the scale of these gradients, by which it divides in the update.
            scale = state.inner.scale if self.scales else 1.0
            observed = self.observing.said(window.outputs.structure_of(gradients), scale)
        try:
            whole = window.outputs.structure_of(gradients)
            result, inner, updated = update(keep, whole if self.observing is None else whole[1], total)
        # With donate the sums were divided in place; after an error the caller's state is to hold them again.
        except Exception:
            if self.donate and replicas is None:
                _restore(merged, gradients, total)
            raise
        # The next window begins in the same memory, unless the result or the state of the transform lie there.
        taken = (observed,) if updated is True and leaves_gradients(self.tx) else (result, inner, observed)
        empty = self._closed(_emptied(window, owned, taken), replicas, is_empty=True)
        count = state.updates + arrays.integer(updated)
        if self.observing is not None:
            observed = selected(updated, observed, state.observed, backend)
        return result, MultiStepsState(
            inner, empty, arrays.integer(0), count, arrays.as_array(updated), dropped, observed
        )

    def _merged(self, window: Accumulation, replicas: Any) -> Accumulation:
        """The window of all replicas. What they have rejected is summed with the gradients, as one more leaf."""
        # So one collective carries all, and the count needs none of its own.
        backend, binding = window.outputs.backend, self.binding
        if binding.counted is None:
            likes, fold = [*map(largest, window.accumulators)], self.fold
            if self.observing is not None:
                before, fold = window.outputs.before, self.observing.folds
                likes[:before] = self.observing.readings.placeholders(likes[before])
            pair = window.rejected, window.outputs.structure_of(likes)
            counted, _ = bind_outputs((sum(), fold), pair, backend)
            binding.counted = replace(counted, before=1)
        accumulators = [window.rejected, *window.accumulators]
        accumulators, total = backend.transforms.merged(
            binding.counted, accumulators, window.tally, replicas, binding.merging
        )
        return window._replace(accumulators=accumulators[1:], rejected=accumulators[0], tally=total)

    def _run(self, backend: Backend, inner: Tree, operands: tuple[Tree, Tree, dict[str, Any]]) -> tuple[Tree, Tree]:
        """(updates, state) of one update of the wrapped transform."""
        grads, params, extra = operands
        update = self.tx.donated if self.donate and isinstance(self.tx, DonatingTransform) else self.tx.update
        return update(grads, inner, backend.transforms.widened(params), **extra)

    def _run_into(
        self, backend: Backend, donate: bool, carried: tuple[Tree, Tree], operands: tuple[Tree, dict[str, Any]]
    ) -> tuple[tuple[()], tuple[Tree, Tree]]:
        """No updates, and (params, state) after one update of the wrapped transform."""
        (params, inner), (grads, extra) = carried, operands
        # Where the gradients and the state are given away and the params are not, their copies are.
        wide = backend.transforms.widened(params, copy=self.donate and not donate)
        after, inner = applied(self.tx, self.donate, grads, inner, wide, extra)
        return (), (backend.transforms.narrowed(after, params, donate), inner)


def _offered(state: MultiStepsState, dropped: Dropped, backend: Backend) -> MultiStepsState:
    """The state with one more micro-batch counted."""
    return state._replace(offered=state.offered + 1, updated=backend.arrays.as_array(False), dropped=dropped)


def _checked_weight(weight: Scalar, window: Accumulation, replicas: Any) -> Scalar:
    """The weight of a micro-batch, as a number where the host sees it. FuncgaError for one that cannot be counted."""
    if replicas is not None and replicas.leaves is not None and not (isinstance(weight, int | float) and weight == 1):
        _check_unweighed(weight, window)
    weight = check_weight(weight, window.outputs.backend.arrays)
    if len(window.tally.weight) == 2:
        check_narrow(weight)
    return weight


def _of_different_experts() -> FuncgaError:
    return FuncgaError(
        "across= names the replicas of each leaf, so the states of replicas are of different experts: they have no "
        "sum. Save the state of each replica, and go on with as many; or save between windows."
    )


def _check_unweighed(weight: Scalar, window: Accumulation) -> None:
    """Raises FuncgaError for the weight of a mean, where leaves have replicas of their own."""
    if any(fold.weighs for fold in window.outputs.folds if fold is not None):
        raise FuncgaError(
            f"weight is {weight}, and across= names the replicas of each leaf: gradients may have what the losses of "
            f"other replicas add to them, each as if it weighed 1. Give gradients of sums, and let funcga "
            f"divide them: fold=funcga.per_weight(), and a loss that is summed over what the weight counts."
        )


def _is_parts(node: object) -> bool:
    return type(node) is Parts


def _emptied(window: Accumulation, owned: bool, taken: Tree) -> Accumulation:
    """The empty window; in the same memory if that is owned, and not `taken` by what was computed from it."""
    arrays = window.outputs.backend.arrays
    zero = Tally(arrays.addends(0, wide=len(window.tally.weight) == 1), arrays.integer(0))
    accumulators = window.outputs.backend.sums.emptied(window.outputs.folds, window.accumulators, owned, taken)
    return Accumulation(window.outputs, accumulators, zero, arrays.integer(0))


def _seen(window: Accumulation) -> Tally:
    """What has been folded, as a normalizer takes it: as numbers where the host sees them."""
    arrays = window.outputs.backend.arrays
    steps, *addends = (arrays.scalar(amount) for amount in (window.tally.steps, *window.tally.weight))
    if any(map(arrays.is_array, addends)):
        return Tally(window.tally.weight, steps)
    # The two addends are exact in float32, and so is their sum in Python's float64.
    return Tally((math.fsum(addends),), steps)


def _total_weight(window: Accumulation, replicas: Any) -> Scalar:
    """The weight of the window so far, on all replicas."""
    total = _seen(window).total
    return total if replicas is None else window.outputs.backend.transforms.summed(total, window.accumulators, replicas)


def _result_folds(
    folds: Sequence[LeafFold | None], params: Sequence[Array], arrays: Arrays
) -> Sequence[LeafFold | None]:
    """The folds of the gradients, with results in the dtypes that the wrapped transform sees of these params."""
    results = [*folds]
    for leaf_index, (fold, param) in enumerate(zip(folds, params, strict=True)):
        dtype = getattr(param, "dtype", None)
        if fold is None or dtype is None or dtype == fold.result_dtype or fold.fold.normalizer.dtype is not None:
            continue
        results[leaf_index] = replace(fold, result_dtype=arrays.accumulator_dtype(dtype))
    return results


def _restore(window: Accumulation, gradients: Sequence[Reduced], total: Tally) -> None:
    """Undoes the division by the total weight of sums that were divided in place, to rounding."""
    # The result lies in the memory of the accumulator exactly where it was divided in place.
    weight = total.total
    divided = [
        accumulator
        for fold, accumulator, gradient in zip(window.outputs.folds, window.accumulators, gradients, strict=True)
        if fold is not None and gradient is accumulator and fold.fold.normalizer.divides_by == "weight"
    ]
    if divided and not window.outputs.backend.arrays.is_array(weight) and weight:
        window.outputs.backend.sums.scaled(divided, float(weight), donate=True)


def _check_extra(extra: dict[str, Any]) -> None:
    """Raises FuncgaError for a misspelled `weight`, which a wrapped transform may take as any name, and ignore."""
    for name in get_close_matches("weight", [name for name in extra if name != "weight_decay"], cutoff=0.75):
        raise FuncgaError(f"`{name}` is no argument of a transform. A micro-batch's weight is `weight=...`.")


def _backend_of_state(state: MultiStepsState) -> Backend:
    """The backend that owns a state, asked of one leaf of it."""
    if not isinstance(state, MultiStepsState):
        raise FuncgaError(
            f"the state is of type {type(state).__module__}.{type(state).__name__}, and this transform's is a "
            f"funcga.MultiStepsState. Pass what init and update return, tx.update(grads, state, params); of an "
            f"optax.chain, the part of its state that is this transform's: state[0]."
        )
    return _backend_of(state.offered, "state")


def _backend_of(tree: Tree, name: str) -> Backend:
    """The backend that owns a call. Without arrays, as optax's own tools call a transform, that is optax's backend."""
    try:
        return backend_of([tree], lambda: [name])
    except FuncgaError:
        for backend in load_imported():
            if backend.optimizers is not None and not backend.trees.flatten(tree)[0]:
                return backend
        raise
