"""What `verify` asks of JAX about a user's function: what it computes in, and what it depends
on.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from funcga._types import GradFn, Tree
from jax_backend import arrays, trees


@contextmanager
def precision(precise: bool) -> Iterator[None]:
    """A context in which floats are computed with in all of their bits, and with `precise`
    float64 exists.
    """
    has_x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with jax.enable_x64(precise or has_x64), jax.default_matmul_precision("highest"):
        yield


def copy(array: jax.Array) -> jax.Array:
    """A copy of the array, in no graph."""
    return jnp.array(array, copy=True)


def take(array: jax.Array, axis: int, rows: Sequence[int]) -> jax.Array:
    """A copy of these rows, which may repeat, along an axis."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = take(jax.random.key_data(array), axis % array.ndim, rows)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return keys
    return jnp.asarray(np.take(np.asarray(array), rows, axis))  # which compiles nothing


def random_state() -> None:
    """The state of every global random generator of this framework."""
    return  # keys are arguments


def restore(state: None) -> None:
    """None; puts back what `random_state` returned."""


def watch(function: GradFn, args: Tree, kwargs: Tree) -> tuple[list[jax.Array], str, float, bool]:
    """(values, program, eps, draws) of a call.

    values, program: the constants and the text of the traced program: what it reads from outside of
    its arguments is in these two. Tracing compiles nothing. eps: of the coarsest float dtype that
    it computes in. draws: whether it draws random numbers.
    """
    leaves, structure = trees.flatten((args, kwargs))
    is_traced = [arrays.is_array(leaf) for leaf in leaves]

    def run(traced: list[jax.Array]) -> Tree:
        rest = iter(traced)
        merged = [
            next(rest) if is_array else leaf
            for leaf, is_array in zip(leaves, is_traced, strict=True)
        ]
        args, kwargs = trees.unflatten(structure, merged)
        return function(*args, **kwargs)

    program = jax.make_jaxpr(run)(
        [leaf for leaf, is_array in zip(leaves, is_traced, strict=True) if is_array]
    )
    dtypes: set[np.dtype] = set()
    names: set[str] = set()
    _collect(program.jaxpr, dtypes, names)
    eps = max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0)  # type: ignore[no-untyped-call]
    values = [
        const for const in program.consts if not jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
    ]
    return values, re.sub("0x[0-9a-f]+", "", str(program)), eps, bool(names & _DRAWS)


_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def _collect(jaxpr: Jaxpr, dtypes: set[np.dtype], names: set[str]) -> None:
    """None; adds the float dtypes that a program computes, and the names of its operations."""
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        avals = [
            variable.aval
            for variable in equation.outvars
            if isinstance(variable.aval, jax.core.ShapedArray)
        ]
        dtypes |= {aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)}
        is_program = lambda parameter: isinstance(parameter, Jaxpr | ClosedJaxpr)
        for inner in filter(
            is_program, jax.tree.leaves([*equation.params.values()], is_leaf=is_program)
        ):
            _collect(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, dtypes, names)


def is_write(error: Exception) -> bool:
    """Whether an error says that a function writes to what it closes over, which a transform
    forbids.
    """
    return False  # arrays cannot be written to


def other_way(function: GradFn, transform: GradFn | None, args: Tree, kwargs: Tree) -> Tree | None:
    """What a gradient function returns, computed in another way than by a step; None where there
    is none.
    """
    return None  # steps have jax.grad itself, and what they return can always be differentiated


def batch_normalisers(function: Callable[..., object]) -> list[str]:
    """What normalises over the batch among what the function closes over, by path and type."""
    return []  # functions have no parts that could be seen from outside


def module_loss(function: Callable[..., object]) -> Callable[..., object] | None:
    """The loss_fn(module, *batch) of a pure_loss whose gradient a function is; None for other
    ones.
    """
    return None  # there is no pure_loss
