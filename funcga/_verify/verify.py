"""`verify`: whether accumulation is exact for a loss."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from funcga.folds import FoldTree, mean

if TYPE_CHECKING:
    from funcga._verify.verdict import Verdict


def verify(
    grad_fn: Callable[..., Any],
    *args: Any,
    n: int | Sequence[int] | None = None,
    fold: FoldTree = mean(),  # noqa: B008 - a frozen value
    weight: Callable[..., Any] | None = None,
    in_axes: Any = None,
    seed: int = 0,
    **kwargs: Any,
) -> "Verdict":
    """A Verdict: whether `accumulate(grad_fn, n, ...)(*args, **kwargs)` is exact, and if not, why and what to write.

    `.ok`; `.causes`, each with `.name`, `.what` is wrong, the line that is the `.fix`, and the `.evidence`; `.rows`,
    the largest relative difference of every split from the whole batch, with its limit; `.notes`; `.gradients`, False
    if there were none to compare, as of a loss given in place of its gradient. `str(verdict)` is a text for people,
    `.as_dict()` is for JSON, and `.assert_exact()` raises AssertionError if it is not exact.

    grad_fn, fold, weight, in_axes: as for `accumulate`. args: parameters and one batch, of 16 rows or so; more rows
        show no more, as long as they differ as those in training do. n: the number of micro-batches that is to be used,
        or several; default: 3. seed: of the order of rows, and of the groups that are looked at.

    The fold over n micro-batches, in order, and over uneven ones in another order is compared with the whole batch, in
    float64 if grad_fn can. Where they differ, batches in which two groups of rows repeat tell what kind of function the
    loss is. The names of the causes: "sum under mean", "mean under sum", "mean under per_weight", "uneven tokens",
    "wrong weight", "weight not additive", "divided by n", "regulariser", "other normaliser", "batch statistics",
    "in-batch negatives", "coupled rows", "row order", "randomness", "state", "per-example output", "params unused",
    "by steps", "wrong gradient" where one by torch.func is another, "first-order step", "small remainder" for what is
    exact but for less than 1e-5, such as an epsilon in a count, and "not decomposable" where none of them explains what
    was seen. A note tells what may be wrong, or could not be looked at, and leaves `.ok` as it is: that the loss is
    divided by a number which equals n, maybe by chance, that its value alone differs by less than 1e-5, that every
    gradient is as small as rounding, or that there are none.

    A difference is relative to the largest of what was added up to a leaf, plus a thousandth of the largest of all
    leaves, plus a floor; up to 1e-9 is rounding, in float64. Where a loss computes in float32 it is 1e-4, plus a tenth;
    in 16 bits 8 epsilons, plus a half. The floor is 8 epsilons over that limit: 2e-6 in float64, 0.01 in float32, 1 in
    16 bits. If all gradients are below it, it is multiplied by the largest, unless this is below 8 eps**0.75 of the
    loss: then a note says that nothing can be told. A mistake that is smaller for these arguments is not seen.

    No argument is changed, and the global random generators are put back, whatever the loss draws. What it prints or
    keeps, it does several times. Raises FuncgaError for bad input: what `accumulate` refuses, fewer than two rows or
    than n, NaN among the arguments, a gradient that is not finite.

    >>> funcga.verify(funcga.value_and_grad(loss_fn), params, batch, n=4).assert_exact()
    """
    from funcga._verify.run import run

    return run(grad_fn, args, kwargs, n, fold, weight, in_axes, seed)
