"""`multi_steps(...).accumulate_from`: a gradient function in place of gradients, which are added where they are computed."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcga
import jax_backend
import torch_backend
from benchmarks.torch_measure import Watch
from funcga import Transform
from tests import problems
from tests.kits import JAX, TORCH, difference
from tests.processes import processes
from tests.torch_backend.reduce.test_replicas import counted


def passing():
    """A transform whose updates are the gradients that it sees."""
    return Transform(lambda params: (), lambda grads, state, params=None: (grads, state))


def problem(kit, dtype="float64", rows=12):
    params, batch, loss = problems.regression(dtype, rows)
    return kit.arrays(params), kit.arrays(batch), loss


def folded(tx, gradient, params, batch, cuts, weights=None, state=None, **kwargs):
    """(values, what flush returns) of micro-batches cut from a batch."""
    state, values, begin = tx.init(params) if state is None else state, [], 0
    for index, rows in enumerate(cuts):
        micro = [x[begin : begin + rows] for x in batch]
        weight = rows if weights is None else weights[index]
        value, state = tx.accumulate_from(gradient, state, params, *micro, weight=weight, **kwargs)
        values.append(value)
        begin += rows
    return values, tx.flush(state, params)


def by_two_steps(tx, gradient, params, batch, cuts, weights=None):
    state, begin = tx.init(params), 0
    for index, rows in enumerate(cuts):
        _, grads = gradient(params, *[x[begin : begin + rows] for x in batch])
        state = tx.accumulate(grads, state, weight=rows if weights is None else weights[index])
        begin += rows
    return tx.flush(state, params)


# In JAX memory is donated to jax.jit.
KITS = pytest.mark.parametrize(
    ("kit", "options"), [(TORCH, {}), (TORCH, {"donate": True}), (JAX, {})], ids=["torch", "torch-donated", "jax"]
)
DONATES = pytest.mark.parametrize("donate", [False, True])


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@KITS
@pytest.mark.parametrize("seed", range(6))
def test_a_ragged_window_is_the_whole_batch(kit, options, seed):
    r = problems.rng(seed)
    cuts = [int(rows) for rows in r.integers(1, 6, size=r.integers(1, 6))]
    params, batch, loss = problem(kit, rows=sum(cuts))
    gradient = funcga.value_and_grad(loss)
    tx = funcga.multi_steps(passing(), 8, **options)
    whole, expected = gradient(params, *batch)
    state = None
    for _ in range(2):  # the second window begins in the state that the first has left
        values, (updates, state) = folded(tx, gradient, params, batch, cuts, state=state)
        assert difference(kit, updates, expected) <= 1e-12
        assert float(whole) == pytest.approx(np.average([float(v) for v in values], weights=cuts), rel=1e-12)
        assert int(state.offered) == 0
    assert int(state.updates) == 2


@KITS
@pytest.mark.parametrize("fold", ["mean", "per_weight", "sum", "by_steps", "max", "mixed", "wide"])
def test_every_fold_is_that_of_two_steps(kit, options, fold):
    by_steps = funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps)
    folds = {
        "mean": funcga.mean(),
        "per_weight": funcga.per_weight(),
        "sum": funcga.sum(),
        "by_steps": by_steps,
        "max": funcga.max(),
        "mixed": {"w": funcga.mean(), "b": funcga.sum()},
        "wide": funcga.mean(dtype="float64"),
    }
    dtype = "float32" if fold == "wide" else "float64"
    params, batch, loss = problem(kit, dtype)
    tx = funcga.multi_steps(passing(), 8, fold=folds[fold], **options)
    gradient, cuts, weights = funcga.value_and_grad(loss), [5, 4, 3], [0.3, 7, 2.5]
    _, (updates, _) = folded(tx, gradient, params, batch, cuts, weights)
    expected, _ = by_two_steps(tx, gradient, params, batch, cuts, weights)
    assert difference(kit, updates, expected) <= (1e-6 if fold == "wide" else 1e-14)


@KITS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_summed_in_float32(kit, options, dtype):
    params, batch, loss = problem(kit, "float32")
    cast = lambda tree: {name: kit.cast(leaf, dtype) for name, leaf in tree.items()}
    params, batch = cast(params), [kit.cast(x, dtype) for x in batch]
    tx = funcga.multi_steps(passing(), 8, **options)
    gradient, cuts = funcga.value_and_grad(loss), [3, 3, 3, 3]
    _, (updates, _) = folded(tx, gradient, params, batch, cuts, [1, 1, 1, 1])
    expected, _ = by_two_steps(tx, gradient, params, batch, cuts, [1, 1, 1, 1])
    assert {str(leaf.dtype).removeprefix("torch.") for leaf in updates.values()} == {"float32"}
    assert difference(kit, updates, expected) <= 1e-6
    # A thousand gradients of 1 are 1,000, where a sum in 16 bits would have stopped.
    one = funcga.grad(lambda params, x: params["w"].sum() * x.mean())
    ones = {"w": kit.cast(kit.arrays(np.ones((2, 2), "float32")), dtype)}
    tx = funcga.multi_steps(passing(), 9999, fold=funcga.sum(), **options)
    state, x = tx.init(ones), kit.cast(kit.arrays(np.ones(1, "float32")), dtype)
    for _ in range(1000 if kit is TORCH else 10):
        _, state = tx.accumulate_from(one, state, ones, x)
    total = tx.flush(state, ones)[0]["w"]
    assert (kit.numpy(total) == (1000 if kit is TORCH else 10)).all()


@KITS
def test_what_is_returned_beside_the_gradient(kit, options):
    params, batch, loss = problem(kit)
    tx = funcga.multi_steps(passing(), 8, **options)
    with_aux = lambda params, x, y: (loss(params, x, y), {"rows": x.sum(), "n": len(x)})
    expected, aux = with_aux(params, *batch)
    value_of = lambda gradient, **kwargs: folded(tx, gradient, params, batch, [12], **kwargs)[0][0]
    assert value_of(funcga.grad(loss)) is None
    assert float(value_of(funcga.value_and_grad(loss))) == pytest.approx(float(expected))
    value, found = value_of(funcga.value_and_grad(with_aux, has_aux=True))
    assert float(value) == pytest.approx(float(expected))
    assert (float(found["rows"]), int(found["n"])) == (pytest.approx(float(aux["rows"])), 12)
    assert float(value_of(funcga.grad(with_aux, has_aux=True))["rows"]) == pytest.approx(float(aux["rows"]))
    scaled = funcga.value_and_grad(loss, scaled=True)
    values, (updates, _) = folded(tx, scaled, params, batch, [12], loss_scale=64.0)
    assert float(values[0]) == pytest.approx(float(expected))
    assert difference(kit, updates, {k: 64 * v for k, v in funcga.grad(loss)(params, *batch).items()}) <= 1e-12


@KITS
def test_a_loss_scale(kit, options):
    params, batch, loss = problem(kit, "float32")
    inner = funcga.loss_scaled(passing(), init_scale=1024.0)
    tx = funcga.multi_steps(inner, 8, **options)
    gradient, state = funcga.value_and_grad(loss, scaled=True), tx.init(params)
    for begin in range(0, 12, 4):
        micro = [x[begin : begin + 4] for x in batch]
        _, state = tx.accumulate_from(gradient, state, params, *micro, loss_scale=state.inner.scale)
    updates, state = tx.flush(state, params)
    assert difference(kit, updates, funcga.grad(loss)(params, *batch)) <= 1e-6
    bad = [x * float("inf") for x in batch]
    _, state = tx.accumulate_from(gradient, state, params, *bad, loss_scale=state.inner.scale)
    updates, state = tx.flush(state, params)
    assert all((leaf == 0).all() for leaf in kit.leaves(updates))
    assert float(state.inner.scale) == 512


@KITS
@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_a_dropped_micro_batch(kit, options, drop):
    params, batch, loss = problem(kit)
    tx = funcga.multi_steps(passing(), 8, drop=drop, **options)
    gradient, state = funcga.value_and_grad(loss), tx.init(params)
    for scale in (1.0, float("nan"), 1.0):
        value, state = tx.accumulate_from(gradient, state, params, *[x * scale for x in batch], weight=12)
        assert np.isfinite(float(value)) == np.isfinite(scale)
    updates, state = tx.flush(state, params)
    expected = gradient(params, *batch)[1]
    if drop == "microbatch":
        assert difference(kit, updates, expected) <= 1e-12
        assert int(state.dropped.microbatches) == 1
    else:
        assert all((leaf == 0).all() for leaf in kit.leaves(updates))
        assert int(state.dropped.windows) == 1


@KITS
def test_a_weight_of_0_adds_nothing(kit, options):
    params, batch, loss = problem(kit)
    tx = funcga.multi_steps(passing(), 8, **options)
    gradient, state = funcga.value_and_grad(loss), tx.init(params)
    for weight, scale in ((0, float("nan")), (12, 1.0), (0, float("nan"))):
        _, state = tx.accumulate_from(gradient, state, params, *[x * scale for x in batch], weight=weight)
    updates, _ = tx.flush(state, params)
    assert difference(kit, updates, gradient(params, *batch)[1]) <= 1e-12


def foreign(kit, loss):
    by = lambda function: lambda params, *batch: function(params, *batch)
    if kit is JAX:
        return [jax.value_and_grad(loss), by(jax.grad(loss))]
    return [torch.func.grad_and_value(loss), by(torch.func.grad(loss))]


@KITS
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_function_of_another_library(kit, options, which):
    params, batch, loss = problem(kit)
    tx = funcga.multi_steps(passing(), 8, **options)
    gradient = foreign(kit, loss)[which]
    values, (updates, _) = folded(tx, gradient, params, batch, [5, 7])
    assert difference(kit, updates, funcga.grad(loss)(params, *batch)) <= 1e-12
    assert [value is None for value in values] == [which == 1] * 2


def test_dicts_in_another_order_and_larger_params(kit):
    params, batch, loss = problem(kit)
    tx = funcga.multi_steps(passing(), 8)
    reordered = dict(reversed(params.items()))
    _, state = tx.accumulate_from(funcga.value_and_grad(loss), tx.init(params), reordered, *batch)
    updates, _ = tx.flush(state, params)
    assert difference(kit, updates, funcga.grad(loss)(params, *batch)) <= 1e-12


def test_several_arguments_are_differentiated(kit):
    params, batch, loss = problem(kit)
    x = kit.arrays(np.ones((3,)))
    both = lambda params, x, rows, y: loss(params, rows * x, y)
    gradient = funcga.value_and_grad(both, argnums=(0, 1))
    tx = funcga.multi_steps(passing(), 8)
    _, state = tx.accumulate_from(gradient, tx.init((params, x)), params, x, *batch)
    updates, _ = tx.flush(state, (params, x))
    assert difference(kit, updates, gradient(params, x, *batch)[1]) <= 1e-12


def test_bad_calls_are_refused_and_leave_the_state(kit):
    params, batch, loss = problem(kit)
    tx = funcga.multi_steps(passing(), 8, **({"donate": True} if kit is TORCH else {}))
    gradient = funcga.value_and_grad(loss)
    _, state = tx.accumulate_from(gradient, tx.init(params), params, *batch)

    def refused(match, gradient=gradient, params=params, error=funcga.FuncgaError, **kwargs):
        with pytest.raises(error, match=match):
            tx.accumulate_from(gradient, state, params, *batch, **kwargs)

    refused("gradient is 3", 3)
    refused("weight of a micro-batch is -1", weight=-1)
    refused("another structure than the params", params={**params, "more": params["b"]})
    refused(
        "has no attribute|takes|does not depend", lambda params, x, y: gradient(params, x.nothing, y), error=Exception
    )
    scalar = kit.arrays(np.asarray(1.0))
    one = funcga.multi_steps(passing(), 2)
    with pytest.raises(funcga.FuncgaError, match="both parts of it have the structure"):
        one.accumulate_from(lambda p, x: (p * x.sum(), x.sum()), one.init(scalar), scalar, batch[0])
    updates, _ = tx.flush(state, params)
    assert difference(kit, updates, gradient(params, *batch)[1]) <= 1e-12


# --- torch: memory, and what autograd can do


def layers(width=8, count=3, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(width, width), nn.Tanh())]).to(dtype)


def of_module(module):
    loss = torch_backend.pure_loss(module, lambda module, x: (module(x) ** 2).mean())
    return {name: p.detach() for name, p in module.named_parameters()}, funcga.value_and_grad(loss)


def test_a_state_that_is_not_donated_stays():
    params, gradient = of_module(layers())
    tx = funcga.multi_steps(passing(), 8)
    _, first = tx.accumulate_from(gradient, tx.init(params), params, torch.ones(2, 8, dtype=torch.float64))
    before = {name: leaf.clone() for name, leaf in first.window.accumulated.items()}
    _, second = tx.accumulate_from(gradient, first, params, torch.ones(2, 8, dtype=torch.float64), weight=3)
    for name, leaf in before.items():
        assert torch.equal(first.window.accumulated[name], leaf)
        torch.testing.assert_close(second.window.accumulated[name], 4 * leaf)
    assert all(p.grad is None for p in params.values())


def test_a_donated_window_has_no_tree_of_gradients():
    params, gradient = of_module(layers(64, 8, torch.float32))
    tx = funcga.multi_steps(passing(), 8, donate=True)
    state, x = tx.init(params), torch.ones(2, 64)
    _, state = tx.accumulate_from(gradient, state, params, x)
    memory = {name: leaf.data_ptr() for name, leaf in state.window.accumulated.items()}
    largest, whole = 64 * 64 * 4, sum(p.nbytes for p in params.values())
    with Watch() as seen:
        _, state = tx.accumulate_from(gradient, state, params, x)
    assert seen.bytes < 3 * largest < whole / 2
    assert memory == {name: leaf.data_ptr() for name, leaf in state.window.accumulated.items()}


def test_a_module_with_a_parameter_out_of_reach_and_a_tied_one():
    module = layers()
    module.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    module[2].weight = module[0].weight
    params, gradient = of_module(module)
    tx, x = funcga.multi_steps(passing(), 8, donate=True), torch.randn(10, 8, dtype=torch.float64)
    _, (updates, _) = folded(tx, gradient, params, [x], [4, 4, 2])
    assert difference(TORCH, updates, gradient(params, x)[1]) <= 1e-12
    assert not updates["unused"].any()


def test_a_checkpoint_and_a_sparse_embedding():
    embedding, module = nn.Embedding(7, 8, sparse=True, dtype=torch.float64), layers()
    whole = nn.ModuleList([embedding, module])
    loss = lambda whole, rows: checkpoint(whole[1], whole[0](rows), use_reentrant=True).square().mean()
    params = {name: p.detach() for name, p in whole.named_parameters()}
    gradient = funcga.value_and_grad(torch_backend.pure_loss(whole, loss))
    rows = torch.tensor([0, 3, 3, 6, 1, 2])
    tx = funcga.multi_steps(passing(), 8, donate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, (updates, _) = folded(tx, gradient, params, [rows], [2, 4])
        embedding.sparse = False
        whole_loss = loss(whole, rows)
    whole_loss.backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(updates[name], parameter.grad, rtol=1e-12, atol=1e-14)


@DONATES
def test_an_error_in_the_loss_leaves_the_window(donate):
    params, gradient = of_module(layers())
    tx, x = funcga.multi_steps(passing(), 8, donate=donate), torch.randn(6, 8, dtype=torch.float64)
    _, state = tx.accumulate_from(gradient, tx.init(params), params, x)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        tx.accumulate_from(gradient, state, params, x[:, :3])
    assert not hasattr(raised.value, "__notes__")
    updates, _ = tx.flush(state, params)
    assert difference(TORCH, updates, gradient(params, x)[1]) <= 1e-12


@DONATES
def test_an_error_in_the_backward_pass_is_noted_if_it_shows(donate):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError("in the middle")

    params = {"w": torch.ones(3), "v": torch.ones(3)}
    tx = funcga.multi_steps(passing(), 8, donate=donate)
    fine = funcga.grad(lambda params, x: (params["w"] * params["v"] * x).sum())
    _, state = tx.accumulate_from(fine, tx.init(params), params, torch.ones(3))
    fails = funcga.grad(lambda params, x: (Fails.apply(params["w"]) * x * params["v"]).sum())
    with pytest.raises(ZeroDivisionError, match="in the middle") as raised:
        tx.accumulate_from(fails, state, params, torch.ones(3))
    is_changed = not all((leaf == 1).all() for leaf in state.window.accumulated.values())
    assert bool(getattr(raised.value, "__notes__", [])) == is_changed
    assert donate or not is_changed


def test_a_gradient_of_a_gradient_goes_through():
    """Inside of a loss that is differentiated nothing is written to, and the graph stays."""
    params, x = {"w": torch.tensor(2.0, dtype=torch.float64)}, torch.ones(3, dtype=torch.float64)
    tx = funcga.multi_steps(passing(), 8)
    inner = funcga.value_and_grad(lambda params, x: (params["w"] ** 3 * x).mean())

    def outer(params):
        _, state = tx.accumulate_from(inner, tx.init(params), params, x)
        return tx.flush(state, params)[0]["w"]

    for gradient in (funcga.grad(outer), torch.func.grad(outer)):
        assert float(gradient(params)["w"]) == pytest.approx(12.0)


def replace_layer(module, params):
    module[2] = nn.Linear(8, 8, dtype=torch.float64)


def replace_parameter(module, params):
    module[0].weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))


def swap_data(module, params):
    params["0.weight"].data = torch.randn(8, 8, dtype=torch.float64)


def transpose_data(module, params):
    """In the same memory, with the same shape."""
    params["0.weight"].data = params["0.weight"].data.t()


def tie(module, params):
    module[2].weight = module[0].weight


def rename(module, params):
    for name in [*module._modules]:
        module._modules[f"layer{name}"] = module._modules.pop(name)


def add_layer(module, params):
    module.append(nn.Linear(8, 8, dtype=torch.float64))


def parametrize(module, params):
    nn.utils.parametrizations.weight_norm(module[2])


def write_in_place(module, params):
    params["0.weight"].detach().mul_(2)


def freeze(module, params):
    module[2].requires_grad_(False)


def another_tensor(module, params):
    params["0.weight"] = params["0.weight"] + 1


def hook(module, params):
    params["2.weight"].requires_grad_().register_hook(lambda grad: 3 * grad)


def evaluate(module, params):
    module.eval()


@pytest.mark.parametrize(
    "change",
    [
        replace_layer, replace_parameter, swap_data, transpose_data, tie, rename, add_layer, parametrize,
        write_in_place, freeze, another_tensor, hook, evaluate,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_what_changes_between_two_micro_batches_counts(change):
    """A window goes on with the leaves of the last micro-batch only where they are what this one would make."""

    def run(accumulate):
        module = layers().append(nn.Dropout(0.5).double())
        params, gradient = of_module(module)
        tx = funcga.multi_steps(passing(), 8, donate=True)
        state, x = tx.init(params), torch.randn(6, 8, dtype=torch.float64)
        try:
            for turn in range(4):
                torch.manual_seed(turn)
                state = accumulate(tx, gradient, state, params, x)
                if turn == 1:
                    change(module, params)
        except funcga.FuncgaError as error:
            return str(error)
        return tx.flush(state, params)[0]

    torch.manual_seed(0)
    one = run(lambda tx, gradient, state, params, x: tx.accumulate_from(gradient, state, params, x)[1])
    step = lambda gradient: funcga.accumulate(gradient, 1)
    two = run(lambda tx, gradient, state, params, x: tx.accumulate(step(gradient)(params, x)[1], state))
    if isinstance(two, str):
        assert one == two
    else:
        assert difference(TORCH, one, two) <= 1e-12


def test_nothing_is_kept_when_the_window_ends():
    params, gradient = of_module(layers())
    tx, x = funcga.multi_steps(passing(), 8, donate=True), torch.ones(2, 8, dtype=torch.float64)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.accumulate_from(gradient, state, params, x)
    assert tx.update.binding.adding.open
    gc.collect()
    gc.disable()  # what is dropped is freed at once
    references = [weakref.ref(leaf) for leaf in (*params.values(), *state.window.accumulated.values())]
    _, state = tx.flush(state, params)
    assert not tx.update.binding.adding.open
    del params, _, state
    left = [reference for reference in references if reference() is not None]
    gc.enable()
    assert not left


def test_a_module_gradient_is_refused():
    module = layers()
    params, _ = of_module(module)
    tx = funcga.multi_steps(passing(), 8)
    gradient = torch_backend.module_value_and_grad(module, lambda module, x: module(x).sum())
    with pytest.raises(funcga.FuncgaError, match="pure_loss"):
        tx.accumulate_from(gradient, tx.init(params), params, torch.ones(2, 8, dtype=torch.float64))


def test_params_of_another_shape_or_dtype(monkeypatch):
    tx = funcga.multi_steps(passing(), 8, donate=True)
    state = tx.init({"w": torch.zeros(3)})
    gradient = funcga.grad(lambda params, x: (params["w"] * x).sum())
    with pytest.raises(funcga.FuncgaError, match="the state was made for"):
        tx.accumulate_from(gradient, state, {"w": torch.zeros(1)}, torch.ones(3))
    # Another float is added to the sums that there are, as by accumulate.
    _, state = tx.accumulate_from(gradient, state, {"w": torch.zeros(3, dtype=torch.bfloat16)}, torch.ones(3))
    assert state.window.accumulated["w"].tolist() == [1, 1, 1]


def of_rank(group, donate):
    torch.manual_seed(0)
    params, gradient = of_module(layers())
    x = torch.randn(12, 8, dtype=torch.float64)
    tx = funcga.multi_steps(passing(), 8, across=group, donate=donate)
    rank = dist.get_rank(group)
    mine, cuts = (x[:5], [2, 3]) if rank == 0 else (x[5:], [1, 2, 4])
    found, state = [], None
    with counted() as calls:
        for scale in (1, 2):
            _, (updates, state) = folded(tx, gradient, params, [mine * scale], cuts, state=state)
            found.append({name: leaf.clone() for name, leaf in updates.items()})
    expected = [gradient(params, x * scale)[1] for scale in (1, 2)]
    return found, expected, len(calls)


@DONATES
def test_replicas_merge_once(donate):
    for found, expected, calls in processes().run(of_rank, donate, size=2):
        for updates, whole in zip(found, expected, strict=True):
            assert difference(TORCH, updates, whole) <= 1e-12
        assert calls == 8  # as update makes them: see test_multi_steps_replicas


# --- JAX: the same program


def test_under_jit_it_is_the_program_of_two_steps():
    params, (x, y), loss = problem(JAX)
    tx = funcga.multi_steps(optax.adam(0.1), 8)
    gradient = funcga.value_and_grad(loss)

    def one(state, params, x, y):
        return tx.accumulate_from(gradient, state, params, x, y, weight=len(x))

    def two(state, params, x, y):
        value, grads = gradient(params, x, y)
        return value, tx.accumulate(grads, state, weight=len(x))

    state = tx.init(params)
    assert str(jax.make_jaxpr(one)(state, params, x, y)) == str(jax.make_jaxpr(two)(state, params, x, y))
    compiled = [jax.jit(step, donate_argnums=0).lower(state, params, x, y).compile() for step in (one, two)]
    memory = [program.memory_analysis().temp_size_in_bytes for program in compiled]
    assert memory[0] == memory[1]


def test_in_shard_map_each_device_has_its_part():
    params, (x, y), loss = problem(JAX)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = funcga.multi_steps(passing(), 8, across="data")
    specs, gradient = jax_backend.state_specs(tx), funcga.value_and_grad(loss)
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=jax.P(), out_specs=specs)

    def step(state, params, x, y):
        own = jax.lax.pcast(params, "data", to="varying")
        value, state = tx.accumulate_from(gradient, state, own, x, y, weight=len(x))
        return jax.lax.pmean(value, "data"), *tx.flush(state, params)

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, jax.P(), jax.P("data"), jax.P("data")),
            out_specs=(jax.P(), jax.P(), specs),
        )
    )
    value, updates, _ = run(init(params), params, x, y)
    whole, expected = gradient(params, x, y)
    assert float(value) == pytest.approx(float(whole))
    assert difference(JAX, updates, expected) <= 1e-12
    assert jnp.isfinite(value)
