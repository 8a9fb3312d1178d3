"""A fold: a reducer and a normalizer. Folds are values; mix the parts for one of your own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias

from funcga import normalizers, reducers
from funcga._types import Dtype
from funcga.normalizers import Normalizer
from funcga.reducers import Reducer


@dataclass(frozen=True)
class Fold:
    """What is accumulated over micro-batches, and how what was accumulated becomes the result.

    Args:
        reducer: One of funcga.reducers, or your own.
        normalizer: One of funcga.normalizers, or your own.

    Example:
        >>> fold = funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)
        >>> step = funcga.accumulate(lambda x: x.mean(), 2, in_axes=0, fold=fold)
        >>> step(torch.tensor([1.0, 1.0, 7.0]))  # the means 1 and 7 count alike
        tensor(4.)
    """

    reducer: Reducer
    normalizer: Normalizer

    @property
    def plain(self) -> "Fold":
        """The fold whose sums `reproducible` has made exact; any other as it is."""
        plain: Fold = getattr(self.reducer.lift, "plain", self)
        return plain

    @property
    def name(self) -> str:
        """The names of its parts, as in `weighted, by_weight`; that of the function for a part
        of your own.
        """
        # A part may have another dtype than the stock one, which changes neither its functions nor
        # its name.
        lift, monoid, apply = self.reducer.lift, self.reducer.monoid, self.normalizer.apply
        reducer = _REDUCERS.get((lift, monoid, self.reducer.stacked), _named(lift))
        if lift is reducers.sum.lift and monoid.axis is not None:
            reducer = f"concat({monoid.axis})"
        return f"{reducer}, {_NORMALIZERS.get(apply, _named(apply))}"

    def __repr__(self) -> str:
        return f"<Fold: {self.name}>"


class _Dataclass(Protocol):
    """Any dataclass: frameworks walk those that are registered as trees."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# A Fold, or a tree prefix of Folds over what grad_fn returns.
FoldTree: TypeAlias = (
    Fold
    | tuple["FoldTree", ...]
    | list[Fold]
    | list["FoldTree"]
    | Mapping[Any, "FoldTree"]
    | _Dataclass
)


_REDUCERS = {
    (part.lift, part.monoid, part.stacked): name
    for name, part in vars(reducers).items()
    if isinstance(part, Reducer)
}
_NORMALIZERS = {
    part.apply: name for name, part in vars(normalizers).items() if isinstance(part, Normalizer)
}


def _named(function: Any) -> str:
    # An object that is called may have a name of its own.
    return str(
        getattr(function, "name", None)
        or getattr(function, "__qualname__", type(function).__qualname__)
    )


def mean(*, dtype: Dtype = None, out_dtype: Dtype = None) -> Fold:
    """The weighted mean, `sum(w * v) / sum(w)`. For a loss that is a **mean** over its micro-batch
    (the default).

    Args:
        dtype: The dtype of the accumulator. By default the leaf's own, with floats of less than 32
            bits in float32.
        out_dtype: The dtype of the result. By default the leaf's own. Both may be given by name,
            "float32".

    Returns:
        A Fold.

    Example:
        >>> w, x = torch.ones(3, dtype=torch.bfloat16), torch.ones(8, 3, dtype=torch.bfloat16)
        >>> gradient = funcga.grad(lambda w, x: (x @ w).mean())
        >>> funcga.accumulate(gradient, 4, fold=funcga.mean(out_dtype="float32"))(w, x)
        tensor([1., 1., 1.])
    """
    return Fold(
        replace(reducers.weighted, dtype=dtype), replace(normalizers.by_weight, dtype=out_dtype)
    )


def per_weight(*, dtype: Dtype = None, out_dtype: Dtype = None) -> Fold:
    """The sum over the total weight, `sum(v) / sum(w)`. For a loss that is a **sum** over items:
    with `weight=` counting the items, the result is the mean per item.

    Args:
        dtype: The dtype of the accumulator, as for `mean`.
        out_dtype: The dtype of the result, as for `mean`.

    Returns:
        A Fold.

    Example:
        >>> sum_loss = lambda w, batch: (w * batch["x"] * (batch["labels"] != -100)).sum()
        >>> tokens = lambda batch: (batch["labels"] != -100).sum()
        >>> fold = funcga.per_weight()
        >>> step = funcga.accumulate(funcga.grad(sum_loss), 2, fold=fold, weight=tokens)
        >>> labels = torch.tensor([[1, 2], [3, -100], [-100, -100]])
        >>> batch = {"x": torch.ones(3, 2), "labels": labels}
        >>> step(torch.tensor(2.0), batch)  # the mean over the three tokens that count
        tensor(1.)
    """
    return Fold(replace(reducers.sum, dtype=dtype), replace(normalizers.by_weight, dtype=out_dtype))


