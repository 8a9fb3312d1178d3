"""`stream`: the same fold over any iterable of micro-batches; `windows`: an iterable of
micro-batches, n at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any, TypeVar, overload

from funcga._call import owner_of, read_program, weight_of
from funcga._call.supported import MODULE
from funcga._fold import weight_on_host
from funcga._transform.window_size import TargetWeight, WindowSize, in_full, scheduled_size
from funcga._types import Across, DropScope, DropTest, R, TotalsFn, Tree, WeightFn
from funcga.errors import FuncgaError, check_count, explains_arguments
from funcga.folds import FoldTree, mean

if TYPE_CHECKING:
    from funcga.tools.observe import ObserverTree

Item = TypeVar("Item")


@overload
def stream(
    grad_fn: Callable[..., R],
    *,
    fold: FoldTree = ...,
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    across: Across = None,
    totals: TotalsFn | None = None,
    observe: None = None,
    drop: DropScope | None = None,
    drop_if: DropTest | None = None,
    device: object = None,
) -> Callable[..., R]: ...
@overload
def stream(
    grad_fn: Callable[..., R],
    *,
    fold: FoldTree = ...,
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    across: Across = None,
    totals: TotalsFn | None = None,
    observe: "ObserverTree",
    drop: DropScope | None = None,
    drop_if: DropTest | None = None,
    device: object = None,
) -> Callable[..., tuple[R, Any]]: ...
@explains_arguments
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
        device=device,
    )
    owner = owner_of(grad_fn)

    def streamed(*args: Any, **kwargs: Any) -> Any:
        """The fold of grad_fn over an iterable of micro-batches: f(params, microbatches)."""
        with program.telling():
            # The first micro-batch determines the framework.
            spread, is_counted = _Spread(), program.totals is not None
            leading, items = _iterate(args, spread, twice=is_counted)
            first = next(items, None)
            own: Sequence[Any] = ()
            if first is None and owner is not None:
                own = owner.parameters()  # the only arrays, without a micro-batch
            # With other processes, the window raises the error on all of them.
            if first is None and across is None and (owner is None or owner.kind == MODULE):
                raise FuncgaError(
                    "the stream is empty: there is no micro-batch to fold, and so no structure to "
                    "return. Check the loader, or that a generator was not used up before."
                )
            backend = program.backend((*leading, *(first or own)), kwargs)
            ahead = [] if first is None else [first]
            # A reference in this frame would keep the first micro-batch in memory during the loop.
            del first
            try:
                if is_counted:
                    count = backend.loop.stream(program.totals.counting(program, backend), backend)
                    kwargs = dict(**kwargs, totals=count(leading, _put_back(ahead, items), {}))
                    items = _again(args, spread)
                return backend.loop.stream(program, backend)(
                    leading, _put_back(ahead, items), kwargs
                )
            except TypeError as error:
                program.check_call(error, len(leading) + spread.fields, kwargs, streamed=True)
                raise

    return streamed


class _Spread:
    """Spreads a micro-batch into arguments of grad_fn. It counts the micro-batches, and the
    fields of the last one.
    """

    fields = count = 0

    def __call__(self, item: object) -> tuple[Any, ...]:
        fields = tuple(item) if isinstance(item, tuple | list) else (item,)
        self.fields = len(fields)
        self.count += 1
        return fields


def _iterate(
    args: tuple[Any, ...], spread: _Spread, twice: bool = False
) -> tuple[tuple[Any, ...], Iterator[tuple[Any, ...]]]:
    """(the leading arguments, an iterator over micro-batches); `twice`: whether they have to be
    iterable again.
    """
    if not args:
        raise FuncgaError(
            "stream's function was called without positional arguments. Call it as f(params, "
            "microbatches)."
        )
    *leading, microbatches = args
    try:
        items = iter(microbatches)
    except TypeError:
        raise FuncgaError(
            f"microbatches is of type {type(microbatches).__name__}, which cannot be iterated "
            "over. Pass a DataLoader, a generator or a list of micro-batches; for one batch to be "
            "split, use funcga.accumulate(grad_fn, n)."
        ) from None
    # Iterable, but a single batch.
    if hasattr(microbatches, "shape") or isinstance(microbatches, Mapping | str):
        raise FuncgaError(
            f"microbatches is of type {type(microbatches).__name__}: one batch, not an iterable of "
            "micro-batches. Split it with funcga.accumulate(grad_fn, n), or pass a list of "
            "micro-batches."
        )
    if twice and items is microbatches:
        raise FuncgaError(
            f"microbatches is of type {type(microbatches).__name__}, which can be gone through "
            "once, and with totals= a window is counted before it is folded. Pass a list, "
            "step(params, list(microbatches)), or what windows yields: for window in "
            "funcga.windows(loader, 8)."
        )
    # `map`, as a generator's frame would keep a reference to its last item.
    return tuple(leading), map(spread, items)


def _again(args: tuple[Any, ...], spread: _Spread) -> Iterator[tuple[Any, ...]]:
    """The micro-batches again. Raises FuncgaError at the end if their number has changed."""
    counted, spread.count = spread.count, 0
    yield from _iterate(args, spread)[1]
    if spread.count != counted:
        raise FuncgaError(
            f"the window had {counted} micro-batches when they were counted, for totals=, and "
            f"{spread.count} when they were folded. Pass one that stays the same, such as a list: "
            "step(params, list(microbatches))."
        )


def _put_back(ahead: list[Any], items: Iterator[Any]) -> Iterator[Any]:
    # Popped, so that no reference is left.
    if ahead:
        yield ahead.pop()
    yield from items


@explains_arguments
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
            numbers, or the first micro-batch weighs more than the target: then all of them may.

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
    # A Dataset may have __getitem__ alone.
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise FuncgaError(
            f"iterable is of type {type(iterable).__name__}. Pass a DataLoader, a generator or a "
            "list."
        )
    if isinstance(n, TargetWeight):
        if not callable(weight):
            raise FuncgaError(
                f"weight is {weight!r}, and n is a {n}: say what a micro-batch weighs, such as its "
                "rows, weight=lambda x, y: len(x)."
            )
        return _weighed(iter(iterable), n, weight)
    if weight is not None:
        raise FuncgaError(
            f"weight is given, and n is {'a function' if callable(n) else repr(n)}: a number of "
            "micro-batches, whatever they weigh. Write funcga.transforms.TargetWeight(256) for "
            "windows that weigh so much, and give weight= to stream as well."
        )
    if callable(n):
        return _windows(iter(iterable), map(partial(scheduled_size, n), count()))
    instead = ", a function of the number of windows so far, or funcga.transforms.TargetWeight(256)"
    return _windows(iter(iterable), repeat(check_count(n, "n", instead)))


def _windows(items: Iterator[Item], sizes: Iterator[int]) -> Iterator[list[Item]]:
    # A size is asked for when there is a micro-batch, so a schedule may end with the data.
    for first in items:
        yield [first, *islice(items, next(sizes) - 1)]


def _weighed(items: Iterator[Item], n: TargetWeight, weight: WeightFn) -> Iterator[list[Item]]:
    window: list[Item] = []
    total, updates = 0.0, 0
    for item in items:
        target = n.after(updates)
        # If the first one exceeds the target, units are probably mixed up: rows, say, for
        # tokens.
        amount = weight_on_host(weight_of(weight, _Spread()(item)))
        if amount > target and not (window or updates):
            raise FuncgaError(
                f"the first micro-batch weighs {amount:g}, and the target is {target:g}: an update "
                "cannot be of less than one micro-batch. Make them smaller, as by "
                "DataLoader(batch_size=...), or raise the target."
            )
        window.append(item)
        total += amount
        if in_full(total) >= target:
            yield window
            window, total, updates = [], 0.0, updates + 1
    # The last, partial window.
    if window:
        yield window
