"""The private or unstable names of JAX that are used: what for, and what happens without them.

All versions in the table of docs/reference/versions.md have these names, unless it is said which.
Without any of these the numbers are right still, and `tests/jax_backend/test_private.py` takes each
away to see that. Everything else that this package uses of JAX is documented.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core
import numpy as np
from jax import lax

from funcga._types import Array

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

if TYPE_CHECKING:
    pass

# -- traces

# Tells whether a trace is running, of jit, vmap, grad or shard_map. Without it every call counts as
# traced: it runs as it is and not jitted, and n="auto" refuses it.
try:
    TRACE_STATE: Callable[[], object] | None = jax.extend.core.get_opaque_trace_state
except AttributeError:
    TRACE_STATE = None

with jax.ensure_compile_time_eval():
    _OUTSIDE = None if TRACE_STATE is None else TRACE_STATE()


def is_tracing() -> bool:
    """Whether a trace is running: a function that is called now may close over its tracers."""
    return TRACE_STATE is None or TRACE_STATE() != _OUTSIDE


# The class of arrays that stand for others in a trace. Without it an array is asked where it
# lies, which one in a trace cannot say.
try:
    TRACER: type | None = jax.core.Tracer
except AttributeError:
    TRACER = None


def is_traced(leaf: object) -> bool:
    """Whether this is an array that has no numbers yet."""
    if TRACER is not None:
        return isinstance(leaf, TRACER)
    try:
        return isinstance(leaf, jax.Array) and not leaf.devices()
    except jax.errors.ConcretizationTypeError:
        return True


def address(array: jax.Array) -> int:
    """Where the memory of an array on one device begins.

    Without `unsafe_buffer_pointer`, that of NumPy's array of the same numbers, which is the same
    on a CPU; on another device an array that another framework shares is reported as copied.
    """
    try:
        return int(array.unsafe_buffer_pointer())
    except AttributeError:
        return int(np.asarray(array).__array_interface__["data"][0])


# -- types of arrays


def varying(aval: Any) -> frozenset[str] | None:
    """The mesh axes along which an array of this type may differ; None if its type does not say.

    Without `manual_axis_type` an array may differ along all manual axes.
    """
    try:
        return frozenset(aval.manual_axis_type.varying)
    except AttributeError:
        return None


def cast_varying(array: Array, names: Sequence[str]) -> Array:
    """The array marked as varying along mesh axes of shard_map, along some of which it may vary
    already.
    """
    varies_along = varying(jax.typeof(array))
    if varies_along is not None:
        missing = tuple(name for name in names if name not in varies_along)
        return lax.pcast(array, missing, to="varying") if missing else array
    for name in names:
        # The error is that it varies along this one already.
        with suppress(ValueError):
            array = lax.pcast(array, name, to="varying")
    return array


# -- programs

# A program as a function. Without it the derivative of a step that drops a micro-batch is NaN.
try:
    AS_FUNCTION: Callable[[Any], Callable[..., list[Array]]] | None = jax.extend.core.jaxpr_as_fun
except AttributeError:
    AS_FUNCTION = None


def equations(jaxpr: "Jaxpr") -> "Iterator[JaxprEqn]":
    """All operations of a program, with those of programs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        # Programs inside of it, such as the body of a loop, are among its parameters: closed ones
        # have one within.
        for value in jax.tree.leaves(equation.params, is_leaf=_is_program):
            if _is_program(value):
                program: Any = getattr(value, "jaxpr", value)
                yield from equations(program)


def _is_program(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


# -- compiling

# Options of XLA for a program that is to compile fast rather than to run fast: on the CPU a quarter
# of the time. They may go as they came, as the second one did with jaxlib 0.12, and XLA refuses
# options that it does not know: those are left out, and compiling takes longer.
QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@cache
def quick_to_compile() -> dict[str, int | bool]:
    """The `compiler_options` for a jitted function that is small and seldom called."""
    return {name: value for name, value in QUICK.items() if _is_option({name: value})}


def _is_option(option: dict[str, int | bool]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=option).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
