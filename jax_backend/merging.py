"""The merge over replicas: the monoids that join micro-batches, as collectives, once, after the loop.

Only JAX has this file: torch sends what is ready while it computes the rest.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcga._backend.prefixes import PrefixError, broadcast, outline
from funcga._fold import tally
from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs
from funcga.errors import FuncgaError
from jax_backend import arrays, trees
from jax_backend.collectives import Exchange, Later, as_varying
from jax_backend.replicas import Replicas


def varying(tree: Any, replicas: Replicas) -> Any:
    """The tree with its arrays marked as differing between replicas: JAX itself sums gradients of what does not differ.

    A Python float becomes an array, as it may be what is differentiated; ints, and what is no number, stay.
    """

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, float | complex) or (
            isinstance(leaf, np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ):
            leaf = jnp.asarray(leaf)
        return as_varying(leaf, replicas.names) if isinstance(leaf, jax.Array) else leaf

    leaves, structure = trees.flatten(tree)
    return trees.unflatten(structure, [*map(mark, leaves)])


class Folded(NamedTuple):
    """What a loop has folded, before it is normalised."""

    reduced: list[Any]
    total: tally.Tally
    state: list[Any]
    collected: list[Any]


def merge(outputs: Outputs, folded: Folded, replicas: Replicas) -> Folded:
    """What all replicas have folded together: the same on each of them, but for the leaves that are scattered.

    Raises FuncgaError for a leaf that cannot be scattered.
    """
    exchange = Exchange(replicas.names)
    scatter = _scattered(outputs, folded.reduced, replicas)
    reduced = [
        _send(exchange, fold, lifted, scatter.get(i))
        for i, fold, lifted in zip(outputs.reduced, outputs.reduced_folds, folded.reduced, strict=True)
    ]
    totals = _stack(exchange, folded.total)
    state = [exchange.last(leaf) for leaf in folded.state]
    collected = [
        exchange.rows(leaf, fold.fold.reducer.monoid.axis or 0)
        for fold, leaf in zip(outputs.collected_folds, folded.collected, strict=True)
    ]
    exchange.run()
    total = _in_order(tally.merge, totals())
    return Folded([later() for later in reduced], total, [later() for later in state], [later() for later in collected])


def _send(exchange: Exchange, fold: LeafFold, lifted: Any, scatter: int | None) -> Later:
    """What the leaf's monoid makes of what the replicas have lifted and combined."""
    which = fold.fold.reducer.monoid.collective
    if which is None:
        stacked = _stack(exchange, lifted)
        return lambda: _in_order(fold.combine, stacked())
    if scatter is not None:
        return _each(lambda part: exchange.scatter(part, scatter), lifted)
    return _each(exchange.sum if which == "sum" else lambda part: exchange.extreme(part, which), lifted)


def _stack(exchange: Exchange, tree: Any) -> Later:
    """The tree of all replicas, with [replicas, ...] for every leaf."""
    return _each(exchange.gather, tree)


def _each(send: Callable[[Any], Later], tree: Any) -> Later:
    parts, structure = jax.tree.flatten(tree)
    laters = [send(part) for part in parts]
    return lambda: jax.tree.unflatten(structure, [later() for later in laters])


def _in_order(combine: Callable[[Any, Any], Any], stacked: Any) -> Any:
    """The combination of what stands along the first axis, [replicas, ...], from the first to the last."""
    first, rest = jax.tree.map(lambda leaf: leaf[0], stacked), jax.tree.map(lambda leaf: leaf[1:], stacked)
    return lax.scan(lambda before, more: (combine(before, more), None), first, rest, unroll=16)[0]


def _scattered(outputs: Outputs, reduced: list[Any], replicas: Replicas) -> dict[int, int]:
    """For every leaf that is to be scattered, the axis that it is cut along."""
    if replicas.scatter is None:
        return {}
    trees, count = outputs.backend.trees, len(outputs.folds)
    tree = outputs.structure_of(range(count))
    try:
        placed = broadcast(replicas.scatter, tree, count, _is_axis, trees, "output")
    except PrefixError as error:
        there, found = outline(error.prefix, trees, repr), outline(error.tree, trees, lambda leaf: "...")
        raise FuncgaError(
            f"scatter is no prefix of what grad_fn returns: at {error.path} it has {there}, and grad_fn returned "
            f"{found}. Write an axis, or None (the whole leaf on every replica), for all that stands below: "
            f"scatter=(None, 0)."
        ) from error
    lifted = dict(zip(outputs.reduced, reduced, strict=True))
    axes = {i: place.value for i, place in enumerate(placed) if place.value is not None}
    return {i: _check_scatter(outputs, i, axis, lifted.get(i), replicas) for i, axis in axes.items()}


def _is_axis(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _check_scatter(outputs: Outputs, i: int, axis: int, lifted: Any, replicas: Replicas) -> int:
    """The axis, counted from the first. Raises FuncgaError, which names the leaf, if it cannot be cut along it."""
    fold, path, count = outputs.folds[i], outputs.paths[i], int(lax.axis_size(replicas.names))
    if lifted is None or fold is None or fold.fold.reducer.monoid.collective != "sum":
        raise FuncgaError(
            f"scatter={axis} for {path}, and its fold is no sum: only what is summed over the replicas can be "
            f"scattered. Write None in its place, or fold it with funcga.mean(), funcga.per_weight() or funcga.sum()."
        )
    rank = 0
    for part in jax.tree.leaves(lifted):
        found, rank = arrays.describe(part), part.ndim
        if not -rank <= axis < rank:
            raise FuncgaError(
                f"scatter={axis} for {path}, which is {found} and has no such axis. Write None in its place, as in "
                f"scatter=(None, 0)."
            )
        if part.shape[axis] % count:
            raise FuncgaError(
                f"scatter={axis} for {path}, which is {found}: its {part.shape[axis]} rows on that axis do not divide "
                f"among {count} replicas. Choose another axis, or write None in its place."
            )
    return axis % rank
