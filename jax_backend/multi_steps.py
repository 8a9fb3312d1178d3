"""What a fold that is spread over calls needs of this framework: its branch, sums that go on, and its own types."""

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from funcga._backend.prefixes import leaf_paths
from funcga._fold.outputs import Outputs
from funcga._fold.tally import Tally
from funcga._transform.transform import MultiSteps
from funcga._transform.window import Dropped, MultiStepsState, Window
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, trees
from jax_backend.arrays import as_varying, typed_axes, varying_axes
from jax_backend.merge import Folded, merge
from jax_backend.replicas import Replicas, check_step_merges, listed, spelled


def detached(tree: Any) -> Any:
    """The tree without the graphs that its arrays are in."""
    return tree  # JAX's arrays are in none


def imported(tx: Any) -> Any:
    """A transform as the framework's own combinators would call it, with extra arguments that it may ignore."""
    optax = _optax()
    if optax is None or not isinstance(tx, optax.GradientTransformation):
        return tx
    return optax.with_extra_args_support(tx)


def exported(made: Any) -> Any:
    """A transform of funcga's in the type that the framework's own combinators take."""
    optax = _optax()
    return made if optax is None else _optax_type(optax.GradientTransformationExtraArgs)(*made)


def _optax() -> Any:
    """optax, if it is installed: what is made before it is imported can be put into its chains too."""
    try:
        return importlib.import_module("optax")
    except ModuleNotFoundError:
        return None


@cache
def _optax_type(base: Any) -> Any:
    return type("MultiSteps", (MultiSteps, base), {"__doc__": MultiSteps.__doc__, "__slots__": ()})


def when(predicate: Any, emit: Callable[..., Any], state: Any, operands: Any, like: Any, donate: bool = False) -> Any:
    """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros and the state.

    `donate` is for torch: here the program that calls it says what it gives away.
    """
    if not _private.is_traced(predicate):
        return emit(state, operands) if predicate else (_nothing(emit, state, operands, like), state)
    leaves, structure = jax.tree.flatten(operands)
    traced = [i for i, leaf in enumerate(leaves) if arrays.is_array(leaf)]

    def run(state: Any, given: list[Any]) -> Any:
        filled = [*leaves]
        for i, leaf in zip(traced, given, strict=True):
            filled[i] = leaf
        return emit(state, jax.tree.unflatten(structure, filled))

    run, state, operands, updates = _closed(run, jax.tree.map(_strong, state), [leaves[i] for i in traced])
    branch = jax.custom_jvp(partial(_looped, run, updates))
    branch.defjvp(lambda primals, tangents: jax.jvp(partial(_branched, run, updates), primals, tangents))
    return branch(predicate, state, operands)


def _closed(run: Callable[..., Any], state: Any, given: list[Any]) -> tuple[Callable[..., Any], Any, list[Any], Any]:
    """The function with what it captures, such as a learning rate to be differentiated, among its operands.

    With it the state, marked as varying as it comes back; the operands; and the types of the updates.
    """
    closed, captured = jax.closure_convert(run, state, given)
    traced, made = jax.make_jaxpr(closed, return_shape=True)(state, given, *captured)
    updates, after = jax.tree.unflatten(jax.tree.structure(made), traced.out_avals)
    typed = _typed(state, after)
    if any(a is not b for a, b in zip(jax.tree.leaves(typed), jax.tree.leaves(state), strict=True)):
        return _closed(run, typed, given)
    return closed, state, [given, *captured], updates


def _nothing(emit: Callable[..., Any], state: Any, operands: Any, like: Any) -> Any:
    """Updates of zeros, like those that `emit` returns; they lie where others of their shapes lie."""
    types = jax.eval_shape(lambda state: emit(state, operands)[0], state)
    if trees.flatten(types)[1] != trees.flatten(like)[1]:
        like = types
    return jax.tree.map(lambda a, b: jnp.zeros_like(b if jnp.shape(b) == a.shape else a, dtype=a.dtype), types, like)


def _strong(leaf: Any) -> Any:
    leaf = arrays.as_array(leaf)
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else lax.convert_element_type(leaf, leaf.dtype)


def _looped(run: Callable[..., Any], updates: Any, predicate: Any, state: Any, operands: list[Any]) -> Any:
    """The branch as a loop of at most one turn: XLA lets its body write into what came in, where a cond would copy."""

    def body(carry: Any) -> Any:
        return jnp.zeros_like(carry[0]), *_typed(run(carry[2], *operands), carry[1:])

    return lax.while_loop(lambda carry: carry[0], body, (predicate, _zeros(updates), state))[1:]


def _branched(run: Callable[..., Any], updates: Any, predicate: Any, state: Any, operands: list[Any]) -> Any:
    """The same as a cond, which can be differentiated in reverse."""
    untaken = _zeros(updates), state
    return lax.cond(predicate, lambda state: _typed(run(state, *operands), untaken), lambda state: untaken, state)


def _zeros(types: Any) -> Any:
    return jax.tree.map(arrays.zeros, types)


