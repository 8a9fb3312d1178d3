"""The tally: how much has been folded. Counts stay exact where a float32 would stop at 2**24."""

from typing import Any, NamedTuple

from funcga._backend.protocols import Arrays
from funcga.errors import FuncgaError


class Tally(NamedTuple):
    """The total weight and the number of micro-batches.

    `weight` is a tuple of scalars whose sum is the total: one where the framework has 64-bit scalars, else a float32
    and the float32 remainder, which together are exact to 48 bits. Inside a normalizer it is one scalar, their sum.
    """

    weight: Any
    steps: Any


def empty(arrays: Arrays) -> Tally:
    """The tally of nothing."""
    return Tally(arrays.limbs(0), arrays.count(0))


def of(weight: Any, arrays: Arrays, steps: int = 1) -> Tally:
    """The tally of one micro-batch of this weight, or of some that weigh this much together."""
    return Tally(arrays.limbs(weight), arrays.count(steps))


def merge(a: Tally, b: Tally) -> Tally:
    """The tally of both."""
    return Tally(_plus(a.weight, b.weight), a.steps + b.steps)


def total(tally: Tally) -> Any:
    """The total weight as one scalar, rounded to the type of its limbs."""
    return tally.weight[0] if len(tally.weight) == 1 else tally.weight[0] + tally.weight[1]


def _plus(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(a) != len(b):
        raise FuncgaError(
            "one state counts in 64 bits and the other in 32: they were made with and without JAX's 64-bit types. "
            'Choose once for the whole program: jax.config.update("jax_enable_x64", True)'
        )
    if len(a) == 1:
        return (a[0] + b[0],)
    high, error = two_sum(a[0], b[0])
    return two_sum(high, error + (a[1] + b[1]))


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded sum and its rounding error, exactly: `a + b == high + low` (Knuth, 1969)."""
    high = a + b
    part = high - a
    return high, (a - (high - part)) + (b - part)
