"""`reproducible`: a fold whose sums are exact, so that nothing depends on their order."""

import math
from dataclasses import replace

from funcga import monoids
from funcga._fold import check_quantity
from funcga.errors import FuncgaError
from funcga.folds import Fold
from funcga.reducers import Reducer
from funcga.tools.reproducible.exact import GREATEST, LEAST, Finish, Lift, monoid


def reproducible(fold: Fold, *, limit: float = 2.0**20) -> Fold:
    """The same fold with exact sums: bitwise the same result for any order, any grouping and any
    number of replicas.

    Of the same micro-batches, `mean()`, `per_weight()` and `sum()` then give the same bits on one
    process or on eight, whichever of them folds which micro-batch, after a restart in the middle of
    a window, and in torch as in JAX. What it takes: the gradient of each micro-batch has the same
    bits wherever it is computed, so its size has to stay, as with `microbatch_size=`; and the
    weights have a sum that a float64 holds, as counts do.

    Each value, times its weight rounded to the dtype of the accumulator, becomes a number in fixed
    point, of which only what is below `limit / 2**73` is lost (float32; for float64 it is `limit /
    2**162`). The sum of those is exact. The result is within one unit in the last place of it, and
    a mean, which is divided as well, within one and a half. It takes 12 bytes an element instead of
    4, and 24 instead of 8 for float64. NaN and infinity come through as in any sum.

    Args:
        fold: A fold whose reducer is `weighted` or `sum`, divided by the weight, the steps or
            nothing. Folds that are exact already, such as `max()`, are returned as they are.
        limit: A number, rounded up to a power of two, that every element of a weighted value must
            be below. For a leaf without axes, such as a loss, it is 2**30 times as large. Of a
            larger value the result is NaN, which is an error where the host sees it: on the CPU, in
            JAX outside of jit and shard_map. The same holds for more than 2,048 micro-batches in
            one window.

    Returns:
        A Fold.

    Raises:
        FuncgaError: The fold has no exact sum, or the limit is not between 2**-40 and 2**60.

    Example:
        >>> gradient = funcga.grad(lambda w, x: (w * x).mean())
        >>> step = funcga.accumulate(gradient, 3, fold=funcga.reproducible(funcga.mean()))
        >>> x = torch.tensor([0.1, 0.7, 0.2])
        >>> torch.equal(step(torch.tensor(1.0), x), step(torch.tensor(1.0), x.flip(0)))
        True
    """
    check_quantity(
        "limit", limit, "2.0**20", "a number from 2**-40 to 2**60", least=LEAST / 2, most=GREATEST
    )
    reducer, normalizer = fold.reducer, fold.normalizer
    if isinstance(reducer.lift, Lift) or reducer.monoid in (monoids.max, monoids.min):
        return fold
    if not (reducer.additive and normalizer.only_divides):
        raise FuncgaError(
            f"reproducible was given the fold `{fold.name}`, and has exact sums for mean(), "
            "per_weight() and sum() alone. Fold by one of these; `concat()` and `carry()` keep the "
            "order that they are given."
        )
    if str(reducer.dtype).rpartition(".")[2] not in ("None", "float32", "float64"):
        raise FuncgaError(
            f"reproducible was given a fold that accumulates in {reducer.dtype}, and has exact "
            "sums for float32 and float64. Leave the dtype out: floats of 16 bits are accumulated "
            "in float32."
        )
    limit = 2.0 ** math.ceil(math.log2(limit))
    finish = Finish(normalizer.divides_by, limit)
    kinds = tuple([kind for kind in reducer.kinds if kind != "complex"])
    return Fold(
        Reducer(Lift(fold, limit), monoid, reducer.dtype, kinds, per_element=True, of_bits=True),
        replace(normalizer, apply=finish, divides_by=None, lost=finish.lost),
    )
