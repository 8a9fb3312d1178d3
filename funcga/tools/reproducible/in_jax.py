"""What can be read of JAX arrays for exact sums."""

from typing import NoReturn

import jax

from funcga.tools.reproducible.exact import no_derivative


@jax.custom_jvp
def readable(array: jax.Array) -> jax.Array:
    """The array, for a fold that reads its bits; FuncgaError if they are not available."""
    return array


@readable.defjvp
def _differentiated(*primals_and_tangents: object) -> NoReturn:
    raise no_derivative()
