"""The loop over the micro-batches: a scan over those of one size, which carries the accumulators.

A `_Microbatch` is evaluated and weighed, and `_add` folds it into the `Carry`. `accumulate` scans
over the micro-batches of each size, all in one program; `stream` runs a program for each. Both
begin with `_begin`, merge over replicas in `_merged`, and normalise in `_result`.
"""

import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call import Program
from funcga._call.arguments import Arguments, argument_names, groups
from funcga._call.dropping import DroppingStep
from funcga._call.totals import OVERFLOWN
from funcga._fold import LEAST32, MOST32, LeafFold, Tally, check_narrow
from funcga._fold.accumulator import unit_of
from funcga._fold.outputs import Outputs, as_leaf, leaf_path
from funcga._grad import GradientFunction, bound
from funcga._observe.readings import Readings
from funcga._types import GradFn, R, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, sharding, trees
from jax_backend._private import is_tracing
from jax_backend.merge import Dropped, Folded, check_unmixed, merge
from jax_backend.replicas import (
    REPLICATED,
    Replicas,
    names_leaves,
    read_across,
    replicas_of,
    requiring_across,
    varying,
)
from jax_backend.sharding import Spread
from jax_backend.trees import Static, partition, split

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.extend.core import ClosedJaxpr

Args: TypeAlias = tuple[Tree, ...]
Kwargs: TypeAlias = dict[str, Tree]

# -- calls outside of jit are compiled


class Numbers:
    """The Python numbers among the arguments that a step was called with, of which each makes a
    program of its own.
    """

    def __init__(self, grad_fn: GradFn):
        self.grad_fn = grad_fn
        self.seen: dict[tuple[Hashable, int], set[object]] = {}

    def note(self, static: Static, args: Args, kwargs: Kwargs) -> None:
        """Warns, once, of an argument that has had five values; `static` is of (args, kwargs)."""
        for leaf_index, kind, leaf in static.others:
            if not isinstance(leaf, int | float | complex) or isinstance(leaf, bool):
                continue
            seen = self.seen.setdefault((static.structure, leaf_index), set())
            count = len(seen)
            if count < _MOST_PROGRAMS:
                seen.add(kind if isinstance(kind, tuple) else leaf)
            if count < len(seen) == _MOST_PROGRAMS:
                path = self._paths(args, kwargs)[leaf_index]
                warnings.warn(
                    f"`{path}` was {_MOST_PROGRAMS} different numbers, and each has compiled the "
                    "step anew: outside of jit a Python number is part of the program. Pass an "
                    f"array, jnp.asarray({path}), or call the step inside of jax.jit.",
                    stacklevel=_outside(),
                )

    def _paths(self, args: Args, kwargs: Kwargs) -> list[str]:
        named = [*zip(argument_names(self.grad_fn, len(args)), args, strict=True)]
        named += sorted(kwargs.items())
        return [path for name, arg in named for path in leaf_paths(arg, trees, name)]


# How many programs are compiled for the values of one number before a warning.
_MOST_PROGRAMS = 5


