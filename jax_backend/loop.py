"""The loop over the micro-batches: a scan over those of one size, which carries the accumulators.

`accumulate` scans over the micro-batches of each size, all in one program; `stream` runs a program
for each. Both trace `_evaluate`, begin with `_initial`, fold a micro-batch by `MicroStep.add`,
merge over replicas in `_merged`, and normalise in `_finished`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold import LEAST32, MOST32, LeafFold, Tally, addends, check_narrow
from funcga._fold.accumulator import unit_of
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction
from funcga._types import Args, GradFn, Kwargs, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import arrays, sharding, trees
from jax_backend._private import is_tracing
from jax_backend.merge import Folded, merge
from jax_backend.replicas import Replicas, merging_over, varying
from jax_backend.sharding import Spread
from jax_backend.trees import Compiled, Static, inlined, partition, split

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.extend.core import ClosedJaxpr

State: TypeAlias = list[jax.Array]
Result: TypeAlias = tuple[Tree, list[jax.Array]]
"""The result of a step, and conditions for it to be lost, which the host does not see yet."""

# -- accumulate: a window in one program


def accumulate(program: Program, backend: Backend) -> Callable[[Args, Kwargs], Tree]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""
    step = program.memory.keep(Compiled, partial(accumulated, program, backend), True)
    return lambda args, kwargs: step(
        (sharding.spread_of_call(program, args, backend),), args, kwargs
    )


def accumulated(
    program: Program, backend: Backend, spread: Spread, args: Args, kwargs: Kwargs
) -> Result:
    """The result of the fold over a batch, traced."""
    outputs, folded, _ = fold_batch(program, backend, spread, args, kwargs)
    return _finished(program, outputs, folded, kwargs)


def fold_batch(
    program: Program, backend: Backend, spread: Spread, args: Args, kwargs: Kwargs
) -> tuple[Outputs, Folded, Spread]:
    """The folds over a batch before they are normalised, and the Spread that was used."""
    with merging_over(program.across) as replicas:
        if replicas is not None:
            args, kwargs = varying((args, kwargs), replicas)
        arguments = program.read(args, backend)
        rows = arguments.rows()
        sizes = program.split.groups(rows)
        narrow = None
        if spread.blocks > 1:
            narrow = sharding.narrowing(spread.blocks, sizes)
        # A number of rows is a weight: a Python number, which XLA fuses with the addition.
        weights = [jnp.asarray(size) if is_symbolic_dim(size) else size for _, size in sizes]

        def trace(size: int, state: State) -> Traced:
            call = program, arguments, kwargs, size, narrow
            # jit, so that grad_fn is traced once for both the shapes and the loop; inline, so that
            # no call remains. No partial, of whose arguments jit makes a text.
            run = jax.jit(lambda start, state: _evaluate(*call, start, state), inline=True)
            return Traced(run, *jax.make_jaxpr(run, return_shape=True)(jnp.int32(0), state))

        state, first, size = [*map(arrays.without_weak_type, arguments.state)], 0, sizes[0][1]
        traced = trace(size, state)
        outputs, _ = program.bind(traced.types[0], arguments)
        # The outputs show whether micro-batches may take other rows.
        if narrow is not None and not sharding.may_reorder_rows(outputs, size):
            narrow, spread = None, replace(spread, blocks=1)
            traced = trace(size, state)
        unit = None
        if program.weight is not None or program.skip is not None:  # so counted in the loop
            total = tally_of(0, steps=0)
        else:
            total = tally_of(rows, sum(count for count, _ in sizes))
            # With equal rows as the unit each micro-batch weighs 1, so that XLA adds every gradient
            # in place. Else a power of 2, by which division is exact.
            unit = weights[0] * 1.0 if len(sizes) == 1 else 2.0 ** (size.bit_length() - 1)
        folded, chunks = _initial(outputs, spread, traced, state, total, program.skip), []
        # One or two sizes, and a scan for each.
        for (count, size), weight in zip(sizes, weights, strict=True):
            traced = trace(size, folded.state) if first else traced
            step = _micro_step(program, arguments, outputs, traced, weight, unit)
            starts = first + size * jnp.arange(count, dtype=jnp.int32)
            folded, collected = _scan(step, folded, traced.program, starts)
            chunks.append(collected)
            first += count * size
        if narrow is not None:
            chunks = [sharding.in_order(outputs, spread.blocks, sizes, chunks)]
        if spread.arguments:
            folded = spread.pinned(outputs, folded)
        return outputs, _merged(outputs, replicas, folded, chunks, unit), spread


def _scan(
    step: "MicroStep", folded: Folded, program: "ClosedJaxpr", starts: jax.Array
) -> tuple[Folded, list[jax.Array]]:
    """What is folded after the micro-batches that begin at these rows, and the collected leaves;
    `program` is that of grad_fn.
    """
    # A carry has to keep its type, which sharded or varying operands may change. Not without a
    # mesh.
    types = (*program.in_avals, *map(jax.typeof, program.consts), *program.out_avals)
    if not (
        jax.sharding.get_abstract_mesh().empty and all(aval.sharding.mesh.empty for aval in types)
    ):
        folded, _ = arrays.settle_types(lambda folded: step.add(folded, starts[0]), folded)
    folded, collected = lax.scan(step.add, folded, starts)
    pairs = zip(step.outputs.collected.values(), collected, strict=True)
    return folded, [sharding.concatenated(stacked, fold.axis or 0) for fold, stacked in pairs]


# -- a micro-batch


def _evaluate(
    program: Program,
    arguments: Arguments,
    kwargs: Kwargs,
    size: int | None,
    narrow: Callable[..., jax.Array] | None,
    start: Scalar,
    state: State,
) -> tuple[Tree, Tally | None]:
    """The output of grad_fn for `size` rows from row `start` on, or for all, and its tally unless
    that is known. Where it is watched, the output is (placeholders for what is measured, output).
    """
    args, backend = arguments.cut(start, size, state, narrow or arrays.slice), arguments.backend
    tally, remake, grad_fn = None, None, program.grad_fn
    # Each micro-batch weighs its rows, unless some may be left out.
    if size is None or program.weight is not None or program.skip is not None:
        weight = program.weigh(arguments, args, size)
        if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
            check_narrow(weight)
        tally = tally_of(weight)
        is_seen = isinstance(weight, int | float)
        if program.weight is not None and not is_seen and program.weighs_all(backend):
            remake = partial(_constant_if_weightless, tally.total)
    # This also copies containers into the running trace, to which an object of nnx belongs.
    leaves, structure = jax.tree.flatten((args, kwargs))
    args, kwargs = jax.tree.unflatten(structure, map(remake, leaves) if remake else leaves)
    whole = [arg for arg, part in zip(args, arguments.parts, strict=True) if not part.axes]
    # Those of other libraries work unchanged.
    if isinstance(grad_fn, GradientFunction):
        grad_fn = grad_fn.bound(backend)
    checks = trees.nnx()
    with checks.check_unchanged((whole, kwargs)) if checks else nullcontext():
        value = grad_fn(*args, **kwargs)
    if program.readings is not None:
        readings = program.readings(value, arguments)
        value = readings.placeholders(jnp.zeros(())), value
    return value, tally


def _constant_if_weightless(weight: jax.Array, leaf: Tree) -> Tree:
    """A leaf of the arguments, constant if the weight is 0: then a micro-batch adds nothing, and
    the derivative of a NaN would be NaN.
    """
    if not is_float(leaf):
        return leaf
    return jnp.where(weight != 0, leaf, lax.stop_gradient(leaf))


def is_float(leaf: Tree) -> bool:
    """Whether it is a float or complex array."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


