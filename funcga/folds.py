"""A fold: a reducer and a normalizer. Folds are values; mix the parts for one of your own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias

from funcga import normalizers, reducers
from funcga.errors import FuncgaError
from funcga.normalizers import Normalizer
from funcga.reducers import Reducer


@dataclass(frozen=True)
class Fold:
    """What is accumulated over micro-batches, and how the sum of it becomes the result.

    >>> from funcga import Fold, normalizers, reducers
    >>> every_microbatch_alike = Fold(reducers.sum, normalizers.by_steps)
    """

    reducer: Reducer
    normalizer: Normalizer

    def __post_init__(self) -> None:
        for part, kind in ((self.reducer, Reducer), (self.normalizer, Normalizer)):
            if not isinstance(part, kind):
                raise FuncgaError(
                    f"a Fold was given {part!r} where it takes a {kind.__name__}. Write "
                    f"Fold(reducers.weighted, normalizers.by_weight); reducers.concat is called, reducers.concat(axis)."
                )

    @property
    def name(self) -> str:
        """The names of its parts, as in `weighted, by_weight`; that of the function for a part of your own."""
        lift, monoid, apply = self.reducer.lift, self.reducer.monoid, self.normalizer.apply
        parts = [(k, r) for k, r in vars(reducers).items() if isinstance(r, Reducer)]
        stacked = self.reducer.stacked
        reducer = [k for k, r in parts if (r.lift, r.monoid, r.stacked) == (lift, monoid, stacked)]
        if lift is reducers.concat().lift and monoid.axis is not None:
            reducer = [f"concat({monoid.axis})"]
        ends = [k for k, part in vars(normalizers).items() if isinstance(part, Normalizer) and part.apply is apply]
        return f"{(reducer or [_named(lift)])[0]}, {(ends or [_named(apply)])[0]}"

    def __repr__(self) -> str:
        return f"<Fold: {self.name}>"


class _Dataclass(Protocol):
    """Any dataclass: frameworks walk those that are registered as trees."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# A Fold, or a tree prefix of Folds over what grad_fn returns.
FoldTree: TypeAlias = (
    Fold | tuple["FoldTree", ...] | list[Fold] | list["FoldTree"] | Mapping[Any, "FoldTree"] | _Dataclass
)


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def mean(*, dtype: Any = None, out_dtype: Any = None) -> Fold:
    """The weighted mean: `sum(w * v) / sum(w)`. For a loss that is a **mean** over its micro-batch (the default).

    dtype: of the accumulator (default: the leaf's own, float32 for floats of less than 32 bits).
    out_dtype: of the result (default: the leaf's own). Both may be given by name, "float32".
    """
    return Fold(replace(reducers.weighted, dtype=dtype), replace(normalizers.by_weight, dtype=out_dtype))


def per_weight(*, dtype: Any = None, out_dtype: Any = None) -> Fold:
    """The sum over the total weight: `sum(v) / sum(w)`. For a loss that is a **sum** over its items, weighed by them.

    dtype, out_dtype: of the accumulator and of the result, as for `mean`.
    """
    return Fold(replace(reducers.sum, dtype=dtype), replace(normalizers.by_weight, dtype=out_dtype))


def sum(*, dtype: Any = None, out_dtype: Any = None) -> Fold:
    """The plain sum: `sum(v)`. Bools are counted; integers keep their dtype, so that an int8 result can overflow.

    dtype, out_dtype: of the accumulator and of the result, as for `mean`.
    """
    return Fold(replace(reducers.sum, dtype=dtype), replace(normalizers.identity, dtype=out_dtype))


def ratio(*, out_dtype: Any = None) -> Fold:
    """`sum(v[0]) / sum(v[1])`: a metric with a denominator of its own, such as accuracy, [correct, counted].

    A leaf has numerator and denominator along its axis 0, [2, ...], and the result is of shape [...]. As integers they
    are summed exactly, up to 2**47. The weight of the micro-batch has no part in it; a denominator of 0 gives 0.

    out_dtype: of the result (default: the leaf's own, float32 for integers and floats of less than 32 bits).

    >>> loss, {"accuracy": jnp.stack([correct.sum(), correct.size])}
    """
    return Fold(reducers.pairs, replace(normalizers.ratio, dtype=out_dtype))


def max() -> Fold:
    """The elementwise maximum over micro-batches; NaN if any of them is."""
    return Fold(reducers.max, normalizers.identity)


def min() -> Fold:
    """The elementwise minimum over micro-batches; NaN if any of them is."""
    return Fold(reducers.min, normalizers.identity)


def moments(*, dtype: Any = None, out_dtype: Any = None) -> Fold:
    """`Moments(mean, variance)`: weighted mean and population variance over micro-batches, for every leaf.

    dtype, out_dtype: of the accumulator and of the result, as for `mean`.
    Source: Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".
    """
    return Fold(replace(reducers.moments, dtype=dtype), replace(normalizers.moments, dtype=out_dtype))


def pooled(*, dtype: Any = None, out_dtype: Any = None) -> Fold:
    """`Pooled(count, mean, variance)` of all items of the micro-batches together, as if they had been one batch.

    For leaves [3, ...]: the count, mean and population variance of one micro-batch, stacked on axis 0 as
    `batch_moments` does. The counts are the weights, `weight=` has none here; a count of 0 adds nothing, not even a
    NaN. In float32 a count is exact up to 2**24; beyond that it is rounded, as the mean is.

    dtype, out_dtype: of the accumulator, as for `mean`, and of the result (default: the same, as a count in float16
    would end at 65,504).
    Source: Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for computing sample variances".

    >>> leaf = torch.stack((torch.full((3,), float(len(x))), x.mean(0), x.var(0, correction=0)))
    """
    return Fold(replace(reducers.pooled, dtype=dtype), replace(normalizers.pooled, dtype=out_dtype))


def concat(axis: int = 0) -> Fold:
    """The values of all micro-batches along `axis`, in the order of the batch. For per-example outputs.

    In an `Accumulator` its state grows with every update, so it does not pass through lax.scan.
    """
    return Fold(reducers.concat(axis), normalizers.identity)


def carry() -> Fold:
    """State that grad_fn returns and gets back with the next micro-batch: the argument that `in_axes` calls CARRY."""
    return Fold(reducers.carry, normalizers.carry)
