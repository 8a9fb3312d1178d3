"""`accumulate`: the fold over the micro-batches that a batch is split into."""

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

from funcga._backend import Backend
from funcga._call import Memory, OwningGradient, Program, owner_of, read_program, read_sizes
from funcga._grad import GradientFunction
from funcga._types import Across, DropScope, DropTest, P, R, TotalsFn, Tree, WeightFn
from funcga.errors import FuncgaError, check_callable, explains_arguments
from funcga.folds import FoldTree, mean

if TYPE_CHECKING:
    from funcga.tools.observe import ObserverTree


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
    observe: "ObserverTree",
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
    observe: "ObserverTree | None" = None,
    drop: DropScope | None = None,
    drop_if: DropTest | None = None,
) -> Callable[P, Any]:
    """A function like grad_fn that goes through a batch in n micro-batches, and folds the results.

    It is called as grad_fn is, and returns what grad_fn returns for the whole batch, with the
    memory of one micro-batch::

        step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
        loss, grads = step(params, batch)

    Three choices make it exact for every n; `funcga.verify` checks them:

    - `fold`: `mean()`, the default, if the loss is a mean over its micro-batch; `per_weight()` if
      it is a sum.
    - `weight`: a count of what the loss divides by. The default counts rows; for a mean over
      tokens write `weight=lambda batch: (batch["labels"] != -100).sum()`.
    - `in_axes`: what is split, as in vmap. By default the first argument is passed whole, every
      other positional argument is split on axis 0, and keyword arguments are passed whole.

    Arguments are trees of arrays: dicts, dataclasses, tuples and lists. No argument is mutated, and
    no result shares memory with one. Results keep grad_fn's dtypes; floats of less than 32 bits are
    accumulated in float32. Make the step once, outside of the training loop.

    In torch a step runs on autograd, at the cost of a `.backward()` loop, and its results have no
    graph (docs/concepts/torch_engine.md). In JAX the body of a micro-batch is compiled once, and a
    call outside of jit is jitted (docs/howto/gradients.md; sharded batches: docs/howto/meshes.md).

    Args:
        grad_fn: Any pure function of arrays that returns a tree of arrays: of funcga.grad,
            funcga.value_and_grad, jax.value_and_grad, torch.func.grad and so on. Of a loss itself
            the result is a loss, without gradients.
        n: How many micro-batches. Their sizes differ by at most one row; a batch of fewer than n
            rows has one for each row. "auto" finds the smallest n that fits in memory, outside of
            jit and torch.compile; `step.n` is that of the last call (docs/howto/out_of_memory.md).
        microbatch_size: How many rows a micro-batch has, in place of `n`; the last one may be
            smaller.
        fold: A Fold, or a tree prefix of Folds over grad_fn's output.
        weight: `weight(*split_args)` gives a micro-batch's weight, a number or 0-d array >= 0.
        in_axes: For each positional argument an axis, None (passed whole), a tree prefix, or
            funcga.CARRY for state that is threaded from one micro-batch to the next.
        across: The replicas to merge over, once a call, by what was folded on all of them: a
            torch.distributed process group or 1-D device mesh; inside shard_map, the name of a JAX
            mesh axis or a tuple of names; or a tree prefix of these over grad_fn's output. Every
            replica gets the same result (docs/howto/replicas.md).
        totals: `totals(*split_args)` gives a tree of numbers for a micro-batch, such as its counts.
            Their sums over all micro-batches and replicas are known before the first one is
            evaluated, and grad_fn gets them as its keyword argument `totals`: for a loss with
            several denominators, under `fold=sum()` (docs/howto/totals.md).
        observe: What to measure of each micro-batch's gradient: `gradient_noise()`,
            `gradient_norms()`, `dropped()`, an Observer, or a dict, tuple or list of them. The step
            then returns (result, observation) (docs/howto/observe.md).
        drop: What becomes of a micro-batch whose loss or gradients are not finite. None: it is
            folded like any other. "microbatch": it is left out, with its weight. "window": the
            result is zeros. This takes the memory of one more set of gradients
            (docs/howto/drop.md).
        drop_if: A test of your own in place of that one: a function of what grad_fn returns for a
            micro-batch, that returns a bool or a 0-d array of one.

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
    """
    # First, as loss_fn's own arguments would be taken for n and be blamed.
    check_callable(grad_fn, "grad_fn", "funcga.value_and_grad(loss_fn)")
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
        with program.telling() if program.is_told else nullcontext():
            # The arrays of each call determine the framework.
            backend = program.backend(args, kwargs)
            if program.totals is not None:
                program.totals.check_call(kwargs)
            try:
                if search:
                    this().n, result = search(backend, args, kwargs)  # type: ignore[union-attr]
                    return result
                return backend.loop.accumulate(program, backend)(args, kwargs)
            except TypeError as error:
                program.check_call(error, len(args), kwargs)
                if any(
                    isinstance(arg, list) and arg and isinstance(arg[0], Mapping) for arg in args
                ):
                    error.add_note(
                        "funcga: an argument is a list of dicts. If it is a window of "
                        "micro-batches, stream it: funcga.stream(grad_fn)(params, microbatches)."
                    )
                raise

    # Not a name of the closure, which would be a cycle that keeps grad_fn, and its module, alive.
    this = weakref.ref(accumulated)
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

    def __call__(
        self, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Any]:
        """(n, the result). Raises what the framework raises if not even one row at a time fits."""
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
        return n, result

    def _planned(
        self, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int | None:
        """The n of a plan; None if it cannot be planned."""
        try:
            # By name, as this tool may be missing.
            plan = import_module("funcga._plan").planned(self.program, backend, args, kwargs)
        except Exception:
            return None  # an invalid call raises in the attempt, too
        return plan.n  # type: ignore[no-any-return]


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
