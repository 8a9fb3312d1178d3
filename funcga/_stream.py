"""`stream`: the same fold over any iterable of micro-batches; `windows`: an iterable of
micro-batches, n at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from funcga._accumulate import DropScope, DropTest, Options, TotalsFn, compose
from funcga._call import backend_of_call, owner_of, read_program
from funcga._fold import has_no_axes
from funcga._transform.window_size import WindowSize, check_size, size_after
from funcga._types import Across, R, Tree, WeightFn
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean

if TYPE_CHECKING:
    from funcga.observers import ObserverTree

Item = TypeVar("Item")


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
    program = read_program(grad_fn, fold, weight, in_axes, across)
    given = totals, observe, drop, drop_if
    if given.count(None) < len(given):
        program = compose(program, *given)
    owner = owner_of(grad_fn)

    def streamed(*args: Any, **kwargs: Any) -> Any:
        """The fold of grad_fn over an iterable of micro-batches: f(params, microbatches)."""
        with program.telling():
            *leading, microbatches = args
            if hasattr(microbatches, "shape") or isinstance(microbatches, Mapping | str):
                raise FuncgaError(
                    f"microbatches is of type {type(microbatches).__name__}: one batch, not an "
                    "iterable of micro-batches. Split it with funcga.accumulate(grad_fn, n), or "
                    "pass a list of micro-batches."
                )
            # `map`, as a generator's frame would keep a reference to its last item.
            items: Iterator[tuple[Any, ...]] = map(_fields, microbatches)
            # The first micro-batch determines the framework.
            first = next(items, None)
            own: Sequence[Any] = ()
            if first is None:
                if not program.is_told:
                    raise FuncgaError(
                        "the stream is empty: there is no micro-batch to fold, and so no structure "
                        "to return. Check the loader, or that a generator was not used up before."
                    )
                # With other processes, the window raises the error on all of them. A module's
                # parameters are then the only arrays.
                own = () if owner is None else owner.parameters()
            backend = backend_of_call(grad_fn, (*leading, *(first or own)), kwargs)
            ahead = [] if first is None else [first]
            # A reference in this frame would keep the first micro-batch in memory during the loop.
            del first
            items = _put_back(ahead, items)
            if program.prologue is not None:
                again = partial(map, _fields, microbatches)
                of_stream = program.prologue.of_stream
                call = tuple(leading), items, again, kwargs, device
                kwargs, items = of_stream(program, backend, *call)
            return backend.loop.stream(program, backend)(tuple(leading), items, kwargs, device)

    return streamed


def _fields(item: object) -> tuple[Any, ...]:
    """The arguments of grad_fn that a micro-batch is spread into."""
    return tuple(item) if isinstance(item, tuple | list) else (item,)


def _put_back(ahead: list[Any], items: Iterator[Any]) -> Iterator[Any]:
    # Popped, so that no reference is left.
    if ahead:
        yield ahead.pop()
    yield from items


def windows(
    iterable: Iterable[Item], n: WindowSize, *, weight: WeightFn | None = None
) -> Iterator[list[Item]]:
    """Lists of n micro-batches in order, the last one shorter; nothing is dropped, and no window is
    taken ahead.

    The micro-batches of a window are held together: their inputs, that is, and no activations.
    Where that is too much, `itertools.islice(iterator, n)` in place of a list gives `stream` one at
    a time.

    Args:
        iterable: A DataLoader, a generator, a list of micro-batches.
        n: A number of micro-batches; a schedule, a function of the number of windows so far, which
            is called when a window begins; or funcga.transforms.TargetWeight(w): a window has as
            many as weigh w together, or more.
        weight: With a TargetWeight, `weight(*item)` is what a micro-batch weighs, as for `stream`:
            its rows, for a target batch size, or its tokens.

    Returns:
        An iterator over the windows.

    Raises:
        FuncgaError: n is neither an int >= 1 nor a TargetWeight nor a function that returns such
            numbers; or weight comes without a TargetWeight, or the other way round.

    Example:
        >>> [len(window) for window in funcga.windows(range(10), 4)]
        [4, 4, 2]
        >>> [len(window) for window in funcga.windows(range(10), lambda windows: 1 + 2 * windows)]
        [1, 3, 5, 1]
        >>> loader = [torch.ones(100), torch.ones(100), torch.ones(100)]
        >>> target = funcga.transforms.TargetWeight(150)
        >>> [len(window) for window in funcga.windows(loader, target, weight=len)]
        [2, 1]
    """
    if hasattr(n, "windows") == (weight is None):  # as a TargetWeight has
        raise FuncgaError(
            f"weight is {weight!r}, and n is {n!r}: windows of a number of micro-batches weigh "
            "nothing, and others need to know what one weighs. Write "
            "funcga.windows(loader, funcga.transforms.TargetWeight(256), weight=lambda x, y: "
            "len(x)), and give weight= to stream as well."
        )
    items = iter(iterable)
    if hasattr(n, "windows"):
        return n.windows(items, weight)
    size = check_size(n)
    on_host = lambda size: size.item() if has_no_axes(size) else size
    return _windows(items, (size_after(size, number, on_host) for number in count()))


def _windows(items: Iterator[Item], sizes: Iterator[int]) -> Iterator[list[Item]]:
    # A size is asked for when there is a micro-batch, so a schedule may end with the data.
    for first in items:
        yield [first, *islice(items, next(sizes) - 1)]
