"""The one error type of funcga, and what its texts share."""

import difflib
from collections.abc import Iterable
from typing import Any


class FuncgaError(ValueError):
    """What was asked, what was found and where, why it cannot work, and the line to write instead.

    Every refusal of bad input is one of these, raised before any work is done wherever that is possible; a call that
    fails has changed nothing. Errors that your own functions raise pass through untouched.
    """


class TooFewRowsError(FuncgaError):
    """A FuncgaError about a loss that cannot take a micro-batch of so few rows; with more of them it can."""


def similar(name: Any, known: Iterable[str]) -> str:
    """A hint at the known name that is most like this one, " (`name`?)", to stand behind it; "" if none is."""
    close = difflib.get_close_matches(str(name), [*known], 1)
    return f" (`{close[0]}`?)" if close else ""
