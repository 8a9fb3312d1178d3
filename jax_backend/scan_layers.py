"""What a scan over layers stacks, folded layer by layer, where it is computed.

Only JAX has this file: XLA adds in place what an operation makes, but not what a loop makes. The backward pass of a
`lax.scan` over layers stacks their gradients, an array of the parameters' size, and only then a fold can add them. So
where a scan stacks an output of grad_fn, and nothing else reads that, the program is evaluated with this scan replaced
by one that carries the accumulator, and combines the part of every layer with it: the same operations on the same
numbers, without the array in between. It is a program of plain operations, to be differentiated and batched as any.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import NamedSharding

from jax_backend.collectives import as_varying, varying_axes


class Into(NamedTuple):
    """An accumulator, combine(part of the accumulator, the same part of what a scan stacks), and the leaf's path."""

    accumulator: jax.Array
    combine: Callable[[Any, Any], Any]
    path: str


def folded_in_place(step: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The leaves of grad_fn's output that a step folds layer by layer, inside of the scan that computes them.

    For all others such a scan makes an array of the leaf's size beside the accumulator. What no scan stacks is added in
    place by XLA, and is not named. step: of `accumulate` or `stream`, or any function that calls one, jitted or not; it
    is traced for these arguments, and nothing is run.

    >>> jax_backend.folded_in_place(step, params, batch)
    ["output[1]['layers']"]
    """
    jitted: Any = step if hasattr(step, "trace") else jax.jit(step)
    found = [path for marked in _marked(jitted.trace(*args, **kwargs).jaxpr.jaxpr) for path in marked.split(_BETWEEN)]
    return list(dict.fromkeys(found))


_MARK, _BETWEEN = re.compile("folded in place<(.*?)>"), "; "


def _marked(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield from _MARK.findall(str(equation.source_info.name_stack))
        for value in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _marked(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


# A scan with any other option is left as it is.
_KNOWN = {"jaxpr", "length", "reverse", "unroll", "num_consts", "num_carry", "ft_in", "ft_out"}


class _Stack(NamedTuple):
    variable: Any  # what the scan stacks
    casts: tuple[Any, ...]  # the dtypes that it is cast to, one after the other, until it is an output


def stacked(jaxpr: Any) -> list[int]:
    """Which outputs of a jaxpr a scan stacks, and nothing else reads."""
    return list(_stacks(jaxpr))


def _stacks(jaxpr: Any) -> dict[int, _Stack]:
    # that a program names a mesh axis is an effect of its type, which nothing that is moved could change
    if any(type(effect).__name__ != "NamedAxisEffect" for effect in jaxpr.effects):
        return {}
    found: dict[Any, _Stack] = {}
    reads = Counter(v for v in _read(jaxpr) if not isinstance(v, Literal))
    for equation in jaxpr.eqns:
        if _is_cast(equation):
            (operand,), (cast,) = equation.invars, equation.outvars
            if reads[operand] == 1 and operand in found:
                variable, casts = found[operand]
                found[cast] = _Stack(variable, (*casts, equation.params["new_dtype"]))
        else:
            found |= {equation.outvars[k]: _Stack(equation.outvars[k], ()) for k in _made(equation)}
    outputs = ((i, v) for i, v in enumerate(jaxpr.outvars) if not isinstance(v, Literal))
    return {i: found[v] for i, v in outputs if reads[v] == 1 and v in found}


def _read(jaxpr: Any) -> Iterator[Any]:
    return chain(jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns))


def _is_cast(equation: Any) -> bool:
    """Whether it is a cast, and to no sharding; the gradient of one names that of an empty mesh."""
    sharding = equation.params.get("sharding")
    return equation.primitive.name == "convert_element_type" and (
        sharding is None or (isinstance(sharding, NamedSharding) and sharding.mesh.empty)
    )


def _made(equation: Any) -> list[int]:
    """Which outputs of an operation a scan stacks."""
    if equation.primitive.name == "jit":
        return stacked(equation.params["jaxpr"].jaxpr) if _is_plain(equation) else []
    if equation.primitive.name != "scan" or not _is_known(equation) or not equation.params["length"]:
        return []
    return list(range(_carried(equation), len(equation.outvars)))


def _is_known(scan: Any) -> bool:
    """Whether it is a scan of arrays as this module writes one, in a version of JAX whose programs it can evaluate."""
    can = hasattr(scan.primitive, "get_bind_params") and hasattr(getattr(scan, "ctx", None), "manager")
    arrays = all(isinstance(v.aval, ShapedArray) for v in (*scan.invars, *scan.outvars))
    return can and arrays and scan.params.keys() <= _KNOWN


def _is_plain(jit: Any) -> bool:
    """Whether a call asks for no sharding, so that what it calls may stand in its place."""
    shardings = (*jit.params["in_shardings"], *jit.params["out_shardings"])
    return all(type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings)


def _carried(scan: Any) -> int:
    """The number of values that a scan carries; its other outputs have an axis more than those of its body."""
    pairs = zip(scan.outvars, scan.params["jaxpr"].jaxpr.outvars, strict=True)
    return sum(whole.aval.ndim == part.aval.ndim for whole, part in pairs)


def takes(jaxpr: Any, args: Sequence[Any]) -> bool:
    """Whether these vary over the mesh axes that the arguments of a jaxpr were traced with."""
    pairs = zip(jaxpr.invars, args, strict=True)
    return all(varying_axes(v.aval) == varying_axes(jax.typeof(arg)) for v, arg in pairs)


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], into: Mapping[int, Into]) -> list[Any]:
    """The outputs of a jaxpr; for those of `stacked` that `into` has, the accumulators combined with them."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read: Callable[[Any], Any] = lambda v: v.val if isinstance(v, Literal) else values[v]
    stacks = _stacks(jaxpr) if into else {}
    wanted = {
        stacks[i].variable: one._replace(combine=_cast_first(stacks[i].casts, one.combine)) for i, one in into.items()
    }
    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        own = {k: wanted[v] for k, v in enumerate(equation.outvars) if v in wanted}
        names = str(equation.source_info.name_stack)
        with equation.ctx.manager, jax.named_scope(names) if names else nullcontext():
            values.update(zip(equation.outvars, _evaluated(equation, operands, own), strict=True))
    return [values[stacks[i].variable] if i in into else read(v) for i, v in enumerate(jaxpr.outvars)]


def _cast_first(casts: tuple[Any, ...], combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda accumulator, part: combine(accumulator, reduce(lax.convert_element_type, casts, part))


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
        return (after, [_combined(accumulator, i, rest.pop(k), into[k].combine) for k, accumulator in pairs]), rest

    accumulators = [_as_combined(one.accumulator, one.combine, body.out_avals[k]) for k, one in into.items()]
    places = jnp.arange(length, dtype=jnp.int32)
    options = {name: scan.params[name] for name in ("reverse", "unroll")}
    with jax.named_scope(f"folded in place<{_BETWEEN.join(one.path for one in into.values())}>"):
        (after, added), rest = lax.scan(step, (init, accumulators), (places, xs), length, **options)
    outputs = dict(enumerate(after)) | rest | dict(zip(into, added, strict=True))
    return [outputs[k] for k in range(len(scan.outvars))]


def _as_combined(accumulator: jax.Array, combine: Callable[[Any, Any], Any], part: Any) -> jax.Array:
    """The accumulator marked as varying as it will, once a part of this type is combined with it."""
    row = partial(lax.index_in_dim, index=0, keepdims=False)
    after = jax.eval_shape(lambda accumulator, part: combine(row(accumulator), part), accumulator, part)
    return as_varying(accumulator, tuple(varying_axes(after)))


def _combined(accumulator: jax.Array, i: Any, part: jax.Array, combine: Callable[[Any, Any], Any]) -> Any:
    """The accumulator with its i-th row combined with a part."""
    row = lax.dynamic_index_in_dim(accumulator, i, keepdims=False)
    return lax.dynamic_update_index_in_dim(accumulator, combine(row, part), i, 0)
