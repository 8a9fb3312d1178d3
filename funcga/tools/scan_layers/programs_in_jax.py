"""The private or unstable names of JAX that programs are read and written anew by: what for, and
what happens without them.

Without any of these scans over layers are left as they are: a scan stacks the gradients of its
layers, and then they are added. Without the two modules that are imported the loop leaves out this
tool. `tests/jax_backend/test_private.py` takes each away to see that.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Literal as Literal
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun

from funcga._types import Array

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn


def is_array_type(aval: object) -> bool:
    """Whether this is the type of an array: not that of a reference to one, or of a token."""
    return isinstance(aval, ShapedArray)


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
