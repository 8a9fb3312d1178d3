"""Arrays as their bits: what is small travels as 16-bit numbers inside of another reduction, without loss.

Only JAX has this file; what does the same in torch is `tail`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funcga.errors import FuncgaError

HOLD_16_BITS = ("float32", "float64", "int32", "int64", "uint32", "uint64", "complex64", "complex128")
"""The dtypes whose numbers hold 16 bits exactly."""


def as_numbers(array: jax.Array) -> tuple[jax.Array, Callable[[Any], jax.Array]]:
    """The array in a dtype of numbers of 16 bits or more, without loss, and the way back."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array), partial(jax.random.wrap_key_data, impl=str(jax.random.key_impl(array)))
    if dtype.itemsize < 2:
        wide = array.astype(jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)
        return wide, lambda found: found.astype(dtype)
    return array, lambda found: found


def as_ranks(array: jax.Array, highest: bool) -> tuple[jax.Array, Callable[[Any], jax.Array]]:
    """Integers in the order of the numbers, NaN last or first, and the way back: XLA's own maximum can lose a NaN."""
    dtype = array.dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return as_numbers(array)
    size = 8 * dtype.itemsize
    integer = jnp.dtype(f"int{size}")
    least, most = jnp.asarray(-(2 ** (size - 1)), integer), jnp.asarray(2 ** (size - 1) - 1, integer)
    # The bits of floats are in the order of the numbers, but for those of the negative ones, which run backwards.
    turned: Callable[[Any], Any] = lambda found: jnp.where(found < 0, found ^ most, found)
    ranks = jnp.where(jnp.isnan(array), most if highest else least, turned(lax.bitcast_convert_type(array, integer)))
    return ranks, lambda found: lax.bitcast_convert_type(turned(found), dtype)


def pack(letters: Sequence[jax.Array]) -> jax.Array:
    """The bits of the arrays, one after the other, as a vector of uint16.

    Raises FuncgaError if a derivative is taken through them: it would be 0.
    """
    return jnp.concatenate([_bits(_constant(letter)) for letter in letters])


@jax.custom_jvp
def _constant(letter: jax.Array) -> jax.Array:
    return letter


@_constant.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise FuncgaError(
        "a derivative is taken through a step that merges over replicas with across=, which sends small results as "
        "bits. Take it inside, of the loss that grad_fn is made of, or through a step without across=."
    )


def _bits(letter: jax.Array) -> jax.Array:
    numbers, _ = as_numbers(letter)
    if jnp.issubdtype(numbers.dtype, jnp.complexfloating):
        numbers = jnp.stack([numbers.real, numbers.imag])
    return lax.bitcast_convert_type(numbers, jnp.uint16).reshape(-1)


def unpack(rows: jax.Array, letters: Sequence[jax.Array]) -> list[jax.Array]:
    """From rows that `pack` has made of such letters, [replicas, ...]: each letter of all rows, [replicas, ...]."""
    opened, start = [], 0
    for letter in letters:
        size = jax.eval_shape(_bits, letter).size
        opened.append(_open(rows[:, start : start + size], letter))
        start += size
    return opened


def _open(rows: jax.Array, letter: jax.Array) -> jax.Array:
    like, back = as_numbers(letter)
    is_complex = jnp.issubdtype(like.dtype, jnp.complexfloating)
    dtype = like.real.dtype if is_complex else like.dtype
    limbs = (dtype.itemsize // 2,) if dtype.itemsize > 2 else ()
    shape = (len(rows), *((2,) if is_complex else ()), *like.shape, *limbs)
    numbers = lax.bitcast_convert_type(rows.reshape(shape), dtype)
    return back(lax.complex(numbers[:, 0], numbers[:, 1]) if is_complex else numbers)
