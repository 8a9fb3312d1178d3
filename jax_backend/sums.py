"""Sums: how the accumulator of each leaf is added to, scaled, divided and emptied, out of place."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from funcga._fold import LeafFold, Tally
from funcga._types import Array, Reduced, Scalar, Tree
from jax_backend import arrays

# In JAX callers donate by jax.jit(donate_argnums=...). A donated array is matched with the first
# result of its shape: if results have another order than arguments, XLA copies.
donates = False


def add(
    folds: Sequence[LeafFold | None],
    accumulators: Sequence[Reduced],
    leaves: Sequence[Array],
    weights: Sequence[Scalar],
    donate: bool,
) -> tuple[list[Reduced], bool]:
    """(the accumulators with one more value, whether they share memory with nothing else)."""
    triples = zip(folds, accumulators, lifted(folds, leaves, weights), strict=True)
    return [
        None if fold is None else fold.combine(before, addend) for fold, before, addend in triples
    ], True


def lifted(
    folds: Sequence[LeafFold | None], leaves: Sequence[Array], weights: Sequence[Scalar]
) -> list[Reduced]:
    """The value of each leaf as it is combined with the accumulator."""
    triples = zip(folds, leaves, weights, strict=True)
    return [None if fold is None else fold.lift(leaf, weight) for fold, leaf, weight in triples]


def finish(
    folds: Sequence[LeafFold | None],
    accumulators: Sequence[Reduced],
    tallies: Sequence[Tally],
    donate: bool,
) -> list[Reduced]:
    """The normalised leaves, in memory of their own, or in that of donated sums."""
    finished = LeafFold.normalize if donate else LeafFold.result
    triples = zip(folds, accumulators, tallies, strict=True)
    return [
        None if fold is None else finished(fold, accumulator, tally)
        for fold, accumulator, tally in triples
    ]


def scaled(leaves: Sequence[Array], factor: Scalar, donate: bool) -> list[Array]:
    """The leaves times a factor; in the same memory if that is donated."""
    return [None if leaf is None else leaf * jnp.asarray(factor, leaf.dtype) for leaf in leaves]


def emptied(
    folds: Sequence[LeafFold | None], accumulators: Sequence[Reduced], donate: bool, in_use: Tree
) -> list[Reduced]:
    """The accumulators of an empty window; in the same memory if that is donated and not in use."""
    pairs = zip(folds, accumulators, strict=True)
    return [
        None
        if fold is None
        else _sharded_as(fold.fold.reducer.monoid.identity(arrays.xp, accumulator), accumulator)
        for fold, accumulator in pairs
    ]


def _sharded_as(constant: Reduced, like: Reduced) -> Reduced:
    """The constant, sharded as the accumulator is. The compiler would replicate a constant."""
    # A selection that is opaque to the compiler: its result has the sharding of both operands.
    never = lax.optimization_barrier(jnp.asarray(False))
    return jax.tree.map(lambda part, other: jnp.where(never, other, part), constant, like)
