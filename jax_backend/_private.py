"""The private or unstable names of JAX that are used: what for, and what happens without them.

All versions in the table of docs/reference/versions.md have these names, unless it is said which.
Without any of these the numbers are right still, and `tests/jax_backend/test_private.py` takes each
away to see that. Everything else that this package uses of JAX is documented.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core
import numpy as np
from jax import lax

from funcga._types import Array

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

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

# An array's type. Without it nothing passes for the type of a plain array: scans over layers
# are left as they are.
try:
    ARRAY_TYPE: type | None = jax.core.ShapedArray
except AttributeError:
    ARRAY_TYPE = None


def is_array_type(aval: object) -> bool:
    """Whether this is the type of an array: not that of a reference to one, or of a token."""
    return ARRAY_TYPE is not None and isinstance(aval, ARRAY_TYPE)


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

# A program's constants, and a program as a function. Without them scans over layers are left as
# they are, as without anything below: a scan stacks the gradients of its layers, and then they are
# added. And the derivative of a step that drops a micro-batch is NaN.
try:
    LITERAL: tuple[type, ...] = (jax.extend.core.Literal,)
    AS_FUNCTION: Callable[[Any], Callable[..., list[Array]]] | None = jax.extend.core.jaxpr_as_fun
except AttributeError:
    LITERAL, AS_FUNCTION = (), None

# What a scan is described by: num_consts and num_carry in 0.10, ft_in and ft_out since 0.11. One
# that is described by anything else is left as it is.
SCAN_PARAMETERS = {
    "jaxpr",
    "length",
    "reverse",
    "unroll",
    "num_consts",
    "num_carry",
    "ft_in",
    "ft_out",
}


def can_repeat(equation: "JaxprEqn") -> bool:
    """Whether this version of JAX lets an operation of a program be done again:
    `get_bind_params`, `ctx.manager`.
    """
    if not LITERAL or AS_FUNCTION is None:
        return False
    try:
        return callable(equation.primitive.get_bind_params) and equation.ctx.manager is not None
    except AttributeError:
        return False


def repeated(equation: "JaxprEqn", operands: Sequence[Array]) -> list[Array]:
    """The results of the operation for other operands."""
    primitive: Any = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return list(results) if primitive.multiple_results else [results]


def context(equation: "JaxprEqn") -> AbstractContextManager[Any]:
    """What was switched on where the operation was traced, such as the precision of matrix
    products, as a context.
    """
    manager: AbstractContextManager[Any] = equation.ctx.manager
    return manager


def named_scope(equation: "JaxprEqn") -> AbstractContextManager[Any]:
    """The names that were given to the part of the program that the operation is in, as a
    context.
    """
    names = scope_of(equation)
    return jax.named_scope(names) if names else nullcontext()


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


def scope_of(equation: "JaxprEqn") -> str:
    """Those names, one after the other; none if JAX no longer keeps them."""
    try:
        return str(equation.source_info.name_stack)
    except AttributeError:
        return ""


def has_effects(program: "Jaxpr") -> bool:
    """Whether a program does something beside computing, such as printing, so that the order of
    operations counts.

    That it names a mesh axis is an effect, too: of a type that JAX does not export, so it is told
    by its name. Under another name every program that communicates has effects, and its scans are
    left as they are.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in program.effects)


def is_inlineable(call: "JaxprEqn") -> bool:
    """Whether a call of a jitted function asks for no sharding, so that what it calls may stand in
    its place.

    The type that says so is not exported. Under another name every such call is left as it is.
    """
    shardings = (
        *call.params.get("in_shardings", (None,)),
        *call.params.get("out_shardings", (None,)),
    )
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


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
