"""A dynamic loss scale: GradScaler step for step in torch, and the same in JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import funcga
import jax_backend
import torch_backend
from tests.kits import JAX
from tests.processes import processes

RNG = np.random.default_rng(0)
# window 3 is so large that its gradients overflow in float16, and window 5 holds an infinity
INPUTS = RNG.standard_normal((12, 8, 6)).astype("float32")
INPUTS[3] *= 1e4
INPUTS[5, 2] = np.inf
LABELS = RNG.integers(0, 3, (12, 8))
N, INTERVAL = 4, 2


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def cross_entropy(module, x, y):
    with torch.autocast("cpu", torch.float16):
        return torch.nn.functional.cross_entropy(module(x), y)


def windows():
    return zip(torch.tensor(INPUTS), torch.tensor(LABELS), strict=True)


def updated(module, optimizer, scaler):
    """The scale and the parameters after an update by what is in the `.grad`s, clipped."""
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale(), [p.detach().clone() for p in module.parameters()]


def by_grad_scaler(init_scale):
    """The scale after every window, and the parameters, as the guide's loop has them."""
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=INTERVAL)
    for xs, ys in windows():
        for x, y in zip(xs.chunk(N), ys.chunk(N), strict=True):
            scaler.scale(cross_entropy(module, x, y) / N).backward()
        yield updated(module, optimizer, scaler)


def transform(init_scale):
    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-2)
    clipped = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    return funcga.transforms.loss_scaled(clipped, init_scale=init_scale, growth_interval=INTERVAL)


def scaled_gradient(module):
    return funcga.value_and_grad(torch_backend.pure_loss(module, cross_entropy), scaled=True)


def by_multi_steps(init_scale):
    module, tx = network(), funcga.multi_steps(transform(init_scale), N, donate=True)
    gradient = scaled_gradient(module)
    params = {name: p.detach() for name, p in module.named_parameters()}
    state = tx.init(params)
    for xs, ys in windows():
        for x, y in zip(xs.chunk(N), ys.chunk(N), strict=True):
            _, grads = gradient(params, x, y, loss_scale=state.inner.scale)
            updates, state = tx.update(grads, state, params)
        params = torch_backend.apply_updates(params, updates)
        yield state.inner.scale.item(), [*params.values()]


def by_assigned_grads(init_scale):
    """torch's own GradScaler and optimizer.step(), with the gradient of funcga."""
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=INTERVAL)
    step = funcga.accumulate(scaled_gradient(module), N)
    for x, y in windows():
        _, grads = step(dict(module.named_parameters()), x, y, loss_scale=scaler.scale(torch.ones(())))
        torch_backend.assign_grads(module, grads)
        yield updated(module, optimizer, scaler)


WAYS = {"multi_steps": by_multi_steps, "assign_grads": by_assigned_grads}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_grad_scaler_step_for_step(way):
    """`scale(loss / n)` begins its backward passes at a scale that is n times smaller than it says."""
    theirs, ours = [*by_grad_scaler(2.0**22)], [*WAYS[way](2.0**22 / N)]
    scales = [scale for scale, _ in theirs]
    assert [scale * N for scale, _ in ours] == scales
    assert {b / a for a, b in itertools.pairwise(scales)} == {0.5, 1, 2}  # it backs off, stays and grows
    for (_, found), (_, expected) in zip(ours, theirs, strict=True):
        for a, b in zip(found, expected, strict=True):
            # a transform adds the difference that the optimizer makes: a rounding of it
            assert (a - b).abs().max() <= (0 if way == "assign_grads" else 2e-7)


