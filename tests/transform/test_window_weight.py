"""Options that are functions of the window's weight: against AdamW by hand, whose beta follows the tokens."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
import torch_backend
from funcga.transforms import Transform
from tests.kits import JAX, TORCH, difference
from tests.problems import rng
from tests.processes import processes

HALF_LIFE, RATE, DECAY = 5e4, 0.05, 0.02
# The tokens of every micro-batch; the last window is shorter.
WINDOWS = [[900, 1100, 7], [3000, 20, 450], [1, 1, 1], [5200, 812]]
pytestmark = pytest.mark.usefixtures("x64", "as_users_write_it")


def start():
    return {"w": rng(0).normal(size=(4, 3)), "b": rng(1).normal(size=3)}


def gradients():
    """For each window its micro-batches: (gradients, tokens)."""
    r = rng(2)
    return [[({"w": r.normal(size=(4, 3)), "b": r.normal(size=3)}, t) for t in window] for window in WINDOWS]


def by_hand(clip=math.inf):
    """The parameters after every update of AdamW, and its beta: Loshchilov and Hutter (2019), in NumPy."""
    params, first, second = start(), *({"w": np.zeros((4, 3)), "b": np.zeros(3)} for _ in range(2))
    for count, window in enumerate(gradients(), 1):
        tokens = sum(t for _, t in window)
        beta = 2 ** (-tokens / HALF_LIFE)
        means = {name: sum(t * g[name] for g, t in window) / tokens for name in params}
        norm = math.sqrt(sum((mean**2).sum() for mean in means.values()))
        for name, param in params.items():
            grad = means[name] * min(1, clip / (norm + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = beta * second[name] + (1 - beta) * grad**2
            corrected = np.sqrt(second[name] / (1 - beta**count)) + 1e-8
            params[name] = param - RATE * DECAY * param - RATE * first[name] / (1 - 0.9**count) / corrected
        yield {**params}, beta


def betas(count, weight):
    return 0.9, funcga.transforms.beta_for_half_life(weight, HALF_LIFE)


def adamw(**options):
    return torch_backend.from_optimizer(
        torch.optim.AdamW, **{"lr": RATE, "weight_decay": DECAY, "betas": betas, **options}
    )


def of_optax():
    """As the docs write it: a transform with a parameter `weight`, which sets what inject_hyperparams has."""
    adam = optax.inject_hyperparams(optax.adamw)(RATE, b2=0.999, weight_decay=DECAY)

    def update(grads, state, params=None, *, weight):
        beta = funcga.transforms.beta_for_half_life(weight, HALF_LIFE)
        return adam.update(grads, state._replace(hyperparams={**state.hyperparams, "b2": beta}), params)

    return adam.init, update


def trained(kit, tx, call, flush):
    """The parameters and the state after every update."""
    params = kit.arrays(start())
    state = tx.init(params)
    for window in gradients():
        for grads, tokens in window:
            params, state = call(kit.arrays(grads), state, params, tokens)
        if not tx.has_updated(state):
            params, state = flush(state, params)
        yield params, state


def flushed(kit, tx, state, params):
    updates, state = tx.flush(state, params)
    return (TORCH_APPLY if kit is TORCH else optax.apply_updates)(params, updates), state


TORCH_APPLY = torch_backend.apply_updates


def in_one(kit, tx, donate=False):
    call = lambda grads, state, params, t: funcga.transforms.apply(tx, grads, state, params, weight=t, donate=donate)
    return trained(kit, tx, call, partial(flushed, kit, tx))


def jitted(kit, tx):
    call = jax.jit(lambda g, s, p, t: funcga.transforms.apply(tx, g, s, p, weight=t)[::-1], donate_argnums=(1,))
    flush = jax.jit(partial(flushed, kit, tx))
    return trained(kit, tx, lambda *args: call(*args)[::-1], flush)


CASES = {
    "torch, apply": (TORCH, lambda: funcga.multi_steps(adamw(), 3), in_one),
    "torch, donated": (TORCH, lambda: funcga.multi_steps(adamw(), 3, donate=True), lambda *a: in_one(*a, donate=True)),
    "torch, scaled": (TORCH, lambda: funcga.multi_steps(funcga.transforms.loss_scaled(adamw(), init_scale=1.0), 3), in_one),
    "torch, of groups": (TORCH, lambda: funcga.multi_steps(adamw(betas=(0.1, 0.1), groups=lambda _: {"betas": betas}), 3), in_one),
    "jax, jitted": (JAX, lambda: funcga.multi_steps(of_optax(), 3), jitted),
    "jax, scaled": (JAX, lambda: funcga.multi_steps(funcga.transforms.loss_scaled(of_optax(), init_scale=1.0), 3), jitted),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_beta_follows_the_tokens(case):
    kit, make, train = CASES[case]
    for (params, _), (expected, _) in zip(train(kit, make()), by_hand(), strict=True):
        assert difference(kit, params, kit.arrays(expected)) <= 1e-12


def test_the_total_is_of_what_was_folded():
    """Not of a micro-batch that was dropped; and only for a transform that says that it wants it."""
    told = []

    def update(grads, state, params=None, weight=None, **extra):
        told.append((weight, extra))
        return grads, state

    params = {"w": torch.zeros(2)}
    tx = funcga.multi_steps(Transform(lambda params: (), update), 3, drop="microbatch")
    state = tx.init(params)
    for tokens, value in ((5, 1.0), (70, math.nan), (2, 1.0)):
        _, state = tx.update({"w": torch.full((2,), value)}, state, params, weight=tokens, scale=3)
    assert told == [(7, {"scale": 3})]
    untold = lambda grads, state, params=None, **extra: (grads, told.append(extra))
    tx = funcga.multi_steps((lambda params: None, untold), 1)
    tx.update(params, tx.init(params), params, weight=5)
    assert told[1] == {}


def test_no_weight():
    params = {"w": torch.zeros(2)}
    tx = adamw()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight'"):
        tx.update(params, tx.init(params), params)
    # The state has the weight of the last update, 0 where none was given.
    sgd = torch_backend.from_optimizer(torch.optim.SGD)
    state = sgd.init(params)
    assert state.weight == 0
    _, state = sgd.update(params, state, params, weight=torch.tensor(5))
    assert state.weight == 5
    _, state = sgd.update(params, state, params)
    assert state.weight == 0


def total_over(group):
    told = []
    update = lambda grads, state, params=None, *, weight: (told.append(weight), (grads, state))[1]
    tx = funcga.multi_steps((lambda params: (), update), 2, across=group)
    params = {"w": torch.ones(2)}
    state = tx.init(params)
    for tokens in (3, 40):
        _, state = tx.update(params, state, params, weight=tokens * (1 + dist.get_rank(group)))
    return [float(weight) for weight in told]


def test_over_replicas():
    assert processes().run(total_over, size=2) == [[129.0], [129.0]]


def test_over_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    update = lambda grads, state, params=None, *, weight: (grads, weight)
    tx = funcga.multi_steps((lambda params: jnp.zeros(()), update), 2, across="data")

    def window(params, tokens):
        own, state = jax.lax.pcast(params, "data", to="varying"), tx.init(params)
        for _ in range(2):
            _, state = tx.update(own, state, params, weight=tokens[0])
        return state

    mapped = jax.shard_map(window, mesh=mesh, in_specs=(P(), P("data")), out_specs=jax_backend.state_specs(tx))
    assert jax.jit(mapped)(jnp.ones(3), jnp.asarray([1.0, 2.0, 30.0, 400.0])).inner == 866
