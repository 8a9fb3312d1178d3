"""The two passes of a loss that needs the whole batch, in one program."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from funcga._backend import Backend
from funcga._types import Args, Kwargs, Tree, TreeFn
from funcga.tools.coupled import SUM, Coupled, Summaries, unused
from jax_backend import sharding
from jax_backend.loop import accumulated, fold_batch, normalised, tallies_of, tally_of
from jax_backend.replicas import replicas_of
from jax_backend.sharding import Spread
from jax_backend.transforms import depends
from jax_backend.trees import Compiled


def coupled(job: Coupled, backend: Backend) -> TreeFn:
    """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from
    args.
    """
    step = job.second.memory.keep(Compiled, partial(_in_two_passes, job, backend))
    return lambda args, kwargs: step(
        (sharding.spread_of_call(job.program, args, backend),), args, kwargs
    )


def _in_two_passes(
    job: Coupled, backend: Backend, spread: Spread, args: Args, kwargs: Kwargs
) -> Tree:
    """The step, traced."""
    program = job.program
    arguments = program.read(args, backend)
    arg_indices = job.arg_indices(arguments)
    params = [args[arg_index] for arg_index in arg_indices]

    # The first pass: the summaries. With one micro-batch, XLA merges both passes.
    outputs, folded, spread = fold_batch(program, backend, spread, args, kwargs)
    reduced, tallies = normalised(outputs, folded)
    leaves = outputs.in_order(outputs.join(reduced, folded.collected, folded.state))
    summaries = Summaries(outputs, leaves, dict(zip(outputs.reduced, tallies, strict=True)))

    # The loss, its gradient by parameters that it uses itself, and the cotangents of the summaries.
    loss, aux, of_variables, of_params = _differentiated(job, backend, summaries, params)
    cotangents = summaries.cotangents(of_variables)
    rows_of = _rows(job, spread, arguments.rows(), cotangents)

    # The second pass: the gradient of the inner product of the cotangents with what a micro-batch
    # contributes. It gets the indices of its rows.
    @wraps(program.grad_fn, updated=())
    def inner_product(*args_and_index: Tree, **kwargs: Tree) -> Tree:
        *args, index = args_and_index
        own = tally_of(program.weigh(program.read(tuple(args), backend), tuple(args), None))
        # In the unit that the tallies of means are in.
        tallies = tallies_of(outputs, own, folded.unit)
        weights = {i: each.total for i, each in zip(outputs.reduced, tallies, strict=True)}
        output, rows = program.grad_fn(*args, **kwargs), partial(rows_of, index)
        return summaries.inner_product(cotangents, output, weights, rows, loss)

    weigh: Any = program.weight
    is_weighed = weigh is not None and summaries.are_weighed(cotangents)
    second = replace(
        job.second,
        grad_fn=replace(
            job.gradient, loss_fn=inner_product, argnums=arg_indices, has_aux=True, with_value=False
        ),
        fold=(SUM, program.fold if outputs.threads else SUM),
        in_axes=(*[part.in_axes for part in arguments.parts], 0),
        weight=lambda *split: weigh(*split[:-1]) != 0 if is_weighed else 1,
    )
    indices = jnp.arange(arguments.rows(), dtype=jnp.int32)
    (grads, _), _ = accumulated(second, backend, spread, (*args, indices), kwargs)
    pairs = zip(grads, of_params, strict=True)
    return job.gradient.compose(loss, aux, [jax.tree.map(jnp.add, *pair) for pair in pairs])


def _differentiated(
    job: Coupled, backend: Backend, summaries: Summaries, params: list[Tree]
) -> tuple[jax.Array, Tree, dict[int, jax.Array], list[Tree]]:
    """(the loss, its aux, its gradient by the summaries, and that by the params)."""

    def loss_of(variables: dict[int, jax.Array], *params: Tree) -> tuple[jax.Array, Tree]:
        loss, aux = job.loss(params, summaries, variables)
        return loss, (loss, aux)

    def check(variables: dict[int, jax.Array]) -> jax.Array:
        loss, _ = loss_of(variables, *params)
        if depends(loss) is False:
            raise unused()
        return loss

    variables = summaries.variables
    jax.eval_shape(jax.grad(check), variables)
    transform = backend.gradients.value_and_grad(loss_of, (*range(len(params) + 1),))
    (_, (loss, aux)), (of_variables, *of_params) = transform(variables, *params)
    return loss, aux, of_variables, of_params


def _rows(
    job: Coupled, spread: Spread, rows: int, cotangents: dict[int, jax.Array]
) -> Callable[..., jax.Array]:
    """f(index, leaf_index, part, axis): the rows of a micro-batch, with these indices, in the
    cotangent of a collected leaf.
    """
    across = job.program.across
    replicas = None if across is None else replicas_of(across)
    (_, size), *_ = job.program.split.groups(rows)

    def rows_of(index: jax.Array, leaf_index: int, part: jax.Array, axis: int) -> jax.Array:
        cotangent, of_part, count = cotangents[leaf_index], part.shape[axis], index.shape[0]
        total, offset = cotangent.shape[axis], jnp.int32(0)
        if replicas is not None:  # equally many rows each, in order
            total //= int(lax.axis_size(replicas.names))
            offset = lax.axis_index(replicas.names) * total
        # Then collected leaves have one row for each row of a micro-batch.
        if spread.blocks > 1:
            return jnp.take(cotangent, offset + index, axis=axis)
        start = index[0] // count * of_part
        if count < size:  # at the end of the batch
            start = total - (rows - index[0]) // count * of_part
        return lax.dynamic_slice_in_dim(cotangent, offset + start, of_part, axis)

    return rows_of
