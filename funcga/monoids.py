"""A monoid: the associative operation that joins what micro-batches, or replicas, have contributed.

Its laws, up to rounding:

    combine(identity, x) = x = combine(x, identity)
    combine(a, combine(b, c)) = combine(combine(a, b), c)

So micro-batches may be grouped in any way. All but `last` and `concat`, which keep the order, are
commutative too. Operands are what a reducer lifts from one leaf: one array, or a tuple of arrays;
`sum`, `max` and `min` work on each array of it.

Example:
    >>> funcga.monoids.sum.combine(torch, torch.tensor(2.0), torch.tensor(3.0))
    tensor(5.)
    >>> funcga.monoids.max.identity(torch, torch.tensor(2.0))
    tensor(-inf)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga._types import Array, Namespace, Reduced
from funcga.errors import FuncgaError


@dataclass(frozen=True)
class Monoid:
    """`identity(xp, like)` and `combine(xp, a, b)`, pure functions on what a reducer lifts from one
    leaf.

    Args:
        identity: The neutral element. `xp` is the array namespace, `torch` or `jax.numpy`; `like`
            has the shapes and dtypes of the operands.
        combine: The operation.
        widens: Whether operands of less than 32 bits are held in 32.
        axis: The axis that values grow along, as in a concatenation: loops collect such values and
            join them once.
        collective: The all-reduce operation that is equivalent to `combine`: "sum", "max" or "min".
            Without one, the operands of all replicas are gathered, and combined in their order.
        ordered: True if the order of the operands matters.
        sent: `sent(xp, operand)` converts an operand to what is all-reduced, if that differs: a
            number in digits, for example, to pieces that leave room for carrying.
        received: `received(xp, reduced)`, the inverse of `sent`.

    Raises:
        FuncgaError: for another collective.

    Example:
        >>> product = funcga.Monoid(lambda xp, like: xp.ones_like(like), lambda xp, a, b: a * b)
        >>> value = funcga.Reducer(lambda xp, value, weight: value, product, kinds=("float",))
        >>> fold = funcga.Fold(value, funcga.normalizers.identity)
        >>> step = funcga.accumulate(lambda x: x.prod(), 2, in_axes=0, fold=fold)
        >>> step(torch.tensor([1.0, 2.0, 3.0]))
        tensor(6.)
    """

    identity: Callable[[Namespace, Reduced], Reduced]
    combine: Callable[[Namespace, Reduced, Reduced], Reduced]
    widens: bool = True
    axis: int | None = None
    collective: str | None = None
    ordered: bool = False
    sent: Callable[[Namespace, Reduced], Reduced] | None = None
    received: Callable[[Namespace, Reduced], Reduced] | None = None

    def __post_init__(self) -> None:
        if self.collective not in (None, "sum", "max", "min"):
            raise FuncgaError(
                f"collective is {self.collective!r}: it names the reduction that is combine over "
                'replicas, "sum", "max" or "min"; None gathers what they have, and combines it in '
                "their order."
            )


def _each(operation: Callable[..., Array]) -> Callable[..., Reduced]:
    """The operation on each array of what is lifted."""

    def on_each(xp: Namespace, *operands: Reduced) -> Reduced:
        if isinstance(operands[0], tuple):
            return tuple(operation(xp, *parts) for parts in zip(*operands, strict=True))
        return operation(xp, *operands)

    return on_each


# sum: a + b, and its identity is 0.
_zeros = _each(lambda xp, like: xp.zeros_like(like))
sum = Monoid(_zeros, _each(lambda xp, a, b: a + b), collective="sum")


def _extreme(xp: Namespace, like: Array, lowest: bool) -> Any:
    """The lowest, or the highest, number of a dtype."""
    # The one test of a dtype that both namespaces and torch.compile understand.
    if "float" in str(like.dtype):
        return float("-inf") if lowest else float("inf")
    if like.dtype == xp.bool:
        return not lowest
    return xp.iinfo(like.dtype).min if lowest else xp.iinfo(like.dtype).max


def _lowest(xp: Namespace, like: Array) -> Array:
    return xp.full_like(like, _extreme(xp, like, lowest=True))


def _highest(xp: Namespace, like: Array) -> Array:
    return xp.full_like(like, _extreme(xp, like, lowest=False))


# max: the larger of both, elementwise. No number is below the lowest one, which so is the identity.
# min alike.
max = Monoid(_each(_lowest), _each(lambda xp, a, b: xp.maximum(a, b)), collective="max")
min = Monoid(_each(_highest), _each(lambda xp, a, b: xp.minimum(a, b)), collective="min")


def _add_counts(xp: Namespace, a: Reduced, b: Reduced) -> Reduced:
    if not isinstance(a, tuple):
        return a + b
    # What the low halves exceed 16 bits by is carried over to the high ones.
    low = a[1] + b[1]
    return a[0] + b[0] + (low >> 16), low & 0xFFFF


# counts: the sum of integers as (high, low) with value = 2**16 * high + low and 0 <= low < 2**16;
# of floats the sum.
counts = Monoid(_zeros, _add_counts)


def _merge_moments(xp: Namespace, a: Reduced, b: Reduced) -> Reduced:
    # With weights A and B, means m and n, variances S and T, and d = n - m, of the union
    # weight = A + B,   mean = m + d B / (A + B),   variance = S A / (A + B) + T B / (A + B)
    # + d**2 A B / (A + B)**2   (Chan, Golub and LeVeque, 1979). There is no difference of large
    # sums of squares in it, which would cancel, and no part is larger than the variance.
    weight = a[0] + b[0]
    filled = xp.where(weight > 0, weight, 1)
    left, right = a[0] / filled, b[0] / filled
    delta = b[1] - a[1]
    # Where d is beyond the range of floats, the mean is not.
    mean = xp.where(xp.isinf(delta), a[1] * left + b[1] * right, a[1] + delta * right)
    # In this order, as d**2 may be beyond the range where its product with a share is not.
    between = delta * (left * right) * delta
    return weight, mean, a[2] * left + b[2] * right + between


# moments: (total weight, weighted mean, weighted variance), and of nothing (0, 0, 0).
moments = Monoid(_zeros, _merge_moments)


def _rescaled(xp: Namespace, reduced: Reduced, top: Array) -> Array:
    """The sum of exp(v - top), of the largest v and the sum of exp(v - largest)."""
    largest, total = reduced
    # inf - inf is NaN; equal infinities shift nothing.
    shift = xp.where(xp.isinf(top) & (largest == top), 0, largest - top)
    return total * xp.exp(shift)


def _merge_exponentials(xp: Namespace, a: Reduced, b: Reduced) -> Reduced:
    top = xp.maximum(a[0], b[0])
    return top, _rescaled(xp, a, top) + _rescaled(xp, b, top)


# logsumexp: (m, s) with m the largest v and s = sum(exp(v - m)), which never overflows; and of
# nothing (-inf, 0).
logsumexp = Monoid(
    lambda xp, like: (_lowest(xp, like[0]), xp.zeros_like(like[1])), _merge_exponentials
)


def _latest(xp: Namespace, a: Reduced, b: Reduced) -> Reduced:
    return xp.where(b[1], b[0], a[0]), a[1] | b[1]


# last: of (value, is there one) the right operand, if it has a value. Associative, and not
# commutative.
last = Monoid(_zeros, _latest, widens=False, ordered=True)


def _empty(axis: int) -> Callable[[Namespace, Array], Array]:
    return lambda xp, like: like[(slice(None),) * (axis % like.ndim) + (slice(0, 0),)]


def concat(axis: int) -> Monoid:
    """Concatenation along an axis: what came first stays first. Its identity has no rows."""
    join = lambda xp, a, b: xp.concatenate((a, b), axis=axis)
    return Monoid(_empty(axis), join, widens=False, axis=axis, ordered=True)
