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
from functools import partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from funcga._fold.outputs import Outputs
from funcga._types import Dtype, Tree
from jax_backend import _private
from jax_backend.arrays import as_varying, varying_axes

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Combine: TypeAlias = Callable[[Tree, jax.Array], Tree]


class Into(NamedTuple):
    """An accumulator, and combine(accumulator, value): what it becomes."""

    accumulator: Tree
    combine: Combine


Gradient: TypeAlias = Callable[..., list[Tree]]
"""`gradient(into, *operands)`: the leaves that grad_fn returns for some operands.

`into` has an Into for some of them, in whose place stands what the accumulator becomes.
"""


def folded(into: Mapping[int, Into], leaves: Sequence[jax.Array]) -> list[Tree]:
    """The leaves, with what the accumulators become in the places of theirs."""
    return [
        into[leaf_index].combine(into[leaf_index].accumulator, leaf) if leaf_index in into else leaf
        for leaf_index, leaf in enumerate(leaves)
    ]


def in_place(gradient: Gradient, program: "ClosedJaxpr", outputs: Outputs) -> Gradient:
    """The gradient function with what scans over layers stack folded layer by layer; itself if there is nothing.

    `program` is what it computes; its operands are the leaves of those that the gradient function takes.
    """
    elementwise = {
        leaf_index
        for leaf_index, fold in zip(outputs.reduced, outputs.reduced_folds, strict=True)
        if fold.fold.reducer.elementwise
    }
    stacked = [leaf_index for leaf_index in _stacks(program.jaxpr) if leaf_index in elementwise]
    types = {leaf_index: program.out_avals[leaf_index] for leaf_index in stacked}
    if not stacked or any((outputs.shapes[k], outputs.dtypes[k]) != (t.shape, t.dtype) for k, t in types.items()):
        return gradient  # which has words for leaves that are unlike those before
    paths = outputs.paths

    def gradient_in_place(into: Mapping[int, Into], *operands: Tree) -> list[Tree]:
        args = jax.tree.leaves(operands)
        # A state that varies over mesh axes only after the first micro-batch is an operand of another program.
        pairs = zip(program.jaxpr.invars, args, strict=True)
        if any(varying_axes(v.aval) != varying_axes(jax.typeof(arg)) for v, arg in pairs):
            return gradient(into, *operands)
        parts = {leaf_index: _Part(*into[leaf_index], paths[leaf_index]) for leaf_index in stacked}
        leaves = _evaluate(program.jaxpr, program.consts, args, parts)
        return folded({leaf_index: into[leaf_index] for leaf_index in into if leaf_index not in parts}, leaves)

    return gradient_in_place


