"""Randomness that belongs to an example, and not to the micro-batch that it happens to be in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from funcga.errors import FuncgaError
from jax_backend import arrays


def example_keys(key: Any, indices: Any) -> jax.Array:
    """A random key for each example, made of one key and the example's index: an argument that is split like any other.

    key: of jax.random.key or jax.random.PRNGKey. indices: integers [rows], where the examples are in the dataset; or a
    number, for one key. Returns keys of that shape, `jax.random.fold_in` of each. As they do not depend on n, what is
    drawn from them does not either.

    Raises FuncgaError for a key that is none and indices that are no integers.

    >>> keys = jax_backend.example_keys(jax.random.key(0), indices)
    >>> loss, grads = step(params, keys, x, y)
    """
    try:
        jax.random.key_data(key)
    except TypeError:
        raise FuncgaError(f"key is {arrays.describe(key)}: it must be a key of JAX: jax.random.key(0).") from None
    place = jnp.asarray(indices)
    if arrays.kind(place.dtype) != "int":
        raise FuncgaError(
            f"indices is {arrays.describe(indices)}: it must be an integer, or an array of some: jnp.arange(len(x))."
        )
    fold = jax.random.fold_in
    for _ in range(place.ndim):
        fold = jax.vmap(fold, (None, 0))
    return fold(key, place)


def sampled(sampler: Callable[..., Any], keys: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    """Noise [rows, *shape], each row drawn with the key of its example: the same in every split of a batch.

    sampler: `sampler(key, shape)`, as jax.random.uniform or jax.random.normal. keys: of `example_keys`. Raises
    FuncgaError for keys that are not one for each row.

    >>> kept = jax_backend.sampled(jax.random.uniform, keys, (16,)) < 0.9
    """
    if not arrays.is_array(keys) or keys.ndim != (1 if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else 2):
        raise FuncgaError(
            f"keys are {arrays.describe(keys)}: there must be one for each row. Make them where the batch is made, "
            f"keys = jax_backend.example_keys(jax.random.key(0), indices), and pass them with it."
        )
    rows: jax.Array = jax.vmap(lambda key: sampler(key, shape))(keys)
    return rows
