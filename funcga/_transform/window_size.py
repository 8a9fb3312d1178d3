"""`n` of `multi_steps` and `windows`: how many micro-batches a window has."""

import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from funcga._fold import as_number, has_no_axes
from funcga._types import Scalar
from funcga.errors import FuncgaError, check_count

if TYPE_CHECKING:
    from funcga.tools.window_size import TargetWeight

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
