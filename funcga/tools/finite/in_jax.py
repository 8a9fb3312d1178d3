"""Whether numbers are finite."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def finite(arrays: Sequence[jax.Array | None]) -> jax.Array:
    """Whether all numbers are finite, as a 0-d array; None is skipped."""
    all_finite = jnp.asarray(True)
    for array in arrays:
        all_finite = all_finite if array is None else jnp.isfinite(array).all() & all_finite
    return all_finite