def _typed(found: Any, like: Any) -> Any:
    """The trees sharded and varying as others are, or as types say."""
    types = jax.tree.map(lambda b: jax.typeof(b) if isinstance(b, jax.Array) else b, like)
    return jax.tree.map(arrays.typed, found, types)


def finite(leaves: list[Any]) -> Any:
    """Whether every number is finite: a 0-d array."""
    kept = jnp.asarray(True)
    for leaf in leaves:
        kept = kept if leaf is None else jnp.isfinite(leaf).all() & kept
    return kept


def check_merged(leaves: list[Any], paths: Callable[[], list[str]], replicas: Any) -> None:
    """Raises FuncgaError for gradients that nothing would merge over the replicas, or that are merged already."""
    if replicas is None:
        check_step_merges()
        return
    axes = typed_axes(replicas.names)
    for leaf_index, leaf in enumerate(leaves):
        if leaf is not None and not axes <= varying_axes(jax.typeof(leaf)):
            raise FuncgaError(
                f"`{paths()[leaf_index]}` is the same on all devices along {listed(replicas.names)}, so it is merged "
                f"already: JAX sums the gradient of what does not differ between devices. Take the gradient of the "
                f'device\'s own copy, jax.grad(loss)(jax.lax.pcast(params, {spelled(replicas.names)}, to="varying"), '
                f"...); or leave across= out, if it is merged as you want it."
            )


def merged(
    outputs: Outputs, held: list[Any], tally: Tally, replicas: Replicas, known: dict[Any, Any]
) -> tuple[list[Any], Tally]:
    """What all replicas hold together; `known` is what a backend works out once."""
    folded = merge(outputs, Folded([held[i] for i in outputs.reduced], tally, [], []), replicas)
    together = [*held]
    for i, leaf in zip(outputs.reduced, folded.reduced, strict=True):
        together[i] = leaf
    return together, folded.total


def summed(number: Any, held: list[Any], replicas: Replicas) -> Any:
    """The sum of a scalar over the replicas, which hold these."""
    return lax.psum(as_varying(jnp.asarray(number), replicas.names), replicas.names)  # type: ignore[no-untyped-call]


def parts(window: Window, replicas: Replicas | None) -> list[Window]:
    """The parts that are this replica's, of a window as a state has it where replicas fold apart.

    It is one, or several of a state that was made on more devices.
    """
    return [jax.tree.map(lambda leaf, i=i: leaf[i], window) for i in range(window.rejected.shape[0])]


def in_order(windows: Sequence[Window]) -> list[Window]:
    """The parts of one window, in the order of the replicas. Raises FuncgaError if one is missing."""
    if len(windows) > 1 or not windows[0].rejected.ndim:
        raise FuncgaError(
            "merge was given states that are not one state of multi_steps(..., across=), which in JAX has the parts "
            "of all devices. Give that one, as it is outside of shard_map: tx.merge([state])."
        )
    return parts(windows[0], None)


def unparted(windows: Sequence[Window]) -> Window:
    """A window of all replicas, and empty ones for the others, as the state has them that each goes on from."""
    return jax.tree.map(lambda *parts: jnp.stack(parts), *windows)  # type: ignore[no-any-return]


def parted(window: Window, replicas: Replicas, is_empty: bool) -> Any:
    """A window as a state has it where replicas fold apart."""
    return jax.tree.map(lambda leaf: as_varying(leaf, replicas.names)[None], window)


def state_specs(tx: MultiSteps) -> MultiStepsState:
    """The PartitionSpecs of the state of `multi_steps(..., across=)`, as a tree prefix, for shard_map.

    What replicas fold apart has a leading axis, which lies over the axes that `across` names; all else is the same on
    every device.

    >>> specs = jax_backend.state_specs(tx)
    >>> state = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)(params)
    """
    if not isinstance(tx, MultiSteps) or tx.across is None:
        raise FuncgaError(
            "state_specs is for funcga.multi_steps(..., across=): only there a state differs between replicas. "
            "Without across= it is the same on every device: jax.sharding.PartitionSpec()."
        )
    replicas = tx.across if isinstance(tx.across, Replicas) else Replicas(tx.across)
    make: Any = PartitionSpec
    whole, window = make(), make(replicas.names)
    return MultiStepsState(whole, window, whole, whole, whole, Dropped(whole, whole))


def alike(state: Any, like: Any) -> Any:
    """The state in the dtypes that it came in."""
    if trees.flatten(state)[1] != trees.flatten(like)[1]:
        paths, before = (set(leaf_paths(tree, trees, "state")) for tree in (state, like))
        raise FuncgaError(
            f"the wrapped transform returned a state of another structure than it was given: missing "
            f"{sorted(before - paths) or 'nothing'}, new {sorted(paths - before) or 'nothing'}. A state keeps its "
            f"structure from init on, or it does not pass through jit."
        )
    return jax.tree.map(_alike, state, like)


def _alike(leaf: Any, like: Any) -> Any:
    leaf, like = arrays.as_array(leaf), arrays.as_array(like)
    return leaf if leaf.dtype == like.dtype else lax.convert_element_type(leaf, like.dtype)
