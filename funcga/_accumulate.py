"""`accumulate`: the fold over the micro-batches that a batch is split into."""

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal, overload

from funcga._backend import Backend
from funcga._call import Memory, OwningGradient, Program, owner_of, read_program, read_sizes
from funcga._call.dropping import DropScope, DropTest
from funcga._call.totals import check_no_totals
from funcga._grad import GradientFunction
from funcga._observe import ObserverTree
from funcga._types import Across, P, R, TotalsFn, Tree, WeightFn
from funcga.errors import FuncgaError, explains_arguments
from funcga.folds import FoldTree, mean


@overload
def accumulate(
    grad_fn: Callable[P, R],
    n: int | Literal["auto"] | None = None,
    *,
    microbatch_size: int | None = None,
    fold: FoldTree = ...,
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    across: Across = None,
    totals: TotalsFn | None = None,
    observe: None = None,
    drop: DropScope | None = None,
    drop_if: DropTest | None = None,
) -> Callable[P, R]: ...
@overload
def accumulate(
    grad_fn: Callable[P, R],
    n: int | Literal["auto"] | None = None,
    *,
    microbatch_size: int | None = None,
    fold: FoldTree = ...,
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    across: Across = None,
    totals: TotalsFn | None = None,
    observe: ObserverTree,
    drop: DropScope | None = None,
    drop_if: DropTest | None = None,
) -> Callable[P, tuple[R, Any]]: ...
@explains_arguments
def accumulate(
    grad_fn: Callable[P, R],
    n: int | Literal["auto"] | None = None,
    *,
    microbatch_size: int | None = None,
    fold: FoldTree = mean(),  # noqa: B008 - a frozen value
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    across: Across = None,
    totals: TotalsFn | None = None,
    observe: ObserverTree | None = None,
    drop: DropScope | None = None,
    drop_if: DropTest | None = None,
) -> Callable[P, Any]:
    """A function with grad_fn's own signature, output structure and dtypes: the fold of grad_fn
    over micro-batches.

    The batch is split into micro-batches of rows, in order. grad_fn is applied to each. `fold`
    combines the values, and normalises them once, at the end, by what was really folded. With a
    `fold` that matches the loss, the result equals that of the whole batch for every n.

    Arguments are trees of arrays: dicts and other mappings, such as a `BatchEncoding`, dataclasses,
    tuples and lists.

    Nothing is mutated, and nothing returned aliases an argument. Floats of less than 32 bits are
    accumulated in float32.

    **In torch**, the gradients of `funcga.grad` and `funcga.value_and_grad` run on autograd and are
    added where they are computed, at the cost of a `.backward()` loop. Weights that differ reach
    the backward pass as cotangents. Any other grad_fn is called with detached arguments, and no
    graph outlives its micro-batch.

    Results have no graph, so `.backward()` on what is computed from them is first-order. Inside of
    a loss that funcga.grad, torch.func or forward-mode AD differentiates they have one:
    funcga.grad(outer_loss), with a step in outer_loss, is second-order.

    **In JAX**, the body of a micro-batch is traced and compiled once, or twice if the rows do not
    divide. A call outside of jit is jitted: arrays are traced, and all other arguments are static,
    so each new number is a new program. A change goes unnoticed in an object that keeps its hash,
    and in what grad_fn closes over, as in any function under jit.

    A batch that is sharded by its rows stays where it is, outside of jit and where the mesh has
    Explicit axes: each micro-batch takes as many rows from every device, if they divide. So
    micro-batches have other rows than on one device, and gradients are reduced for each of them.
    The batch is gathered inside jit with Auto axes, where rows do not divide, and where their order
    counts, as for moments() and threaded state. (With Explicit axes JAX refuses the last two, and
    concat().) To reduce once, use `across` inside shard_map, where each device cuts its own rows,
    or jax_backend.replicated(step, mesh).

    Args:
        grad_fn: Any pure function of arrays that returns a tree of arrays: torch.func.grad,
            jax.value_and_grad, funcga.value_and_grad(loss_fn) and so on. Of a loss itself the
            result is a loss, without gradients.
        n: How many micro-batches; their sizes differ by at most one, and a batch of fewer rows,
            such as the last one of an epoch, has one for each row. Or "auto": the smallest number
            that fits in memory. It begins with that of a `plan`, and if memory runs out all the
            same, or nothing can be planned, the window is replayed with more micro-batches, then
            with as few as fit. What is found is remembered for arguments of these shapes. The call
            that finds it takes the time of several windows; the result is exact in any case. Not
            inside of jit or torch.compile.
        microbatch_size: How many rows a micro-batch has, in place of `n`; the last one may be
            smaller.
        fold: A Fold, or a tree prefix of Folds over grad_fn's output. `mean()` is for a loss that
            is a mean over its micro-batch, `per_weight()` for a sum.
        weight: `weight(*split_args)` gives a micro-batch's weight, a number or 0-d array >= 0. By
            default that is its rows. What is accumulated in float32 takes weights from 1.2e-38 to
            8.5e37. In JAX a traced weight beyond gives NaN, and one below that is in float32
            already is 0 for XLA.
        in_axes: As in vmap: an axis, None (passed whole), a tree prefix, or funcga.CARRY for
            threaded state. By default the first argument is passed whole, and every other
            positional argument is split on axis 0. A gradient function with parameters of its own,
            as module_value_and_grad, has all of them split; so has one around it that shows what it
            wraps: a functools.partial, a decorator by functools.wraps, a step. Keyword arguments
            are passed whole.
        across: The replicas to merge over, once, at the end, by what was folded on all of them. A
            torch.distributed process group or 1-D device mesh; or, inside shard_map, the name of a
            JAX mesh axis or a tuple of names. A tree prefix of these over grad_fn's output, or a
            function of a leaf's dotted path that returns one, merges each leaf over its own
            replicas, as those of an expert; the weights are those of the whole window. Every
            replica gets the same result. What carry() threads is that of the last replica that
            folded anything. In torch the replicas may have different numbers of rows, fewer than n,
            or, after the first window, none. In JAX parameters have to be arguments, and the loss
            is that of a replica's own rows, without psum or pmean.
        totals: `totals(*split_args)` gives a tree of numbers or 0-d arrays for a micro-batch, such
            as its counts. They are added up over all micro-batches and replicas before the first of
            these is evaluated, and grad_fn gets the sums, 0-d arrays, as the keyword argument
            `totals`. So a loss with several denominators divides each term by its count in the
            whole batch, under `fold=sum()`. A total may be 0: divide by
            `totals["tokens"].clamp(min=1)`, in JAX by `jnp.maximum(totals["tokens"], 1)`. Integers
            are added exactly, in int64; in JAX without 64-bit types in int32, and a total beyond
            2**31 - 1 makes the result NaN. Floats are added in at least float32. Over replicas this
            is one reduction more for each dtype.
        observe: What the window says of its gradients, while they are folded: `gradient_noise()`,
            `gradient_norms()`, an `Observer` of your own, or a dict, tuple or list of them. The
            step then returns (what it returns without, the observation, or a tree of them). Every
            leaf of a micro-batch's gradient is read once, where it is computed, and nothing of it
            is kept. The gradient is what funcga.grad or funcga.value_and_grad returns as such; in
            what another grad_fn returns it is the part that looks like the first argument. It is
            folded by mean(), per_weight() or sum().
        drop: What becomes of a micro-batch whose loss or gradients are not finite. None: it is
            folded like any other. "microbatch": it is left out, with its weight, its loss and its
            aux, and threaded state stays as it was. "window": the result is zeros, and threaded
            state what came in. If everything is dropped, sums and means are zeros. A micro-batch of
            weight 0 adds nothing, and is not looked at. Of a gradient function of funcga's all but
            the aux has to be finite, of any other grad_fn every float that it returns. The
            gradients of one micro-batch are held beside the sums: the peak is higher by the bytes
            of the parameters. Not with concat(), whose rows would not be known, and "microbatch"
            not with totals.
        drop_if: A function of what grad_fn returns for a micro-batch, to drop by in place of that:
            of the gradients for `grad`, of (loss, gradients) for `value_and_grad`. It returns a
            bool, or a 0-d array of one, and has to find what is not finite too.

    Returns:
        A function that is called as grad_fn is, on a whole batch, and returns what grad_fn returns;
        with `observe`, a pair of that and the observation.

    Raises:
        FuncgaError: If an argument is invalid, before any work.

    Example:
        >>> loss_fn = lambda params, x, y: ((x @ params["w"] - y) ** 2).mean()
        >>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=4)
        >>> x, y = torch.ones(10, 2), torch.ones(10)
        >>> loss, grads = step({"w": torch.zeros(2)}, x, y)  # micro-batches of 3, 3, 2 and 2 rows
        >>> loss, grads
        (tensor(1.), {'w': tensor([-2., -2.])})

        A mean over tokens plus a mean over rows, each divided by its count in the whole batch:

        >>> def loss_fn(w, x, mask, *, totals):
        ...     squares = (w * x) ** 2
        ...     per_token = (squares * mask).sum() / totals["tokens"]
        ...     return per_token + 0.1 * squares[:, 0].sum() / totals["rows"]
        >>> totals = lambda x, mask: {"tokens": mask.sum(), "rows": len(x)}
        >>> step = funcga.accumulate(funcga.grad(loss_fn), n=3, fold=funcga.sum(), totals=totals)
        >>> mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
        >>> step(torch.tensor(2.0), torch.ones(3, 2), mask)
        tensor(4.4000)
    """
    searches = isinstance(n, str) and n == "auto" and microbatch_size is None
    count, rows = (None, None) if searches else read_sizes(n, microbatch_size, ', or n="auto"')
    program = read_program(
        grad_fn,
        fold,
        weight,
        in_axes,
        across,
        totals,
        observe,
        drop=drop,
        drop_if=drop_if,
        n=count,
        microbatch_size=rows,
        searches=searches,
    )
    search = Search(program) if searches else None

    # A gradient function has no name of its own to copy.
    names = (
        ()
        if isinstance(grad_fn, GradientFunction | OwningGradient)
        else ("__doc__", "__name__", "__qualname__")
    )

    @functools.wraps(grad_fn, assigned=names, updated=())
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        """The fold of grad_fn over the micro-batches that the arguments are split into."""
        # The arrays of each call determine the framework.
        backend = program.backend(args, kwargs)
        if totals is not None:
            check_no_totals(kwargs)
        try:
            if search is not None:
                return search(backend, args, kwargs)
            return backend.loop.accumulate(program, backend)(args, kwargs)
        except TypeError as error:
            program.check_call(error, len(args), kwargs)
            if any(isinstance(arg, list) and arg and isinstance(arg[0], Mapping) for arg in args):
                error.add_note(
                    "funcga: an argument is a list of dicts. If it is a window of micro-batches, "
                    "stream it: funcga.stream(grad_fn)(params, microbatches)."
                )
            raise

    # For code that wraps the step, and for tools that inspect it.
    accumulated.program = program  # type: ignore[attr-defined]
    return accumulated


