"""observe=: what a step says of its gradients is what the gradients of its micro-batches, one by one, say."""

import jax
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from tests import problems
from tests.kits import TORCH, difference
from tests.observe import oracle
from tests.test_errors import check_refused

ROWS = 11
# Sums of some hundred numbers in float64, in another order; squared norms are differences of them.
LIMIT = 1e-12
pytestmark = pytest.mark.usefixtures("x64")


def problem(kit):
    params, batch, loss = problems.regression("float64", ROWS)
    return kit.arrays(params), kit.arrays(batch), loss


def rows(batch, part):
    return [leaf[part] for leaf in batch]


def gradients(kit, loss, params, batch, sizes):
    """The gradient of each micro-batch, flat."""
    each = [funcga.grad(loss)(params, *rows(batch, part)) for part in oracle.apart(ROWS, sizes)]
    return [oracle.flat(kit.leaves(gradient)) for gradient in each]


def loaded(batch, sizes):
    return [tuple(rows(batch, part)) for part in oracle.apart(ROWS, sizes)]


def close(kit, observed, expected):
    observed = float(kit.numpy(observed))
    assert abs(observed - expected) <= LIMIT * max(1, abs(expected)), (observed, expected)


def spellings(kit, loss):
    """(grad_fn, its fold) of each way to the same gradient."""
    summed = lambda params, x, y: loss(params, x, y) * len(y)
    return {
        "mean": (funcga.value_and_grad(loss), funcga.mean()),
        "aux": (funcga.grad(lambda *args: (loss(*args), args[1].sum()), has_aux=True), (funcga.mean(), funcga.sum())),
        "sums": (funcga.value_and_grad(summed), funcga.per_weight()),
        "others": (torch.func.grad_and_value(loss) if kit.name == "torch" else jax.value_and_grad(loss), funcga.mean()),
        "argnums": (funcga.value_and_grad(loss, argnums=(0,)), funcga.mean()),
    }


@pytest.mark.parametrize(("name", "n"), [("mean", 3), ("aux", 2), ("others", 4), ("argnums", 4)])
def test_observations_are_those_of_the_gradients_one_by_one(kit, name, n):
    params, batch, loss = problem(kit)
    sizes = oracle.sizes(ROWS, n)
    each = gradients(kit, loss, params, batch, sizes)
    trace, norm_squared = oracle.noise(each, sizes)
    norms, mean = oracle.norms(each, sizes)
    grad_fn, fold = spellings(kit, loss)[name]
    observers = {"noise": funcga.gradient_noise(), "norms": [funcga.gradient_norms()]}
    plain = funcga.accumulate(grad_fn, n, fold=fold)(params, *batch)
    for step, args in (
        (funcga.accumulate(grad_fn, n, fold=fold, observe=observers), batch),
        (funcga.stream(grad_fn, fold=fold, observe=observers), (loaded(batch, sizes),)),
    ):
        result, observed = step(params, *args)
        assert difference(kit, result, plain) < LIMIT
        close(kit, observed["noise"].trace, trace)
        close(kit, observed["noise"].norm_squared, norm_squared)
        close(kit, observed["noise"].scale, trace / norm_squared)
        assert np.allclose(kit.numpy(observed["norms"][0].microbatches), norms, rtol=LIMIT, atol=0)
        close(kit, observed["norms"][0].mean, mean)


@pytest.mark.parametrize("name", ["mean", "sums"])
def test_the_norm_of_what_weighs_nothing_is_0(kit, name):
    params, (x, y), loss = problem(kit)
    sizes, weights = [3, 3, 3, 2], [0.0, 3.0, 0.0, 2.0]
    items = loaded((x, y), sizes)
    items[0], items[2] = (items[0][0], items[0][1] + 1000), (items[2][0] * float("nan"), items[2][1] + 1000)
    weight = lambda x, y: kit.xp.where(y.max() < 500, len(y), 0)
    grad_fn, fold = spellings(kit, loss)[name]
    options = {"fold": fold, "weight": weight, "observe": funcga.gradient_norms()}
    norms, mean = oracle.norms(gradients(kit, loss, params, (x, y), sizes), weights)
    observed = funcga.stream(grad_fn, **options)(params, items)[1]
    expected = norms * (np.asarray(weights) > 0)
    if name != "sums":  # whose sum has them in it, whatever they weigh
        close(kit, observed.mean, mean)
    assert np.allclose(kit.numpy(observed.microbatches), expected, rtol=LIMIT, atol=0)


