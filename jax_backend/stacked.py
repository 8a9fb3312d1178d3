"""What a scan over layers stacks, folded layer by layer, where it is computed.

Only JAX has this file: XLA adds in place what an operation makes, but not what a loop makes. The backward pass of a
`lax.scan` over layers stacks their gradients, an array of the parameters' size, and only then a fold can add them. So
where a scan stacks an output of grad_fn, and nothing else reads that, the program is evaluated with this scan replaced
by one that carries the accumulator, and combines the part of every layer with it: the same operations on the same
numbers, without the array in between. It is a program of plain operations, to be differentiated and batched as any.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import AxisType

from jax_backend.exchange import as_varying, varying_axes

Into = tuple[jax.Array, Callable[[Any, Any], Any]]
"""An accumulator, and combine(part of the accumulator, the same part of what a scan stacks)."""

# A scan with any other option is left as it is.
_KNOWN = {"jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry", "ft_in", "ft_out"}


def stacked(jaxpr: Any) -> list[int]:
    """Which outputs of a jaxpr a scan stacks, and nothing else reads."""
    return [] if jaxpr.effects else [i for i in range(len(jaxpr.outvars)) if _source(jaxpr, i) is not None]


def _source(jaxpr: Any, i: int) -> Any:
    """The variable that a scan stacks, and that is the i-th output, once it is cast; None if there is none."""
    variable = jaxpr.outvars[i]
    made = {v: (equation, k) for equation in jaxpr.eqns for k, v in enumerate(equation.outvars)}
    read = [v for equation in jaxpr.eqns for v in equation.invars] + jaxpr.outvars
    for _ in made:
        if isinstance(variable, Literal) or variable not in made or sum(v is variable for v in read) != 1:
            return None
        equation, k = made[variable]
        if equation.primitive.name != "convert_element_type":
            return variable if _stacks(equation, k) else None
        (variable,) = equation.invars
    return None


def _stacks(equation: Any, k: int) -> bool:
    if equation.primitive.name == "jit":
        return _is_plain(equation) and k in stacked(equation.params["jaxpr"].jaxpr)
    if equation.primitive.name != "scan" or not equation.params.keys() <= _KNOWN or k < _carried(equation):
        return False
    # with explicit axes the type says how it lies on a mesh, of which an accumulator knows nothing
    return AxisType.Explicit not in equation.outvars[k].aval.sharding.mesh.axis_types


def _is_plain(jit: Any) -> bool:
    """Whether a call asks for no sharding, so that what it calls may stand in its place."""
    shardings = (*jit.params["in_shardings"], *jit.params["out_shardings"])
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


def _carried(scan: Any) -> int:
    """The number of values that a scan carries; its other outputs have an axis more than those of its body."""
    pairs = zip(scan.outvars, scan.params["jaxpr"].jaxpr.outvars, strict=True)
    return sum(whole.aval.ndim == part.aval.ndim for whole, part in pairs)


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], into: Mapping[int, Into]) -> list[Any]:
    """The outputs of a jaxpr; for those of `stacked` that `into` has, the accumulators combined with them."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read: Callable[[Any], Any] = lambda v: v.val if isinstance(v, Literal) else values[v]
    wanted = {_source(jaxpr, i): found for i, found in into.items()}
    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        own = {k: wanted[v] for k, v in enumerate(equation.outvars) if v in wanted}
        names = str(equation.source_info.name_stack)
        with equation.ctx.manager, jax.named_scope(names) if names else nullcontext():
            values.update(zip(equation.outvars, _evaluated(equation, operands, own), strict=True))
    return [values[_source(jaxpr, i)] if i in into else read(v) for i, v in enumerate(jaxpr.outvars)]


def _evaluated(equation: Any, operands: list[Any], into: Mapping[int, Into]) -> Sequence[Any]:
    if not into:
        found = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
        return found if equation.primitive.multiple_results else [found]
    if equation.primitive.name == "scan":
        return _scan(equation, operands, into)
    inner = equation.params["jaxpr"]
    return evaluate(inner.jaxpr, inner.consts, operands, into)


def _scan(scan: Any, operands: list[Any], into: Mapping[int, Into]) -> list[Any]:
    """The outputs of the scan, with accumulators in place of what it would stack."""
    body, length, carried = scan.params["jaxpr"], scan.params["length"], _carried(scan)
    run = jaxpr_as_fun(body)
    whole = sum(v.aval.ndim == part.aval.ndim for v, part in zip(scan.invars, body.jaxpr.invars, strict=True))
    consts, init, xs = operands[: whole - carried], operands[whole - carried : whole], operands[whole:]

    def step(carry: Any, cut: Any) -> Any:
        before, accumulators = carry
        i, parts = cut
        found = run(*consts, *before, *parts)
        after, rest = found[:carried], dict(enumerate(found[carried:], carried))
        pairs = zip(into, accumulators, strict=True)
        return (after, [_combined(accumulator, i, rest.pop(k), into[k][1]) for k, accumulator in pairs]), rest

    vary = {k: tuple(varying_axes(scan.outvars[k].aval)) for k in into}
    accumulators = [as_varying(accumulator, vary[k]) for k, (accumulator, _) in into.items()]
    places = jnp.arange(length, dtype=jnp.int32)
    options = {name: scan.params[name] for name in ("reverse", "unroll")}
    (after, added), rest = lax.scan(step, (init, accumulators), (places, xs), length, **options)
    outputs = dict(enumerate(after)) | rest | dict(zip(into, added, strict=True))
    return [outputs[k] for k in range(len(scan.outvars))]


def _combined(accumulator: jax.Array, i: Any, part: jax.Array, combine: Callable[[Any, Any], Any]) -> Any:
    """The accumulator with its i-th row combined with a part."""
    row = lax.dynamic_index_in_dim(accumulator, i, keepdims=False)
    return lax.dynamic_update_index_in_dim(accumulator, combine(row, part), i, 0)
