"""The loop over the micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from funcga._backend.protocols import Backend
from funcga._call.arguments import Arguments, groups
from funcga._call.program import Program
from funcga._fold import tally
from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs, as_leaf, leaf_path
from funcga._fold.weight import LEAST32, MOST32, check_narrow
from funcga._grad import bound
from funcga.errors import FuncgaError
from jax_backend import accumulators, arrays, compilation, dlpack, nnx, trees
from jax_backend import scan_layers as stacked
from jax_backend import sharded_rows as blocks
from jax_backend.accumulators import Places
from jax_backend.compilation import Static, compiled
from jax_backend.merging import Folded, merge, varying
from jax_backend.replicas import replicas_of, unmerged


def accumulate(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(args, kwargs): the fold of the program over the micro-batches cut from args."""
    fold = _kept(program, "accumulate", lambda: compiled(_accumulate(bound(program, backend), backend)))
    if program.across is not None or jax.device_count() == 1:
        return lambda args, kwargs: fold(args, kwargs, 1, None)
    # here, as inside jit an array does not say where it lies
    return lambda args, kwargs: fold(
        args, kwargs, blocks.blocks_of(program.read(args, backend)), accumulators.places(args)
    )


def _kept(program: Program, name: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What is made once and kept with what it has traced; inside of a trace, made for this call alone."""
    if compilation.is_tracing():
        return make()
    kept = program.keep(_Traced)
    if name not in kept:
        kept[name] = make()
    return kept[name]


class _Traced(dict[str, Callable[..., Any]]):
    """The functions that are made of a step once, by their names, with what each has traced."""


def _accumulate(program: Program, backend: Backend) -> Callable[..., Any]:
    def fold(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int, places: Places | None) -> Any:
        replicas = replicas_of(program.across)
        if replicas is not None:
            args, kwargs = varying(args, replicas), varying(kwargs, replicas)
        with unmerged(()):  # a fold inside of grad_fn is merged by this one
            return folded(args, kwargs, parts, places, replicas)

    def folded(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int, places: Places | None, replicas: Any) -> Any:
        nnx.check_unshared((args, kwargs))
        arguments = program.read(args, backend)
        found = _groups(arguments.rows(), program)
        narrow = partial(blocks.narrow, parts) if blocks.fits(parts, found) else None
        carry: Any = None
        chunks: list[list[jax.Array]] = []
        first, shared = 0, None if program.weight is not None or len(found) > 1 else found[0][1]
        for count, size in found:
            # jit so that grad_fn is traced once for the shapes and the loop alike; inline so that no call remains.
            evaluate = jax.jit(partial(_cut_and_evaluate, program, arguments, kwargs, size, narrow), inline=True)
            state = [_strong(leaf) for leaf in arguments.state] if carry is None else carry[-1]
            traced, made = jax.make_jaxpr(evaluate, return_shape=True)(jnp.int32(0), state)
            if carry is None:
                outputs, _ = program.bind(made[0], arguments)
                if narrow is not None and not blocks.keeps_result(outputs, size):
                    return folded(args, kwargs, 1, places, replicas)
                carry = _placed(places, outputs, (*_nothing(outputs, traced.out_avals), state))
            weigh = jax.jit(partial(_cut_and_weigh, program, arguments, size, narrow), inline=True)
            one = _Microbatch(outputs, evaluate, weigh, traced, _in_place(outputs, traced, made[0]))
            if program.weight is not None:
                carry, collected = _scan(one, carry, first, count, size)
            else:
                carry, collected = _scan_rows(one, carry, first, count, size, later=shared is not None)
            chunks.append(collected)
            first += count * size
        if narrow is not None:
            chunks = [blocks.in_order(outputs, parts, found, chunks)]
        return _finish(outputs, replicas, _placed(places, outputs, carry), chunks, shared)

    return fold


def _groups(rows: Any, program: Program) -> list[tuple[int, int]]:
    """(count, size) of the micro-batches; of a symbolic number of rows as well, which has to divide."""
    divisor = program.n or program.microbatch_size
    if is_symbolic_dim(rows) and not rows % divisor == 0:
        raise FuncgaError(
            f"the batch has a symbolic number of rows, `{rows}`, of which it is not known that {divisor} divides it. "
            f'Export the program for rows that it does: jax.export.symbolic_shape("{divisor}*b").'
        )
    return groups(rows, program.n, program.microbatch_size)


class _Microbatch(NamedTuple):
    """One micro-batch: `evaluate` makes its value and weight of some operands, and `weigh` the weight alone."""

    outputs: Outputs
    evaluate: Callable[..., Any]
    weigh: Callable[..., Any]
    traced: Any  # the jaxpr of evaluate
    in_place: list[int]  # the leaves that are folded where they are computed

    def fold(self, reduced: list[Any], operands: Any, weights: list[Any] | None = None) -> tuple[Any, ...]:
        """What is reduced with it, the state that it threads, its values of the collected leaves, and its weight.

        The weights are one for each leaf that is reduced; by default its own.
        """
        leaves = jax.tree.leaves(operands)
        if not self.in_place or not stacked.takes(self.traced.jaxpr, leaves):
            value, limbs = self.evaluate(*operands)
            return *_combine(self.outputs, reduced, value, weights or _weights(self.outputs, limbs)), limbs
        limbs = self.weigh(*operands)  # before all else, as it takes part in the loop over the layers
        weights = weights or _weights(self.outputs, limbs)
        folds = zip(self.outputs.reduced, self.outputs.reduced_folds, weights, strict=True)
        added = {i: partial(_one_more, fold, weight) for i, fold, weight in folds}
        before = dict(zip(added, reduced, strict=True))
        into = {i: stacked.Into(before[i], added[i], self.outputs.paths[i]) for i in self.in_place}
        leaves = stacked.evaluate(self.traced.jaxpr, self.traced.consts, leaves, into)
        reduced = [leaves[i] if i in into else added[i](before[i], leaves[i]) for i in added]
        return reduced, [leaves[i] for i in self.outputs.threads], [leaves[i] for i in self.outputs.collected], limbs


def _one_more(fold: LeafFold, weight: Any, before: Any, value: Any) -> Any:
    return fold.combine(before, fold.lift(value, weight))


def _weights(outputs: Outputs, limbs: Any) -> list[Any]:
    """The weight of one micro-batch for each leaf that is reduced."""
    one = tally.Tally(limbs, arrays.count(1))
    return [tally.total(each) for each in _tallies(outputs, one)] if outputs.reduced else []


def _tallies(outputs: Outputs, one: tally.Tally) -> list[tally.Tally]:
    """A tally for each leaf that is reduced: NaN where a float32 cannot hold the weight, so that no 0 comes of it."""
    narrow = tally.Tally((_narrowed(tally.total(one)),), one.steps)
    return [narrow if fold.is_narrow else one for fold in outputs.reduced_folds]


def _narrowed(weight: jax.Array) -> jax.Array:
    """A weight as a float32, and NaN where a float32 cannot multiply with it and divide by it."""
    fits = (weight == 0) | ((weight >= LEAST32) & (weight <= MOST32))
    return jnp.where(fits, weight, jnp.full_like(weight, jnp.nan)).astype(jnp.float32)


def _in_place(outputs: Outputs, traced: Any, value: Any) -> list[int]:
    """The leaves of a value that a scan stacks, and whose fold is elementwise."""
    leaves, structure = jax.tree.flatten(value)
    if structure != outputs.structure or any(
        (leaf.shape, leaf.dtype) != (shape, dtype)
        for leaf, shape, dtype in zip(leaves, outputs.shapes, outputs.dtypes, strict=True)
    ):
        return []  # which is an error that has its words elsewhere
    pairs = zip(outputs.reduced_folds, outputs.reduced, strict=True)
    elementwise = {i for fold, i in pairs if fold.fold.reducer.elementwise}
    return [i for i in stacked.stacked(traced.jaxpr) if i in elementwise]


def _scan(one: _Microbatch, carry: Any, first: int, count: int, size: int) -> tuple[Any, list[jax.Array]]:
    """The carry after `count` micro-batches of `size` rows from row `first` on, and what they have collected."""

    def body(carry: Any, start: Any) -> Any:
        return _add(one, carry, start, carry[-1])

    places = first + size * jnp.arange(count, dtype=jnp.int32)
    carry, collected = lax.scan(body, _typed(body, carry, places[0]), places)
    return carry, [_unstack(*pair) for pair in zip(one.outputs.collected_folds, collected, strict=True)]


def _scan_rows(
    one: _Microbatch, carry: Any, first: int, count: int, size: int, later: bool
) -> tuple[Any, list[jax.Array]]:
    """The same for micro-batches that weigh as much as they have rows, which is known before the loop.

    `later`: a linear fold is left to be weighed by `_finish`, so that XLA adds every gradient in place.
    """
    folds = one.outputs.reduced_folds
    weights = [1 if later and fold.fold.reducer.linear else _weight_of(size) for fold in folds]

    def body(carry: Any, start: Any) -> Any:
        reduced, state = carry
        reduced, state, collected, _ = one.fold(reduced, (start, state), weights)
        return (reduced, state), collected

    reduced, total, state = carry
    places = first + size * jnp.arange(count, dtype=jnp.int32)
    (reduced, state), collected = lax.scan(body, _typed(body, (reduced, state), places[0]), places)
    total = tally.merge(total, tally.of(count * size, arrays, steps=count))
    return (reduced, total, state), [_unstack(*p) for p in zip(one.outputs.collected_folds, collected, strict=True)]


def _weight_of(rows: Any) -> Any:
    return jnp.asarray(rows) if is_symbolic_dim(rows) else rows


def _cut_and_evaluate(
    program: Program, arguments: Arguments, kwargs: dict[str, Any], size: int, narrow: Any, start: Any, state: list[Any]
) -> tuple[Any, Any]:
    return _evaluate(program, arguments, arguments.cut(start, size, state, narrow), kwargs)


def _cut_and_weigh(program: Program, arguments: Arguments, size: int, narrow: Any, start: Any, state: list[Any]) -> Any:
    return _limbs(program, arguments, arguments.cut(start, size, state, narrow))


def _limbs(program: Program, arguments: Arguments, args: tuple[Any, ...]) -> Any:
    """The weight of one micro-batch; the default weight is left to the caller."""
    if program.weight is None:
        return ()
    weight = program.weigh(arguments, args, None)
    if jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        check_narrow(weight)
    return arrays.limbs(weight)


def _evaluate(program: Program, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The value of one micro-batch, and its weight as limbs."""
    limbs = _limbs(program, arguments, args)
    args, kwargs = nnx.fresh((args, kwargs))
    whole = [arg for arg, part in zip(args, arguments.parts, strict=True) if not part.axes]
    check_unchanged = nnx.watched((whole, kwargs))
    value = program.grad_fn(*args, **kwargs)
    check_unchanged()
    for i, leaf in enumerate(jax.tree.leaves(value)):
        as_leaf(leaf, partial(leaf_path, value, i, arguments.backend), arguments.backend)
    return value, limbs


def stream(program: Program, backend: Backend) -> Callable[..., Any]:
    """f(leading, microbatches, kwargs): the fold of the program over an iterable of micro-batches."""
    return _kept(program, "stream", lambda: _stream(bound(program, backend), backend))


def _outputs_of(program: Program, backend: Backend, evaluate: Callable[..., Any]) -> Callable[..., Outputs]:
    """f(leading, kwargs, item): the Outputs of micro-batches like this one, bound once for all of the same types."""
    config: Any = jax.config
    known: dict[Any, Outputs] = {}

    def outputs_of(leading: Any, kwargs: Any, item: Any) -> Outputs:
        key, found = Static((leading, kwargs, item)).taken()
        types = (*map(jax.typeof, found), config.jax_enable_x64, config.jax_numpy_dtype_promotion)
        if (key, types) not in known:
            arguments = program.read((*leading, *item), backend)
            state = [_strong(leaf) for leaf in arguments.state]
            # over the arrays alone, as all else is static
            value, _ = jax.eval_shape(lambda found: evaluate(*key.tree(found), state), found)
            known[key, types], _ = program.bind(value, arguments)
        return known[key, types]

    return outputs_of


def _stream(program: Program, backend: Backend) -> Callable[..., Any]:
    def weigh(arguments: Arguments, state: Any) -> Any:
        return _limbs(program, arguments, arguments.cut(0, None, state)) or arrays.limbs(arguments.rows())

    @partial(compiled, inline=True)
    def evaluate(leading: Any, kwargs: Any, item: Any, state: Any) -> Any:
        arguments = program.read((*leading, *item), backend)
        value, limbs = _evaluate(program, arguments, arguments.cut(0, None, state), kwargs)
        return value, limbs or arrays.limbs(arguments.rows())

    @partial(compiled, keep_unused=True)  # it has no devices but those of its arguments
    def begin(outputs: Outputs, places: Places | None, leading: Any, kwargs: Any, item: Any) -> Any:
        state = [_strong(leaf) for leaf in program.read((*leading, *item), backend).state]
        types = jax.make_jaxpr(partial(evaluate, leading, kwargs, item))(state).out_avals
        carry = *_nothing(outputs, types), [jnp.array(leaf, copy=True) for leaf in state]
        return _placed(places, outputs, carry)

    def step(
        outputs: Outputs,
        places: Places | None,
        whole: Static,
        cut: Static,
        carry: Any,
        arrays_whole: Any,
        arrays_cut: Any,
    ) -> Any:
        (leading, kwargs), item = whole.tree(arrays_whole), cut.tree(arrays_cut)
        arguments = program.read((*leading, *item), backend)
        of = partial(evaluate, leading, kwargs, item)
        traced, made = jax.make_jaxpr(of, return_shape=True)(carry[-1])
        one = _Microbatch(outputs, of, partial(weigh, arguments), traced, _in_place(outputs, traced, made[0]))
        carry, collected = _add(one, carry, carry[-1])
        return _placed(places, outputs, carry), collected

    finish = compiled(_finish)
    jitted = jax.jit(step, static_argnums=(0, 1, 2, 3), donate_argnums=4)
    outputs_of = _outputs_of(program, backend, evaluate)

    def fold(leading: tuple[Any, ...], microbatches: Iterator[tuple[Any, ...]], kwargs: dict[str, Any]) -> Any:
        replicas = replicas_of(program.across)
        with unmerged(()):
            return folded(leading, microbatches, kwargs, replicas)

    def folded(
        leading: tuple[Any, ...], microbatches: Iterator[tuple[Any, ...]], kwargs: dict[str, Any], replicas: Any
    ) -> Any:
        outputs = carry = places = None
        chunks = []
        if replicas is not None:
            leading, kwargs = varying(leading, replicas), varying(kwargs, replicas)
        whole, arrays_whole = Static((leading, kwargs)).taken()
        device = None if program.device is None else dlpack.device(program.device)
        run = step if compilation.is_tracing() else jitted
        for item in microbatches:
            if device is not None:
                item = _moved(item, device)  # the copy runs while the last step does
            if replicas is not None:
                item = varying(item, replicas)
            if outputs is None:
                outputs = outputs_of(leading, kwargs, item)
                places = accumulators.places((*leading, *item))
                carry = begin(outputs, places, leading, kwargs, item)
            carry, collected = run(outputs, places, whole, *_parted(item, carry, arrays_whole))
            if collected:  # else finish would be compiled for every number of micro-batches
                chunks.append(collected)
            del item, collected  # so that no more than one micro-batch is held
        if outputs is None:  # with across, the core cannot know whether other replicas have something to fold
            raise FuncgaError(
                "the stream is empty: there is no micro-batch to fold, and so no structure to return. Check the "
                "loader, or that a generator was not used up before."
            )
        return finish(outputs, replicas, carry, chunks)

    return fold


def _moved(item: Any, device: Any) -> Any:
    def move(leaf: Any) -> Any:
        return jax.device_put(leaf, device) if isinstance(leaf, jax.Array | np.ndarray) else leaf

    leaves, structure = trees.flatten(item)
    return trees.unflatten(structure, [*map(move, leaves)])


def _parted(item: Any, carry: Any, arrays_whole: list[Any]) -> tuple[Any, ...]:
    cut, arrays_cut = Static(item).taken()
    return cut, carry, arrays_whole, arrays_cut


def _placed(places: Places | None, outputs: Outputs, carry: Any) -> Any:
    return carry if places is None else places.pinned(outputs, carry)


def _nothing(outputs: Outputs, types: Sequence[Any]) -> tuple[list[Any], tally.Tally]:
    """What no micro-batch has contributed, where grad_fn returns leaves of these types."""
    pairs = zip(outputs.reduced, outputs.reduced_folds, strict=True)
    return [fold.identity(accumulators.zeros(types[i])) for i, fold in pairs], tally.empty(arrays)


def _add(one: _Microbatch, carry: Any, *operands: Any) -> Any:
    """The carry with one more micro-batch of the weight that it has, and its values of the collected leaves."""
    reduced, total, _ = carry
    reduced, state, collected, limbs = one.fold(reduced, operands)
    return (reduced, tally.merge(total, tally.Tally(limbs, arrays.count(1))), state), collected


def _combine(
    outputs: Outputs, reduced: list[Any], value: Any, weights: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """What is reduced with one more micro-batch, the state that it threads, and its values of the collected leaves."""
    leaves = outputs.leaves(value, "a later micro-batch")
    reduced = [
        fold.combine(before, fold.lift(leaves[i], weight))
        for fold, before, i, weight in zip(outputs.reduced_folds, reduced, outputs.reduced, weights, strict=True)
    ]
    return reduced, [leaves[i] for i in outputs.threads], [leaves[i] for i in outputs.collected]


def _finish(outputs: Outputs, replicas: Any, carry: Any, chunks: list[list[Any]], shared: int | None = None) -> Any:
    """The normalised result of all replicas, in the structure of grad_fn's output.

    A weight that is `shared` by all micro-batches, on all replicas, is applied here, where XLA divides: one pass.
    """
    reduced, total, state = carry
    collected = [
        jnp.concatenate(accumulators.alike(column), axis=fold.fold.reducer.monoid.axis or 0).astype(fold.result_dtype)
        for fold, column in zip(outputs.collected_folds, zip(*chunks, strict=True), strict=True)
    ]
    if replicas is not None:
        reduced, total, state, collected = merge(outputs, Folded(reduced, total, state, collected), replicas)
    if shared is not None:
        pairs = zip(outputs.reduced_folds, reduced, strict=True)
        reduced = [fold.lift(r, _weight_of(shared)) if fold.fold.reducer.linear else r for fold, r in pairs]
    triples = zip(outputs.reduced_folds, reduced, _tallies(outputs, total), strict=True)
    results = [fold.normalize(r, each) for fold, r, each in triples]
    return outputs.join(results, collected, state)


def _unstack(fold: LeafFold, stacked: jax.Array) -> jax.Array:
    """What a scan collected, [micro-batches, ...], with the micro-batches in order along the fold's own axis."""
    axis = (fold.fold.reducer.monoid.axis or 0) % (stacked.ndim - 1)
    return blocks.joined(jnp.moveaxis(stacked, 0, axis), axis)


def _strong(leaf: Any) -> Any:
    """The leaf as an array whose dtype a loop can keep."""
    leaf = arrays.as_array(leaf)
    return jnp.asarray(leaf, dtype=leaf.dtype)


def _typed(body: Callable[..., Any], carry: Any, start: Any) -> Any:
    """The carry sharded and varying as the body makes it: what is sharded or varies can make more so."""
    for _ in range(3):  # it settles at once in practice
        leaves, structure = jax.tree.flatten(carry)
        after = jax.make_jaxpr(body)(carry, start).out_avals
        marked = [accumulators.typed(leaf, aval) for leaf, aval in zip(leaves, after, strict=False)]
        if all(a is b for a, b in zip(leaves, marked, strict=True)):
            break
        carry = jax.tree.unflatten(structure, marked)
    return carry


def is_traced(tree: Any) -> bool:
    """Whether these arguments are those of a program that is being compiled."""
    return compilation.is_tracing()


def finished(tree: Any) -> Any:
    """The tree when it is computed, or the error that computing it raises."""
    return jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out."""
    ran_out = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return ran_out or isinstance(error, MemoryError)