class Traced(NamedTuple):
    """A micro-batch as a function `run` of its first row and of threaded state, which is traced
    once: its program, and the types of its value and of its tally.
    """

    run: Callable[..., tuple[Tree, Tally | None]]
    program: "ClosedJaxpr"
    types: tuple[Tree, Tally | None]


# -- the fold of a micro-batch


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
        return self.fold.fold.reducer.monoid.combine(
            jnp, before, self.fold.lift(value, self.weight)
        )


class Weighed(NamedTuple):
    """A micro-batch weighed: where each reduced leaf is added, by leaf index, and the tally of the
    window after it.
    """

    into: dict[int, Into]
    total: Tally


Leaves: TypeAlias = tuple[list[Tree], Weighed, dict[int, jax.Array]]
"""The leaves of grad_fn's output, with the new accumulator in place of each that is folded in
place; what they weigh; and the measures of those that are folded in place, by leaf index.
"""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """How one more micro-batch is folded. `in_scans` is of the tool for scans over layers, if there
    are any; `skip` of one that may leave it out. `rows`, `unit`: the weight and its unit in means,
    if they are known before the loop.
    """

    outputs: Outputs
    run: Callable[..., tuple[Tree, Tally | None]]
    in_scans: Callable[..., Leaves | None] | None
    readings: Any
    skip: Any
    rows: Scalar
    unit: Scalar

    def add(self, before: Folded, start: Scalar) -> tuple[Folded, list[jax.Array]]:
        """What is folded after one more micro-batch, and its collected leaves."""
        outputs, weigh, found = self.outputs, partial(self._weigh, before), None
        if self.in_scans is not None:
            found = self.in_scans(weigh, start, before.state)
        if found is None:
            value, own = self.run(start, before.state)
            found = outputs.leaves(value, "a later micro-batch"), weigh(own), {}
        leaves, weighed, in_place = found
        if self.readings is not None:
            # The weight of a mean is in its unit, but of that only whether it is 0 counts.
            leaves[: outputs.before] = self.readings.leaves_for(
                leaves, weighed.into[0].weight, in_place
            )
        values = [*leaves]
        for leaf_index, addend in weighed.into.items():
            if leaf_index not in in_place:
                leaves[leaf_index] = addend.combine(addend.accumulator, leaves[leaf_index])
        after = before._replace(
            reduced=[leaves[leaf_index] for leaf_index in outputs.reduced],
            total=weighed.total,
            state=[leaves[leaf_index] for leaf_index in outputs.threads],
        )
        collected = [leaves[leaf_index] for leaf_index in outputs.collected]
        if self.skip is None:
            return after, collected
        assert own is not None
        result: tuple[Folded, list[jax.Array]] = self.skip.in_jax.kept(
            self.skip, outputs, values, own.total, before, after, collected
        )
        return result

    def _weigh(self, before: Folded, own: Tally | None) -> Weighed:
        outputs, total, factor = self.outputs, before.total, None
        if own is None:
            folds = outputs.reduced.values()
            weights = [self.rows / self.unit if fold.is_mean else self.rows for fold in folds]
        else:
            total = total.merge(own)
            # The unit follows the total, so that no sum is much larger than its mean.
            unit = unit_of(total.total, arrays)
            factor = unit_of(before.total.total, arrays) / unit
            weights = [tally.total for tally in tallies_of(outputs, own, unit)]
        triples = zip(outputs.reduced.items(), before.reduced, weights, strict=True)
        into = {
            leaf_index: Into(accumulator, fold, weight, factor if fold.is_mean else None)
            for (leaf_index, fold), accumulator, weight in triples
        }
        return Weighed(into, total)


