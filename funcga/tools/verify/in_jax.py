"""The JAX side of `verify`: which dtypes a function computes in, and what it depends on."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, subjaxprs

from funcga._types import GradFn, Tree
from jax_backend import trees


@contextmanager
def precision(precise: bool) -> Iterator[None]:
    """A context for computing in full precision; with `precise`, float64 is enabled."""
    has_x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with jax.enable_x64(precise or has_x64), jax.default_matmul_precision("highest"):
        yield


def copy(array: jax.Array) -> jax.Array:
    """A copy of the array, in no graph."""
    return jnp.array(array, copy=True)


def take(array: jax.Array, axis: int, rows: Sequence[int]) -> jax.Array:
    """A copy of these rows, which may repeat, along an axis."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return array[(slice(None),) * (axis % array.ndim) + (np.array(rows),)]
    return jnp.asarray(np.take(np.asarray(array), rows, axis))  # which compiles nothing


def random_kept() -> AbstractContextManager[None]:
    """A context after which the global random generators are as they were before it."""
    return nullcontext()  # keys are arguments


def trace_call(
    function: GradFn, args: Tree, kwargs: Tree
) -> tuple[list[jax.Array], str, float, bool]:
    """(values, program, eps, draws) of a call.

    values, program: the constants and the text of the traced program, which contain all that the
    function reads besides its arguments. Nothing is compiled. eps: of the coarsest float dtype in
    it. draws: whether it draws random numbers.
    """
    static, traced = trees.partition((args, kwargs))

    def run(traced: list[jax.Array]) -> Tree:
        args, kwargs = static.tree(traced)
        return function(*args, **kwargs)

    program = jax.make_jaxpr(run)(traced)
    avals = [variable.aval for each in _equations(program.jaxpr) for variable in each.outvars]
    # The weights of micro-batches, which have no axes, are float32 in any case.
    dtypes = {aval.dtype for aval in program.out_avals} | {
        aval.dtype for aval in avals if isinstance(aval, jax.core.ShapedArray) and aval.shape
    }
    eps = [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]  # type: ignore[no-untyped-call]
    text = re.sub("0x[0-9a-f]+", "", str(program))
    draws = re.search("random_bits|threefry2x32|rng_bit_generator|rng_uniform", text)
    return program.consts, text, max(eps, default=2.0**-52), bool(draws)


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program, and of those inside of it."""
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from _equations(inner)


def module_loss(function: Callable[..., object]) -> Callable[..., object] | None:
    """The loss_fn(module, *batch) if the function is the gradient of a pure_loss, else None."""
    return None  # there is no pure_loss
