"""The suite must reject wrong folds: each one here is a mistake that people make. Wrong libraries are in tests/faults."""

import functools

import pytest

import funcga
from tests import properties

regression, tokens = (
    functools.partial(properties.equals_the_full_batch, dtype="float32", problem=p) for p in ("regression", "tokens")
)


def divides_by_n(grad_fn, n=None, *, fold=None, weight=None, **options):
    """The loop of most tutorials: every micro-batch counts alike."""
    return funcga.accumulate(grad_fn, n, fold=funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps), **options)


def weighs_by_rows(grad_fn, n=None, *, weight=None, **options):
    """Averages losses over micro-batches with different token counts."""
    return funcga.accumulate(grad_fn, n, **options)


def multiplies_by_the_weight(grad_fn, n=None, **options):
    """0 * NaN is NaN: a masked micro-batch poisons the sum."""
    fold = funcga.Fold(funcga.Reducer(lambda xp, v, w: v * w, funcga.monoids.sum), funcga.normalizers.by_weight)
    return funcga.accumulate(grad_fn, n, **{**options, "fold": fold})


def divides_by_zero(grad_fn, n=None, **options):
    """NaN where every token is masked."""
    by_weight = funcga.normalizers.Normalizer(lambda xp, r, t: r / (xp.zeros_like(r) + t.weight))
    return funcga.accumulate(grad_fn, n, **{**options, "fold": funcga.Fold(funcga.reducers.sum, by_weight)})


# Every mistake, and the property that must see it.
WRONG = [
    (divides_by_n, regression),
    (weighs_by_rows, tokens),
    (multiplies_by_the_weight, properties.ignores_empty_microbatches),
    (divides_by_zero, properties.gives_zeros_for_no_weight),
]


@pytest.mark.parametrize(("accumulate", "holds"), WRONG, ids=lambda f: getattr(f, "__name__", ""))
def test_wrong_folds_are_rejected(kit, accumulate, holds):
    with pytest.raises(AssertionError):
        holds(kit, accumulate=accumulate)
