"""The program of a gradient, with accumulators in place of what its scans would stack.

XLA adds the result of an operation in place, but not that of a loop. The
backward pass of a `lax.scan` over layers stacks their gradients in an array of the parameters'
size, which the fold adds afterwards. So if a scan stacks an output of grad_fn, and nothing else
reads it, the program is evaluated with another scan, which carries the accumulator and combines
each layer's part with it: the same operations on the same numbers, without the array in between.
The result is a program of plain operations, which can be differentiated and batched.

Design note: docs/concepts/inside_scan_layers.md.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from funcga._fold.outputs import Outputs
from funcga._types import Dtype, Reduced, Tree
from funcga.tools.scan_layers import programs_in_jax as jaxprs
from jax_backend.arrays import as_varying, varying_axes
from jax_backend.loop import Into, Leaves, Traced, Weighed

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var


def folding(outputs: Outputs, traced: Traced, readings: Any) -> Callable[..., Leaves | None] | None:
    """Makes `fold(weigh, *operands)`, which runs a micro-batch like the traced one, and folds
    stacks of scans over layers layer by layer; None if there are none.

    With `readings` the first leaves are measures of the others. `weigh` makes a Weighed of the
    tally. `fold` returns None for operands of other types.
    """
    program, (value, tally_type) = traced.program, traced.types
    elementwise = {
        leaf_index
        for leaf_index, fold in outputs.reduced.items()
        if fold.fold.reducer.elementwise
        # A reducer may treat a leaf without axes, as a row would be here, in another way.
        and (not fold.fold.reducer.per_element or len(program.out_avals[leaf_index].shape) > 1)
    }
    stacked = [leaf_index for leaf_index in _stacks(program.jaxpr) if leaf_index in elementwise]
    # If structure or types differ, `outputs.leaves` raises the error, or reorders.
    if (
        not stacked
        or jax.tree.structure(value) != outputs.structure
        or any(
            (outputs.shapes[leaf_index], outputs.dtypes[leaf_index])
            != (program.out_avals[leaf_index].shape, program.out_avals[leaf_index].dtype)
            for leaf_index in stacked
        )
    ):
        return None
    paths, count = outputs.paths(), len(outputs.folds)
    of_tally = jax.tree.structure(tally_type)
    observed = () if readings is None else readings.indices

    def fold(weigh: Callable[[Tree], Weighed], *operands: Tree) -> Leaves | None:
        args = jax.tree.leaves(operands)
        # Threaded state may vary over mesh axes only after the first micro-batch: then the
        # program is another one.
        if any(
            varying_axes(variable.aval) != varying_axes(jax.typeof(arg))
            for variable, arg in zip(program.jaxpr.invars, args, strict=True)
        ):
            return None
        values: Values = {}

        # Where the first stack is made: a micro-batch is weighed before its gradient is computed.
        @cache
        def weighed() -> Weighed:
            tally = [
                jnp.asarray(_read(values, variable)) for variable in program.jaxpr.outvars[count:]
            ]
            return weigh(jax.tree.unflatten(of_tally, tally))

        def part_of(leaf_index: int) -> _Part:
            is_observed = leaf_index in observed
            into = lambda: weighed().into[leaf_index]
            return _Part(into, paths[leaf_index], readings if is_observed else None)

        parts = {leaf_index: part_of(leaf_index) for leaf_index in stacked}
        leaves = _evaluate(program.jaxpr, program.consts, args, parts, values)[:count]
        measures = {}
        for leaf_index in stacked:
            leaves[leaf_index], measures[leaf_index] = leaves[leaf_index]
        return leaves, weighed(), measures

    return fold


def folded_in_place(step: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> list[str]:
    """The leaves of grad_fn's output that a step folds layer by layer, inside of the scan that
    computes them.

    For all others such a scan makes an array of the leaf's size beside the accumulator. What no
    scan stacks is added in place by XLA, and is not named.

    Args:
        step: Of `accumulate` or `stream`, or any function that calls one, jitted or not. It is
            traced for these arguments, and nothing is run.
        *args: What the step is called with.
        **kwargs: What the step is called with by keyword.

    Returns:
        The paths of the leaves, such as "output[1]['layers']".

    Example:
        >>> def loss_fn(params, x):
        ...     h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
        ...     return jnp.mean(h**2)
        >>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), 4)
        >>> jax_backend.hlo.folded_in_place(step, {"layers": jnp.ones((6, 3, 3))}, jnp.ones((8, 3)))
        ["output[1]['layers']"]
    """
    jitted = step if hasattr(step, "trace") else jax.jit(step)
    # `_scan` marks its scans by named scopes.
    paths = chain.from_iterable(
        mark.split(_BETWEEN) for mark in _marks(jitted.trace(*args, **kwargs).jaxpr.jaxpr)
    )
    return list(dict.fromkeys(paths))


_MARK, _BETWEEN = re.compile("folded in place<(.*?)>"), "; "


def _marks(jaxpr: "Jaxpr") -> Iterator[str]:
    """The paths in named scopes of `_scan` in a program."""
    for equation in jaxprs.equations(jaxpr):
        if equation.primitive.name == "scan":
            yield from _MARK.findall(jaxprs.scope_of(equation))


# -- which outputs a scan stacks


class _Stack(NamedTuple):
    variable: "Var"  # what the scan stacks
    # the dtypes that it is cast to, in order, before it is an output
    casts: tuple[Dtype, ...]


def _stacks(jaxpr: "Jaxpr") -> dict[int, _Stack]:
    """The outputs of a program that a scan stacks, and nothing else reads, by output index."""
    # Effects, such as prints, would be reordered.
    if jaxprs.has_effects(jaxpr):
        return {}
    stacks: dict[Var, _Stack] = {}
    # How often each variable is read.
    operands = chain(jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns))
    reads = Counter(variable for variable in operands if not isinstance(variable, jaxprs.Literal))
    # In order, as stacks may be cast before they are outputs.
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("scan", "jit"):
            stacks |= {variable: _Stack(variable, ()) for variable in _stacked(equation)}
        elif equation.primitive.name == "convert_element_type":
            _note_cast(equation, reads, stacks)
    return {
        leaf_index: stacks[variable]
        for leaf_index, variable in enumerate(jaxpr.outvars)
        if not isinstance(variable, jaxprs.Literal) and reads[variable] == 1 and variable in stacks
    }


def _note_cast(equation: "JaxprEqn", reads: Mapping[Any, int], stacks: "dict[Any, _Stack]") -> None:
    """Records the cast of a stack, if nothing else reads the stack."""
    (operand,), (result,) = equation.invars, equation.outvars
    if reads[operand] == 1 and operand in stacks and not _reshards(equation):
        stack = stacks[operand]
        stacks[result] = stack._replace(casts=(*stack.casts, equation.params["new_dtype"]))


def _stacked(equation: "JaxprEqn") -> "list[Var]":
    """The results of a scan, or of a call of a jitted function, that are stacks of a scan."""
    if equation.primitive.name == "scan":
        return equation.outvars[_carried(equation) :] if _is_known(equation) else []
    if not jaxprs.is_inlineable(equation):
        return []
    return [equation.outvars[leaf_index] for leaf_index in _stacks(equation.params["jaxpr"].jaxpr)]


def _is_known(scan: "JaxprEqn") -> bool:
    """Whether it is a scan of arrays with parameters that `_scan` supports."""
    return (
        bool(scan.params["length"])
        and jaxprs.can_repeat(scan)
        and all(jaxprs.is_array_type(variable.aval) for variable in (*scan.invars, *scan.outvars))
        and scan.params.keys() <= jaxprs.SCAN_PARAMETERS
    )


def _carried(scan: "JaxprEqn") -> int:
    """The number of values that a scan carries; other outputs have one axis more than in its
    body.
    """
    return _of_body_shape(scan.outvars, scan.params["jaxpr"].jaxpr.outvars)


def _of_body_shape(outside: "Sequence[Var | Literal]", inside: "Sequence[Var | Literal]") -> int:
    """How many variables of a scan have as many axes as in its body."""
    pairs = zip(outside, inside, strict=True)
    return sum(
        cast("ShapedArray", a.aval).ndim == cast("ShapedArray", b.aval).ndim for a, b in pairs
    )


def _reshards(conversion: "JaxprEqn") -> bool:
    """Whether a cast also reshards; the gradient of a cast has the sharding of an empty mesh."""
    sharding = conversion.params.get("sharding")
    return sharding is not None and not (
        isinstance(sharding, NamedSharding) and sharding.mesh.empty
    )


# -- the program with accumulators in place of stacks


class _FoldedStack(NamedTuple):
    """In place of a stack that is folded: the new accumulator, and the measures of all layers."""

    accumulator: Tree
    measures: jax.Array


class _Part(NamedTuple):
    """What makes the Into for the layers of a stack, the path of its leaf, its Readings if it is
    observed, and its casts.
    """

    into: Callable[[], Into]
    path: str
    readings: Any = None
    casts: tuple[Dtype, ...] = ()

    def cast(self, value: jax.Array) -> jax.Array:
        """The value of a layer, as the output has it."""
        return reduce(lax.convert_element_type, self.casts, value)

    def combine(self, row: Reduced, value: jax.Array) -> Reduced:
        """A row of the accumulator with the value of a layer."""
        return self.into().combine(row, self.cast(value))

    def measure(self, value: jax.Array) -> jax.Array:
        """The measures of a layer, [measures]; empty if it is not observed."""
        if self.readings is None:
            return jnp.zeros(0)
        measures: jax.Array = self.readings.row(self.cast(value))
        return measures

    def begin(self, layer: "ShapedArray") -> _FoldedStack:
        """The accumulator and the measures before the first layer, which has this type. They
        vary over mesh axes as the layer does, as a carry keeps its type.
        """
        row = jax.tree.map(
            partial(lax.index_in_dim, index=0, keepdims=False), self.into().accumulator
        )
        measures = jax.eval_shape(self.measure, layer)
        # Not zeros_like, as a type may have mesh axes, without its mesh.
        before = _FoldedStack(self.into().accumulator, jnp.zeros(measures.shape, measures.dtype))
        after = _FoldedStack(jax.eval_shape(self.combine, row, layer), measures)
        begun: _FoldedStack = jax.tree.map(
            lambda array, like: as_varying(array, varying_axes(like)), before, after
        )
        return begun

    def fold_layer(
        self, before: _FoldedStack, layer_index: jax.Array, value: jax.Array
    ) -> _FoldedStack:
        """The accumulator and the measures after one more layer: the value is combined with its
        row, and its measures are added.
        """
        accumulator, measures = before
        row = jax.tree.map(
            lambda array: lax.dynamic_index_in_dim(array, layer_index, keepdims=False), accumulator
        )
        accumulator = jax.tree.map(
            lambda array, row: lax.dynamic_update_index_in_dim(array, row, layer_index, 0),
            accumulator,
            self.combine(row, value),
        )
        return _FoldedStack(accumulator, measures + self.measure(value))


def _evaluate(
    jaxpr: "Jaxpr",
    consts: Sequence[jax.Array],
    args: Sequence[jax.Array],
    into: Mapping[int, _Part],
    values: "Values",
) -> list[Tree]:
    """The outputs of a program; a _FoldedStack for those in `into`, which are stacks. `values` gets
    what its variables are.
    """
    values.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    stacks = _stacks(jaxpr) if into else {}
    parts = {
        stacks[leaf_index].variable: part._replace(casts=(*stacks[leaf_index].casts, *part.casts))
        for leaf_index, part in into.items()
    }
    # Operation by operation, except for those that make the stacks.
    for equation in jaxpr.eqns:
        operands = [_read(values, variable) for variable in equation.invars]
        inside = {
            output_index: parts[variable]
            for output_index, variable in enumerate(equation.outvars)
            if variable in parts
        }
        with jaxprs.context(equation), jaxprs.named_scope(equation):
            if any(isinstance(operand, _FoldedStack) for operand in operands):
                results = operands  # a cast, applied to each layer already
            elif not inside:
                results = jaxprs.repeated(equation, operands)
            elif equation.primitive.name == "scan":
                results = _scan(equation, operands, inside)
            else:  # a call of a jitted function, inlined
                inner, values_inside = equation.params["jaxpr"], dict[Any, Tree]()
                for variable, own in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
                    values[variable] = _Inside(values_inside, own)
                results = _evaluate(inner.jaxpr, inner.consts, operands, inside, values_inside)
        values.update(zip(equation.outvars, results, strict=True))
    return [_read(values, variable) for variable in jaxpr.outvars]


Values: TypeAlias = "dict[Var, Tree]"


class _Inside(NamedTuple):
    """In place of the result of a call that is being inlined: what it will be."""

    values: Values
    variable: Any


def _read(values: Values, variable: Any) -> Tree:
    is_literal = isinstance(variable, jaxprs.Literal)
    value = variable.val if is_literal else values[variable]
    return _read(*value) if isinstance(value, _Inside) else value


def _scan(scan: "JaxprEqn", operands: Sequence[jax.Array], into: Mapping[int, _Part]) -> list[Tree]:
    """The outputs of the scan, with a _FoldedStack in place of each stack in `into`."""
    body, length, carried = scan.params["jaxpr"], scan.params["length"], _carried(scan)
    run = jaxprs.jaxpr_as_fun(body)
    # Operands are constants, the carry, and scanned arrays, which have one axis more than in the
    # body.
    first_scanned = _of_body_shape(scan.invars, body.jaxpr.invars)
    consts, scanned = operands[: first_scanned - carried], operands[first_scanned:]
    init = operands[first_scanned - carried : first_scanned]

    # The new scan carries the accumulators, too, and stacks all other outputs as before.
    def step(carry: Tree, layer: Tree) -> tuple[Tree, Tree]:
        (before, accumulated), (layer_index, cut) = carry, layer
        outputs = run(*consts, *before, *cut)
        after, rest = outputs[:carried], dict(enumerate(outputs[carried:], carried))
        accumulated = {
            output_index: part.fold_layer(
                accumulated[output_index], layer_index, rest.pop(output_index)
            )
            for output_index, part in into.items()
        }
        return (after, accumulated), rest

    nothing = {
        output_index: part.begin(body.out_avals[output_index])
        for output_index, part in into.items()
    }
    layers = jnp.arange(length, dtype=jnp.int32), scanned
    options = {name: scan.params[name] for name in ("reverse", "unroll")}
    # Found by `folded_in_place`.
    with jax.named_scope(f"folded in place<{_BETWEEN.join(part.path for part in into.values())}>"):
        (after, accumulated), rest = lax.scan(step, (init, nothing), layers, length, **options)
    outputs = dict(enumerate(after)) | rest | accumulated
    return [outputs[output_index] for output_index in range(len(scan.outvars))]