def test_a_window_that_is_not_finite_changes_no_state_of_the_transform(kit):
    tx = funcga.transforms.loss_scaled(momentum(kit), init_scale=8.0, growth_interval=2)
    params = kit.arrays({"w": np.ones(3, "float32")})
    good, bad = (kit.arrays({"w": np.array([8, 16, v], "float32")}) for v in (8, np.nan))
    _, before = tx.update(good, tx.init(params), params)
    _, state = tx.update(bad, before, params)
    for a, b in zip(kit.leaves(state.inner), kit.leaves(before.inner), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (float(state.scale), int(state.growth), int(state.skipped)) == (4, 0, 1)


def momentum(kit):
    if kit is JAX:
        return optax.sgd(1.0, momentum=0.5)
    return torch_backend.from_optimizer(torch.optim.SGD, lr=1.0, momentum=0.5)


def test_a_scale_neither_leaves_a_float32_nor_becomes_0(kit):
    params, bad = kit.arrays(({"w": np.zeros(1, "float32")}, {"w": np.full(1, np.nan, "float32")}))
    tx = funcga.transforms.loss_scaled(momentum(kit), init_scale=2.0**127, growth_interval=1)
    _, state = tx.update(params, tx.init(params), params)
    assert (float(state.scale), int(state.growth)) == (2.0**127, 0)
    tx = funcga.transforms.loss_scaled(momentum(kit), init_scale=2.0**-125)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(bad, state, params)
    assert float(state.scale) == 2.0**-126


def test_the_value_is_the_loss_and_the_gradient_that_of_the_product(kit):
    loss_fn = lambda w, x: (((w * x) ** 2).mean(), {"rows": x.shape[0]})
    w, x = kit.arrays(np.array(2.0, "float32")), kit.arrays(np.arange(6, dtype="float32"))
    plain = funcga.value_and_grad(loss_fn, has_aux=True)(w, x)
    gradient = funcga.value_and_grad(loss_fn, has_aux=True, scaled=True)
    fold = ((funcga.mean(), funcga.sum()), funcga.mean())
    for step in (gradient, funcga.accumulate(gradient, 3, fold=fold)):
        value, grads = step(w, x, loss_scale=4.0)
        np.testing.assert_allclose(kit.leaves(value)[0], kit.leaves(plain[0])[0], rtol=1e-6)
        np.testing.assert_allclose(kit.leaves(grads)[0], 4 * kit.leaves(plain[1])[0], rtol=1e-6)
    halved, _ = funcga.grad(loss_fn, has_aux=True, scaled=True)(w, x, loss_scale=0.5)
    assert kit.leaves(halved)[0] == 0.5 * kit.leaves(plain[1])[0]


def test_small_gradients_survive_in_float16(kit):
    """Each is 1e-8, of which float16 makes 0."""
    half = [kit.cast(kit.arrays(np.full(shape, 1e-4, "float32")), "float16") for shape in ((), 4)]
    loss_fn = lambda w, x: (w * x).mean() * 1e-4
    step = funcga.accumulate(funcga.grad(loss_fn, scaled=True), 2)
    np.testing.assert_array_equal(kit.leaves(funcga.grad(loss_fn)(*half)), 0)
    tx = funcga.transforms.loss_scaled(momentum(kit), init_scale=2.0**15)
    state = tx.init(half[0])
    updates, _ = tx.update(step(*half, loss_scale=state.scale), state, half[0])
    (update,) = kit.leaves(updates)
    assert update.dtype == "float64"
    np.testing.assert_allclose(update, -1e-8, rtol=2e-3)  # of float16's eleven bits


def test_replicas_in_jax_skip_a_window_together():
    """One of four overflows: the merged gradient does, and all of them back off."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = funcga.multi_steps(funcga.transforms.loss_scaled(optax.sgd(1.0), init_scale=8.0), 2, across="data")
    gradient = funcga.grad(lambda w, x: (w * x).mean(), scaled=True)
    specs, whole, cut = jax_backend.state_specs(tx), jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def step(w, state, x):
        grads = gradient(jax.lax.pcast(w, "data", to="varying"), x, loss_scale=state.inner.scale)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(whole, specs, cut), out_specs=(whole, specs)))
    w, x = jnp.ones(()), jnp.arange(8.0)
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=whole, out_specs=specs))(w)
    for i in range(4):
        w, state = step(w, state, x.at[6].set(jnp.inf) if i == 1 else x)
        assert (float(w), float(state.inner.scale)) == ((1, 8) if i == 0 else (1, 4) if i < 3 else (1 - 3.5, 4))
    assert int(state.inner.skipped) == 1


def sharded(group, kind):
    """The scale and the update on a rank, of gradients of which another one has the part that is not finite."""
    rank = dist.get_rank(group)
    mesh = dist.init_device_mesh("cpu", (2,))
    numbers = {"uneven": [1.0], "plain": [1.0, 2.0], "cut": [1.0, 2.0, 3.0, 4.0]}[kind]
    good = torch.tensor(numbers)
    bad = good.clone()
    bad[0] = float("nan") if rank == 0 or kind != "plain" else 1.0
    if kind != "plain":
        good, bad = (distribute_tensor(x, mesh, [Shard(0)]) for x in (good, bad))
    sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=1.0)
    tx = funcga.transforms.loss_scaled(sgd, init_scale=2.0, across=group if kind == "plain" else None)
    state, found = tx.init(good), []
    for grads in (good, bad, good):
        updates, state = tx.update(grads, state, good)
        updates = updates.full_tensor() if kind != "plain" else updates
        found.append((updates.tolist(), state.scale.item(), int(state.skipped)))
    return found, numbers


def on_each_rank(group):
    merging_parts(group, dist.init_device_mesh("cpu", (2,)))
    return [sharded(group, kind) for kind in ("cut", "uneven", "plain")]


def test_replicas_with_parts_of_the_gradients_skip_a_window_together():
    for kinds in processes(2).run(on_each_rank):
        for found, numbers in kinds:
            halves = [-x / 2 for x in numbers]
            assert found == [(halves, 2, 0), ([0] * len(numbers), 1, 1), ([-x for x in numbers], 1, 1)]


def merging_parts(group, mesh):
    """Parts of a tensor are not merged."""
    grads = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=1.0), 1, across=group)
    with pytest.raises(
        funcga.FuncgaError,
        match=r"which hold different parts of one DTensor, \[.*Shard\(dim=0\)\] on .*reduced over its own mesh without across=",
    ):
        tx.update(grads, tx.init(grads), grads)


def test_weights_do_not_enlarge_what_a_backward_pass_in_float16_begins_with():
    """32,768 is half of what float16 can hold, so that it would not hold any weight above one."""
    loss_fn = lambda w, x: (w.half() * x.half()).float().mean()
    weights = torch.tensor([1.0, 500.0, 500.0, 20.0])
    step = funcga.accumulate(funcga.grad(loss_fn, scaled=True), 4, weight=lambda x: x.sum(), in_axes=(None, 0))
    grads = step(torch.ones(()), weights, loss_scale=2.0**7)
    expected = (weights * weights).sum() / weights.sum() * 2**7
    torch.testing.assert_close(grads, expected, rtol=1e-3, atol=0)
    known = funcga.accumulate(funcga.grad(loss_fn, scaled=True), 4, weight=lambda x: float(x.sum()))
    torch.testing.assert_close(known(torch.ones(()), weights, loss_scale=2.0**7), expected, rtol=1e-3, atol=0)


ABOVE_0 = "it must be a finite number above 0, such as init_scale=65536.0."
SCALED = funcga.grad(lambda w, x: (w * x).sum(), scaled=True)
W, X = torch.ones(()), torch.ones(4)
OF_A_SCALE = "it must be a finite number above 0, or a 0-d array of one, such as loss_scale=state.scale."
scaled = lambda **options: lambda: funcga.transforms.loss_scaled(optax.sgd(1.0), **options)
REFUSED = [
    (scaled(init_scale=0), f"init_scale is 0: {ABOVE_0}"),
    (scaled(init_scale=float("nan")), f"init_scale is nan: {ABOVE_0}"),
    (scaled(init_scale=1e39), f"init_scale is 1e+39: {ABOVE_0}"),
    (
        scaled(growth_factor=1),
        "growth_factor is 1: it must be a finite number above 1, such as growth_factor=2.0.",
    ),
    (
        scaled(backoff_factor=2),
        "backoff_factor is 2: it must be a number between 0 and 1, such as backoff_factor=0.5.",
    ),
    (
        scaled(growth_interval=0),
        "growth_interval is 0: it must be an int, at least 1. Write growth_interval=8.",
    ),
    (lambda: SCALED(W, X, loss_scale=0.0), f"loss_scale is 0.0: {OF_A_SCALE}"),
    (lambda: SCALED(W, X, loss_scale=torch.tensor(float("nan"))), f"loss_scale is nan: {OF_A_SCALE}"),
    (lambda: SCALED(*map(JAX.arrays, (np.float32(1), np.ones(4, "float32"))), loss_scale=-1), f"loss_scale is -1: {OF_A_SCALE}"),
    (lambda: SCALED(W, X, loss_scale=X), f"loss_scale is {X!r}: {OF_A_SCALE}"),
    (lambda: funcga.accumulate(SCALED, 2)(W, X), f"loss_scale is None: {OF_A_SCALE}"),
    (
        lambda: funcga.multi_steps(funcga.transforms.loss_scaled(optax.sgd(1.0)), 2, drop="window"),
        "drop= was given together with scaled=True, and the loss_scaled that divides by the scale has to see what is not "
        "finite, or the scale would never back off. Leave drop out: loss_scaled skips such updates itself.",
    ),
    (
        lambda: torch_backend.chain(torch_backend.clip_grad_norm(1.0), transform(1.0)),
        "transforms[1] is a loss_scaled, and those before it would see gradients that are scaled: clipping would leave "
        "next to nothing of them. Put it around: funcga.transforms.loss_scaled(torch_backend.chain(torch_backend."
        "clip_grad_norm(1.0), adamw)).",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_is_refused(call, text):
    with pytest.raises(funcga.FuncgaError) as error:
        call()
    assert str(error.value) == text


def test_a_state_of_another_transform():
    with pytest.raises(AttributeError, match="scale"):
        funcga.transforms.loss_scaled(momentum(None)).update(W, (), W)


def test_a_scale_that_nobody_takes():
    step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).sum()), 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'loss_scale'"):
        step(W, X, loss_scale=2.0)


def test_a_wrapped_module_takes_a_scale():
    module = network()
    x, y = torch.tensor(INPUTS[0]), torch.tensor(LABELS[0])
    loss_fn = lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y)
    plain = funcga.accumulate(torch_backend.module_value_and_grad(module, loss_fn), 2)(x, y)
    step = funcga.accumulate(torch_backend.module_value_and_grad(module, loss_fn, scaled=True), 2)
    value, grads = step(x, y, loss_scale=2.0**8)
    assert value == plain[0]
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient / 2**8, plain[1][name], rtol=0, atol=0)