def _outside() -> int:
    """The stacklevel of the call of funcga, for a warning of the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    return level


_PACKAGES = ("funcga", "jax_backend")


def jitted(
    function: Callable[..., Tree],
    *,
    inline: bool = False,
    keep_unused: bool = False,
    numbers: Numbers | None = None,
) -> Callable[..., Tree]:
    """`f(settings, *args)`: `function(*settings, *args)`, jitted. Settings are static. In args,
    arrays are traced and all else is static. Raises FuncgaError for an argument that is neither
    an array nor hashable. `numbers`: those among args, which are (args, kwargs).
    """

    def run(settings: tuple[Hashable, ...], static: Static, arrays: Sequence[jax.Array]) -> Tree:
        return function(*settings, *static.tree(arrays))

    of_arrays = jax.jit(run, static_argnums=(0, 1), inline=inline, keep_unused=keep_unused)

    def call(settings: tuple[Hashable, ...], *args: Tree) -> Tree:
        static, leaves = split(args)
        result = of_arrays(settings, static, leaves)
        if numbers is not None and static.others:
            numbers.note(static, *args)
        return result

    return call


def compiled(
    function: Callable[..., Tree],
    *,
    keep_unused: bool = False,
    is_exact: bool = False,
    numbers: Numbers | None = None,
) -> Callable[..., Tree]:
    """The function, jitted for calls outside of any trace, and unchanged inside of jit, vmap,
    grad or shard_map. With `is_exact`, `function` takes a list `lost` as its last argument, and
    appends bool arrays that are True if a sum was beyond its range.
    """
    outside = (
        _checked(function, numbers)
        if is_exact
        else jitted(function, keep_unused=keep_unused, numbers=numbers)
    )
    return lambda settings, *args: (
        function(*settings, *args) if is_tracing() else outside(settings, *args)
    )


def _checked(function: Callable[..., Tree], numbers: Numbers | None) -> Callable[..., Tree]:
    """The function, jitted; raises FuncgaError if the host sees that the result is lost."""

    def checking(*args: Tree) -> tuple[Tree, list[jax.Array]]:
        lost: list[jax.Array] = []
        return function(*args, lost), lost

    run = jitted(checking, numbers=numbers)

    def outside(settings: tuple[Hashable, ...], *args: Tree) -> Tree:
        result, lost = run(settings, *args)
        # The host does not wait for an accelerator. The same call without jit raises, with the
        # path of the leaf.
        if any(arrays.scalar(is_lost) is True for is_lost in lost):
            function(*settings, *args, [])
        return result

    return outside


def _over_replicas(fold: Callable[..., R], program: Program, *operands: Tree) -> R:
    """`fold(replicas, *operands)`, with the replicas of `across=`; the operands are marked as
    differing between them.
    """
    if program.across is None and REPLICATED.get() is None:
        return fold(None, *operands)
    # Read outside of the context, in which a fold inside of grad_fn needs no across=.
    replicas = replicas_of(program.across)
    program.check_one_group(replicas)
    with requiring_across(()):
        return fold(replicas, *varying(operands, replicas))


# -- shared by accumulate and stream: a micro-batch, and a step of the fold


@dataclass(frozen=True, eq=False)
class _Microbatch:
    """One micro-batch, as functions of its first row and of threaded state."""

    program: Program
    arguments: Arguments
    kwargs: Kwargs
    size: int | None = None  # None: it has all rows
    narrow: Callable[..., jax.Array] | None = None

    def evaluate(
        self, start: Scalar, state: list[jax.Array], weight: jax.Array | None = None
    ) -> Tree:
        """The output of grad_fn; with observers, (placeholders for what they fold, output).
        `weight` is given if a micro-batch of weight 0 adds nothing.
        """
        args = self.arguments.cut(start, self.size, state, self.narrow)
        remake = lambda leaf: leaf
        if weight is not None:
            remake = partial(_constant_if_weightless, weight)
        # tree.map also copies containers into the running trace, to which an object of nnx
        # belongs.
        args, kwargs = jax.tree.map(remake, (args, self.kwargs))
        whole = [arg for arg, part in zip(args, self.arguments.parts, strict=True) if not part.axes]
        with trees.check_unchanged((whole, kwargs)):
            value = self.program.grad_fn(*args, **kwargs)
        # Checked here, as the error of jit would not mention funcga.
        for leaf_index, leaf in enumerate(jax.tree.leaves(value)):
            if not isinstance(leaf, jax.Array):
                trees.check_registered(leaf, "output")
                backend = self.arguments.backend
                as_leaf(leaf, partial(leaf_path, value, leaf_index, backend), backend)
        if self.program.observers is None:
            return value
        return self.program.readings(value, self.arguments).placeholders(jnp.zeros(())), value

    def weigh(self, start: Scalar, state: list[jax.Array]) -> "Weighed":
        """Its tally, and the weight that `evaluate` takes."""
        args = self.arguments.cut(start, self.size, state, self.narrow)
        size: Any = self.size
        rows: Any = jnp.asarray(size) if is_symbolic_dim(size) else size
        program = self.program
        weight = program.weigh(self.arguments, args, rows)
        if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
            check_narrow(weight)
        tally, is_seen = arrays.tally(weight), isinstance(weight, int | float)
        weighs_all = program.weight is not None and program.weighs_all(self.arguments.backend)
        return Weighed(tally, tally.total if weighs_all and not is_seen else None)


class Weighed(NamedTuple):
    """The tally of a micro-batch; its weight, if it is not known at trace time and a micro-batch
    of weight 0 adds nothing.
    """

    tally: Tally
    weight: jax.Array | None


def _like_weight(
    weigh: Callable[..., Weighed], start: Scalar, state: list[jax.Array]
) -> jax.Array | None:
    """Zero, in the type of the weight that `weigh` says; None if it says none."""
    # Not of eval_shape, whose type may vary over mesh axes, without their mesh.
    types = jax.make_jaxpr(lambda *args: weigh(*args).weight)(start, state).out_avals
    return arrays.zeros(types[0]) if types else None


def _constant_if_weightless(weight: jax.Array, leaf: Tree) -> Tree:
    """A leaf of the arguments, constant if the weight is 0: the derivative of a NaN would be
    NaN.
    """
    if not is_float(leaf):
        return leaf
    return jnp.where(weight != 0, leaf, lax.stop_gradient(leaf))


def is_float(leaf: Tree) -> bool:
    """Whether it is a float or complex array."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _differentiable_if_kept(
    evaluate: Callable[..., Tree], keeps: Callable[[Tree], jax.Array]
) -> Callable[..., Tree]:
    """`evaluate`, with a derivative only where its value is kept: that of a NaN would be NaN,
    even times 0.
    """
    as_function = _private.AS_FUNCTION
    if as_function is None:
        return evaluate

    def value_of(*operands: Tree) -> Tree:
        program, types = jax.make_jaxpr(evaluate, return_shape=True)(*operands)
        structure, count = jax.tree.structure(types), len(program.consts)

        @jax.custom_jvp
        def run(*leaves: jax.Array) -> Tree:
            closed = program.replace(consts=leaves[:count])
            return jax.tree.unflatten(structure, as_function(closed)(*leaves[count:]))

        @run.defjvp
        def _(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
            value, derivative = jax.linearize(run.fun, *primals)
            keep = keeps(value)
            # On both sides, for forward and reverse mode.
            only = partial(
                jax.tree.map, lambda leaf: jnp.where(keep, leaf, 0) if is_float(leaf) else leaf
            )
            return value, only(derivative(*only(tangents)))

        # With all that it depends on as arguments, as custom_jvp requires.
        return run(*program.consts, *jax.tree.leaves(operands))

    return value_of


class Carry(NamedTuple):
    """What a loop carries: the accumulators, their tally, and threaded state; with drop="window"
    also what was dropped.
    """

    reduced: list[Tree]
    total: Tally
    state: list[jax.Array]
    dropped: Dropped | None = None


class Into(NamedTuple):
    """An accumulator, and the fold that a value of this weight is added to it by. Before that it
    is multiplied by the factor, if there is one.
    """

    accumulator: Tree
    fold: LeafFold
    weight: Scalar
    factor: Scalar = None

    def combine(self, before: Reduced, value: jax.Array) -> Reduced:
        """The accumulator, or a row of it, with a value."""
        if self.factor is not None:
            before = jax.tree.map(lambda part: part * self.factor.astype(part.dtype), before)
        return self.fold.combine(before, self.fold.lift(value, self.weight))


class _Step(NamedTuple):
    """How one more micro-batch is folded.

    `weights` has one for each reduced leaf, if they are known before the loop. `in_scans`: as the
    tool for scans over layers makes it, if it is installed and there are any.
    """

    outputs: Outputs
    evaluate: Callable[..., Tree]
    in_scans: Callable[..., "tuple[list[Tree], dict[int, jax.Array]] | None"] | None
    readings: Readings | None
    weigh: Callable[..., Weighed]
    weights: list[Scalar] | None = None
    dropping: DroppingStep | None = None


def _step(
    microbatch: _Microbatch,
    outputs: Outputs,
    weigh: Callable[..., Weighed],
    evaluate: Callable[..., Tree],
    traced: "ClosedJaxpr",
    value: Tree,
    weight: Scalar = None,
    unit: float = 1.0,
) -> _Step:
    """The step for micro-batches that `evaluate` and `weigh` compute; `traced` is the program of
    `evaluate`. `weight`: if it is known before the loop, with the `unit` of those of means.
    """
    program, dropping = microbatch.program, microbatch.program.dropping
    if program.weight is not None and names_leaves(program.across):
        check_unmixed(outputs, traced, read_across(program.across))
    readings = (
        None if program.observers is None else program.readings(value[1], microbatch.arguments)
    )
    if dropping is not None:
        evaluate = _differentiable_if_kept(evaluate, partial(_is_kept, outputs, dropping))
    in_scans = None
    # If some may be dropped, all leaves are tested before one is folded.
    if dropping is None:
        with suppress(ModuleNotFoundError):  # the tool may be missing
            tool = import_module("funcga.tools.scan_layers.in_jax")
            in_scans = tool.folding(outputs, traced, value, readings)
    weights = None
    if weight is not None:
        weights = [weight / unit if fold.is_mean else weight for fold in outputs.reduced_folds]
    return _Step(outputs, evaluate, in_scans, readings, weigh, weights, dropping)


def _is_kept(outputs: Outputs, dropping: DroppingStep, value: Tree) -> jax.Array:
    """Whether a micro-batch with this value, of weight above 0, is folded."""
    leaves = outputs.leaves(value, "a later micro-batch")
    return jnp.asarray(dropping.keeps(outputs, dropping.tested(outputs), leaves, 1.0))


def _add(step: _Step, carry: Carry, start: Scalar) -> tuple[Carry, list[jax.Array]]:
    """The carry after one more micro-batch, and its collected leaves."""
    outputs, dropping, total, weights = step.outputs, step.dropping, carry.total, step.weights
    weight, factor = None, None
    if weights is None:
        # Before the gradient, as scans over layers fold in place, with the weight.
        counted, weight = step.weigh(start, carry.state)
        total = total.merge(counted)
        # The unit follows the total, so that no sum is much larger than its mean.
        unit = unit_of(total.total, arrays)
        factor = unit_of(carry.total.total, arrays) / unit
        weights = [of_leaf.total for of_leaf in _tallies(outputs, counted, unit)]
    into = {
        leaf_index: Into(before, fold, weight, factor if fold.is_mean else None)
        for leaf_index, fold, before, weight in zip(
            outputs.reduced, outputs.reduced_folds, carry.reduced, weights, strict=True
        )
    }
    operands = (start, carry.state, weight)
    folded = None if step.in_scans is None else step.in_scans(into, *operands)
    if folded is None:
        folded = outputs.leaves(step.evaluate(*operands), "a later micro-batch"), {}
    leaves, measured = folded
    if step.readings is not None:
        # The first leaf has the counts, whose fold gets the weight unscaled.
        rows = [
            measured[leaf_index]
            if leaf_index in measured
            else step.readings.measures_of([leaves[leaf_index]])[0]
            for leaf_index in step.readings.leaf_indices
        ]
        observed = step.readings.leaves_for(jnp.stack(rows), into[0].weight)
        leaves = [*observed, *leaves[len(observed) :]]
    keep: jax.Array | None = None
    if dropping is not None:
        keep = jnp.asarray(dropping.keeps(outputs, dropping.tested(outputs), leaves, counted.total))
    for leaf_index, part in into.items():
        if leaf_index not in measured:
            leaves[leaf_index] = part.combine(part.accumulator, leaves[leaf_index])
    reduced, state, collected = (
        [leaves[leaf_index] for leaf_index in leaf_indices]
        for leaf_indices in (outputs.reduced, outputs.threads, outputs.collected)
    )
    after = Carry(reduced, total, state)
    if keep is None:
        return after, collected
    # Selected, as 0 * NaN is NaN. Only observers collect here.
    after = jax.tree.map(partial(jnp.where, keep), after, carry._replace(dropped=None))
    collected = [jnp.where(keep, leaf, jnp.nan) for leaf in collected]
    if carry.dropped is None:
        return after, collected
    rejected = carry.dropped.rejected + (~keep).astype(jnp.int32)
    return after._replace(dropped=carry.dropped._replace(rejected=rejected)), collected


def _tallies(outputs: Outputs, total: Tally, unit: Scalar) -> list[Tally]:
    """A tally for each leaf that is reduced."""
    of_kind = cache(partial(tally_of, total, unit))  # one for each kind of leaf
    return [of_kind(fold.is_mean, fold.is_narrow) for fold in outputs.reduced_folds]


def tally_of(total: Tally, unit: Scalar, is_mean: bool, is_narrow: bool) -> Tally:
    """The tally for a fold: in this unit for a mean; NaN if a float32 cannot hold it, as 0 would
    be wrong.
    """
    weight = total.total / unit if is_mean else total.total
    if not is_narrow:  # a program in float64 has no float32 in it
        return Tally((weight,), total.steps)
    # The range in which a float32 and its reciprocal are normal numbers.
    fits = (weight == 0) | ((weight >= LEAST32) & (weight <= MOST32))
    narrowed = jnp.where(fits, weight, jnp.full_like(weight, jnp.nan)).astype(jnp.float32)
    return Tally((narrowed,), total.steps)


def _identity(fold: LeafFold, aval: "ShapedArray") -> Reduced:
    """The identity of a fold for leaves of this type, sharded and varying alike."""
    reduced = fold.identity(arrays.zeros(aval))
    if aval.sharding.mesh.empty:
        return reduced
    return jax.tree.map(
        lambda part: arrays.typed(part, aval) if part.shape == aval.shape else part, reduced
    )


def _begin(
    outputs: Outputs,
    spread: Spread,
    types: "Sequence[ShapedArray]",
    state: list[jax.Array],
    dropping: DroppingStep | None,
) -> Carry:
    """The carry before the first micro-batch, if grad_fn returns leaves of these types."""
    pairs = zip(outputs.reduced, outputs.reduced_folds, strict=True)
    identities = [_identity(fold, types[leaf_index]) for leaf_index, fold in pairs]
    dropped = None
    if dropping is not None and dropping.scope == "window":
        # Copied, as what is carried may be donated.
        dropped = Dropped(jnp.int32(0), [jnp.array(leaf, copy=True) for leaf in state])
    carry: Carry = spread.pinned(
        outputs, Carry(identities, arrays.tally(0, steps=0), state, dropped)
    )
    return carry


def _merged(
    outputs: Outputs,
    replicas: Replicas | None,
    carry: Carry,
    chunks: Sequence[Sequence[jax.Array]],
    unit: Scalar,
) -> Folded:
    """The folds merged over all replicas, before they are normalised."""
    # Collected values are cast here, if the fold has a dtype of its own.
    collected = [
        jnp.concatenate(arrays.with_common_sharding(column), axis=fold.axis or 0).astype(
            fold.result_dtype
        )
        for fold, column in zip(outputs.collected_folds, zip(*chunks, strict=True), strict=True)
    ]
    own = Folded(carry.reduced, carry.total, carry.state, collected, carry.dropped, unit)
    return own if replicas is None else merge(outputs, own, replicas)


def _result(program: Program, outputs: Outputs, folded: Folded, kwargs: Kwargs) -> Tree:
    """The result of a step: what was folded, normalised, in the structure of grad_fn's output."""
    tallies = _tallies(outputs, folded.total, folded.unit)
    triples = zip(outputs.reduced_folds, folded.reduced, tallies, strict=True)
    normalised = [fold.normalize(leaf, of_leaf) for fold, leaf, of_leaf in triples]
    state, collected = folded.state, folded.collected
    if folded.dropped is not None:
        is_whole = folded.dropped.rejected == 0
        normalised = jax.tree.map(
            lambda leaf: jnp.where(is_whole, leaf, jnp.zeros_like(leaf)), normalised
        )
        state = jax.tree.map(partial(jnp.where, is_whole), state, folded.dropped.state)
        collected = [jnp.where(is_whole, leaf, jnp.nan) for leaf in collected]
    result = outputs.join(normalised, collected, state)
    if program.observers is not None:
        result = program.observed(result, kwargs)
    return result if program.totals is None else nan_if_overflown(result, kwargs["totals"])


def _check_known(outputs: Outputs, folded: Folded, lost: list[jax.Array]) -> None:
    """Raises FuncgaError, which names the leaf, if the host sees that a result is lost; appends
    the conditions that it does not see.
    """
    unseen: list[jax.Array] = []
    for leaf_index, fold, reduced in zip(
        outputs.reduced, outputs.reduced_folds, folded.reduced, strict=True
    ):
        path = lambda leaf_index=leaf_index: outputs.paths()[leaf_index]
        unseen += fold.check_known(reduced, folded.total, path)
    if unseen:
        lost.append(jnp.any(jnp.stack(unseen)))


def nan_if_overflown(result: Tree, totals: Tree) -> Tree:
    """The result, with NaN for every float if a total does not fit in its integers."""
    counts = [total for total in jax.tree.leaves(totals) if total.dtype == np.int32]
    if not counts:
        return result
    fits = jnp.all(jnp.stack(counts) != OVERFLOWN)
    return jax.tree.map(
        lambda leaf: jnp.where(fits, leaf, jnp.nan) if is_float(leaf) else leaf, result
    )


# -- accumulate


def accumulate(program: Program, backend: Backend) -> Callable[[Args, Kwargs], Tree]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""
    fold = program.memory.keep(Accumulate, program, backend).fold
    return lambda args, kwargs: fold(
        (sharding.spread_of_call(program, args, backend),), args, kwargs
    )


class Accumulate:
    """Cached by a step of `accumulate`: its jitted fold."""

    def __init__(self, program: Program, backend: Backend):
        self.program, self.backend = bound(program, backend), backend
        numbers = Numbers(program.grad_fn)
        self.fold = compiled(self.traced, is_exact=program.is_exact, numbers=numbers)

    def traced(
        self, spread: Spread, args: Args, kwargs: Kwargs, lost: list[jax.Array] | None = None
    ) -> Tree:
        """The fold, traced."""
        kwargs = with_totals(self.program, self.backend, spread, args, kwargs)
        outputs, folded, _ = self.folded(spread, args, kwargs)
        if lost is not None:
            _check_known(outputs, folded, lost)
        return _result(self.program, outputs, folded, kwargs)

    def folded(self, spread: Spread, args: Args, kwargs: Kwargs) -> tuple[Outputs, Folded, Spread]:
        """The folds before they are normalised, and the Spread that was used."""
        return _over_replicas(partial(self._fold, spread), self.program, args, kwargs)

    def _fold(
        self, spread: Spread, replicas: Replicas | None, args: Args, kwargs: Kwargs
    ) -> tuple[Outputs, Folded, Spread]:
        program = self.program
        trees.check_unshared((args, kwargs))
        arguments = program.read(args, self.backend)
        rows = arguments.rows()
        if is_symbolic_dim(rows):
            _check_divides(rows, program)
        sizes = groups(rows, program.n, program.microbatch_size)
        narrow = _narrow(spread, sizes)
        # Rows are known before the loop, unless some may be dropped.
        is_known = (program.weight, program.dropping) == (None, None)
        carry: Carry | None = None
        chunks: list[list[jax.Array]] = []
        unit: Scalar = None
        first = 0
        for count, size in sizes:  # one or two sizes, and a scan for each
            microbatch = _Microbatch(program, arguments, kwargs, size, narrow)
            weight: Scalar = None
            if is_known:
                # As a Python number, which XLA fuses with the addition.
                weight = jnp.asarray(size) if is_symbolic_dim(size) else size
            # jit, so that grad_fn is traced once for both the shapes and the loop; inline, so
            # that no call remains.
            evaluate = jax.jit(microbatch.evaluate, inline=True)
            weigh = jax.jit(microbatch.weigh, inline=True)
            state = (
                [*map(arrays.without_weak_type, arguments.state)] if carry is None else carry.state
            )
            amount = None if is_known else _like_weight(weigh, jnp.int32(0), state)
            traced, value = jax.make_jaxpr(evaluate, return_shape=True)(jnp.int32(0), state, amount)
            if carry is None:
                outputs, _ = program.bind(value, arguments)
                # The outputs show whether micro-batches may take other rows.
                if narrow is not None and not sharding.may_reorder_rows(outputs, size):
                    return self._fold(replace(spread, blocks=1), replicas, args, kwargs)
                if is_known:
                    # With equal rows as the unit each micro-batch weighs 1, so that XLA adds every
                    # gradient in place. Else a power of 2, by which division is exact.
                    unit = weight * 1.0 if len(sizes) == 1 else 2.0 ** (size.bit_length() - 1)
                carry = _begin(outputs, spread, traced.out_avals, state, program.dropping)
            step = _step(microbatch, outputs, weigh, evaluate, traced, value, weight, unit)
            carry, collected = _scan(step, carry, traced, first, count, size)
            chunks.append(collected)
            first += count * size
        assert carry is not None  # as a batch has rows
        if narrow is not None:
            chunks = [sharding.in_order(outputs, spread.blocks, sizes, chunks)]
        carry = spread.pinned(outputs, carry)
        unit = unit if is_known else unit_of(carry.total.total, arrays)
        return outputs, _merged(outputs, replicas, carry, chunks, unit), spread


def with_totals(
    program: Program, backend: Backend, spread: Spread, args: Args, kwargs: Kwargs
) -> Kwargs:
    """The keyword arguments of grad_fn, with the totals of the window if there are any."""
    if program.totals is None:
        return kwargs
    counting = Accumulate(program.counting(backend), backend)
    return {**kwargs, "totals": counting.traced(spread, args, {})}


def _narrow(spread: Spread, sizes: Sequence[tuple[int, int]]) -> Callable[..., jax.Array] | None:
    """Slices equally many rows of each block, so that no row moves to another device; None if
    rows are sliced as usual.
    """
    if spread.blocks > 1 and all(size % spread.blocks == 0 for _, size in sizes):
        return partial(sharding.rows_of_blocks, spread.blocks)
    return None


def _check_divides(rows: Scalar, program: Program) -> None:
    """Raises FuncgaError for a symbolic number of rows that may not divide."""
    divisor = program.n or program.microbatch_size
    if not rows % divisor == 0:
        raise FuncgaError(
            f"the batch has a symbolic number of rows, `{rows}`, of which it is not known that "
            f"{divisor} divides it. "
            f'Export the program for rows that it does: jax.export.symbolic_shape("{divisor}*b").'
        )


def _scan(
    step: _Step, carry: Carry, traced: "ClosedJaxpr", first: int, count: int, size: int
) -> tuple[Carry, list[jax.Array]]:
    """The carry after `count` micro-batches of `size` rows from row `first` on, and the
    collected leaves.
    """
    body = partial(_add, step)
    starts = first + size * jnp.arange(count, dtype=jnp.int32)
    # A carry has to keep its type, which sharded or varying operands may change. Not without a
    # mesh.
    types = (*traced.in_avals, *map(jax.typeof, traced.consts), *traced.out_avals)
    if not (
        jax.sharding.get_abstract_mesh().empty and all(aval.sharding.mesh.empty for aval in types)
    ):
        carry, _ = arrays.settle_types(lambda carry: body(carry, starts[0]), carry)
    carry, collected = lax.scan(body, carry, starts)
    if step.weights is not None:  # known before the loop, so not counted in it
        carry = carry._replace(total=carry.total.merge(arrays.tally(count * size, count)))
    pairs = zip(step.outputs.collected_folds, collected, strict=True)
    return carry, [sharding.concatenated(stacked, fold.axis or 0) for fold, stacked in pairs]


# -- stream


def stream(program: Program, backend: Backend) -> Callable[[Args, Iterator[Args], Kwargs], Tree]:
    """f(leading, microbatches, kwargs): the fold of the program over an iterable of
    micro-batches.
    """
    # Nothing is cached inside of a trace, as it may close over its tracers.
    return (
        _Stream(program, backend)
        if is_tracing()
        else program.memory.keep(_Stream, program, backend)
    ).fold


class _Stream:
    """Cached by a step of `stream`: its programs, and the Outputs for each type of micro-batch.
    One program begins a carry, one adds a micro-batch, and one finishes.
    """

    def __init__(self, program: Program, backend: Backend):
        self.program, self.backend = bound(program, backend), backend
        self.outputs: dict[object, tuple[Outputs, tuple[ShapedArray, ...]]] = {}
        self.numbers = Numbers(program.grad_fn)
        # Traced once for both the shapes and the steps.
        self.evaluate = jitted(self._evaluate, inline=True)
        self.weigh = jitted(self._weigh, inline=True)
        # keep_unused, as its devices are those of its arguments.
        self.begin = compiled(self._begin, keep_unused=True)
        self.add = jax.jit(self._add, static_argnums=(0, 1, 2, 3), donate_argnums=4)
        self.finish = compiled(self._finish, is_exact=program.is_exact)

    def fold(self, leading: Args, microbatches: Iterator[Args], kwargs: Kwargs) -> Tree:
        """The fold over the micro-batches; each is released once it is folded."""
        return _over_replicas(partial(self._fold, microbatches), self.program, leading, kwargs)

    def _fold(
        self, microbatches: Iterator[Args], replicas: Replicas | None, leading: Args, kwargs: Kwargs
    ) -> Tree:
        outputs: Outputs | None = None
        chunks = []
        device = None if self.program.device is None else arrays.device(self.program.device)
        if device is not None and self.program.totals is not None:
            kwargs = {**kwargs, "totals": _moved(kwargs["totals"], device)}
        # Arguments passed whole are split once. Micro-batches of one shape share a program.
        whole, arrays_whole = split((leading, kwargs))
        add = self._add if is_tracing() else self.add
        for item in microbatches:
            if device is not None:
                item = _moved(item, device)  # the copy runs while the last step does
            item = varying(item, replicas)
            if outputs is None:
                outputs, types = self._outputs_of(leading, kwargs, item)
                spread = sharding.spread_of((*leading, *item))
                carry = self.begin((outputs, types, spread), leading, kwargs, item)
            cut, arrays_cut = split(item)
            carry, collected = add(outputs, spread, whole, cut, carry, arrays_whole, arrays_cut)
            if collected:  # empty lists would make a program for every number of micro-batches
                chunks.append(collected)
            if not is_tracing() and (whole.others or cut.others):
                args = (*leading, *item)
                self.numbers.note(split((args, kwargs))[0], args, kwargs)
            del item, arrays_cut, collected  # so that only one micro-batch is in memory
        # With across= only this replica's stream may be empty.
        if outputs is None:
            raise FuncgaError(
                "the stream is empty: there is no micro-batch to fold, and so no structure to "
                "return. Check the loader, or that a generator was not used up before."
            )
        if self.program.observers is None and self.program.totals is None:
            kwargs = {}  # not needed by finish
        return self.finish((outputs, replicas), carry, chunks, kwargs)

    def _finish(
        self,
        outputs: Outputs,
        replicas: Replicas | None,
        carry: Carry,
        chunks: Sequence[Sequence[jax.Array]],
        kwargs: Kwargs,
        lost: list[jax.Array] | None = None,
    ) -> Tree:
        unit = unit_of(carry.total.total, arrays)
        folded = _merged(outputs, replicas, carry, chunks, unit)
        if lost is not None:
            _check_known(outputs, folded, lost)
        return _result(self.program, outputs, folded, kwargs)

    def _outputs_of(
        self, leading: Args, kwargs: Kwargs, item: Args
    ) -> "tuple[Outputs, tuple[ShapedArray, ...]]":
        """The Outputs of micro-batches like this one, and the types of their leaves; cached by
        the types of the arguments.
        """
        static, of_item = split((leading, kwargs, item))
        config: Any = jax.config
        key = (
            static,
            *map(jax.typeof, of_item),
            config.jax_enable_x64,
            config.jax_numpy_dtype_promotion,
            jax.sharding.get_abstract_mesh(),
        )
        if key not in self.outputs:
            arguments = self._microbatch(leading, kwargs, item).arguments
            state = [*map(arrays.without_weak_type, arguments.state)]

            # Only arrays are operands; all else is static.
            def evaluate(of_item: Sequence[jax.Array]) -> Tree:
                args = static.tree(of_item)
                return self.evaluate((), *args, state, self.weigh((), *args, state).weight)

            traced, value = jax.make_jaxpr(evaluate, return_shape=True)(of_item)
            outputs, _ = self.program.bind(value, arguments)
            self.outputs[key] = outputs, tuple(traced.out_avals)
        return self.outputs[key]

    def _microbatch(self, leading: Args, kwargs: Kwargs, item: Args) -> _Microbatch:
        return _Microbatch(self.program, self.program.read((*leading, *item), self.backend), kwargs)

    def _evaluate(
        self,
        leading: Args,
        kwargs: Kwargs,
        item: Args,
        state: list[jax.Array],
        weight: jax.Array | None,
    ) -> Tree:
        return self._microbatch(leading, kwargs, item).evaluate(0, state, weight)

    def _weigh(self, leading: Args, kwargs: Kwargs, item: Args, state: list[jax.Array]) -> Weighed:
        return self._microbatch(leading, kwargs, item).weigh(0, state)

    def _begin(
        self,
        outputs: Outputs,
        types: "tuple[ShapedArray, ...]",
        spread: Spread,
        leading: Args,
        kwargs: Kwargs,
        item: Args,
    ) -> Carry:
        microbatch = self._microbatch(leading, kwargs, item)
        # Copied, as the carry is donated to each step, and the caller keeps the state that came in.
        state = [
            jnp.array(arrays.without_weak_type(leaf), copy=True)
            for leaf in microbatch.arguments.state
        ]
        return _begin(outputs, spread, types, state, self.program.dropping)

    def _add(
        self,
        outputs: Outputs,
        spread: Spread,
        whole: Static,
        cut: Static,
        carry: Carry,
        arrays_whole: Sequence[jax.Array],
        arrays_cut: Sequence[jax.Array],
    ) -> tuple[Carry, list[jax.Array]]:
        (leading, kwargs), item = whole.tree(arrays_whole), cut.tree(arrays_cut)

        def evaluate(start: None, state: list[jax.Array], weight: jax.Array | None) -> Tree:
            return self.evaluate((), leading, kwargs, item, state, weight)

        def weigh(start: None, state: list[jax.Array]) -> Weighed:
            weighed: Weighed = self.weigh((), leading, kwargs, item, state)
            return weighed

        amount = _like_weight(weigh, None, carry.state)
        traced, value = jax.make_jaxpr(evaluate, return_shape=True)(None, carry.state, amount)
        microbatch = self._microbatch(leading, kwargs, item)
        step = _step(microbatch, outputs, weigh, evaluate, traced, value)
        carry, collected = _add(step, carry, None)
        return spread.pinned(outputs, carry), collected


def _moved(tree: Tree, device: jax.Device | jax.sharding.Sharding) -> Tree:
    static, arrays = partition(tree)
    return static.tree([jax.device_put(array, device) for array in arrays])


# -- the rest of the protocol


def alone(grad_fn: GradientFunction, backend: Backend) -> GradFn:
    """The gradient function for a call outside of any window."""
    return grad_fn.bound(backend)


def telling(programs: Sequence[Program], backend: Backend) -> AbstractContextManager[object] | None:
    """The context of a call that folds these programs one after the other, in which other
    processes are told of an error; None if they are folded by one process, or one program.
    """
    return None


def is_traced(tree: Tree) -> bool:
    """Whether these arguments belong to a program that is being compiled."""
    return is_tracing()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out."""
    ran_out = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return ran_out or isinstance(error, MemoryError)
