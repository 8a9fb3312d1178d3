"""observe= of multi_steps: the state says what the window of the last update has said of its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
import torch_backend
from tests.jax_backend.test_replicas_jax import mesh
from tests.kits import JAX, TORCH
from tests.observe import oracle
from tests.processes import processes
from tests.test_errors import check_refused

LIMIT = 1e-12
OBSERVE = {"noise": funcga.gradient_noise(groups=lambda path: None if path == "b" else path)}
WEIGHTS = [3, 1, 2, 2, 4]
pytestmark = pytest.mark.usefixtures("x64")


def numbers():
    generator = np.random.default_rng(0)
    return [{"w": generator.normal(size=(3, 2)), "b": generator.normal(size=2)} for _ in WEIGHTS]


def params(kit):
    return kit.arrays({"w": np.zeros((3, 2)), "b": np.zeros(2)})


def optimizer(kit, lr=0.1):
    return torch_backend.from_optimizer(torch.optim.SGD, lr=lr) if kit.name == "torch" else optax.sgd(lr)


def expected(gradients, weights):
    return oracle.noise([oracle.flat([gradient["w"]]) for gradient in gradients], weights)


def check(observed, gradients, weights):
    noise = observed["noise"]["w"]
    for got, want in zip((noise.trace, noise.norm_squared), expected(gradients, weights), strict=True):
        assert abs(float(got) / want - 1) < LIMIT


PER_WEIGHT = {"fold": funcga.per_weight()}


@pytest.mark.parametrize(
    ("kit", "options"),
    [(TORCH, PER_WEIGHT), (TORCH, {"donate": True}), (JAX, {"drop": "window"}), (JAX, PER_WEIGHT)],
    ids=lambda part: getattr(part, "name", str(part)),
)
def test_a_state_has_what_the_last_window_has_said(kit, options):
    tx = funcga.multi_steps(optimizer(kit), 5, observe=OBSERVE, **options)
    update = jax.jit(tx.update) if kit.name == "jax" else tx.update
    state = tx.init(params(kit))
    assert np.isnan(float(state.observed["noise"]["w"].trace))
    gradients = numbers()
    given = lambda gradient, weight: kit.arrays(
        {name: leaf * (weight if "fold" in options else 1) for name, leaf in gradient.items()}
    )
    for window in (gradients, gradients[::-1]):
        for gradient, weight in zip(window, WEIGHTS, strict=True):
            before = float(state.observed["noise"]["w"].trace)
            _, state = update(given(gradient, weight), state, params(kit), weight=weight)
            if not tx.has_updated(state):
                assert np.isnan(before) or float(state.observed["noise"]["w"].trace) == before
        check(state.observed, window, WEIGHTS)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_state_passes_under_debug_nans(is_jitted):
    """No NaN is in it before the first update: it passes through jit, and has the same structure after."""
    largest = funcga.observers.Observer(funcga.max(), lambda xp, observed: 1 / xp.sqrt(observed.folded))
    tx = funcga.multi_steps(optimizer(JAX), 5, observe={**OBSERVE, "inverse": largest})
    jitted = jax.jit if is_jitted else lambda function: function
    with jax.debug_nans(True):
        start = state = jitted(tx.init)(params(JAX))
        for gradient, weight in zip(numbers(), WEIGHTS, strict=True):
            before = state.observed
            assert all((leaf == 0).all() for leaf in jax.tree.leaves(before))
            _, state = jitted(tx.update)(JAX.arrays(gradient), state, params(JAX), weight=weight)
    check(state.observed, numbers(), WEIGHTS)
    assert jax.tree.map(jax.typeof, start.observed) == jax.tree.map(jax.typeof, state.observed)


def test_what_is_dropped_is_not_observed(kit):
    gradients, weights = numbers(), [*WEIGHTS]
    bad = {name: leaf * np.nan for name, leaf in gradients[1].items()}
    tx = funcga.multi_steps(optimizer(kit), 5, drop="microbatch", observe=OBSERVE)
    state = tx.init(params(kit))
    for gradient, weight in zip([gradients[0], bad, *gradients[2:]], weights, strict=True):
        _, state = tx.update(kit.arrays(gradient), state, params(kit), weight=weight)
    check(state.observed, [gradients[0], *gradients[2:]], [weights[0], *weights[2:]])
    tx = funcga.multi_steps(optimizer(kit), 2, drop="window", observe=OBSERVE)
    state = tx.init(params(kit))
    for gradient in (*gradients[:2], gradients[0], bad):
        _, state = tx.update(kit.arrays(gradient), state, params(kit))
    # A window without an update changes nothing of what was said.
    check(state.observed, gradients[:2], [1, 1])


def test_what_grows_is_refused(kit):
    for observe in ([funcga.dropped()], funcga.gradient_norms()):
        tx = funcga.multi_steps(optimizer(kit), 2, observe=observe)
        check_refused(
            "the fold of measured collects rows, and the state of multi_steps cannot grow", tx.init, params(kit)
        )
    tx = funcga.multi_steps(optimizer(kit), 2, fold=funcga.max(), observe=OBSERVE)
    check_refused("funcga.mean(), per_weight() or sum()", tx.init, params(kit))


def over_processes(group):
    rank = dist.get_rank(group)
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.SGD, lr=0.1), 2, across=group, observe=OBSERVE)
    own = funcga.to_torch(numbers()[2 * rank : 2 * rank + 2])
    start = funcga.to_torch({"w": np.zeros((3, 2)), "b": np.zeros(2)})
    state = tx.init(start)
    for _ in range(2):
        for gradient, weight in zip(own, WEIGHTS[2 * rank : 2 * rank + 2], strict=True):
            _, state = tx.update(gradient, state, start, weight=weight)
        check(state.observed, numbers()[:4], WEIGHTS[:4])
    return True


def test_processes_are_observed_together():
    assert processes().run(over_processes, size=2) == [True, True]


def test_devices_are_observed_together():
    tx = funcga.multi_steps(optax.sgd(0.1), 2, across="data", observe=OBSERVE)
    specs = jax_backend.state_specs(tx)
    start = funcga.to_jax({"w": np.zeros((3, 2)), "b": np.zeros(2)})
    # [calls, devices, ...]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.stack(leaves[:2]), jnp.stack(leaves[2:4])]), *numbers()[:4])
    weights = jnp.asarray([[3.0, 1.0], [2.0, 2.0]])

    def window(params, gradients, weights):
        state = tx.init(params)
        params = jax.lax.pcast(params, "data", to="varying")
        for call in range(2):
            gradient = jax.tree.map(lambda leaf, call=call: leaf[call, 0], gradients)
            _, state = tx.update(gradient, state, params, weight=weights[call, 0])
        return state

    mapped = jax.shard_map(
        window, mesh=mesh(2), in_specs=(P(), P(None, "data"), P(None, "data")), out_specs=specs
    )  # fmt: skip
    check(jax.jit(mapped)(start, stacked, weights).observed, numbers()[:4], [3, 1, 2, 2])