@pytest.mark.parametrize("n", [1, 4])
def test_norms_of_sparse_gradients_are_those_of_dense_ones(n):
    indices, observed = torch.tensor([0, 1, 1, 3, 3, 3, 0, 2]), []
    for sparse in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Embedding(5, 3, sparse=sparse, dtype=torch.float64)
        gradient = torch_backend.module_value_and_grad(module, lambda module, i: module(i).square().sum())
        observed.append(funcga.accumulate(gradient, n, observe=funcga.gradient_norms())(indices)[1])
    dense, of_sparse = observed
    assert torch.allclose(of_sparse.microbatches, dense.microbatches, rtol=LIMIT, atol=0)
    close(TORCH, of_sparse.mean, dense.mean)


def test_short_leaves_and_long_ones_in_groups():
    torch.manual_seed(0)
    # By turns long and short: short ones wait for the end of a pass, and are measured together.
    shapes = {"a.w": (50, 100), "a.b": (100,), "b.w": (90, 100), "b.scale": (), "b.b": (2, 50), "a.last": (70, 1000)}
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    factors = {name: torch.randn(4, *shape, dtype=torch.float64) for name, shape in shapes.items()}

    def loss(params, factors):
        terms = [(params[name] * factor.mean(0)).square().sum() for name, factor in factors.items()]
        return sum(terms[:-1], terms[-1])

    by_part = funcga.gradient_norms(groups=lambda path: path.split(".")[0])
    without_scale = funcga.gradient_norms(groups=lambda path: None if path == "b.scale" else "the rest")
    observers = [funcga.gradient_norms(), by_part, without_scale]
    _, (whole, parts, rest) = funcga.accumulate(funcga.grad(loss), 4, observe=observers)(params, factors)
    for index in range(4):
        rows = {name: factor[index : index + 1] for name, factor in factors.items()}
        gradient = torch.func.grad(loss)(params, rows)
        norm = lambda names, gradient=gradient: oracle.norms([oracle.flat([gradient[name] for name in names])], [1])[1]
        close(TORCH, whole.microbatches[index], norm(shapes))
        close(TORCH, parts["a"].microbatches[index], norm(["a.w", "a.b", "a.last"]))
        close(TORCH, parts["b"].microbatches[index], norm(["b.w", "b.scale", "b.b"]))
        close(TORCH, rest["the rest"].microbatches[index], norm([name for name in shapes if name != "b.scale"]))


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_what_is_dropped_is_not_observed(kit, drop):
    params, (x, y), loss = problem(kit)
    sizes = [3, 3, 3, 2]
    items = loaded((x, y), sizes)
    items[2] = (items[2][0] * float("nan"), items[2][1])
    expected = oracle.noise(gradients(kit, loss, params, (x, y), sizes), [3, 3, 0, 2])
    batch = [kit.xp.concatenate(column) for column in zip(*items, strict=True)]
    options = {"drop": drop, "observe": {"noise": funcga.gradient_noise()}}
    for grad_fn, fold in (spellings(kit, loss)[name] for name in ("mean", "others")):
        plain = funcga.stream(grad_fn, fold=fold, drop=drop)(params, items)
        for step, args in (
            (funcga.accumulate(grad_fn, 4, fold=fold, **options), batch),
            (funcga.stream(grad_fn, fold=fold, **options), (items,)),
        ):
            result, observed = step(params, *args)
            if drop == "window":
                assert np.isnan(kit.numpy(observed["noise"].trace))
                continue
            assert difference(kit, result, plain) < LIMIT
            close(kit, observed["noise"].trace, expected[0])
            close(kit, observed["noise"].norm_squared, expected[1])


