"""What `verify` asks of a framework about a user's function: what it computes in, and what it depends on."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_backend.trees import split


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """A context in which arrays of this dtype exist and are computed with in all of their bits."""
    with jax.enable_x64(dtype == "float64" or _has_x64()), jax.default_matmul_precision("highest"):
        yield


def differentiated() -> AbstractContextManager[Any]:
    """A context in which steps keep the graph of what they return, as inside of a loss that is differentiated."""
    return nullcontext()  # what they return can always be differentiated


def _has_x64() -> bool:
    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)


def take(array: Any, axis: int, rows: Sequence[int]) -> jax.Array:
    """A copy of these rows, which may repeat, along an axis."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = take(jax.random.key_data(array), axis % array.ndim, rows)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        return keys
    return jnp.asarray(np.take(np.asarray(array), rows, axis))  # which compiles nothing


def random_state() -> Any:
    """The state of every global random generator of this framework."""
    return None  # keys are arguments


def restore(state: Any) -> None:
    """Puts back what `random_state` returned."""


def watch(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], str, float, bool, bool]:
    """(values, program, eps, random, mixed) of a call: what two calls must share, and how it computes.

    values: the constants of the program; program: its text. The function is traced, which compiles nothing: what it
    reads from outside of its arguments is in these two. eps: of the coarsest float dtype that it computes in. random:
    whether it draws numbers. mixed: whether it computes in several precisions.
    """
    static, arrays = split((args, kwargs))

    def run(arrays: list[Any]) -> Any:
        args, kwargs = static.tree(arrays)
        return function(*args, **kwargs)

    made = jax.make_jaxpr(run)(arrays)
    dtypes: set[Any] = set()
    names: set[str] = set()
    _walk(made.jaxpr, dtypes, names)
    found = {
        float(jnp.finfo(dtype).eps)  # type: ignore[no-untyped-call]
        for dtype in dtypes
    } or {0.0}
    values = [const for const in made.consts if not jnp.issubdtype(const.dtype, jax.dtypes.prng_key)]
    return values, re.sub("0x[0-9a-f]+", "", str(made)), max(found), bool(names & _DRAWS), len(found) > 1


_DRAWS = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def _walk(jaxpr: Any, dtypes: set[Any], names: set[str]) -> None:
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        avals = [variable.aval for variable in equation.outvars]
        dtypes |= {aval.dtype for aval in avals if jnp.issubdtype(getattr(aval, "dtype", np.dtype(bool)), jnp.inexact)}
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(inner, "eqns"):
                _walk(getattr(inner, "jaxpr", inner), dtypes, names)


def is_write(error: Exception) -> bool:
    """Whether an error says that a function writes to what it closes over, which a transform forbids."""
    return False  # arrays cannot be written to


def other_way(gradient: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a gradient function gives by the framework's own transform, if the loop has another; else None.

    gradient: the transform's. function: that of funcga which it stands for.
    """
    return None  # the loop has jax.grad itself


def batch_normalisers(function: Callable[..., Any]) -> list[str]:
    """What normalises over the batch among what the function closes over, by path and type."""
    return []  # functions have no parts that could be seen from outside