def sum(*, dtype: Dtype = None, out_dtype: Dtype = None) -> Fold:
    """The plain sum, `sum(v)`. Bools are counted. Integers keep their dtype, and an int8 sum may
    overflow: pass out_dtype.

    Args:
        dtype: The dtype of the accumulator, as for `mean`.
        out_dtype: The dtype of the result, as for `mean`.

    Returns:
        A Fold.

    Example:
        >>> right = lambda w, x: ((x @ w).mean(), (x @ w > 0).sum())  # (loss, how many are right)
        >>> step = funcga.accumulate(right, 4, fold=(funcga.mean(), funcga.sum()))
        >>> step(torch.ones(3), torch.ones(10, 3))
        (tensor(3.), tensor(10))
    """
    return Fold(replace(reducers.sum, dtype=dtype), replace(normalizers.identity, dtype=out_dtype))


def ratio(*, out_dtype: Dtype = None) -> Fold:
    """`sum(v[0]) / sum(v[1])`: a metric with a denominator of its own, such as accuracy, [correct,
    counted].

    A leaf has numerator and denominator along its axis 0, [2, ...], and the result is of shape
    [...]. As integers they are summed exactly, up to 2**47. The weight of the micro-batch has no
    part in it; a denominator of 0 gives 0.

    Args:
        out_dtype: The dtype of the result. By default the leaf's own, and float32 for floats of
            less than 32 bits. Of integers what their quotient is: float32; float64 for 64 bits in
            JAX, and where that is torch's default dtype.

    Returns:
        A Fold.

    Example:
        >>> accuracy = lambda correct: torch.stack((correct.sum(), torch.tensor(len(correct))))
        >>> step = funcga.accumulate(accuracy, 2, in_axes=0, fold=funcga.ratio())
        >>> step(torch.tensor([True, True, False, True]))
        tensor(0.7500)
    """
    return Fold(reducers.pairs, replace(normalizers.ratio, dtype=out_dtype))


def max() -> Fold:
    """The elementwise maximum over micro-batches; NaN if any of them is.

    Returns:
        A Fold.

    Example:
        >>> step = funcga.accumulate(lambda x: x.max(), 2, in_axes=0, fold=funcga.max())
        >>> step(torch.tensor([1.0, 5.0, 3.0]))
        tensor(5.)
    """
    return Fold(reducers.max, normalizers.identity)


def min() -> Fold:
    """The elementwise minimum over micro-batches; NaN if any of them is.

    Returns:
        A Fold.

    Example:
        >>> step = funcga.accumulate(lambda x: x.min(), 2, in_axes=0, fold=funcga.min())
        >>> step(torch.tensor([4.0, 5.0, 3.0]))
        tensor(3.)
    """
    return Fold(reducers.min, normalizers.identity)


def logsumexp(*, dtype: Dtype = None, out_dtype: Dtype = None) -> Fold:
    """`log(sum(exp(v)))` over micro-batches, elementwise. For a softmax whose classes are folded
    over in tiles.

    It does not overflow, and is -inf where all values are. The weight of a micro-batch has no part
    in it.

    A step with this fold may be a part of a loss: of a contrastive one, the log of the sum over
    columns. The derivative by v is `exp(v - result)`, and 0 where v is -inf. In torch that loss
    must be differentiated by funcga or torch.func, as all losses with a step inside: `.backward()`
    takes the result of a step for a constant.

    Args:
        dtype: The dtype of the accumulator, as for `mean`.
        out_dtype: The dtype of the result, as for `mean`.

    Returns:
        A Fold.

    Example:
        >>> fold = funcga.logsumexp()
        >>> step = funcga.accumulate(lambda x: x.logsumexp(0), 2, in_axes=0, fold=fold)
        >>> x = torch.tensor([1000.0, 1001.0, 1002.0])
        >>> step(x), x.logsumexp(0)
        (tensor(1002.4076), tensor(1002.4076))
    """
    return Fold(
        replace(reducers.logsumexp, dtype=dtype), replace(normalizers.logsumexp, dtype=out_dtype)
    )


