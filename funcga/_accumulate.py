"""`accumulate`: the fold over the micro-batches that a batch is split into."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from funcga._auto_n import Fitting
from funcga._backend.dispatch import load_imported
from funcga._call.program import OwningGradient, Program
from funcga._grad import GradientFunction
from funcga._replicas import step_of
from funcga.errors import FuncgaError, check_callable, check_count
from funcga.folds import mean


def accumulate(
    grad_fn: Callable[..., Any],
    n: int | Literal["auto"] | None = None,
    *,
    microbatch_size: int | None = None,
    fold: Any = mean(),  # noqa: B008 - a frozen value
    weight: Callable[..., Any] | None = None,
    in_axes: Any = None,
    across: Any = None,
) -> Callable[..., Any]:
    """A function with grad_fn's own signature, output structure and dtypes: the fold of grad_fn over micro-batches.

    The batch is split into `n` micro-batches of rows in order, whose sizes differ by at most one, or into
    micro-batches of `microbatch_size` rows, the last one smaller. grad_fn is applied to each; the values are combined
    by `fold` and normalised once, at the end, by what was really folded. With `fold` matched to the loss the result
    equals that of the whole batch, for every n.

    n: a number, or "auto": the smallest that fits in memory. It is looked for when memory runs out, by replaying the
        window with more micro-batches, and then with as few as fit, and remembered for arguments of these shapes. The
        call that looks for it takes the time of some windows; the result is exact in any case. Not inside of jit or
        torch.compile.
    grad_fn: any pure function of arrays that returns a tree of arrays: torch.func.grad, jax.value_and_grad,
        funcga.value_and_grad(loss_fn) and so on.
    fold: a Fold, or a tree prefix of Folds over grad_fn's output. `mean()` is for a loss that is a mean over its
        micro-batch, `per_weight()` for a sum.
    weight: `weight(*split_args)` gives a micro-batch's weight, a number or 0-d array >= 0. Default: its rows. What is
        accumulated in float32 takes weights from 1.2e-38 to 8.5e37. In JAX a traced weight beyond gives NaN, and one
        that is below in float32 already is 0 for XLA.
    in_axes: as in vmap: an axis, None (passed whole), a tree prefix, or funcga.CARRY for threaded state. Default: the
        first argument whole, every other positional argument split on axis 0; all of them, for a gradient function that
        has its own parameters, as module_value_and_grad. Keyword arguments are passed whole.
    across: the replicas to merge over, once, at the end, by what was folded on all of them: a torch.distributed process
        group or 1-D device mesh, or the name of a JAX mesh axis, or a tuple of names, inside shard_map. Every replica
        gets the same result. What is threaded by carry() is that of the last replica that folded anything. In torch
        the replicas may have different numbers of rows, fewer than n, or none. In JAX parameters have to be arguments,
        and the loss is that of a replica's own rows, without psum or pmean.

    Nothing is mutated and nothing returned aliases an argument. Floats of less than 32 bits are accumulated in
    float32. Raises FuncgaError for bad input, before any work.

    In JAX the micro-batch body is traced and compiled once (twice if the rows do not divide). A call outside of jit is
    jitted: arrays are traced and all other arguments are static, so each new number is a new program. A change goes
    unnoticed in an object that keeps its hash, and in what grad_fn closes over, as in any function under jit.

    A batch that is sharded by its rows stays where it is: outside of jit, or where the mesh has Explicit axes, each
    micro-batch takes as many rows from every device, if they divide, so micro-batches have other rows than on one
    device, and gradients are reduced for each of them. Inside jit with Auto axes, and where rows do not divide or their
    order counts, as for moments() and threaded state, it is gathered (with Explicit axes JAX refuses that, and
    concat()). To reduce once, use `across` inside shard_map, where each device
    cuts its own rows, or through jax_backend.replicated(step, mesh).

    In torch, the gradients of `funcga.grad` and `funcga.value_and_grad` run on autograd and are added where they are
    computed, at the cost of a `.backward()` loop; weights that differ reach it as cotangents. Any other grad_fn is
    called with detached arguments, and no graph outlives its micro-batch. Results have no graph, so `.backward()` on
    what is computed from them is first-order. Inside of a loss that funcga.grad, torch.func or forward-mode AD
    differentiates they have one: funcga.grad(outer_loss), with a step in outer_loss, is second-order.

    >>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
    >>> loss, grads = step(params, batch)
    """
    check_callable(grad_fn, "grad_fn", "funcga.value_and_grad(loss_fn)")
    if (n is None) == (microbatch_size is None):
        given = "neither" if n is None else "both"
        raise FuncgaError(
            f"{given} of n and microbatch_size were given. Say one: accumulate(grad_fn, n=8) for 8 micro-batches, or "
            f"accumulate(grad_fn, microbatch_size=4) for micro-batches of 4 rows."
        )
    automatic = isinstance(n, str) and n == "auto"
    if automatic and across is not None:
        raise FuncgaError(
            'n="auto" was given together with across=: a replica that runs out of memory would begin anew while the '
            "others wait for it. Find n without across= first, on the replica with the most rows, and give the number: "
            "n=8."
        )
    if automatic and isinstance(grad_fn, OwningGradient):
        grad_fn.check_search()
    number = None if n is None or automatic else check_count(n, "n", ', or n="auto"')
    microbatch_size = None if microbatch_size is None else check_count(microbatch_size, "microbatch_size")
    if weight is not None:
        check_callable(weight, "weight", 'lambda batch: (batch["labels"] != -100).sum()')
    load_imported()
    program = Program(
        grad_fn,
        fold,
        weight,
        in_axes,
        number,
        microbatch_size,
        across=across,
        step=None if across is None else step_of(grad_fn),
    )
    fitting = Fitting(program) if automatic else None

    # The signature is grad_fn's in any case; the names are only if grad_fn is a function that has them.
    names = () if isinstance(grad_fn, GradientFunction | OwningGradient) else ("__doc__", "__name__", "__qualname__")

    @functools.wraps(grad_fn, assigned=names, updated=())
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        """The fold of grad_fn over the micro-batches that the arguments are split into."""
        backend = program.backend(args, kwargs)
        if fitting is not None:
            return fitting(backend, args, kwargs)
        return backend.loop.accumulate(program, backend)(args, kwargs)

    accumulated.program = program  # type: ignore[attr-defined]  # for who wraps it: what does it split?
    return accumulated
