"""What can be read of JAX arrays for exact sums."""

import jax

from funcga.tools.reproducible.exact import no_derivative


def readable(array: jax.Array) -> jax.Array:
    """The array, for a fold that reads its bits; FuncgaError if they are not available."""

    @jax.custom_jvp
    def same(array: jax.Array) -> jax.Array:
        return array

    @same.defjvp
    def _(
        primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        raise no_derivative()

    result: jax.Array = same(array)
    return result
