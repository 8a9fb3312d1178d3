"""Totals that the integers of JAX cannot hold: gradients that are divided by them are NaN."""

import jax
import jax.numpy as jnp
import numpy as np

from funcga._types import Tree
from funcga.tools.totals import OVERFLOWN
from jax_backend.loop import is_float


def nan_if_overflown(result: Tree, totals: Tree) -> Tree:
    """The result, with NaN for every float if a total does not fit in its integers."""
    counts = [total for total in jax.tree.leaves(totals) if total.dtype == np.int32]
    if not counts:
        return result
    fits = jnp.all(jnp.stack(counts) != OVERFLOWN)
    return jax.tree.map(
        lambda leaf: jnp.where(fits, leaf, jnp.nan) if is_float(leaf) else leaf, result
    )
