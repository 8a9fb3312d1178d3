"""The private or unstable names of JAX that are used: what for, and what happens without them.

All versions in the table of docs/reference/versions.md have these names, unless it is said which.
Without any of these the numbers are right still, and `tests/jax_backend/test_private.py` takes each
away to see that. Everything else that this package uses of JAX is documented.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core

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


# -- types of arrays


def varying(aval: Any) -> frozenset[str] | None:
    """The mesh axes along which an array of this type may differ; None if its type does not say.

    Without `manual_axis_type` an array may differ along all manual axes.
    """
    try:
        return frozenset(aval.manual_axis_type.varying)
    except AttributeError:
        return None