def _micro_step(
    program: Program,
    arguments: Arguments,
    outputs: Outputs,
    traced: Traced,
    rows: Scalar = None,
    unit: Scalar = None,
) -> MicroStep:
    """The MicroStep for micro-batches like the traced one."""
    readings = None
    if program.readings is not None:
        readings = program.readings(traced.types[0][1], arguments)
    in_scans = None
    # What may be left out is tested as a whole before any of it is folded.
    if program.skip is None and {"scan", "jit"} & {
        each.primitive.name for each in traced.program.jaxpr.eqns
    }:
        with suppress(ImportError):  # the tool may be missing, or names of JAX that it needs
            tool = import_module("funcga.tools.scan_layers.in_jax")
            in_scans = tool.folding(outputs, traced, readings)
    return MicroStep(outputs, traced.run, in_scans, readings, program.skip, rows, unit)


# -- the beginning and the end of a window


def _initial(
    outputs: Outputs, spread: Spread, traced: Traced, state: State, total: Tally, skip: Any
) -> Folded:
    """What is folded before the first micro-batch, if it is like the traced one. The `total` is
    nothing, or what is known of all.
    """
    identities = []
    for leaf_index, fold in outputs.reduced.items():
        aval: ShapedArray = traced.program.out_avals[leaf_index]
        if aval.sharding.mesh.empty:
            identities.append(fold.identity(aval))
            continue
        # Sharded and varying alike.
        typed = lambda part, aval=aval: (
            arrays.typed(part, aval) if part.shape == aval.shape else part
        )
        identities.append(jax.tree.map(typed, fold.identity(arrays.zeros(aval))))
    folded = Folded(identities, total, state)
    if skip is not None:
        folded = skip.in_jax.begun(folded, skip)
    if spread.arguments:
        folded = spread.pinned(outputs, folded)
    return folded


