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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from funcga._fold.outputs import Outputs
from funcga._types import Dtype, Tree, TreeFn
from funcga.tools.scan_layers import programs_in_jax as jaxprs
from jax_backend.arrays import manual_axes, settle_types, varying_axes
from jax_backend.loop import Into, Leaves, Traced, Weighed

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

Values: TypeAlias = "dict[Var, Tree]"


def folding(outputs: Outputs, traced: Traced, readings: Any) -> Callable[..., Leaves | None] | None:
    """Makes `fold(weigh, *operands)`, which runs a micro-batch like the traced one, and folds
    stacks of scans over layers layer by layer; None if there are none.

    With `readings` the first leaves are measures of the others. `weigh` makes a Weighed of the
    tally. `fold` returns None for operands of other types.
    """
    program, (value, tally_type) = traced.program, traced.types
    avals, count = program.out_avals, len(outputs.folds)
    # If structure or types differ, `outputs.leaves` raises the error, or reorders.
    is_alike = jax.tree.structure(value) == outputs.structure and all(
        (avals[leaf_index].shape, avals[leaf_index].dtype)
        == (outputs.shapes[leaf_index], outputs.dtypes[leaf_index])
        for leaf_index in outputs.reduced
    )
    folds = outputs.reduced if is_alike else {}
    reducers = {leaf_index: fold.fold.reducer for leaf_index, fold in folds.items()}
    stacked = [
        leaf_index
        for leaf_index in _stacks(program.jaxpr)
        if leaf_index in reducers
        and reducers[leaf_index].elementwise
        # A reducer may treat a leaf without axes, as a row would be here, in another way.
        and (not reducers[leaf_index].per_element or avals[leaf_index].ndim > 1)
    ]
    if not stacked:
        return None
    paths, of_tally = outputs.paths(), jax.tree.structure(tally_type)
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
            tally = [jnp.asarray(_read(values, each)) for each in program.jaxpr.outvars[count:]]
            return weigh(jax.tree.unflatten(of_tally, tally))

        parts = {
            leaf_index: _Part(
                lambda leaf_index=leaf_index: weighed().into[leaf_index],  # type: ignore[misc]
                paths[leaf_index],
                readings if leaf_index in observed else None,
            )
            for leaf_index in stacked
        }
        leaves = _evaluate(program.jaxpr, program.consts, args, parts, values)[:count]
        measures = {}
        for leaf_index in stacked:
            leaves[leaf_index], measures[leaf_index] = leaves[leaf_index]
        return leaves, weighed(), measures

    return fold


def folded_in_place(step: TreeFn, *args: Tree, **kwargs: Tree) -> list[str]:
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
    casts: tuple[Dtype, ...] = ()


def _stacks(jaxpr: "Jaxpr") -> dict[int, _Stack]:
    """The outputs of a program that a scan stacks, and nothing else reads, by output index."""
    # Effects, such as prints, would be reordered.
    if jaxprs.has_effects(jaxpr):
        return {}
    stacks: dict[Any, _Stack] = {}
    # How often each variable is read.
    operands = chain(jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns))
    reads = Counter(variable for variable in operands if not isinstance(variable, jaxprs.Literal))
    # In order, as stacks may be cast before they are outputs.
    for equation in jaxpr.eqns:
        stacks |= {variable: _Stack(variable) for variable in _stacked(equation)}
        if equation.primitive.name == "convert_element_type" and not _reshards(equation):
            operand: Any = equation.invars[0]
            if reads[operand] == 1 and operand in stacks:
                stack = stacks[operand]
                casts = *stack.casts, equation.params["new_dtype"]
                stacks[equation.outvars[0]] = stack._replace(casts=casts)
    return {
        leaf_index: stacks[variable]
        for leaf_index, variable in enumerate(jaxpr.outvars)
        if not isinstance(variable, jaxprs.Literal) and reads[variable] == 1 and variable in stacks
    }


def _stacked(equation: "JaxprEqn") -> "list[Var]":
    """The results of a scan, or of a call of a jitted function, that are stacks of a scan."""
    name, results = equation.primitive.name, equation.outvars
    if name == "scan" and _is_known(equation):
        return results[_unscanned(equation, "outvars") :]
    if name == "jit" and jaxprs.is_inlineable(equation):
        return [results[index] for index in _stacks(equation.params["jaxpr"].jaxpr)]
    return []


