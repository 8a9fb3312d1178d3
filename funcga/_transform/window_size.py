"""`n` of `multi_steps` and `windows`: how many micro-batches a window has. `windows` itself: those
of an iterable, n at a time.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

from funcga._fold import as_number, has_no_axes
from funcga._types import Scalar, WeightFn
from funcga.errors import FuncgaError, check_count

if TYPE_CHECKING:
    from funcga.tools.window_size import TargetWeight

Item = TypeVar("Item")

# A number of micro-batches, a function of the number of updates that returns one, or what says
# itself whether a window `is_full`.
WindowSize: TypeAlias = Union[int, Callable[[Any], Scalar], "TargetWeight"]


def check_size(n: WindowSize) -> WindowSize:
    """What `n` may be. Raises FuncgaError for a number that is no int >= 1."""
    if callable(n) or hasattr(n, "is_full"):
        return n
    number: Scalar = n
    try:
        number = number.item() if has_no_axes(number) else number
    except Exception:  # a traced number, as optax.inject_hyperparams passes one, has no value yet
        return n
    instead = ", a function of the number of updates, or funcga.transforms.TargetWeight(1_000_000)"
    return check_count(number, "n", instead)


def size_after(n: Any, updates: Scalar, on_host: Callable[[Scalar], Scalar]) -> Scalar:
    """How many micro-batches the window after so many updates has: an int, or a 0-d array if it
    stays one `on_host`. Raises FuncgaError if a schedule returns no such number.
    """
    if not callable(n):
        return n
    size = n(updates)
    number = on_host(as_number(size))
    if has_no_axes(number):
        return number
    is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
    if not is_number or not 1 <= number < math.inf:
        raise FuncgaError(
            f"the schedule of n returned {size!r} after {updates} updates: it must be a number "
            "of micro-batches, at least 1, or a 0-d array of one."
        )
    return math.ceil(number)  # a window is full when it has at least as many


def windows(
    iterable: Iterable[Item], n: WindowSize, *, weight: WeightFn | None = None
) -> Iterator[list[Item]]:
    """Lists of n micro-batches in order, the last one shorter; each is in one, and no window is
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
