"""The suite must reject wrong folds and wrong backends: each one here is a mistake that people make."""

import functools

import numpy as np
import pytest
import torch

import funcga
import jax_backend
import torch_backend
from tests import properties
from tests.kits import JAX, TORCH

regression, tokens = (
    functools.partial(properties.equals_the_full_batch, dtype="float32", problem=p) for p in ("regression", "tokens")
)


def divides_by_n(grad_fn, n=None, *, fold=None, weight=None, **options):
    """The loop of most tutorials: every micro-batch counts alike."""
    return funcga.accumulate(grad_fn, n, fold=funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps), **options)


def weighs_by_rows(grad_fn, n=None, *, weight=None, **options):
    """Averages losses over micro-batches with different token counts."""
    return funcga.accumulate(grad_fn, n, **options)


def drops_the_last_rows(grad_fn, n=None, *, microbatch_size=None, in_axes=None, **options):
    """Integer division, as in reshape: the remainder is left out."""
    step = funcga.accumulate(grad_fn, n, microbatch_size=microbatch_size, in_axes=in_axes, **options)

    def dropping(*args):
        first = 0 if in_axes is not None else 1
        rows = next(leaf.shape[0] for leaf in _leaves(args[first:]))
        keep = rows // (n or microbatch_size) * (n or microbatch_size) or rows
        return step(*args[:first], *(_cut(arg, keep) for arg in args[first:]))

    return dropping


def _leaves(tree):
    return [x for v in tree for x in (v.values() if isinstance(v, dict) else [v])]


def _cut(arg, keep):
    return {k: v[:keep] for k, v in arg.items()} if isinstance(arg, dict) else arg[:keep]


def averages_halves(grad_fn, n=None, **options):
    """Replicas that average their own averages, as DDP does with uneven token counts."""
    options = {**options, "microbatch_size": None, "n": 1}
    step = funcga.accumulate(grad_fn, **options)

    def averaged(params, *batch):
        rows = next(leaf.shape[0] for leaf in _leaves(batch))
        if rows < 2:
            return step(params, *batch)
        half = rows // 2 + 1
        parts = [step(params, *(_slice(b, s) for b in batch)) for s in (slice(0, half), slice(half, None))]
        flatten = (TORCH if isinstance(parts[0][0], torch.Tensor) else JAX).backend.trees
        (a, structure), (b, _) = (flatten.flatten(part) for part in parts)
        return flatten.unflatten(structure, [(x + y) / 2 for x, y in zip(a, b, strict=True)])

    return averaged


def _slice(arg, s):
    return {k: v[s] for k, v in arg.items()} if isinstance(arg, dict) else arg[s]


def multiplies_by_the_weight(grad_fn, n=None, **options):
    """0 * NaN is NaN: a masked micro-batch poisons the sum."""
    fold = funcga.Fold(funcga.Reducer(lambda xp, v, w: v * w, funcga.monoids.sum), funcga.normalizers.by_weight)
    return funcga.accumulate(grad_fn, n, **{**options, "fold": fold})


def divides_by_zero(grad_fn, n=None, **options):
    """NaN where every token is masked."""
    by_weight = funcga.normalizers.Normalizer(lambda xp, r, t: r / (xp.zeros_like(r) + t.weight))
    return funcga.accumulate(grad_fn, n, **{**options, "fold": funcga.Fold(funcga.reducers.sum, by_weight)})


def reverses_the_order(grad_fn, n=None, **options):
    """Right for sums, wrong for everything that has an order."""
    backwards = funcga.Monoid(
        funcga.reducers.concat().monoid.identity, lambda xp, a, b: xp.concatenate((b, a)), widens=False, axis=0
    )
    first = lambda: funcga.Accumulator(
        funcga.Fold(funcga.Reducer(lambda xp, v, w: v, backwards), funcga.normalizers.identity)
    )

    def reversing(x):
        accumulator = first()
        values = [grad_fn(part)[0] for part in (x[:6], x[6:])]
        state = accumulator.init(values[0])
        for value in values:
            state = accumulator.update(state, value)
        return accumulator.finalize(state), x.max(), x.min()

    return reversing


# Every mistake, and the property that must see it.
WRONG = [
    (divides_by_n, regression),
    (weighs_by_rows, tokens),
    (drops_the_last_rows, regression),
    (averages_halves, tokens),
    (multiplies_by_the_weight, properties.ignores_empty_microbatches),
    (divides_by_zero, properties.gives_zeros_for_no_weight),
]


@pytest.mark.parametrize(("accumulate", "holds"), WRONG, ids=lambda f: getattr(f, "__name__", ""))
def test_wrong_folds_are_rejected(kit, accumulate, holds):
    with pytest.raises(AssertionError):
        holds(kit, accumulate=accumulate)


def test_the_wrong_order_is_rejected(kit):
    with pytest.raises(AssertionError):
        properties.keeps_the_order_of_rows(kit, reverses_the_order)


def in_float32(tally):
    """A total weight that stops counting at 2**24."""

    def mutant(weight, steps=1):
        counted = tally(weight, steps)
        high = counted.weight[0]
        in_torch = tally.__module__.startswith("torch")
        return counted._replace(weight=(torch.as_tensor(high).to(torch.float32) if in_torch else high,))

    return mutant


MUTANTS = {
    "accumulates in the leaf's own dtype": (
        "accumulator_dtype",
        lambda own: lambda dtype: dtype,
        properties.sums_16_bit_floats_in_32,
    ),
    "cuts at the wrong place": (
        "slice",
        lambda own: lambda x, axis, start, size: own(x, axis, start // 2, size),
        regression,
    ),
    "keeps the total weight in float32": ("tally", in_float32, properties.counts_past_two_to_the_24),
    "counts no weight": ("tally", lambda own: lambda weight, steps=1: own(1, steps), tokens),
    "returns another dtype": (
        "cast",
        lambda own: lambda x, dtype, *beside: own(x, _wide(x), *beside),
        properties.keeps_dtypes,
    ),
}


def _wide(x):
    return torch.float32 if isinstance(x, torch.Tensor) else np.dtype("float32")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_backends_are_rejected(kit, mutant, monkeypatch):
    name, change, holds = MUTANTS[mutant]
    module = torch_backend.arrays if kit.name == "torch" else jax_backend.arrays
    holds(kit, accumulate=funcga.accumulate)
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    if (kit.name, name) == ("torch", "tally"):  # what the host sees it adds up itself, in numbers of any size
        monkeypatch.setattr(module, "scalar", lambda weight: weight)
    with pytest.raises(AssertionError):
        holds(kit, accumulate=funcga.accumulate)


def test_a_buffer_that_is_not_copied_is_rejected(monkeypatch):
    """The first gradient taken as the accumulator: what is returned aliases an argument."""
    from torch_backend.sums import Sums

    def steals(self, indices, values, factor):
        for k in indices:
            total = self.accumulators[k]
            self.accumulators[k] = values[k] if total is None else total.add_(values[k] * factor)

    monkeypatch.setattr(Sums, "add", steals)
    with pytest.raises(AssertionError):
        properties.leaves_arguments_alone(TORCH, funcga.accumulate)