def moments(*, dtype: Dtype = None, out_dtype: Dtype = None) -> Fold:
    """`Moments(mean, variance)`: weighted mean and population variance over micro-batches, for
    every leaf.

    Source: Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for
    computing sample variances".

    Args:
        dtype: The dtype of the accumulator, as for `mean`.
        out_dtype: The dtype of the result, as for `mean`.

    Returns:
        A Fold.

    Example:
        >>> gradient = funcga.grad(lambda w, x: (w * x).mean())
        >>> step = funcga.accumulate(gradient, 2, fold=funcga.moments())
        >>> noise = step(torch.tensor(1.0), torch.tensor([1.0, 3.0]))
        >>> noise.mean, noise.variance
        (tensor(2.), tensor(1.))
    """
    return Fold(
        replace(reducers.moments, dtype=dtype), replace(normalizers.moments, dtype=out_dtype)
    )


def pooled(*, dtype: Dtype = None, out_dtype: Dtype = None) -> Fold:
    """`Pooled(count, mean, variance)` of all items of the micro-batches together, as if they had
    been one batch.

    For leaves [3, ...]: the count, mean and population variance of one micro-batch, stacked on axis
    0 as `batch_moments` does. The counts are the weights, `weight=` has none here; a count of 0
    adds nothing, not even a NaN. In float32 a count is exact up to 2**24; beyond that it is
    rounded, as the mean is.

    Source: Chan, Golub and LeVeque (1979), "Updating formulae and a pairwise algorithm for
    computing sample variances".

    Args:
        dtype: The dtype of the accumulator, as for `mean`.
        out_dtype: The dtype of the result. By default that of the accumulator, as a count in
            float16 would end at 65,504.

    Returns:
        A Fold.

    Example:
        >>> count = lambda x: torch.tensor(float(len(x)))
        >>> statistics = lambda x: torch.stack((count(x), x.mean(), x.var(correction=0)))
        >>> step = funcga.accumulate(statistics, 2, in_axes=0, fold=funcga.pooled())
        >>> step(torch.tensor([1.0, 3.0, 5.0, 7.0])).variance
        tensor(5.)
    """
    return Fold(replace(reducers.pooled, dtype=dtype), replace(normalizers.pooled, dtype=out_dtype))


def concat(axis: int = 0) -> Fold:
    """The values of all micro-batches along `axis`, in the order of the batch. For per-example
    outputs.

    In an `Accumulator` its state grows with every update, so it does not pass through lax.scan.

    Nothing says which axis of an output has the examples. Micro-batches of different sizes show it,
    and another `axis` is refused. Micro-batches of one size are joined along any axis:
    `funcga.verify`, which cuts unevenly, finds a wrong one.

    Args:
        axis: The axis of the examples.

    Returns:
        A Fold.

    Example:
        >>> grad_fn = funcga.value_and_grad(lambda w, x: ((x @ w).mean(), x @ w), has_aux=True)
        >>> fold = ((funcga.mean(), funcga.concat()), funcga.mean())  # of ((loss, logits), grads)
        >>> step = funcga.accumulate(grad_fn, 4, fold=fold)
        >>> (loss, logits), grads = step(torch.ones(3), torch.ones(10, 3))
        >>> logits.shape
        torch.Size([10])
    """
    return Fold(reducers.concat(axis), normalizers.identity)


def carry() -> Fold:
    """Marks an output, in `fold`, as state that is threaded from one micro-batch to the next. The
    argument that gets it is marked by `in_axes=`, with `CARRY`.

    Returns:
        A Fold.

    Example:
        >>> f = lambda params, seen, x: (params * x.mean(), seen + len(x))  # (value, state)
        >>> fold = (funcga.mean(), funcga.carry())
        >>> step = funcga.accumulate(f, 3, in_axes=(None, funcga.CARRY, 0), fold=fold)
        >>> step(torch.tensor(2.0), torch.tensor(0), torch.arange(7.0))
        (tensor(6.), tensor(7))
    """
    return Fold(reducers.carry, normalizers.carry)