# -- n="auto": the smallest number of micro-batches whose memory suffices, planned, then tried out

# How many shapes of arguments are remembered.
_SHAPES = 256


class Search:
    """The fold of a program with the smallest n that fits; what fitted is remembered for each shape
    of arguments.

    A window that runs out of memory is dropped and replayed from its start with more micro-batches.
    So no part of it is counted twice, and the result is that of the n that ran to its end.
    """

    def __init__(self, program: Program):
        self.program = program
        self.fitted: dict[Any, int] = {}
        self.programs: dict[int, Program] = {}

    def __call__(self, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result. Raises what the framework raises if not even one row at a time fits."""
        if backend.loop.is_traced((args, kwargs)):
            raise FuncgaError(
                'n="auto" tries sizes out when it is called, which cannot be done in a program '
                "that is being compiled. "
                "Call the step outside of jax.jit or torch.compile, or give a number: n=8."
            )
        leaves = filter(backend.arrays.is_array, backend.trees.flatten((args, kwargs))[0])
        key = backend.name, *[(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]
        rows = self.program.read(args, backend).rows()
        owner = owner_of(self.program.grad_fn)
        undo = None if owner is None else owner.snapshot()

        def run(n: int) -> Any:
            if undo is not None:  # an earlier attempt may have written to the module's buffers
                undo()
            program = self.programs.setdefault(n, replace(self.program, n=n, memory=Memory()))
            result = backend.loop.accumulate(program, backend)(args, kwargs)
            # JAX raises when the result is waited for.
            for leaf in backend.trees.flatten(result)[0]:
                if hasattr(leaf, "block_until_ready"):
                    leaf.block_until_ready()
            return result

        fitted = self.fitted[key] if key in self.fitted else self._planned(backend, args, kwargs)
        n, result = smallest(run, rows, backend.loop.is_out_of_memory, fitted)
        # Least recently used: the latest shapes are last in the dict, and the first is
        # forgotten.
        self.fitted.pop(key, None)
        self.fitted[key] = n
        if len(self.fitted) > _SHAPES:
            del self.fitted[next(iter(self.fitted))]
        return result

    def _planned(
        self, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int | None:
        """The n of a plan; None if it cannot be planned."""
        try:
            # By name, as this tool may be missing.
            plan = import_module("funcga._plan").planned(self.program, backend, args, kwargs)
        except Exception:
            return None  # an invalid call raises in the attempt, too
        n: int | None = plan.n if plan.fits else None
        return n


def smallest(
    run: Callable[[int], Any],
    most: int,
    is_out_of_memory: Callable[[BaseException], bool],
    fitted: int | None = None,
) -> tuple[int, Any]:
    """The smallest n from 1 to `most` for which `run(n)` has enough memory, and what it returns.

    `fitted` is one that had enough before. It is tried first, and is the answer if it still has.
    """

    def attempt(n: int) -> tuple[bool, Any]:
        try:
            return True, run(n)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if n == most:
                error.add_note(
                    f"funcga: tried up to n={n}, one row a micro-batch, and that does not fit "
                    "either."
                )
                raise
        # Not in the `except` block, where the error still references frames and their arrays.
        gc.collect()
        return False, None

    n, too_few = (1, 0) if fitted is None else (min(fitted, most), fitted - 1)
    fits, result = attempt(n)
    # Invariant: `too_few` micro-batches are taken not to fit. Double until something fits, ...
    while not fits:
        too_few, n = n, min(2 * n, most)
        fits, result = attempt(n)
    # ... then halve the gap below it.
    while n - too_few > 1:
        middle = (n + too_few) // 2
        result = None  # frees its memory for the next attempt
        fits, result = attempt(middle)
        n, too_few = (middle, too_few) if fits else (n, middle)
    # If the last attempt did not fit, the result of n is gone: run it again.
    return (n, result) if fits else smallest(run, most, is_out_of_memory, n)
