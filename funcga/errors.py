"""The one error type of funcga."""


class FuncgaError(ValueError):
    """What was asked, what was found and where, why it cannot work, and the line to write instead.

    Every refusal of bad input is one of these, raised before any work is done wherever that is possible; a call that
    fails has changed nothing. Errors that your own functions raise pass through untouched.
    """


class TooFewRowsError(FuncgaError):
    """A FuncgaError about a loss that cannot take a micro-batch of so few rows; with more of them it can."""
