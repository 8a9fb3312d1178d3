"""Exact sums, against rational numbers, NumPy's correctly rounded operations and each other's framework."""

import re
from fractions import Fraction

import jax
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcga
import torch_backend
from tests.kits import JAX, TORCH

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])
KITS = pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)
LIMIT = 2.0**20


@pytest.fixture(autouse=True)
def wide(request):
    with jax.enable_x64(
        getattr(request.node, "callspec", None) is not None and request.node.callspec.params.get("dtype") == "float64"
    ):
        yield


def drawn(dtype, *shape, seed=0):
    """Numbers of all sizes, from far below the last digit to just below the limit, and some that are special."""
    r = np.random.default_rng(seed)
    numbers = (r.uniform(-1, 1, shape) * 2.0 ** r.integers(-70, 21, shape)).astype(dtype)
    numbers.flat[:6] = [0.0, -0.0, 1.0, -1.0, np.nextafter(np.array(LIMIT, dtype), 0), 1e-40]
    return numbers


# -- the numbers


@DTYPES
@KITS
def test_a_sum_is_one_of_the_two_floats_beside_the_rational_number(kit, dtype):
    """Terms lose no more than half of the last digit; so they do in any order and grouping, of which 40 are replicas."""
    terms = drawn(dtype, 60, 300, seed=1) / 64
    fold = funcga.reproducible(funcga.sum(), limit=LIMIT)
    step = funcga.accumulate(lambda x: x[0], 60, in_axes=0, fold=fold)
    result = kit.numpy(step(kit.arrays(terms)))
    unit = Fraction(2) ** (7 - 60) if dtype == "float32" else Fraction(2) ** (31 - 53 - 120)
    for number, column in zip(result.tolist(), terms.T.tolist(), strict=True):
        exact, lost = sum(map(Fraction, column)), 60 * unit / 2
        below, above = (float(np.nextafter(np.array(number, dtype), np.array(end, dtype))) for end in (-np.inf, np.inf))
        assert Fraction(below) - lost < exact < Fraction(above) + lost
    accumulator, parts = funcga.Accumulator(fold), []
    for index in np.random.default_rng(2).permutation(60).tolist():
        value = kit.arrays(terms[index])
        parts.append(accumulator.update(accumulator.init(value), value))
    while len(parts) > 1:
        parts = [
            accumulator.merge(*parts[k : k + 2]) if k + 1 < len(parts) else parts[k] for k in range(0, len(parts), 2)
        ]
    np.testing.assert_array_equal(kit.numpy(accumulator.finalize(parts[0])), result)


@DTYPES
@pytest.mark.parametrize("divisor", [3, 0.3, 2**23 + 1, 2.0**60])
def test_a_quotient_is_rounded_correctly(dtype, divisor):
    numbers = drawn(dtype, 1, 3000, seed=4) / 64
    numbers = numbers[:, np.abs(numbers[0]) > 2.0**-20]  # which a sum holds whole
    expected = numbers[0] / np.array(divisor, dtype)
    expected[np.abs(expected) < np.finfo(dtype).tiny] = 0
    options = {"in_axes": 0, "fold": funcga.reproducible(funcga.per_weight())}
    for kit in (TORCH, JAX):
        # As a constant, which XLA multiplies by the inverse of, and as an operand.
        for weight in (lambda x: divisor, lambda x: kit.arrays(np.array(divisor, dtype))):  # noqa: B023
            found = funcga.accumulate(lambda x: x[0], 1, weight=weight, **options)(kit.arrays(numbers))
            np.testing.assert_array_equal(kit.numpy(found), expected)


@DTYPES
@pytest.mark.parametrize("weight", [0.3, 1e4 + 1])
def test_a_weighted_term_is_rounded_once(dtype, weight):
    """In a program that could contract the product and what follows."""
    values = drawn(dtype, 3, 4000, seed=5) / 2**18
    options = {"in_axes": 0, "weight": lambda x: weight}
    found = funcga.accumulate(lambda x: x[0], 3, fold=funcga.reproducible(funcga.mean()), **options)
    in_torch, jitted = found(torch.from_numpy(values)), jax.jit(found)(JAX.arrays(values))
    np.testing.assert_array_equal(jitted, in_torch)


# -- the fold


def rows_of(kit, dtype="float32", rows=24, width=700, seed=6):
    return kit.arrays(drawn(dtype, rows, width, seed=seed) / 64)


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


@pytest.mark.parametrize(
    ("kit", "shape", "weight"),
    [
        *((TORCH, *each) for each in [((140_000,), 3), ((300, 511), 0.3), ((1,), 0), ((0,), 3), ((), 4)]),
        (JAX, (300, 511), 0.3),
        (JAX, (), 4),
    ],
)
def test_large_leaves_and_small_ones_are_held_alike(kit, shape, weight):
    """A window and a state between calls, of any size and weight: as funcga._exact says."""
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