def _merged(
    outputs: Outputs,
    replicas: Replicas | None,
    folded: Folded,
    chunks: Sequence[Sequence[jax.Array]],
    unit: Scalar,
) -> Folded:
    """The folds merged over all replicas, before they are normalised; `unit`: that of the weights
    in means, if it is not the one of the total.
    """
    if unit is None:
        unit = unit_of(folded.total.total, arrays)
    # Collected values are cast here, if the fold has a dtype of its own.
    collected = [
        jnp.concatenate(arrays.with_common_sharding(column), axis=fold.axis or 0).astype(
            fold.result_dtype
        )
        for fold, column in zip(outputs.collected.values(), zip(*chunks, strict=True), strict=True)
    ]
    folded = folded._replace(collected=collected, unit=unit)
    return folded if replicas is None else merge(outputs, folded, replicas)


def normalised(outputs: Outputs, folded: Folded) -> tuple[list[Tree], list[Tally]]:
    """(the reduced leaves, normalised; the tally of each)."""
    tallies = tallies_of(outputs, folded.total, folded.unit)
    triples = zip(outputs.reduced.values(), folded.reduced, tallies, strict=True)
    return [fold.normalize(leaf, tally) for fold, leaf, tally in triples], tallies


def _finished(program: Program, outputs: Outputs, folded: Folded, kwargs: Kwargs) -> Result:
    """What was folded, normalised, in the structure of grad_fn's output."""
    parts = normalised(outputs, folded)[0], folded.collected, folded.state
    if program.skip is not None:
        parts = program.skip.in_jax.unless_rejected(outputs, folded, *parts)
    result = outputs.join(*parts)
    if program.completed is not None:
        result = program.completed(outputs.backend, result, kwargs)
    # Raises FuncgaError, which names the leaf, for a result that is lost where the host sees it.
    lost: list[jax.Array] = []
    for (leaf_index, fold), reduced in zip(outputs.reduced.items(), folded.reduced, strict=True):
        if fold.fold.normalizer.lost:
            path = lambda leaf_index=leaf_index: outputs.paths()[leaf_index]
            lost += fold.check_known(reduced, folded.total, path)
    return result, lost


def tally_of(weight: Scalar, steps: int = 1) -> Tally:
    """The Tally of micro-batches that weigh this much together, in the widest type that counts."""
    is_wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    return Tally(addends(weight, is_wide, arrays), jnp.asarray(steps, dtype=jnp.int32))


def tallies_of(outputs: Outputs, total: Tally, unit: Scalar) -> list[Tally]:
    """A tally for each leaf that is reduced: in this unit for a mean; NaN if a float32 cannot hold
    it, as 0 would be wrong.
    """
    of_kind: dict[tuple[bool, int], Tally] = {}  # one for each kind of leaf
    for fold in outputs.reduced.values():
        kind = fold.is_mean, fold.bits
        if kind in of_kind:
            continue
        weight = total.total / unit if fold.is_mean else total.total
        if fold.bits == 32:  # a program in float64 has no float32 in it
            # The range in which a float32 and its reciprocal are normal numbers.
            fits = (weight == 0) | ((weight >= LEAST32) & (weight <= MOST32))
            weight = jnp.where(fits, weight, jnp.full_like(weight, jnp.nan)).astype(jnp.float32)
        of_kind[kind] = Tally((weight,), total.steps)
    return [of_kind[fold.is_mean, fold.bits] for fold in outputs.reduced.values()]


# -- stream: a program for each micro-batch


def stream(program: Program, backend: Backend) -> Callable[..., Tree]:
    """f(leading, microbatches, kwargs, device): the fold of the program over an iterable of
    micro-batches, moved to the device if there is one, each while the one before it is computed
    with.
    """
    # Nothing is cached inside of a trace, as it may close over its tracers.
    if is_tracing():
        return _Stream(program, backend).fold
    return program.memory.keep(_Stream, program, backend).fold


