"""`multi_steps`: the fold spread over calls, as a transform around an optimizer.

It is an Accumulator, whose window is in its state, and a gate that ends the window.

Design note: docs/concepts/inside_multi_steps.md.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from funcga._backend import Arrays, Backend
from funcga._backend.dispatch import backend_of, load_imported
from funcga._call import Memory, Program, telling
from funcga._call.supported import ANY, check_supported
from funcga._fold import Tally, check_weight
from funcga._fold.accumulator import Accumulation, AccumulatorState, Parts, StateFolding, empty
from funcga._replicas import step_of
from funcga._tools import load
from funcga._transform import Traits, Transform, optax_if_used, wrapped_transform
from funcga._transform.apply import Step, UpdateFunction, traits_of
from funcga._transform.window_size import WindowSize, check_size, size_after
from funcga._types import Array, Kwargs, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean

if TYPE_CHECKING:
    from funcga.observers import ObserverTree


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
        window: What has been folded since the last update, as the state of an Accumulator.
        offered: How many micro-batches have come since then, folded or not.
        updates: How many updates there have been.
        updated: Whether the last call was one.
        dropped: How many micro-batches and windows have been dropped, up to the last window that
            has ended.
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
    window: AccumulatorState
    offered: Array
    updates: Array
    updated: Array
    dropped: Dropped
    observed: Tree = ()


def classes_of_states() -> Sequence[type]:
    """The classes that states consist of, those of tools among them, for what loads states."""
    of_tools = {
        "funcga.observers": "GradientNoise",
        "funcga.tools.loss_scale": "LossScaledState",
    }
    there = [vars(import_module(tool))[name] for tool, name in of_tools.items() if find_spec(tool)]
    return [AccumulatorState, Dropped, MultiStepsState, Parts, Tally, *there]


class MultiSteps(Transform):
    """What `multi_steps` returns: a transform (init, update), and the same in two halves,
    `accumulate` and `flush`.

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

    init: Callable[[Tree], MultiStepsState]
    update: "MultiStepsUpdate"

    def accumulate(
        self, grads: Tree, state: MultiStepsState, *, weight: Scalar = 1
    ) -> MultiStepsState:
        """The state with one more micro-batch's gradients in its window. It only adds; nothing else
        is touched.

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
        update = self.update
        window = update.opened(state, backend_of_state(state))
        return update.add(grads, window, state, weight, update.donate)[1]

    def flush(
        self, state: MultiStepsState, params: Tree = None, **extra: Any
    ) -> tuple[Tree, MultiStepsState]:
        """The update of the micro-batches that are in the window, however few they are; the window
        is then empty.

        Inside of jit an empty window goes unnoticed: then the updates are zeros, and no update is
        counted. It is the same with `drop` if every micro-batch was dropped.

        Args:
            state: What `init` or an earlier call returned.
            params: The parameters, for the wrapped transform.
            **extra: Further arguments of the wrapped transform, which are those of the window: the
                loss of all its micro-batches, say, that an Accumulator has folded.

        Returns:
            (updates, state).

        Raises:
            FuncgaError: The window is empty; with across= in torch that of every replica: one that
                has nothing takes part, and adds nothing.

        Example:
            >>> updates, state = tx.flush(state, params)
        """
        update = self.update
        with telling(update.program):
            _check_extra(extra)
            backend = backend_of_state(state)
            if params is not None:
                params, _ = update.opened(state, backend).matched(params, "params")
            has_any = backend.arrays.scalar(state.offered > 0)  # inside of jit an array
            step = Step(update.tx, backend, update.donate)
            return update.end(step, step.owned, has_any, state, params, extra)

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
        return backend_of_state(state).arrays.scalar(state.updated)

    def merge(self, states: Sequence[MultiStepsState], *, replicas: int = 1) -> MultiStepsState:
        """One state of what all replicas hold, to be saved: each can go on from it, whatever their
        number.

        In torch each replica has a state of its own: gather them, or load what each has saved. In
        JAX one state has the parts of all devices, and goes on as it is on as many, or on a number
        that divides theirs; for any other number of devices write tx.merge([state],
        replicas=number), outside of shard_map.

        The replicas may have been given other numbers of micro-batches since the last update. The
        state has the largest of these as `offered`.

        Args:
            states: The states of all replicas after the same update.
            replicas: In JAX, on how many devices the state goes on.

        Returns:
            The state of the whole window.

        Raises:
            FuncgaError: A replica's state is missing or there twice, the states have made other
                numbers of updates, or there are several without across=.

        Example:
            >>> sgd = torch_backend.from_optimizer(torch.optim.SGD)
            >>> tx = funcga.multi_steps(sgd, 8, across=dist.group.WORLD)
            >>> state = tx.accumulate({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}))
            >>> states = [None] * dist.get_world_size()
            >>> dist.all_gather_object(states, state)
            >>> torch.save(tx.merge(states), "state.pt")  # load it on every replica, then go on
        """
        folding, backend = self.update.folding, backend_of_state(states[0])
        updates = [int(state.updates) for state in states]
        if len({*updates}) > 1:
            raise FuncgaError(
                "the states to merge are not of one moment: they have made so many updates: "
                f"{', '.join(map(str, updates))}. Save them between the same two updates on every "
                "replica."
            )
        parts = backend.states.own_parts([state.window for state in states], None)
        whole = reduce(Accumulation.merge, [folding.opened(part, backend) for part in parts])
        # One replica gets the whole window, the others empty ones: the sum is the same.
        nothing = empty(whole.outputs, backend.states.emptied(whole)).packed()
        windows = [whole.packed(), *[nothing] * (replicas - 1)]
        # In a window that some replica has added to, all may flush.
        latest = max(states, key=lambda state: int(state.offered))
        return states[0]._replace(
            window=backend.states.as_part(windows, None, is_empty=False),
            offered=latest.offered,
            updated=latest.updated,
        )

    @property
    def across(self) -> Any:
        """The replicas that an update merges over, as they were given."""
        return self.update.program.across


def multi_steps(
    tx: Any,
    n: WindowSize,
    *,
    fold: FoldTree = mean(),  # noqa: B008 - a frozen value
    drop: Literal["microbatch", "window"] | None = None,
    drop_if: Callable[[Any], Any] | None = None,
    across: Any = None,
    observe: "ObserverTree | None" = None,
    donate: bool = False,
) -> MultiSteps:
    """An optax-style transform that accumulates the gradients of n calls, then makes one update.

    It wraps an optimizer and is called as the optimizer is. The updates are zeros, except in every
    n-th call::

        tx = funcga.multi_steps(optax.adamw(1e-3), 8)
        state = tx.init(params)
        updates, state = tx.update(grads, state, params, weight=rows)

    Its functions:

    - `update(grads, state, params, weight=1, **extra) -> (updates, state)`. `extra` goes to tx, of
      the call that makes the update alone: a `loss=` is that of the last micro-batch, not of the
      window. Fold it with an Accumulator, and pass it to `flush(state, params, loss=...)`.
    - `accumulate(grads, state, weight=1) -> state` and `flush(state, params) -> (updates, state)`,
      its two halves, for code that knows when a window ends. `flush` also ends a partial window.
    - `has_updated(state)`: whether the last call made an update. `state.updates` counts them.
    - `merge(states)`: one state of those of all replicas, to be saved.

    tx runs only for updates, so its schedules and decay count these. Gradients are accumulated in
    at least float32; tx sees gradients and params of less than 32 bits as float32, and its state
    and the updates are float32, too (docs/howto/multi_steps.md).

    Args:
        tx: Any pair of functions (init, update): optax's transforms, torch_backend.from_optimizer,
            your own. If its update has a parameter named weight, it gets the weight of the window.
        n: The micro-batches of a window, at least 1; a schedule, a function of the number of
            updates so far (an int, in JAX a 0-d array); or funcga.transforms.TargetWeight(w): as
            many as weigh w.
        fold: A Fold, or a tree prefix of Folds over the gradients. Rows are not seen here, so a
            micro-batch weighs 1 unless you say: with `mean()` pass `weight=` if micro-batches
            differ in rows or tokens; with `per_weight()` always.
        drop: What becomes of a micro-batch whose gradients are not finite. None: it is folded like
            any other. "microbatch": it is left out with its weight, and still counts towards n.
            "window": there is no update. `state.dropped` counts both.
        drop_if: A test of your own in place of that one: a function of the gradients that returns a
            bool, or a 0-d array of one.
        across: The replicas to merge over, as in `accumulate`, once an update. For `update` all
            make the same number of calls, as n counts these. With `accumulate` each adds as many
            micro-batches as it has, or none, and all call `flush`. In JAX this is inside
            shard_map, with jax_backend.state_specs(tx) as the specs of the state.
        observe: As in `accumulate`; `state.observed` has what the last update's window gave. Not
            with gradient_norms(), whose list would grow in the state.
        donate: In torch, whether a call may reuse the memory of the state that it is given, which
            is then no longer valid. In JAX it does nothing: jax.jit(step, donate_argnums=...).

    Returns:
        A transform (init, update) with `accumulate`, `flush`, `has_updated` and `merge`.

    Raises:
        FuncgaError: If an argument is invalid. The state given to a call that raises it is as good
            as before.

    Example:
        >>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
        >>> tx = funcga.multi_steps(optax.sgd(0.1), 2)
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(grads, state, params)
        ...     print(updates["w"])  # zeros, except in every second call
        [0. 0.]
        [-0.1 -0.1]
    """
    read = wrapped_transform(tx)
    memory = Memory(None if across is None else step_of(read.update))
    program = Program(read.update, fold, across=across, memory=memory)
    folding, traits, skip = StateFolding(fold, "params"), traits_of(read), None
    if observe is not None:
        observed = load("observe", "observe=").ObservedFolding
        folding = observed(folding, observe, traits.scales)
        memory.options = {**memory.options, **folding.options}
    if (drop, drop_if) != (None, None):
        check_supported(["drop=", "scaled=True"] if traits.scales else [], ANY)
        skip = load("dropping", "drop=").dropping(drop, drop_if, memory, read)
    update = MultiStepsUpdate(read, check_size(n), folding, skip, program, donate, traits)
    return _for_chains(update.init, update)


def _for_chains(init: Callable[..., Any], update: "MultiStepsUpdate") -> MultiSteps:
    """The MultiSteps of two functions, in the type that optax.chain takes, where optax is used."""
    optax = optax_if_used()
    kind = MultiSteps if optax is None else _both_types(optax.GradientTransformationExtraArgs)
    return kind(init, update)


@cache
def _both_types(base: type) -> type[MultiSteps]:
    """MultiSteps as a subclass of the type that optax.chain looks for."""
    # pickle looks up classes by name, and this one is in no module: it is made again.
    reduced = lambda tx: (_for_chains, (tx.init, tx.update))
    members = {"__doc__": MultiSteps.__doc__, "__slots__": (), "__reduce__": reduced}
    return type("MultiSteps", (MultiSteps, base), members)


@dataclass(frozen=True, eq=False)
class MultiStepsUpdate(UpdateFunction[MultiStepsState]):
    """The `update` of one `multi_steps`, its options, and the functions that need them."""

    tx: Transform
    n: WindowSize
    folding: StateFolding
    skip: Any  # of the tool that leaves micro-batches out: which ones, and what becomes of a window
    program: Program  # what replicas merge
    donate: bool
    inner: Traits  # of the wrapped transform

    @property
    def traits(self) -> Traits:
        """What it says of itself."""
        return Traits(scales=self.inner.scales)

    def init(self, params: Tree) -> MultiStepsState:
        """The state of nothing folded, for gradients like these params."""
        backend = _backend_of(params)
        # The window is made for gradients as wide as the params that the wrapped transform sees.
        arrays, (wide, _) = backend.arrays, backend.transforms.widened(params)
        nothing, observed = self.folding.empty(wide, backend)
        zero = partial(arrays.as_array, 0, arrays.xp.int32)
        for leaf_index, fold in enumerate(nothing.outputs.folds):
            if fold is not None and fold.axis is not None:  # a state cannot grow with every call
                raise FuncgaError(
                    f"the fold of {nothing.outputs.paths('params')[leaf_index]} collects rows, and "
                    "the state of multi_steps cannot grow. Fold with funcga.mean(), per_weight() "
                    "or sum(); or fold the window in one call, by funcga.accumulate."
                )
        window = nothing._replace(across=self.program.across).packed(is_empty=True)
        counts, dropped = (zero(), zero(), arrays.as_array(False)), Dropped(zero(), zero())
        return MultiStepsState(self.tx.init(wide), window, *counts, dropped, observed)

    # -- the gate

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: Any,
        params: Tree,
        extra: Kwargs,
    ) -> tuple[Tree, MultiStepsState]:
        """(result, state) with one more micro-batch: zeros, or unchanged params, unless it fills
        the window.
        """
        extra, owned, backend = {**extra}, owned or self.donate, backend_of_state(state)
        weight, arrays, n = extra.pop("weight", 1), backend.arrays, self.n
        full = state.offered + 1 >= n if type(n) is int else self._is_last(state, arrays)
        may_end = full is None or arrays.scalar(full) is True
        tells = may_end and self.program.across is not None
        with telling(self.program) if tells else nullcontext():
            if extra:
                _check_extra(extra)
            before = self.opened(state, backend)
            # All checks come before the work, so that the state is intact after an error.
            trained = None if params is None else before.matched(params, "params")[0]
            window, state = self.add(grads, before, state, weight, owned)
            if hasattr(n, "is_full"):
                full = n.is_full(window, arrays.scalar(state.updates))
            # Sums that this call has made may be written to when the window ends.
            spent = owned or not window.shares_sums(before)
            # A Python branch if the host sees the predicate, else a conditional of the program.
            step = Step(self.tx, backend, owned, into)
            end = partial(self.end, step, spent, True)
            result, state, _ = step.when(full, end, state, trained, extra, grads, views=owned)
            is_part = into is not None and trained is not params
            return with_others(result, params, backend) if is_part else result, state

    def _is_last(self, state: MultiStepsState, arrays: Arrays) -> Scalar:
        """Whether the next micro-batch fills the window, by a schedule; None for a target, as
        replicas have to add up their weights first.
        """
        if hasattr(self.n, "is_full"):
            return None
        offered = state.offered + 1
        size = size_after(self.n, arrays.scalar(state.updates), arrays.scalar)
        if arrays.is_array(size):  # a schedule may return a float
            offered = arrays.as_array(offered, size.dtype, size)
        return offered >= size

    def add(
        self,
        grads: Tree,
        window: Accumulation,
        state: MultiStepsState,
        weight: Scalar,
        owned: bool,
    ) -> tuple[Accumulation, MultiStepsState]:
        """The window with one more micro-batch, and the state with it; in place if `owned`."""
        backend, folding = window.outputs.backend, self.folding
        _, leaves = window.matched(grads, "grads")
        if type(weight) is not int:
            weight = check_weight(weight, backend.arrays)
        keep = True
        if self.skip is not None:
            keep = self.skip.test_of(window.outputs.of_value)(leaves, weight)
        if folding.before and keep is not False:
            leaves = folding.folded(leaves, weight)
        if keep is True:
            after = window.add(leaves, weight, owned)
        else:
            after = self.skip.added(keep, window, leaves, weight)
        offered, updated = state.offered + 1, backend.arrays.as_array(False)
        return after, state._replace(window=after.packed(), offered=offered, updated=updated)

    def end(
        self,
        step: Step,
        spent: bool,
        keep: bool | Array,
        state: MultiStepsState,
        params: Tree,
        extra: Kwargs,
    ) -> tuple[Tree, MultiStepsState]:
        """(result, state): a step of the wrapped transform with the merged windows of all
        replicas; the window is then empty.

        spent: whether the accumulators may be written to. keep: whether the window has a
        micro-batch.
        """
        backend, folding = step.backend, self.folding
        arrays, states = backend.arrays, backend.states
        window = self.opened(state, backend)
        # Merged first, as only the whole window shows whether there is an update.
        merged, dropped = window, state.dropped
        if window.across:
            merged, spent = states.merged(window, self.program.memory, state.updates, spent), True
            if keep is not True:
                keep = arrays.scalar(merged.tally.steps + merged.rejected > 0)
        if keep is False:
            raise FuncgaError(
                "the window is empty: nothing was accumulated since the last update, on any "
                "replica, so there is nothing to flush. After the last window ask first: if "
                "state.offered > 0. Over replicas flush once for each window that one of them has "
                "a micro-batch of."
            )
        if self.skip is not None:
            steps, rejected = arrays.scalar(merged.tally.steps), merged.rejected
            keep, dropped = self.skip.at_the_end(dropped, steps, rejected, arrays)
        finished = merged.finished(spent, "grads")
        outputs = merged.outputs
        value = backend.trees.unflatten(outputs.structure, finished)
        if self.inner.takes_weight:
            extra = {**extra, "weight": merged.total}
        run, like, inner, observed = step.run, value, state.inner, state.observed
        if folding.before:
            run, like, inner = partial(folding.updating, run), value[1], (inner, observed)
        try:
            given = value, extra
            result, inner, updated = step.when(keep, run, inner, params, given, like)
        except Exception:
            if step.owned and merged is window:
                merged.restore(finished)
            raise
        if folding.before:
            inner, observed = inner
        emptied = empty(window.outputs, states.emptied(window), window.across)
        integer, flag = arrays.xp.int32, arrays.as_array(updated)
        updates, zero = (
            state.updates + arrays.as_array(updated, integer),
            arrays.as_array(0, integer),
        )
        nothing = emptied.packed(is_empty=True)
        return result, MultiStepsState(inner, nothing, zero, updates, flag, dropped, observed)

    # -- windows over replicas

    def opened(self, state: MultiStepsState, backend: Backend) -> Accumulation:
        """The window of a state, of this replica."""
        window, across = state.window, self.program.across
        # Without replicas, also with the () of JAX, the window is whole.
        if not across and isinstance(window.part, tuple):
            return self.folding.opened(window, backend)._replace(across=across)
        # A state saved on another number of replicas may have several parts for this one, or none.
        own = backend.states.own_parts([window], across)
        parts = [self.folding.opened(part, backend) for part in own]
        if not parts:
            whole = self.folding.opened(window, backend)
            parts = [empty(whole.outputs, backend.states.emptied(whole))]
        return reduce(Accumulation.merge, parts)._replace(across=across)


# -- params


def with_others(after: Tree, params: Tree, backend: Backend) -> Tree:
    """Params after an update, put back into the larger tree that they were taken from."""
    is_none = lambda leaf: leaf is None
    leaves, structure = backend.trees.flatten(params, is_none)
    pairs = zip(backend.trees.flatten(after, is_none)[0], leaves, strict=True)
    return backend.trees.unflatten(structure, [old if new is None else new for new, old in pairs])


# -- what is refused


def _check_extra(extra: Kwargs) -> None:
    """Raises FuncgaError for a misspelled `weight`, which a transform with **kwargs would
    ignore.
    """
    names = [name for name in extra if name != "weight_decay"]
    for name in get_close_matches("weight", names, cutoff=0.75):
        raise FuncgaError(
            f"`{name}` is no argument of a transform. A micro-batch's weight is `weight=...`."
        )


def backend_of_state(state: MultiStepsState) -> Backend:
    """The backend that owns a state, by one of its leaves."""
    if not isinstance(state, MultiStepsState):
        raise FuncgaError(
            f"the state is of type {type(state).__name__}, and this transform's is a "
            "funcga.transforms.MultiStepsState: what init and update return, or of an optax.chain "
            "the part of its state that is this transform's, state[0]."
        )
    return backend_of([state.offered], lambda: ["state"])


def _backend_of(params: Tree) -> Backend:
    """The backend that owns params; without arrays, as tools of optax call a transform, that of
    optax.
    """
    try:
        return backend_of([params], lambda: ["params"])
    except FuncgaError:
        for backend in load_imported():
            if backend.name == "jax" and not backend.trees.flatten(params)[0]:
                return backend
        raise
