"""Random numbers per example, independent of the micro-batches."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcga._fold import describe
from funcga._types import Array
from funcga.errors import FuncgaError
from jax_backend import _private

Sampler: TypeAlias = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def example_keys(key: jax.Array, indices: Array) -> jax.Array:
    """A random key for each example, made of one key and the example's index: an argument that is
    split like any other.

    As the keys do not depend on the number of micro-batches, what is drawn from them does not
    either. Those of "rbg" and "unsafe_rbg" are made one after the other for that.

    Args:
        key: A key, of jax.random.key or jax.random.PRNGKey, or made by this function:
            `example_keys(key, epoch)` is the key of an epoch. Without it an example has the same
            noise in every epoch.
        indices: Integers [rows], where the examples are in the dataset; or a number, for one key.

    Returns:
        Keys in the shape of the indices, `jax.random.fold_in` of each.

    Raises:
        FuncgaError: The indices are no integers, or are seen to need more than 32 bits, of which
            JAX would drop some.

    Example:
        >>> epoch, indices = 0, jnp.arange(4)
        >>> key = jax_backend.example_keys(jax.random.key(0), epoch)
        >>> keys = jax_backend.example_keys(key, indices)
        >>> keys.shape
        (4,)
    """
    # Flat, and back into their shape.
    numbers = _integers(indices)
    keys = _map_rows(key, lambda index: jax.random.fold_in(key, index), numbers.ravel())
    return keys.reshape(*numbers.shape, *keys.shape[1:])


def _map_rows(
    key: jax.Array, function: Callable[[jax.Array], jax.Array], rows: jax.Array
) -> jax.Array:
    """The function of every row, independently. Under vmap only threefry keys do that: numbers
    of rbg keys depend on their neighbours.
    """
    is_alone = jax.random.key_impl(key) == "threefry2x32"
    drawn: jax.Array = jax.vmap(function)(rows) if is_alone else lax.map(function, rows)
    return drawn


def _integers(indices: Array) -> jax.Array:
    indices = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if indices.dtype.kind not in "iu":
        raise FuncgaError(
            f"indices is {describe(indices)}: it must be an integer, or an array of some: "
            "jnp.arange(len(x))."
        )
    if indices.dtype.itemsize <= 4:
        return jnp.asarray(indices)
    # JAX would truncate 64 bits to 32. Traced values cannot be checked.
    is_seen = indices.size and not _private.is_traced(indices)
    if is_seen and not 0 <= indices.min() <= indices.max() < 2**32:
        raise FuncgaError(
            f"indices is {describe(indices)}, and keys are made of 32 bits, 0 to 2**32 - 1. "
            "Number the examples, jnp.arange(len(dataset))."
        )
    return jnp.asarray(indices, jnp.uint32)


def sampled(sampler: Sampler, keys: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    """Noise `[rows, *shape]`, each row drawn with the key of its example: the same in every split
    of a batch.

    With keys of "rbg" and "unsafe_rbg" the rows are drawn one after the other, as JAX's vmap would
    mix them up.

    Args:
        sampler: `sampler(key, shape)`, as jax.random.uniform or jax.random.normal.
        keys: Of `example_keys`.
        shape: The shape of what is drawn for one example.

    Returns:
        The draws of all examples, stacked along axis 0.

    Example:
        >>> keys = jax_backend.example_keys(jax.random.key(0), jnp.arange(4))
        >>> kept = jax_backend.sampled(jax.random.uniform, keys, (16,)) < 0.9
        >>> kept.shape
        (4, 16)
    """
    return _map_rows(keys, lambda key: sampler(key, shape), keys)