class _Stream:
    """Cached by a step of `stream`: its programs. One begins a window, one adds a micro-batch, and
    one finishes.
    """

    def __init__(self, program: Program, backend: Backend):
        self.program, self.backend = program, backend
        # Traced once for both the shapes and the steps.
        self.run = inlined(self._run)
        # keep_unused, as its devices are those of its arguments.
        self.begin = Compiled(self._begin, keep_unused=True)
        self.add = jax.jit(self._add, static_argnums=0, donate_argnums=1)
        self.finish = Compiled(self._finish, is_checked=True)

    def fold(
        self,
        leading: Args,
        microbatches: Iterator[Args],
        kwargs: Kwargs,
        device: object = None,
    ) -> Tree:
        """The fold over the micro-batches; each is released once it is folded."""
        with merging_over(self.program.across) as replicas:
            if device is not None:
                microbatches = _moved(microbatches, device)
            if replicas is not None:
                leading, kwargs = varying((leading, kwargs), replicas)
                microbatches = map(partial(varying, replicas=replicas), microbatches)
            # Arguments passed whole are split once. Micro-batches of one shape share a program.
            whole, arrays_whole = split((leading, kwargs))
            add = self._add if is_tracing() else self.add
            folded: Folded | None = None
            chunks = []
            for item in microbatches:
                if folded is None:
                    spread = sharding.spread_of((*leading, *item))
                    folded, bound = self.begin((spread,), leading, kwargs, item)
                cut, arrays_cut = split(item)
                settings = bound.outputs, spread, whole, cut
                folded, collected = add(settings, folded, arrays_whole, arrays_cut)
                if collected:  # empty lists would make a program for every number of micro-batches
                    chunks.append(collected)
                del item, arrays_cut, collected  # so that only one micro-batch is in memory
            # With across= only this replica's stream may be empty.
            if folded is None:
                raise FuncgaError(
                    "the stream is empty: there is no micro-batch to fold, and so no structure to "
                    "return. Check the loader, or that a generator was not used up before."
                )
            if self.program.completed is None:
                kwargs = {}  # not needed by finish
            return self.finish((bound.outputs, replicas), folded, chunks, kwargs)

    def _begin(self, spread: Spread, *call: Tree) -> "tuple[Folded, Bound]":
        arguments = self._arguments(call)
        # Copied, as the carry is donated to each step, and the caller keeps the state that came in.
        state = [jnp.array(arrays.without_weak_type(leaf), copy=True) for leaf in arguments.state]
        traced, nothing = self._traced(call, state), tally_of(0, steps=0)
        outputs, _ = self.program.bind(traced.types[0], arguments)
        folded = _initial(outputs, spread, traced, state, nothing, self.program.skip)
        return folded, Bound(outputs)

    def _add(
        self,
        settings: tuple[Outputs, Spread, Static, Static],
        folded: Folded,
        arrays_whole: Sequence[jax.Array],
        arrays_cut: Sequence[jax.Array],
    ) -> tuple[Folded, list[jax.Array]]:
        outputs, spread, whole, cut = settings
        call = (*whole.tree(arrays_whole), cut.tree(arrays_cut))
        traced = self._traced(call, folded.state)
        step = _micro_step(self.program, self._arguments(call), outputs, traced)
        folded, collected = step.add(folded, None)
        if spread.arguments:
            folded = spread.pinned(outputs, folded)
        return folded, collected

    def _finish(
        self, outputs: Outputs, replicas: Replicas | None, folded: Folded, chunks: Any, kwargs: Any
    ) -> Result:
        folded = _merged(outputs, replicas, folded, chunks, None)
        return _finished(self.program, outputs, folded, kwargs)

    # A call is (leading arguments, keyword arguments, the item of the iterable).

    def _arguments(self, call: Args) -> Arguments:
        leading, _, item = call
        return self.program.read((*leading, *item), self.backend)

    def _run(self, call: Args, state: State) -> tuple[Tree, Tally | None]:
        arguments, (_, kwargs, _) = self._arguments(call), call
        return _evaluate(self.program, arguments, kwargs, None, None, 0, state)

    def _traced(self, call: Args, state: State) -> Traced:
        run = lambda start, state: self.run(call, state)
        return Traced(run, *jax.make_jaxpr(run, return_shape=True)(None, state))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Bound:
    """The Outputs as a result of a compiled program, which keeps them."""

    outputs: Outputs


def _moved(items: Iterator[Args], device: object) -> Iterator[Args]:
    """The items of a stream with their arrays on a device, each copied while the one before it is
    computed with.
    """
    to = arrays.device_of(device)

    def put(item: Args) -> Args:
        static, leaves = partition(item)
        placed: Args = static.tree([jax.device_put(leaf, to) for leaf in leaves])
        return placed

    return map(put, items)  # a generator's frame would keep a reference to its last item


# -- the rest of the protocol


def alone(grad_fn: GradientFunction, backend: Backend) -> GradFn:
    """The gradient function for a call outside of any window."""
    return grad_fn.bound(backend)


def telling(programs: Sequence[Program], backend: Backend) -> AbstractContextManager[object] | None:
    """The context of a call that folds these programs one after the other, in which other
    processes are told of an error; None if they are folded by one process, or one program.
    """
    return None
