"""States between calls: how their sums are added to, divided and emptied, out of place; the part of
a window that each replica has, and their merge.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from funcga._call import Memory
from funcga._fold import Tally
from funcga._fold.accumulator import Accumulation, AccumulatorState
from funcga._fold.accumulator import counted as counted
from funcga._transform.multi_steps import MultiSteps, MultiStepsState
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import merge as merging
from jax_backend.arrays import as_varying, typed_axes, varying_axes
from jax_backend.replicas import (
    Across,
    check_step_merges,
    listed,
    read_across,
    replicas_of,
    spelled,
)

# -- sums


def add(
    window: Accumulation, leaves: Sequence[Array], weights: Sequence[Scalar], donate: bool
) -> list[Reduced]:
    """The accumulators of a window with the value of one more micro-batch."""
    replicas = None if window.across is None else replicas_of(window.across)
    if replicas is not None:
        _check_not_merged(leaves, window, replicas.names)
    elif isinstance(window.like, tuple) and not window.like:  # of multi_steps
        check_step_merges()
    triples = zip(window.outputs.folds, leaves, weights, strict=True)
    return [
        None if fold is None else window.combined(leaf_index, fold.lift(leaf, weight))
        for leaf_index, (fold, leaf, weight) in enumerate(triples)
    ]


def finish(window: Accumulation, tallies: Sequence[Tally], donate: bool) -> list[Reduced]:
    """The leaves of a window, each normalised by its tally; in memory of their own, or in that of
    donated sums.
    """
    triples = zip(window.outputs.folds, window.accumulators, tallies, strict=True)
    results = [
        None if fold is None else fold.normalize(reduced, tally) for fold, reduced, tally in triples
    ]
    # JAX arrays are immutable, but donating a result that is a sum would delete the sum.
    sums = set() if donate else {*map(id, jax.tree.leaves([*window.accumulators]))}
    own = lambda leaf: jnp.array(leaf, copy=True) if id(leaf) in sums else leaf
    finished: list[Reduced] = jax.tree.map(own, results)
    return finished


def scaled(leaves: Sequence[Array], factor: Scalar, donate: bool) -> list[Array]:
    """The leaves times a factor; in the same memory if that is donated."""
    return [leaf * jnp.asarray(factor, leaf.dtype) for leaf in leaves]


def emptied(window: Accumulation) -> list[Reduced]:
    """The accumulators of an empty window like this one."""
    return [
        None
        if fold is None
        else _sharded_as(fold.fold.reducer.monoid.identity(jnp, accumulator), accumulator)
        for fold, accumulator in zip(window.outputs.folds, window.accumulators, strict=True)
    ]


def _sharded_as(constant: Reduced, like: Reduced) -> Reduced:
    """The constant, sharded as the accumulator is. The compiler would replicate a constant."""
    # A selection that is opaque to the compiler: its result has the sharding of both operands.
    never = lax.optimization_barrier(jnp.asarray(False))
    return jax.tree.map(lambda part, other: jnp.where(never, other, part), constant, like)


# -- over replicas


def _check_not_merged(
    leaves: Sequence[Array], window: Accumulation, names: tuple[str, ...]
) -> None:
    """Raises FuncgaError for gradients that are merged over the replicas of a window already."""
    for leaf_index in range(window.outputs.before, len(leaves)):
        leaf = leaves[leaf_index]
        varying = frozenset(names) if leaf is None else varying_axes(jax.typeof(leaf))
        missing = tuple(name for name in names if not typed_axes((name,)) <= varying)
        if missing:
            path = window.outputs.paths("grads")[leaf_index]
            raise FuncgaError(
                f"`{path}` is the same on all devices along {listed(missing)}, so "
                "it is merged already: JAX sums the gradient of what does not differ between "
                "devices. Take the gradient of the "
                f"device's own copy, jax.grad(loss)(jax.lax.pcast(params, {spelled(missing)}, "
                'to="varying"), '
                "...); or leave across= out, if it is merged as you want it."
            )


def merged(window: Accumulation, memory: Memory, updates: Array, donate: bool) -> Accumulation:
    """The window merged over its replicas, whose states have made so many `updates`; in the same
    memory if that is donated.
    """
    outputs, accumulators = window.outputs, dict(enumerate(window.accumulators))
    reduced = [accumulators[leaf_index] for leaf_index in outputs.reduced]
    rejected = window.rejected.astype(window.tally.weight[0].dtype)
    folded = merging.Folded(reduced, window.tally, [], [], window.unit, rejected)
    folded = merging.merge(outputs, folded, read_across(window.across))
    accumulators.update(zip(outputs.reduced, folded.reduced, strict=True))  # None stays
    sums, rejected = [*accumulators.values()], jnp.asarray(folded.rejected, jnp.int32)
    return Accumulation(outputs, sums, folded.total, folded.unit, rejected)


def own_parts(windows: Sequence[AccumulatorState], across: Across | None) -> list[AccumulatorState]:
    """The parts of a state's window that belong to this replica; without across= all, of several
    states.

    Raises FuncgaError if a part is missing, or is another replica's. Of a state that was made on
    more devices a replica has several parts.
    """
    first, *others = windows
    if others or not first.rejected.ndim:
        raise FuncgaError(
            "merge was given states that are not one state of multi_steps(..., across=), which in "
            "JAX has the parts of all devices. Give that one, as it is outside of shard_map: "
            "tx.merge([state])."
        )
    return [
        jax.tree.map(lambda leaf, part=part: leaf[part], first)
        for part in range(first.rejected.shape[0])
    ]


def as_part(
    windows: Sequence[AccumulatorState], across: Across | None, is_empty: bool
) -> AccumulatorState:
    """A window as this replica's part of a state; without across= the whole of all parts."""
    # Parts are stacked along a leading axis, which is sharded over the devices.
    replicas = replicas_of(across) if across else None
    names = () if replicas is None else replicas.names
    stacked: AccumulatorState = jax.tree.map(
        lambda *parts: jnp.stack([as_varying(part, names) for part in parts]), *windows
    )
    return stacked


def state_specs(tx: MultiSteps) -> MultiStepsState:
    """The PartitionSpecs of the state of `multi_steps(..., across=)`, as a tree prefix, for
    shard_map.

    What replicas fold apart has a leading axis, which lies over the axes that `across` names; all
    else is the same on every device.

    Args:
        tx: What `multi_steps(..., across=)` returned.

    Returns:
        A MultiStepsState of PartitionSpecs.

    Raises:
        FuncgaError: The transform merges over no replicas.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> tx = funcga.multi_steps(optax.sgd(0.1), 8, across="data")
        >>> specs = jax_backend.state_specs(tx)
        >>> init = jax.shard_map(tx.init, mesh=mesh, in_specs=jax.P(), out_specs=specs)
        >>> state = init({"w": jnp.ones(2)})
    """
    if not isinstance(tx, MultiSteps) or tx.across is None:
        raise FuncgaError(
            "state_specs is for funcga.multi_steps(..., across=): only there a state differs "
            "between replicas. Without across= it is the same on every device: "
            "jax.sharding.PartitionSpec()."
        )
    replicas = read_across(tx.across)
    spec: Callable[..., Tree] = PartitionSpec
    whole, window = spec(), spec(replicas.names)
    return MultiStepsState(whole, window, whole, whole, whole, whole, whole)