def test_one_microbatch_says_nothing(kit):
    params, batch, loss = problem(kit)
    _, (noise, norms) = funcga.accumulate(
        funcga.grad(loss), 1, observe=(funcga.gradient_noise(), funcga.gradient_norms())
    )(params, *batch)
    assert np.isnan([float(kit.numpy(number)) for number in noise]).all()
    close(kit, norms.microbatches[0], float(kit.numpy(norms.mean)))


def test_a_loss_scale_is_divided_out(kit):
    params, batch, loss = problem(kit)
    observers = funcga.gradient_noise(), funcga.gradient_norms()
    _, expected = funcga.accumulate(funcga.grad(loss), 3, observe=observers)(params, *batch)
    step = funcga.accumulate(funcga.grad(loss, scaled=True), 3, observe=observers)
    for scale in (1024.0, kit.arrays(np.float32(1024))):
        assert difference(kit, step(params, *batch, loss_scale=scale)[1], expected) < LIMIT


def test_gradients_of_two_structures_take_turns(kit):
    """A window of the first may be finished again, with more micro-batches, after one of the second."""
    loss = lambda params, x: sum(leaf.sum() * x.mean() for leaf in params.values())
    step = funcga.stream(funcga.grad(loss), observe=funcga.gradient_norms(groups=lambda path: path))
    ones = lambda size: kit.arrays(np.ones(size))
    one, two, window = {"a": ones(4)}, {"b": ones(9), "c": ones(1)}, [ones(2), 2 * ones(2)]
    for params, microbatches in ((one, window), (two, window), (one, [*window, 3 * ones(2)])):
        _, observed = step(params, microbatches)
        assert [*observed] == [*params]
        for name, norms in observed.items():
            expected = [(index + 1) * len(params[name]) ** 0.5 for index in range(len(microbatches))]
            assert np.allclose(kit.numpy(norms.microbatches), expected, rtol=LIMIT, atol=0)


def test_an_observer_of_ones_own_sees_every_leaf(kit):
    params, batch, loss = problem(kit)
    measure = lambda xp, leaf: abs(leaf).sum()
    mine = funcga.observers.Observer(
        funcga.max(), lambda xp, observed: {"most": observed.folded, "all": observed.result}, measure, degree=1
    )
    each = gradients(kit, loss, params, batch, oracle.sizes(ROWS, 3))
    for grad_fn, fold in (spellings(kit, loss)[name] for name in ("mean", "sums")):
        result, observed = funcga.accumulate(grad_fn, 3, fold=fold, observe=mine)(params, *batch)
        close(kit, observed["most"], max(abs(g).sum() for g in each))
        close(kit, observed["all"], abs(oracle.flat(kit.leaves(result[1]))).sum())


def test_what_cannot_be_observed_is_refused(kit):
    params, batch, loss = problem(kit)
    observe = funcga.gradient_noise()
    grad_fn = funcga.value_and_grad(loss)
    check_refused("gradient_noise()", lambda: funcga.accumulate(grad_fn, 2, observe=funcga.gradient_noise))
    check_refused("{} in observe= is no observer", lambda: funcga.accumulate(grad_fn, 2, observe={}))
    check_refused("3 in observe= is no observer", lambda: funcga.accumulate(grad_fn, 2, observe=[observe, 3]))
    step = funcga.accumulate(grad_fn, 2, fold=(funcga.mean(), funcga.max()), observe=observe)
    check_refused("funcga.mean(), per_weight() or sum()", lambda: step(params, *batch))
    mixed = {name: funcga.mean() if index else funcga.sum() for index, name in enumerate(sorted(params))}
    step = funcga.accumulate(grad_fn, 2, fold=(funcga.mean(), mixed), observe=observe)
    check_refused("Fold all of them alike", lambda: step(params, *batch))
    step = funcga.accumulate(lambda params, x, y: loss(params, x, y), 2, observe=observe)
    check_refused("funcga.value_and_grad(loss_fn)", lambda: step(params, *batch))
    step = funcga.accumulate(lambda params, x, y: (funcga.grad(loss)(params, x, y),) * 2, 2, observe=observe)
    check_refused("more than one part", lambda: step(params, *batch))
    step = funcga.accumulate(grad_fn, 2, observe=funcga.gradient_noise(groups=lambda path: None))
    with pytest.raises((RuntimeError, ValueError)):  # there is nothing to stack
        step(params, *batch)
    for bad in (1, -0.1, float("nan")):
        check_refused("decay is", lambda bad=bad: funcga.observers.averaged(None, None, bad))
    check_refused("no array was found in `noise`", lambda: funcga.observers.averaged(3.0, None, 0.9))
    step = funcga.accumulate(grad_fn, 2, observe=funcga.observers.Observer(funcga.mean, len))
    check_refused("fold= is no Fold", lambda: step(params, *batch))


