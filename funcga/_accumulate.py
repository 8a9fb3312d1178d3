"""`accumulate`: the fold over the micro-batches that a batch is split into; `stream`: the same fold
over any iterable of micro-batches.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from funcga._call import (
    OwningGradient,
    Program,
    backend_of_call,
    owner_of,
    read_program,
    read_split,
    telling,
)
from funcga._call.arguments import Split
from funcga._call.supported import ANY, check_supported
from funcga._grad import GradientFunction
from funcga._tools import load
from funcga._types import Across, Args, P, R, Tree, WeightFn
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean

if TYPE_CHECKING:
    from funcga.observers import ObserverTree

TotalsFn = Callable[..., Tree]
DropScope = Literal["microbatch", "window"]
DropTest = Callable[[Tree], object]


class Options(TypedDict, total=False):
    """The options that a step has with `observe=` and without it, for type checkers."""

    fold: FoldTree
    weight: WeightFn | None
    in_axes: Tree
    across: Across
    totals: TotalsFn | None
    drop: DropScope | None
    drop_if: DropTest | None


@overload
def accumulate(
    grad_fn: Callable[P, R],
    n: int | Literal["auto"] | None = None,
    *,
    microbatch_size: int | None = None,
    observe: None = None,
    **options: Unpack[Options],
) -> Callable[P, R]: ...
@overload
def accumulate(
    grad_fn: Callable[P, R],
    n: int | Literal["auto"] | None = None,
    *,
    microbatch_size: int | None = None,
    observe: "ObserverTree",
    **options: Unpack[Options],
) -> Callable[P, tuple[R, Any]]: ...
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
            mesh axis or a tuple of names. Every replica gets the same result
            (docs/howto/replicas.md).
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
    searches = n == "auto" and microbatch_size is None
    split = Split() if searches else read_split(n, microbatch_size, ', or n="auto"')
    program, counting = read_program(grad_fn, fold, weight, in_axes, across, split), None
    given = totals, observe, drop, drop_if
    if searches or given.count(None) < len(given):
        program, counting = _composed(program, *given, searches)
    search = load("plan.search", 'n="auto"').Search(counting) if searches else None
    # What folds a batch: a tool in the place of the backend's loop, or that.
    loop = search or counting
    # torch.compile may trace a call, but not what is cached at the first one.
    is_told = program.is_told
    # A gradient function has no name of its own to copy.
    is_object = isinstance(grad_fn, GradientFunction | OwningGradient)
    names = () if is_object else ("__doc__", "__name__", "__qualname__")

    @functools.wraps(grad_fn, assigned=names, updated=())
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        """The fold of grad_fn over the micro-batches that the arguments are split into."""
        with telling(counting, program) if is_told else nullcontext():
            # The arrays of each call determine the framework.
            backend = backend_of_call(grad_fn, args, kwargs)
            return (loop or backend.loop).accumulate(program, backend)(args, kwargs)

    if search is not None:  # a cycle would keep grad_fn, and its module, alive
        search.step = weakref.ref(accumulated)
    # For code that wraps the step, and for tools that inspect it.
    accumulated.program, accumulated.counting = program, counting  # type: ignore[attr-defined]
    return accumulated


@overload
def stream(
    grad_fn: Callable[..., R],
    *,
    observe: None = None,
    device: object = None,
    **options: Unpack[Options],
) -> Callable[..., R]: ...
@overload
def stream(
    grad_fn: Callable[..., R],
    *,
    observe: "ObserverTree",
    device: object = None,
    **options: Unpack[Options],
) -> Callable[..., tuple[R, Any]]: ...
def stream(
    grad_fn: Callable[..., Any],
    *,
    fold: FoldTree = mean(),  # noqa: B008 - a frozen value
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    across: Across = None,
    totals: TotalsFn | None = None,
    observe: "ObserverTree | None" = None,
    drop: DropScope | None = None,
    drop_if: DropTest | None = None,
    device: object = None,
) -> Callable[..., Any]:
    """A function `f(params, microbatches)`: grad_fn folded over an iterable of micro-batches.

    `microbatches` is a DataLoader, a generator or a list. It is read one micro-batch at a time. The
    result is divided by what was folded, so a last window that is shorter is exact::

        step = funcga.stream(funcga.value_and_grad(loss_fn))
        for window in funcga.windows(loader, 8):
            loss, grads = step(params, window)

    An item that is a tuple or a list is `grad_fn(params, *item)`, anything else `grad_fn(params,
    item)`. Micro-batches may differ in size; `fold` and `weight` are chosen as in `accumulate`.
    Make the step once, outside of the loop: in JAX it is compiled once for each shape of
    micro-batch (docs/howto/stream.md).

    Args:
        grad_fn: As in `accumulate`.
        fold: As in `accumulate`.
        weight: As in `accumulate`.
        in_axes: As in `accumulate`, for grad_fn's positional arguments. Micro-batches come split;
            an axis only says where their rows are counted, and `weight` gets the arguments that
            have one. With a CARRY argument, the initial state stands where grad_fn has it, before
            the micro-batches: f(params, state, microbatches).
        across: As in `accumulate`. A replica whose data has run out passes an empty iterable.
        totals: As in `accumulate`. The window is read twice, first to count it, so it cannot be an
            iterator.
        observe: As in `accumulate`.
        drop: As in `accumulate`.
        drop_if: As in `accumulate`.
        device: Where to move the arrays of a micro-batch as it arrives: a torch.device, a
            jax.Device, the name of one, or a Sharding. On CUDA, from pinned memory, the next
            micro-batch is copied while this one computes.

    Returns:
        A function f(params, microbatches) that returns what grad_fn returns; with `observe`, a pair
        of that and the observation.

    Raises:
        FuncgaError: If an argument is invalid, or no replica has a micro-batch.

    Example:
        >>> step = funcga.stream(funcga.grad(lambda w, x: (w * x).mean()))
        >>> loader = [torch.ones(2), torch.ones(2), torch.full((1,), 6.0)]  # the last is smaller
        >>> for window in funcga.windows(loader, 8):
        ...     print(step(torch.tensor(1.0), window))
        tensor(2.)
    """
    program, counting = read_program(grad_fn, fold, weight, in_axes, across), None
    given = totals, observe, drop, drop_if
    if given.count(None) < len(given):
        program, counting = _composed(program, *given)
    owner = owner_of(grad_fn)

    def streamed(*args: Any, **kwargs: Any) -> Any:
        """The fold of grad_fn over an iterable of micro-batches: f(params, microbatches)."""
        with telling(counting, program):
            *leading, microbatches = args
            if hasattr(microbatches, "shape") or isinstance(microbatches, Mapping | str):
                raise FuncgaError(
                    f"microbatches is of type {type(microbatches).__name__}: one batch, not an "
                    "iterable of micro-batches. Split it with funcga.accumulate(grad_fn, n), or "
                    "pass a list of micro-batches."
                )
            # `map`, as a generator's frame would keep a reference to its last item.
            items: Iterator[Args] = map(_fields, microbatches)
            # The first micro-batch determines the framework.
            first = next(items, None)
            # With other processes, the window raises the error on all of them.
            if first is None and not program.is_told:
                raise FuncgaError(
                    "the stream is empty: there is no micro-batch to fold, and so no structure "
                    "to return. Check the loader, or that a generator was not used up before."
                )
            backend = backend_of_call(grad_fn, (*leading, *(first or ())), kwargs, owner)
            ahead = [] if first is None else [first]
            # A reference in this frame would keep the first micro-batch in memory during the loop.
            del first
            items = _put_back(ahead, items)
            fixed = tuple(leading)
            if counting is not None:
                again = functools.partial(map, _fields, microbatches)
                kwargs, items = counting.of_stream(backend, fixed, items, again, kwargs, device)
            return backend.loop.stream(program, backend)(fixed, items, kwargs, device)

    return streamed


def _fields(item: object) -> Args:
    """The arguments of grad_fn that a micro-batch is spread into."""
    return tuple(item) if isinstance(item, tuple | list) else (item,)


def _put_back(ahead: list[Any], items: Iterator[Any]) -> Iterator[Any]:
    # Popped, so that no reference is left.
    if ahead:
        yield ahead.pop()
    yield from items


def _composed(
    program: Program,
    totals: TotalsFn | None,
    observe: Tree,
    drop: DropScope | None,
    drop_if: DropTest | None,
    searches: bool = False,
) -> tuple[Program, Any]:
    """(the program as the tools of these options make it; the one that counts a batch before, for
    `totals`, or None). `searches`: n is searched for. Raises FuncgaError for an unsupported
    combination.
    """
    across, owner = program.across, owner_of(program.grad_fn)
    features = {
        "across=": across is not None,
        'n="auto"': searches,
        "totals=": totals is not None,
        "observe=": observe is not None,
        "drop=": drop is not None,
        f'drop="{drop}"': drop is not None,
        "drop_if=": drop_if is not None,
        "scaled=True": getattr(program.grad_fn, "scaled", False),
        # In Replicas a tree of ints; a torch process group has a method of this name.
        "scatter=": isinstance(getattr(across, "scatter", None), int | tuple | list | dict),
    }
    used = [feature for feature, is_used in features.items() if is_used]
    check_supported(used, ANY if owner is None else owner.kind)
    if (drop, drop_if) != (None, None):
        skip = load("dropping", "drop=").dropping(drop, drop_if, program.memory, program.grad_fn)
        program = replace(program, skip=skip)
    if observe is not None:
        program = load("observe", "observe=").observed(program, observe)
    counting = None if totals is None else load("totals", "totals=").counting(program, totals)
    return program, counting
