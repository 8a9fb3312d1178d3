"""The one error type of funcga, and what its texts share."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any


class FuncgaError(ValueError):
    """What was asked, what was found and where, why it cannot work, and the line to write instead.

    Every refusal of bad input is one of these, raised before any work is done wherever that is
    possible; a call that fails has changed nothing. Errors that your own functions raise pass
    through untouched.

    Example:
        >>> funcga.accumulate(lambda x: x.mean(), 0)
        Traceback (most recent call last):
        funcga.errors.FuncgaError: n is 0: it must be an int, at least 1. Write n=8, or n="auto".
    """


def similar(name: object, names: Iterable[str]) -> str:
    """A hint at the one of `names` that is most like this name, " (`name`?)", to stand behind
    it; "" if none is.
    """
    # Slow to import, and rarely needed.
    import difflib

    close = difflib.get_close_matches(str(name), [*names], 1)
    return f" (`{close[0]}`?)" if close else ""


def listed(names: Sequence[str], most: int = 4) -> str:
    """Some names in a row, "a, b and 3 more"; "nothing" if there are none."""
    return (
        ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")
        or "nothing"
    )


def check_callable(function: object, name: str, like: str) -> None:
    """Raises FuncgaError if it cannot be called."""
    if not callable(function):
        raise FuncgaError(
            f"{name} is {function!r:.60}, which is no function. Pass one, such as {like}"
        )


def check_count(value: Any, name: str, instead: str = "") -> int:
    """A number of micro-batches or rows as an int >= 1; `instead` is what else may stand there."""
    # In Python True is an int, but it is not a count.
    is_int = hasattr(value, "__index__") and not isinstance(value, bool)
    count = operator.index(value) if is_int else 0
    if count < 1:
        raise FuncgaError(
            f"{name} is {value!r}: it must be an int, at least 1. Write {name}=8{instead}."
        )
    return count
