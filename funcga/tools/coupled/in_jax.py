"""The two passes of a loss that needs the whole batch, in one program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import groups
from funcga._types import Scalar, Tree
from funcga.folds import sum as summed
from funcga.tools.coupled import Cotangents, Coupled, Summaries
from jax_backend import arrays, sharding, trees
from jax_backend.loop import accumulated, begin, fold_batch, tallies_of
from jax_backend.sharding import Spread
from jax_backend.transforms import depends


def coupled(job: Coupled, backend: Backend) -> Callable[..., Tree]:
    """f(args, kwargs): the loss and its gradient, of summaries of the micro-batches cut from
    args.
    """
    step = job.memory.keep(_Step, job, backend).step
    return lambda args, kwargs: step(
        (sharding.spread_of_call(job.program, args, backend),), args, kwargs
    )


class _Step:
    """Cached by a step of `coupled`: its jitted function."""

    def __init__(self, job: Coupled, backend: Backend):
        self.job, self.backend = job, backend
        self.step = trees.Compiled(self.traced)

    def traced(self, spread: Spread, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        """The step, traced."""
        job, backend = self.job, self.backend
        if job.program.prologue is not None:
            kwargs = begin(job.program, backend, spread, args, kwargs)
        arguments = job.program.read(args, backend)
        arg_indices = job.arg_indices(arguments)
        params = [args[arg_index] for arg_index in arg_indices]
        if checks := trees.nnx():
            checks.check_trained(params)
        rows = arguments.rows()
        sizes = groups(rows, job.program.n, job.program.microbatch_size)
        # The first pass: the summaries. With one micro-batch, XLA merges both passes.
        first = job.first()
        outputs, folded, spread = fold_batch(first, backend, spread, args, kwargs)
        tallies = tallies_of(outputs, folded.total, folded.unit)
        triples = zip(outputs.reduced.values(), folded.reduced, tallies, strict=True)
        reduced = [fold.normalize(leaf, tally) for fold, leaf, tally in triples]
        value = outputs.join(reduced, folded.collected, folded.state)
        summaries = Summaries(outputs, outputs.in_order(value), tallies)
        variables = summaries.variables

        # The loss, its gradient by parameters that it uses itself, and the cotangents of the
        # summaries.
        def loss_of(
            variables: dict[int, jax.Array], *params: Tree
        ) -> tuple[jax.Array, tuple[jax.Array, Tree]]:
            loss, aux = job.loss_of(params, summaries.tree(variables), backend)
            return loss, (loss, aux)

        def check(variables: dict[int, jax.Array]) -> jax.Array:
            loss, _ = loss_of(variables, *params)
            job.check_depends(depends(loss) is not False)
            return loss

        jax.eval_shape(jax.grad(check), variables)
        transform = jax.value_and_grad(loss_of, argnums=(*range(len(params) + 1),), has_aux=True)
        (_, (loss, aux)), (of_variables, *of_params) = transform(variables, *params)
        cotangents = summaries.cotangents(of_variables)

        # The second pass: the cotangents, pulled back through each micro-batch, which gets the
        # indices of its rows.
        pulled_back = _PulledBack(
            job, first, backend, arg_indices, cotangents, spread, sizes, folded.unit
        )
        fold = (summed(), job.program.fold) if outputs.threads else summed()
        second = job.second(pulled_back, fold, _with_indices(job.program.in_axes, len(args)))
        indices = jnp.arange(rows, dtype=jnp.int32)
        result, _ = accumulated(second, backend, spread, (*args, indices), kwargs)
        grads = result[0] if outputs.threads else result
        composed = job.gradient.compose(
            loss, aux, [jax.tree.map(jnp.add, *pair) for pair in zip(grads, of_params, strict=True)]
        )
        return job.program.finish(backend, composed, kwargs)


def _with_indices(in_axes: Tree, count: int) -> Tree:
    """The in_axes with one more argument, the indices of the rows."""
    if in_axes is None:
        return None
    return *(in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * count), 0


@dataclass(frozen=True, eq=False)
class _PulledBack:
    """The gradient of one micro-batch: the cotangents, pulled back through its summary."""

    job: Coupled
    first: Program
    backend: Backend
    arg_indices: tuple[int, ...]
    cotangents: Cotangents
    spread: Spread
    sizes: list[tuple[int, int]]
    unit: Scalar

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """The gradients of the differentiated arguments, and the state that is threaded, if
        there is any.
        """
        job, outputs, (*args_of_user, index) = self.job, self.cotangents.outputs, args
        arguments = job.program.read(tuple(args_of_user), self.backend)
        weight = job.program.weigh(arguments, tuple(args_of_user), None)
        if not isinstance(weight, int | float):
            weight = arrays.tally(weight).total
        # In the unit that the tallies of means are in.
        weights = [weight / self.unit if f.is_mean else weight for f in outputs.reduced.values()]

        def parts_of(*params: Tree) -> tuple[dict[int, Tree], Tree]:
            replaced = dict(zip(self.arg_indices, params, strict=True))
            called = [replaced.get(arg_index, arg) for arg_index, arg in enumerate(args_of_user)]
            output = self.first.grad_fn(*called, **kwargs)
            parts = self.cotangents.parts(output, weights)
            job.check_reached(
                not params or any(depends(part) is not False for part in parts.values())
            )
            return parts, self.cotangents.threaded(output)

        params = [args_of_user[arg_index] for arg_index in self.arg_indices]
        parts, pull, threaded = jax.vjp(parts_of, *params, has_aux=True)
        of_parts = self.cotangents.of_parts(parts, partial(self._rows, index))
        # A cotangent has the type of its primal, and varies over mesh axes as that does.
        typed = lambda cotangent, part: arrays.typed(cotangent.astype(part.dtype), jax.typeof(part))
        grads = pull(jax.tree.map(typed, of_parts, parts))
        if self.cotangents.are_weighed and not isinstance(weight, int | float):
            # 0 times an infinite derivative, as of an empty mean, is NaN.
            grads = jax.tree.map(
                lambda grad: jnp.where(weight != 0, grad, jnp.zeros_like(grad)), grads
            )
        return (grads, threaded) if outputs.threads else grads

    def _rows(
        self, index: jax.Array, position: int, cotangent: jax.Array, axis: int, size: int
    ) -> jax.Array:
        """The rows of a micro-batch, with these indices, in the cotangent of a collected leaf."""
        replicas = self.job.program.replicas(self.backend)
        total, offset = cotangent.shape[axis], jnp.int32(0)
        if replicas is not None:  # equally many rows each, in order
            total //= int(lax.axis_size(replicas.names))
            offset = lax.axis_index(replicas.names) * total
        # Then collected leaves have one row for each row of a micro-batch.
        if self.spread.blocks > 1:
            return jnp.take(cotangent, offset + index, axis=axis)
        (count, rows), *smaller = self.sizes
        if smaller and index.shape[0] == smaller[0][1]:
            # Micro-batches of the second size, at the end of the batch.
            before, (count, rows) = count * rows, smaller[0]
            start = total - count * size + (index[0] - before) // rows * size
        else:
            start = index[0] // rows * size
        return lax.dynamic_slice_in_dim(cotangent, offset + start, size, axis)