def test_a_backward_pass_and_an_accumulator_have_the_same_bits():
    """The pass folds each gradient as soon as it is there. One leaf is reached by some rows alone."""
    torch.manual_seed(0)
    module, rows = Many(), torch.randn(12, 32)
    params = {name: p.detach() for name, p in module.named_parameters()}
    gradient = funcga.grad(torch_backend.pure_loss(module, lambda module, x: module(x).square().mean()))
    fold = funcga.reproducible(funcga.mean())
    weight = lambda x: 3.0 if bool(x[0, 0] > 0.5) else 0.7
    grads = funcga.accumulate(gradient, microbatch_size=2, fold=fold, weight=weight)(params, rows)
    accumulator = funcga.Accumulator(fold)
    state = accumulator.init(params)
    for x in (rows[k : k + 2].clone() for k in range(0, 12, 2)):
        each = funcga.accumulate(gradient, 1)(params, x)
        state = accumulator.update(state, each, weight=weight(x))
    for name, expected in accumulator.finalize(state).items():
        assert torch.equal(grads[name], expected), name
        assert grads[name].untyped_storage().nbytes() == grads[name].nbytes
    assert grads["extra"].any()


def kernels(step, *args):
    """How many operators of torch have run in a warm step, views left out."""
    step(*args)
    with Kernels() as seen:
        step(*args)
    return seen.count


class Kernels(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def test_short_leaves_are_folded_as_one():
    """So that it takes as many kernels, up to 2**16 elements. Numbers without axes have a larger range, and stay alone."""
    rows = torch.ones(4, 2**13)
    exact = funcga.reproducible(funcga.mean())
    made = {}
    for leaves in (1, 7, 9):  # 9 leaves are two groups
        gradient = lambda x, leaves=leaves: [x[0]] * leaves
        made[leaves] = kernels(funcga.accumulate(gradient, 4, in_axes=0, fold=exact), rows)
    assert made[7] < made[1] + 60
    assert 1.8 * made[1] < made[9] < 2 * made[1] + 60
    step = funcga.accumulate(lambda x: (x.sum(), x.mean()), 2, in_axes=0, fold=exact)
    assert step(2.0**40 * torch.ones(2, 2)) == (2.0**41, 2.0**40)


@KITS
def test_special_numbers_in_a_window(kit):
    rows = np.ones((3, 140_000), "float32")
    rows[1, 5], rows[2, 6], rows[0, 7], rows[2, 7] = np.nan, np.inf, np.inf, -np.inf
    step = funcga.accumulate(lambda v: v[0], 3, in_axes=0, fold=funcga.reproducible(funcga.mean()))
    result = kit.numpy(step(kit.arrays(rows)))
    np.testing.assert_array_equal(result[5:8], [np.nan, np.inf, np.nan])
    assert (np.delete(result, [5, 6, 7]) == 1).all()


def test_folds_that_are_exact_are_left_alone():
    for fold in (funcga.max(), funcga.min(), funcga.reproducible(funcga.mean())):
        assert funcga.reproducible(fold) is fold


# -- what leaves the range


@pytest.mark.host
@DTYPES
@KITS
@pytest.mark.parametrize("shape", [(3,), ()])
def test_terms_just_below_the_limit_are_exact_and_no_others(kit, dtype, shape):
    """As many as there is room for, of either sign; in a leaf without axes they may be 2**30 times as large."""
    most = LIMIT if shape else LIMIT * 2**30
    just_below = float(np.nextafter(np.array(most, dtype), np.array(0, dtype)))
    step = funcga.accumulate(lambda x: x[0], microbatch_size=1, in_axes=0, fold=funcga.reproducible(funcga.sum()))
    for rows, sign, above in ((1, 1, most), (4, -1, -most), (2048, -1, most)):
        terms = np.full((rows, *shape), sign * just_below, dtype)
        assert (kit.numpy(step(kit.arrays(terms))) == rows * sign * just_below).all()
        terms[-1] = above  # which the others do not cancel
        with pytest.raises(funcga.FuncgaError, match=f"is not below {most:.3g}".replace("+", r"\+")):
            step(kit.arrays(terms))


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
@pytest.mark.parametrize("exponent", [2, -39])
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
        (lambda: funcga.reproducible(funcga.mean(), limit=0), "limit is 0"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(funcga.FuncgaError, match=message):
        make()


def test_what_is_no_fold_raises_what_python_says():
    for fold in (funcga.mean, (funcga.mean(), funcga.sum())):
        with pytest.raises(AttributeError, match="reducer"):
            funcga.reproducible(fold)


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