def folded_in_place(step: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> list[str]:
    """The leaves of grad_fn's output that a step folds layer by layer, inside of the scan that computes them.

    For all others such a scan makes an array of the leaf's size beside the accumulator. What no scan stacks is added in
    place by XLA, and is not named.

    Args:
        step: Of `accumulate` or `stream`, or any function that calls one, jitted or not. It is traced for these
            arguments, and nothing is run.
        *args: What the step is called with.
        **kwargs: What the step is called with by keyword.

    Returns:
        The paths of the leaves, such as "output[1]['layers']".

    Example:
        >>> jax_backend.folded_in_place(step, params, batch)
        ["output[1]['layers']"]
    """
    jitted = step if hasattr(step, "trace") else jax.jit(step)
    paths = chain.from_iterable(mark.split(_BETWEEN) for mark in _marks(jitted.trace(*args, **kwargs).jaxpr.jaxpr))
    return list(dict.fromkeys(paths))


_MARK, _BETWEEN = re.compile("folded in place<(.*?)>"), "; "


def _marks(jaxpr: "Jaxpr") -> Iterator[str]:
    """The names of scopes that `_scan` has left in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield from _MARK.findall(_private.scope_of(equation))
        for value in jax.tree.leaves(equation.params, is_leaf=_is_program):
            if hasattr(value, "eqns"):
                yield from _marks(value)
            elif hasattr(value, "jaxpr"):
                yield from _marks(value.jaxpr)


def _is_program(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


# -- which outputs a scan stacks


class _Stack(NamedTuple):
    variable: "Var"  # what the scan stacks
    casts: tuple[Dtype, ...]  # the dtypes that it is cast to, one after the other, until it is an output


def _stacks(jaxpr: "Jaxpr") -> dict[int, _Stack]:
    """For the outputs of a program that a scan stacks, and nothing else reads: what the scan stacks."""
    if _private.has_effects(jaxpr):
        return {}  # their order would change
    stacks: dict[Var, _Stack] = {}
    reads = Counter(
        v for v in chain(jaxpr.outvars, *(e.invars for e in jaxpr.eqns)) if not isinstance(v, _private.LITERAL)
    )
    for equation in jaxpr.eqns:
        match equation.primitive.name:
            case "scan" if _is_known(equation):
                stacks |= {v: _Stack(v, ()) for v in equation.outvars[_carried(equation) :]}
            case "jit" if _private.is_inlineable(equation):
                inner = equation.params["jaxpr"].jaxpr
                stacks |= {equation.outvars[k]: _Stack(equation.outvars[k], ()) for k in _stacks(inner)}
            case "convert_element_type" if not _reshards(equation):
                (operand,), (result,) = equation.invars, equation.outvars
                if reads[operand] == 1 and operand in stacks:
                    stack = stacks[operand]
                    stacks[result] = stack._replace(casts=(*stack.casts, equation.params["new_dtype"]))
    outputs = ((leaf_index, v) for leaf_index, v in enumerate(jaxpr.outvars) if not isinstance(v, _private.LITERAL))
    return {leaf_index: stacks[v] for leaf_index, v in outputs if reads[v] == 1 and v in stacks}


def _is_known(scan: "JaxprEqn") -> bool:
    """Whether it is a scan of arrays as `_scan` writes one."""
    return (
        bool(scan.params["length"])
        and _private.can_repeat(scan)
        and all(_private.is_array_type(v.aval) for v in (*scan.invars, *scan.outvars))
        and scan.params.keys() <= _private.SCAN_PARAMETERS
    )


def _carried(scan: "JaxprEqn") -> int:
    """The number of values that a scan carries; its other outputs have an axis more than those of its body."""
    return _of_body_shape(scan.outvars, scan.params["jaxpr"].jaxpr.outvars)


def _of_body_shape(outside: "Sequence[Var | Literal]", inside: "Sequence[Var | Literal]") -> int:
    """How many variables of a scan have the shape that they have in its body, where others have an axis less."""
    pairs = zip(outside, inside, strict=True)
    return sum(cast("ShapedArray", a.aval).ndim == cast("ShapedArray", b.aval).ndim for a, b in pairs)


def _reshards(conversion: "JaxprEqn") -> bool:
    """Whether a cast also asks for a sharding; the gradient of one names that of an empty mesh."""
    sharding = conversion.params.get("sharding")
    return sharding is not None and not (isinstance(sharding, NamedSharding) and sharding.mesh.empty)


# -- the program with accumulators in place of stacks


class _Part(NamedTuple):
    """An Into for each layer's part of a stack, and the path of the leaf that the stack is."""

    accumulator: jax.Array
    combine: Combine
    path: str


def _evaluate(
    jaxpr: "Jaxpr", consts: Sequence[jax.Array], args: Sequence[jax.Array], into: Mapping[int, _Part]
) -> list[jax.Array]:
    """The outputs of a program; for those that `into` has, which are of `_stacks`, what the accumulators become."""
    values: dict[Var, jax.Array] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> jax.Array:
        is_literal = isinstance(v, _private.LITERAL)
        return v.val if is_literal else values[v]

    stacks = _stacks(jaxpr) if into else {}
    parts = {
        stacks[leaf_index].variable: part._replace(combine=_after_casts(stacks[leaf_index].casts, part.combine))
        for leaf_index, part in into.items()
    }
    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        inside = {k: parts[v] for k, v in enumerate(equation.outvars) if v in parts}
        with _private.context(equation), _private.named_scope(equation):
            if not inside:
                results = _private.repeated(equation, operands)
            elif equation.primitive.name == "scan":
                results = _scan(equation, operands, inside)
            else:
                inner = equation.params["jaxpr"]
                results = _evaluate(inner.jaxpr, inner.consts, operands, inside)
        values.update(zip(equation.outvars, results, strict=True))
    return [
        values[stacks[leaf_index].variable] if leaf_index in into else read(v)
        for leaf_index, v in enumerate(jaxpr.outvars)
    ]


def _after_casts(casts: tuple[Dtype, ...], combine: Combine) -> Combine:
    return lambda accumulator, part: combine(accumulator, reduce(lax.convert_element_type, casts, part))


def _scan(scan: "JaxprEqn", operands: Sequence[jax.Array], into: Mapping[int, _Part]) -> list[jax.Array]:
    """The outputs of the scan, with accumulators in place of what it would stack."""
    body, length, carried = scan.params["jaxpr"], scan.params["length"], _carried(scan)
    assert _private.AS_FUNCTION is not None  # or no scan is known
    run = _private.AS_FUNCTION(body)
    # Operands are constants, what is carried, and what is scanned over, which has an axis more than in the body.
    first_scanned = _of_body_shape(scan.invars, body.jaxpr.invars)
    consts, scanned = operands[: first_scanned - carried], operands[first_scanned:]
    init = operands[first_scanned - carried : first_scanned]

    def step(carry: Tree, layer: Tree) -> tuple[Tree, Tree]:
        before, accumulators = carry
        layer_index, cut = layer
        outputs = run(*consts, *before, *cut)
        after, rest = outputs[:carried], dict(enumerate(outputs[carried:], carried))
        pairs = zip(into.items(), accumulators, strict=True)
        added = [_combined(accumulator, layer_index, rest.pop(k), part.combine) for (k, part), accumulator in pairs]
        return (after, added), rest

    accumulators = [_marked_as_combined(part, body.out_avals[k]) for k, part in into.items()]
    layers = jnp.arange(length, dtype=jnp.int32), scanned
    options = {name: scan.params[name] for name in ("reverse", "unroll")}
    with jax.named_scope(f"folded in place<{_BETWEEN.join(part.path for part in into.values())}>"):
        (after, added), rest = lax.scan(step, (init, accumulators), layers, length, **options)
    outputs = dict(enumerate(after)) | rest | dict(zip(into, added, strict=True))
    return [outputs[k] for k in range(len(scan.outvars))]


def _marked_as_combined(part: _Part, layer: "ShapedArray") -> jax.Array:
    """The accumulator marked as varying as it will, once a layer of this type is combined with it."""
    row = partial(lax.index_in_dim, index=0, keepdims=False)
    after = jax.eval_shape(lambda accumulator, value: part.combine(row(accumulator), value), part.accumulator, layer)
    return as_varying(part.accumulator, varying_axes(after))


def _combined(accumulator: jax.Array, layer_index: jax.Array, value: jax.Array, combine: Combine) -> jax.Array:
    """The accumulator with one of its rows combined with a value."""
    row = lax.dynamic_index_in_dim(accumulator, layer_index, keepdims=False)
    combined: jax.Array = lax.dynamic_update_index_in_dim(accumulator, combine(row, value), layer_index, 0)
    return combined
