"""Exact sums, against rational numbers, NumPy's correctly rounded operations and each other's framework."""

import math
import re
from fractions import Fraction

import jax
import numpy as np
import pytest
import torch

import funcga
import torch_backend
from funcga import _exact
from tests.kits import JAX, TORCH

LIMIT = 2.0**20
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])
KITS = pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)
WEIGHTS = [3, 49, 0.3, 2**23 + 1, 2.0**60]


@pytest.fixture(autouse=True)
def wide(request):
    with jax.enable_x64(
        getattr(request.node, "callspec", None) is not None and request.node.callspec.params.get("dtype") == "float64"
    ):
        yield


def parts_of(dtype):
    """(bits of a digit, what a leading 1 stands for) of an array with the limit above."""
    return (30, Fraction(2) ** 7) if dtype == "float32" else (60, Fraction(2) ** (31 - 53))


def values_of(total, dtype):
    """The rational numbers that a sum of arrays stands for."""
    bits, unit = parts_of(dtype)
    rows = [funcga.to_numpy(part).ravel().tolist() for part in total]
    return [
        unit * sum(Fraction(part) / 2 ** (bits * place) for place, part in enumerate(element))
        for element in zip(*rows, strict=True)
    ]


def drawn(dtype, *shape, seed=0):
    """Numbers of all sizes, from far below the last digit to just below the limit, and some that are special."""
    r = np.random.default_rng(seed)
    numbers = (r.uniform(-1, 1, shape) * 2.0 ** r.integers(-70, 21, shape)).astype(dtype)
    numbers.flat[:6] = [0.0, -0.0, 1.0, -1.0, np.nextafter(np.array(LIMIT, dtype), 0), 1e-40]
    return numbers


def summed(kit, terms):
    xp = kit.backend.arrays.xp
    total = tuple(xp.zeros_like(part) for part in _exact.expanded(xp, kit.arrays(terms[0]), LIMIT))
    for term in terms:
        total = _exact.added(xp, total, _exact.expanded(xp, kit.arrays(term), LIMIT))
    return total


@DTYPES
@KITS
def test_a_term_loses_no_more_than_half_of_the_last_digit(kit, dtype):
    terms = drawn(dtype, 4000)
    bits, unit = parts_of(dtype)
    held = values_of(_exact.expanded(kit.backend.arrays.xp, kit.arrays(terms), LIMIT), dtype)
    lost = max(abs(a - Fraction(float(b))) for a, b in zip(held, terms, strict=True))
    assert 0 < lost <= unit / 2 ** (2 * bits) / 2


