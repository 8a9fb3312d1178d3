"""A monoid: the associative operation that joins what micro-batches, or replicas, have contributed.

`combine(identity, x) = x`, and `combine(a, combine(b, c)) = combine(combine(a, b), c)`. All but `last` and `concat`,
which keep the order, are commutative too. Operands are what a reducer lifts from one leaf: one array, or a tuple of
arrays; `sum`, `max` and `min` work on each array of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga.errors import FuncgaError


@dataclass(frozen=True)
class Monoid:
    """`identity(xp, like)` and `combine(xp, a, b)`, pure functions on what a reducer lifts from one leaf.

    `xp` is the array namespace, `torch` or `jax.numpy`. `like` has the shapes and dtypes of the operands.
    `widens` says that operands of less than 32 bits are held in 32. `axis` is that of a monoid whose values grow along
    an axis: loops collect such values and join them once. `ordered` says that the order of the operands counts.
    `collective` names the reduction, "sum", "max" or "min", that is `combine` over replicas; where there is none they
    are gathered, and combined in their order.
    """

    identity: Callable[[Any, Any], Any]
    combine: Callable[[Any, Any, Any], Any]
    widens: bool = True
    axis: int | None = None
    collective: str | None = None
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.collective not in (None, "sum", "max", "min"):
            raise FuncgaError(
                f'collective is {self.collective!r}: it names the reduction that is combine over replicas, "sum", '
                f'"max" or "min"; None gathers what they have, and combines it in their order.'
            )


def _each(operation: Callable[..., Any]) -> Callable[..., Any]:
    def on_each(xp: Any, *operands: Any) -> Any:
        if isinstance(operands[0], tuple):
            return tuple(operation(xp, *parts) for parts in zip(*operands, strict=True))
        return operation(xp, *operands)

    return on_each


def _lowest(xp: Any, like: Any) -> Any:
    return xp.full_like(like, _extreme(xp, like, lowest=True))


def _highest(xp: Any, like: Any) -> Any:
    return xp.full_like(like, _extreme(xp, like, lowest=False))


def _extreme(xp: Any, like: Any, lowest: bool) -> Any:
    if "float" in str(like.dtype):  # the one test of a dtype that both namespaces and torch.compile understand
        return float("-inf") if lowest else float("inf")
    if like.dtype == xp.bool:
        return not lowest
    return xp.iinfo(like.dtype).min if lowest else xp.iinfo(like.dtype).max


def _merge_moments(xp: Any, a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Chan, Golub and LeVeque (1979): the moments of a union, without the cancellation of a sum of squares."""
    weight = a[0] + b[0]
    share = b[0] / xp.where(weight > 0, weight, 1)
    delta = b[1] - a[1]
    return weight, a[1] + delta * share, a[2] + b[2] + delta * delta * (a[0] * share)


def _add_counts(xp: Any, a: Any, b: Any) -> Any:
    """Of (high, low), integers in two halves, whose low one has 16 bits; of floats the sum."""
    if not isinstance(a, tuple):
        return a + b
    low = a[1] + b[1]
    return a[0] + b[0] + (low >> 16), low & 0xFFFF


def _latest(xp: Any, a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    return xp.where(b[1], b[0], a[0]), a[1] | b[1]


def _empty(axis: int) -> Callable[[Any, Any], Any]:
    return lambda xp, like: like[(slice(None),) * (axis % like.ndim) + (slice(0, 0),)]


def concat(axis: int) -> Monoid:
    """Concatenation along an axis: what came first stays first."""
    join = lambda xp, a, b: xp.concatenate((a, b), axis=axis)
    return Monoid(_empty(axis), join, widens=False, axis=axis, ordered=True)


_zeros = _each(lambda xp, like: xp.zeros_like(like))

sum = Monoid(_zeros, _each(lambda xp, a, b: a + b), collective="sum")
max = Monoid(_each(_lowest), _each(lambda xp, a, b: xp.maximum(a, b)), collective="max")
min = Monoid(_each(_highest), _each(lambda xp, a, b: xp.minimum(a, b)), collective="min")
counts = Monoid(_zeros, _add_counts)
moments = Monoid(_zeros, _merge_moments)
last = Monoid(_zeros, _latest, widens=False, ordered=True)