def _is_known(scan: "JaxprEqn") -> bool:
    """Whether it is a scan of arrays with parameters that `_scan` supports."""
    return (
        bool(scan.params["length"])
        and jaxprs.can_repeat(scan)
        and all(jaxprs.is_array_type(variable.aval) for variable in (*scan.invars, *scan.outvars))
        and scan.params.keys() <= jaxprs.SCAN_PARAMETERS
    )


def _unscanned(scan: "JaxprEqn", kind: str) -> int:
    """How many "invars" of a scan are constants and the carry, or how many "outvars" the carry;
    all others have one axis more than in its body.
    """
    pairs = zip(getattr(scan, kind), getattr(scan.params["jaxpr"].jaxpr, kind), strict=True)
    return sum(outside.aval.ndim == inside.aval.ndim for outside, inside in pairs)


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

    def begin(self) -> _FoldedStack:
        """The accumulator and the measures before the first layer."""
        measures, readings = jnp.zeros(0), self.readings
        if readings is not None:
            count = len(readings.measures)
            measures = jnp.zeros((count,) if count > 1 else (), readings.dtype)
        return _FoldedStack(self.into().accumulator, measures)

    def fold_layer(
        self, before: _FoldedStack, layer_index: jax.Array, value: jax.Array
    ) -> _FoldedStack:
        """The accumulator and the measures after one more layer: the value is combined with its
        row, and its measures are added.
        """
        accumulator, measures = before
        value = reduce(lax.convert_element_type, self.casts, value)  # as the output has it
        take = partial(lax.dynamic_index_in_dim, index=layer_index, keepdims=False)
        row = self.into().combine(jax.tree.map(take, accumulator), value)
        put = partial(lax.dynamic_update_index_in_dim, index=layer_index, axis=0)
        if self.readings is not None:
            measures = measures + self.readings.row(value)
        return _FoldedStack(jax.tree.map(put, accumulator, row), measures)


def _evaluate(
    jaxpr: "Jaxpr",
    consts: Sequence[jax.Array],
    args: Sequence[jax.Array],
    into: Mapping[int, _Part],
    values: Values,
) -> list[Tree]:
    """The outputs of a program; a _FoldedStack for those in `into`, which are stacks. `values` gets
    what its variables are.
    """
    values.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    stacks = _stacks(jaxpr)
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
                inner = equation.params["jaxpr"]
                results = _evaluate(inner.jaxpr, inner.consts, operands, inside, {})
        values.update(zip(equation.outvars, results, strict=True))
    return [_read(values, variable) for variable in jaxpr.outvars]


def _read(values: Values, variable: Any) -> Tree:
    return variable.val if isinstance(variable, jaxprs.Literal) else values[variable]


def _scan(scan: "JaxprEqn", operands: Sequence[jax.Array], into: Mapping[int, _Part]) -> list[Tree]:
    """The outputs of the scan, with a _FoldedStack in place of each stack in `into`."""
    run, length = jaxprs.jaxpr_as_fun(scan.params["jaxpr"]), scan.params["length"]
    # Operands are constants, the carry, and scanned arrays.
    carried, first_scanned = _unscanned(scan, "outvars"), _unscanned(scan, "invars")
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

    carry: Tree = init, {output_index: part.begin() for output_index, part in into.items()}
    layers = jnp.arange(length, dtype=jnp.int32), scanned
    if manual_axes():  # an accumulator varies over mesh axes as its layers do
        first = jax.tree.map(lambda array: array[0], layers)
        carry, _ = settle_types(lambda carry: step(carry, first)[0], carry)
    options = {name: scan.params[name] for name in ("reverse", "unroll")}
    # Found by `folded_in_place`.
    with jax.named_scope(f"folded in place<{_BETWEEN.join(part.path for part in into.values())}>"):
        (after, accumulated), rest = lax.scan(step, carry, layers, length, **options)
    outputs = dict(enumerate(after)) | rest | accumulated
    return [outputs[output_index] for output_index in range(len(scan.outvars))]