@DTYPES
def test_a_sum_is_exact_and_the_same_in_any_order_and_grouping(dtype):
    terms = drawn(dtype, 60, 200, seed=1) / 64
    total = summed(TORCH, terms)
    exact = [sum(column) for column in zip(*[values_of(_expanded(term), dtype) for term in terms], strict=True)]
    assert values_of(total, dtype) == exact
    r = np.random.default_rng(2)
    for _ in range(20):
        order = r.permutation(60)
        cut = int(r.integers(1, 59))
        both = _exact.added(torch, summed(TORCH, terms[order[:cut]]), summed(TORCH, terms[order[cut:]]))
        assert all(map(torch.equal, both, total))
    for ours, theirs in zip(total, summed(JAX, terms), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _expanded(term):
    return _exact.expanded(torch, torch.from_numpy(term), LIMIT)


@DTYPES
@pytest.mark.parametrize("shape", [(50,), ()])
def test_pieces_may_be_added_over_many_replicas(dtype, shape):
    totals = [
        summed(TORCH, drawn(dtype, 20, 50, seed=seed)[:, : math.prod(shape)].reshape(20, *shape) / 64)
        for seed in range(40)
    ]
    one_by_one = totals[0]
    for total in totals[1:]:
        one_by_one = _exact.added(torch, one_by_one, total)
    pieces = [_exact.pieces(torch, total) for total in totals]
    added = tuple(sum(parts[1:], parts[0]) for parts in zip(*pieces, strict=True))
    assert all(map(torch.equal, _exact.joined(torch, added), one_by_one))


@DTYPES
def test_the_result_is_one_of_the_two_next_floats(dtype):
    total = summed(TORCH, drawn(dtype, 60, 500, seed=3) / 64)
    result = _exact.rounded(torch, total, LIMIT).numpy()
    for number, exact in zip(result, values_of(total, dtype), strict=True):
        below, above = (float(np.nextafter(number, np.array(end, dtype))) for end in (-np.inf, np.inf))
        assert Fraction(below) < exact < Fraction(above)
    jitted = jax.jit(lambda total: _exact.rounded(jax.numpy, total, LIMIT))(
        tuple(map(JAX.arrays, map(np.asarray, total)))
    )
    np.testing.assert_array_equal(jitted, result)


@DTYPES
@pytest.mark.parametrize("divisor", WEIGHTS)
def test_a_quotient_is_rounded_correctly(dtype, divisor):
    numbers = drawn(dtype, 3000, seed=4)
    numbers = numbers[np.abs(numbers) > 1e-30]
    expected = numbers / np.array(divisor, dtype)
    expected[np.abs(expected) < np.finfo(dtype).tiny] = 0
    np.testing.assert_array_equal(_exact.quotient(torch, torch.from_numpy(numbers), divisor), expected)
    # As a constant, which XLA multiplies by the inverse of, and as an operand.
    constant = jax.jit(lambda v: _exact.quotient(jax.numpy, v, divisor))
    operand = jax.jit(lambda v, w: _exact.quotient(jax.numpy, v, w))
    np.testing.assert_array_equal(constant(JAX.arrays(numbers)), expected)
    np.testing.assert_array_equal(operand(JAX.arrays(numbers), JAX.arrays(np.array(divisor, dtype))), expected)


@DTYPES
@pytest.mark.parametrize("weight", [0.3, 1e4 + 1])
def test_a_weighted_term_is_rounded_once(dtype, weight):
    """In a program that could contract the product and what follows."""
    values = drawn(dtype, 4000, seed=5) / 2**15
    expected = _exact.expanded(torch, torch.from_numpy(values * np.array(weight, dtype)), LIMIT)
    jitted = jax.jit(lambda v: _exact.expanded(jax.numpy, v * weight, LIMIT))(JAX.arrays(values))
    for ours, theirs in zip(jitted, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@DTYPES
@KITS
def test_what_is_not_finite_comes_through(kit, dtype):
    nan, inf = math.nan, math.inf
    first = np.array([nan, inf, -inf, inf, inf, 1.0, LIMIT, -LIMIT, LIMIT, 2.0**120], dtype)
    second = np.array([1.0, 1.0, 1.0, -inf, inf, nan, 1.0, 1.0, -LIMIT, inf], dtype)
    total, xp = summed(kit, [first, second]), kit.backend.arrays.xp
    for divisor in (None, 3):
        result = _exact.rounded(xp, total, LIMIT)
        result = result if divisor is None else _exact.quotient(xp, result, divisor)
        # The fourth group is out of range, but for infinity, which counts as such.
        np.testing.assert_array_equal(kit.numpy(result), [nan, inf, -inf, nan, inf, nan, nan, nan, nan, inf])
    assert bool(_exact.is_beyond(xp, total))
    assert not bool(_exact.is_beyond(xp, tuple(part[:6] for part in total)))


@pytest.mark.parametrize(
    ("dtype", "number", "weight", "limit"),
    [
        (torch.float16, 2.0**-13, 1, 2.0),
        (torch.float16, 2.0**-13, 2**24, LIMIT),
        (torch.uint8, 16, 1, LIMIT),
        (torch.float32, 2.0**-76, 2**21, 2.0**-40),
        (torch.float32, 2.0**-75, 2**20, 2.0**-40),
    ],
)
def test_numbers_whose_squares_or_weights_leave_their_dtype(dtype, number, weight, limit):
    """The square is 0 there, or the weight in the unit of the sum is infinite."""
    fold = funcga.mean() if dtype.is_floating_point else funcga.sum(dtype="float32")
    rows = torch.zeros(64, 3, dtype=dtype)
    rows[:, 1] = number
    step = funcga.accumulate(
        lambda v: v[0], 64, in_axes=0, fold=funcga.reproducible(fold, limit=limit), weight=lambda v: weight
    )
    assert step(rows).tolist() == [0, number * (1 if dtype.is_floating_point else 64), 0]


# -- the fold


def rows_of(kit, dtype="float32", rows=24, width=700, seed=6):
    return kit.arrays(drawn(dtype, rows, width, seed=seed) / 64)


def step_of(fold, **choices):
    return funcga.accumulate(lambda rows: (rows.sum(0), rows[:, 6].mean()), in_axes=0, fold=fold, **choices)


FOLDS = {"mean": funcga.mean, "per_weight": funcga.per_weight, "sum": funcga.sum}


@pytest.mark.parametrize("name", FOLDS)
@DTYPES
def test_torch_and_jax_have_the_same_bits_in_any_order(name, dtype):
    fold = funcga.reproducible(FOLDS[name]())
    step = step_of(fold, microbatch_size=1)
    rows = rows_of(TORCH, dtype)
    first = step(rows)
    for seed in range(10):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(24))
        assert all(map(torch.equal, step(rows[order]), first))
    for ours, theirs in zip(first, step(rows_of(JAX, dtype)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_plain_sums_depend_on_the_order():
    """The negative control: of sums in float32 most elements differ in another order."""
    step = funcga.accumulate(lambda rows: rows.sum(0), 24, in_axes=0)
    rows = torch.randn(24, 700, generator=torch.Generator().manual_seed(0))
    assert (step(rows) != step(rows.flip(0))).double().mean() > 0.5
    step = funcga.accumulate(lambda rows: rows.sum(0), 24, in_axes=0, fold=funcga.reproducible(funcga.mean()))
    assert torch.equal(step(rows), step(rows.flip(0)))


def test_bits_do_not_depend_on_where_rows_lie_in_memory():
    """Rows of 20 bytes, whose micro-batches begin at any place of a cache line: kernels round differently there."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 5, generator=random), torch.randn(24, generator=random)
    module = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    params = dict(module.named_parameters())
    loss_fn = lambda module, x, y: ((module(x).squeeze(-1) - y) ** 2).mean()
    gradient = funcga.grad(torch_backend.pure_loss(module, loss_fn))
    exact = funcga.reproducible(funcga.mean())
    for fold in (exact, dict.fromkeys(params, exact)):
        step = funcga.accumulate(gradient, microbatch_size=2, fold=fold)
        wanted = step(params, x, y)
        own = [(x[k : k + 2].clone(), y[k : k + 2].clone()) for k in range(0, 24, 2)]
        results = [funcga.stream(gradient, fold=exact)(params, own)]
        for _ in range(5):
            order = torch.randperm(12, generator=random)
            results.append(step(params, x.view(12, 2, 5)[order].view(24, 5), y.view(12, 2)[order].view(24)))
        assert all(torch.equal(result[name], wanted[name]) for result in results for name in params)
    verdict = funcga.verify(gradient, params, x, y, n=12, fold=exact, bitwise=True)
    verdict.assert_exact()


@KITS
@pytest.mark.parametrize(
    ("shape", "weight"), [((140_000,), 3), ((300, 511), 0.3), ((140_000,), 0), ((1,), 0), ((0,), 3), ((), 4)]
)
def test_large_leaves_and_small_ones_are_held_alike(kit, shape, weight):
    """In torch a large leaf is folded in place, in pieces: as funcga._exact says."""
    r = np.random.default_rng(8)
    values = [r.normal(size=shape).astype("float32") for _ in range(3)]
    fold = funcga.reproducible(funcga.mean())
    accumulator = funcga.Accumulator(fold)
    state = accumulator.init(kit.arrays(values[0]))
    for value in values:
        state = accumulator.update(state, kit.arrays(value), weight=weight)
    stacked = kit.arrays(np.stack(values))
    step = funcga.accumulate(lambda v: v[0], 3, in_axes=0, fold=fold, weight=lambda v: weight)
    np.testing.assert_array_equal(kit.numpy(step(stacked)), kit.numpy(accumulator.finalize(state)))


class Many(torch.nn.Module):
    """Layers with leaves of all sizes, one of which only some rows reach."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(4)])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(32) for _ in range(4)])
        self.extra = torch.nn.Parameter(torch.ones(5))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(layer(norm(x)))
        return x + self.extra.mean() if bool(x[0, 0] > 0) else x


@pytest.mark.parametrize("weighed", [False, True])
def test_a_backward_pass_and_an_accumulator_have_the_same_bits(weighed):
    """The pass folds each gradient as soon as it is there. One leaf is reached by some rows alone."""
    torch.manual_seed(0)
    module, rows = Many(), torch.randn(12, 32)
    params = {name: p.detach() for name, p in module.named_parameters()}
    gradient = funcga.grad(torch_backend.pure_loss(module, lambda module, x: module(x).square().mean()))
    fold = funcga.reproducible(funcga.mean())
    weight = (lambda x: 3.0 if bool(x[0, 0] > 0.5) else 0.7) if weighed else None
    grads = funcga.accumulate(gradient, microbatch_size=2, fold=fold, weight=weight)(params, rows)
    accumulator = funcga.Accumulator(fold)
    state = accumulator.init(params)
    for x in (rows[k : k + 2].clone() for k in range(0, 12, 2)):
        each = funcga.accumulate(gradient, 1)(params, x)
        state = accumulator.update(state, each, weight=weight(x) if weighed else 2.0)
    for name, expected in accumulator.finalize(state).items():
        assert torch.equal(grads[name], expected), name
        assert grads[name].untyped_storage().nbytes() == grads[name].nbytes
    assert grads["extra"].any()


def test_a_leaf_that_leaves_the_range_is_named():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 1))
    fold = funcga.reproducible(funcga.mean(), limit=8)
    loss_fn = lambda module, x: module(x).sum() + 9 * module[1].bias[3]
    step = funcga.accumulate(funcga.grad(torch_backend.pure_loss(module, loss_fn)), 2, fold=fold)
    with pytest.raises(funcga.FuncgaError, match=r"the result of output\['1.bias'\] is not known"):
        step(dict(module.named_parameters()), torch.randn(2, 64) / 64)


@KITS
def test_special_numbers_in_a_window(kit):
    rows = np.ones((3, 140_000), "float32")
    rows[1, 5], rows[2, 6], rows[0, 7], rows[2, 7] = np.nan, np.inf, np.inf, -np.inf
    step = funcga.accumulate(lambda v: v[0], 3, in_axes=0, fold=funcga.reproducible(funcga.mean()))
    result = kit.numpy(step(kit.arrays(rows)))
    np.testing.assert_array_equal(result[5:8], [np.nan, np.inf, np.nan])
    assert (np.delete(result, [5, 6, 7]) == 1).all()


@KITS
def test_integers_are_summed_as_they_are(kit):
    step = funcga.accumulate(lambda v: v.sum(), 3, in_axes=0, fold=funcga.reproducible(funcga.sum()))
    assert int(step(kit.arrays(np.arange(7, dtype="int32")))) == 21


def test_halves_are_accumulated_in_float32():
    rows = torch.randn(16, 140_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    fold = funcga.reproducible(funcga.mean(out_dtype="float32"))
    step = funcga.accumulate(lambda v: v[0], 16, in_axes=0, fold=fold)
    assert torch.equal(step(rows), step(rows.flip(0)))
    torch.testing.assert_close(step(rows).double(), rows.double().mean(0), rtol=0, atol=2.0**-24)


def test_folds_that_are_exact_are_left_alone():
    for fold in (funcga.max(), funcga.min(), funcga.reproducible(funcga.mean())):
        assert funcga.reproducible(fold) is fold


# -- what leaves the range


@pytest.mark.host
@KITS
def test_out_of_range_is_an_error_on_the_host(kit):
    """It names the leaf, whether micro-batches are cut or come one by one."""
    fold = {"a": funcga.mean(), "w": funcga.reproducible(funcga.mean(), limit=1000)}
    gradient = lambda v: {"a": v[0], "w": v[0]}
    step, of_stream = (
        funcga.accumulate(gradient, 2, in_axes=0, fold=fold),
        funcga.stream(lambda _, v: gradient(v), fold=fold),
    )
    zero = kit.arrays(np.float32(0))
    rows = np.array([[1.0, 1024.0], [1.0, -1024.0]], "float32")
    for call in (step, lambda rows: of_stream(zero, [(rows[:1],), (rows[1:],)])):
        with pytest.raises(funcga.FuncgaError, match=r"of output\['w'\] is not known: .* not below 1.02e\+03"):
            call(kit.arrays(rows))
        np.testing.assert_array_equal(kit.numpy(call(kit.arrays(rows / 2))["w"]), [0.5, 0.0])


def test_out_of_range_is_nan_inside_of_jit():
    fold = funcga.reproducible(funcga.mean(), limit=1000)
    step = jax.jit(funcga.accumulate(lambda v: v[0], 2, in_axes=0, fold=fold))
    np.testing.assert_array_equal(step(np.array([[1.0, 1024.0], [1.0, -1024.0]], "float32")), [1.0, np.nan])


@pytest.mark.host
@pytest.mark.parametrize("exponent", [2, -39, 50])
@KITS
def test_out_of_range_is_an_error_of_finalize(kit, exponent):
    """It names a limit that is taken."""
    fold = funcga.reproducible(funcga.sum(), limit=2.0**exponent)
    accumulator = funcga.Accumulator(fold)
    value = kit.arrays(np.full(2, 1.25 * 2.0**exponent, "float32"))
    with pytest.raises(funcga.FuncgaError, match="the result of output is not known: ") as caught:
        accumulator.finalize(accumulator.update(accumulator.init(value), value))
    advised = re.search(r"limit=(2\.0\*\*-?\d+)\)", str(caught.value)).group(1)
    accumulator = funcga.Accumulator(funcga.reproducible(funcga.sum(), limit=eval(advised)))
    result = accumulator.finalize(accumulator.update(accumulator.init(value), value))
    np.testing.assert_array_equal(kit.numpy(result), kit.numpy(value))


@pytest.mark.host
@KITS
def test_more_micro_batches_than_there_is_room_for(kit):
    step = funcga.accumulate(lambda v: v.sum(), microbatch_size=1, in_axes=0, fold=funcga.reproducible(funcga.sum()))
    assert float(step(kit.arrays(np.ones(2048, "float32")))) == 2048
    with pytest.raises(funcga.FuncgaError, match=r"2049 micro-batches, .* room for 2048"):
        step(kit.arrays(np.ones(2049, "float32")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: funcga.reproducible(funcga.moments()), "the fold `moments, moments`, and has exact sums for mean"),
        (lambda: funcga.reproducible(funcga.mean(dtype="bfloat16")), "accumulates in bfloat16"),
        (lambda: funcga.reproducible(funcga.mean), "takes one Fold"),
        (lambda: funcga.reproducible(funcga.mean(), limit=0), "limit is 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(funcga.FuncgaError, match=message):
        make()


def test_complex_gradients_are_refused(kit):
    z = kit.arrays(np.array([1 + 2j, 3j], "complex64"))
    with pytest.raises(funcga.FuncgaError, match=r"the fold `exact weighted .* is not defined for complex"):
        funcga.accumulate(lambda x: x.sum(0), 2, in_axes=0, fold=funcga.reproducible(funcga.mean()))(z)
    # As the text says: a fold for each leaf.
    folds = (funcga.reproducible(funcga.sum()), funcga.sum())
    real, summed = funcga.accumulate(lambda x: (abs(x).sum(), x.sum(0)), 2, in_axes=0, fold=folds)(z)
    assert np.isclose(float(real), 3 + 5**0.5)
    assert kit.numpy(summed) == 1 + 5j


def test_a_step_that_is_differentiated_is_an_error():
    """Sums of integers would have the derivative 0."""
    step = funcga.accumulate(lambda rows: rows.sum(0), 2, in_axes=0, fold=funcga.reproducible(funcga.sum()))
    message = r"a step with the fold reproducible\(\) is differentiated"
    with pytest.raises(funcga.FuncgaError, match=message):
        torch.func.grad(lambda rows: step(rows).sum())(torch.ones(4, 2))
    with pytest.raises(funcga.FuncgaError, match=message):
        jax.grad(lambda rows: step(rows).sum())(JAX.arrays(np.ones((4, 2), "float32")))
    batched = torch.vmap(step)(torch.ones(3, 4, 2))
    assert torch.equal(batched, torch.full((3, 2), 4.0))
    np.testing.assert_array_equal(jax.vmap(step)(JAX.arrays(np.ones((3, 4, 2), "float32"))), batched)
