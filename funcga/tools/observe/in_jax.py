"""Observers in JAX."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from funcga._types import Tree
from funcga.tools.observe import Readings


def rows(readings: Readings, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The measures of arrays; XLA knows where they are."""
    return [*map(readings.row, leaves)]


def unknown(compute: Callable[[], Tree]) -> Tree:
    """The tree of arrays that `compute` returns, with NaN in place of each number.

    Under jax_debug_nans a state with NaN could not be passed to a jitted function: then it is 0.
    """
    fill = 0.0 if jax.config.jax_debug_nans else jnp.nan  # type: ignore[attr-defined]
    # Only types are computed, as observers of nothing may divide by 0.
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, fill), jax.eval_shape(compute))