@pytest.mark.parametrize("length", [3, 2**13], ids=["short", "long"])
def test_a_gradient_that_comes_in_pieces_is_refused(length):
    """A checkpoint that runs a backward pass of its own gives parameters its part of their gradient there."""
    torch.manual_seed(0)
    w, x = torch.randn(length, dtype=torch.float64), torch.randn(4, length, dtype=torch.float64)

    def loss(w, x, reentrant):
        h = checkpoint(lambda x: torch.tanh(x * w), x + 0 * w, use_reentrant=reentrant)
        return (h * w).square().mean()

    step = funcga.accumulate(funcga.grad(loss), 2, in_axes=(None, 0, None), observe=funcga.gradient_norms())
    each = [torch.func.grad(lambda w, x: (torch.tanh(x * w) * w).square().mean())(w, part) for part in x.split(2)]
    norms, mean = oracle.norms([oracle.flat([gradient]) for gradient in each], [2, 2])
    _, observed = step(w, x, False)
    assert np.allclose(observed.microbatches, norms, rtol=LIMIT, atol=0)
    close(TORCH, observed.mean, mean)
    check_refused("Use use_reentrant=False", lambda: step(w, x, True))


def test_an_error_leaves_no_hook_on_a_module():
    torch.manual_seed(0)
    module, x, runs = torch.nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64), []

    def loss(module, x):
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("mine")
        return module(x).square().mean()

    step = funcga.accumulate(torch_backend.module_value_and_grad(module, loss), 2, observe=funcga.gradient_norms())
    with pytest.raises(KeyError, match="mine"):
        step(x)
    assert not any(p._backward_hooks for p in module.parameters())
    _, observed = step(x)
    each = [torch.autograd.grad(loss(module, part), [*module.parameters()]) for part in x.split(2)]
    norms, mean = oracle.norms([oracle.flat(gradient) for gradient in each], [2, 2])
    assert np.allclose(observed.microbatches, norms, rtol=LIMIT, atol=0)
    close(TORCH, observed.mean, mean)


def test_an_average_keeps_numerator_and_denominator_apart(kit):
    number = lambda value: kit.arrays(np.float64(value))
    windows = [(8.0, 2.0, 1.0, 0.5), (float("nan"),) * 4, (6.0, -1.0, 2.0, 0.25), (1.0, 4.0, 0.5, 1.0)]
    noises = [
        funcga.observers.GradientNoise(*map(number, (trace, norm, trace / norm, error, norm_error, 0.0)))
        for trace, norm, error, norm_error in windows
    ]
    state, decay = None, 0.75
    for noise in noises:
        average, state = funcga.observers.averaged({"all": noise}, state, decay)
    kept = [window for window in windows if window[0] == window[0]]
    weights = np.array([decay ** (len(kept) - 1 - index) for index in range(len(kept))])
    trace, norm, error, norm_error = np.array(kept).T
    mean = lambda values: (weights * values).sum() / weights.sum()
    spread = lambda values: np.sqrt(((weights * values) ** 2).sum()) / weights.sum()
    close(kit, average["all"].trace, mean(trace))
    close(kit, average["all"].scale, mean(trace) / mean(norm))
    close(kit, average["all"].trace_error, spread(error))
    close(kit, average["all"].norm_squared_error, spread(norm_error))
