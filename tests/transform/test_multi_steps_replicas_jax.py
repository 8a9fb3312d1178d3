"""`multi_steps` over several devices: sharded state, and with `across=` one reduction an update and none before it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from funcga import multi_steps
from jax_backend import collectives
from tests.kits import JAX, difference
from tests.problems import rng
from tests.test_errors import check_refused

CALLS, N = 6, 3
pytestmark = pytest.mark.usefixtures("as_users_write_it")


def tree(*leading, seed=0, dtype="float32"):
    r = rng(seed)
    return {
        "b": jnp.asarray(r.normal(size=(*leading, 4)), dtype),
        "w": jnp.asarray(r.normal(size=(*leading, 8, 4)), dtype),
    }


PARAMS = tree()
GRADS = [tree(4, seed=seed) for seed in range(1, CALLS + 1)]  # of every call, those of the four devices
WEIGHTS = jnp.asarray(rng(9).integers(0, 50, size=(CALLS, 4)), jnp.float32)


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("data",), axis_types=(kind,))


def alone(tx, windows, weights=WEIGHTS):
    """The params after an update for each window of calls, with the weighted mean of all devices, in NumPy."""
    params, state = PARAMS, tx.init(PARAMS)
    for calls in windows:
        total = sum(float(weights[i].sum()) for i in calls)
        weigh = lambda i, g: np.tensordot(np.asarray(weights[i], np.float64), np.nan_to_num(np.float64(g)), 1)
        own = [jax.tree.map(partial(weigh, i), GRADS[i]) for i in calls]
        grads = jax.tree.map(lambda *gs, total=total: jnp.asarray(sum(gs) / total, jnp.float32), *own)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


WINDOWS = [range(0, 3), range(3, 6)]


def own(grads):
    return jax.tree.map(lambda leaf: leaf[0], grads)


class Stepped:
    """The transform with one shard_map for each of its functions."""

    def __init__(self, tx):
        specs, devices, each = jax_backend.state_specs(tx), mesh(), P("data")
        over = lambda f, into, out: jax.jit(jax.shard_map(f, mesh=devices, in_specs=into, out_specs=out))

        def update(params, state, grads, weight):
            updates, state = tx.update(own(grads), state, params, weight=weight[0])
            return optax.apply_updates(params, updates), state

        def flush(params, state):
            updates, state = tx.flush(state, params)
            return optax.apply_updates(params, updates), state

        self.init = over(tx.init, P(), specs)
        self.update = over(update, (P(), specs, each, each), (P(), specs))
        add = lambda state, grads, weight: tx.accumulate(own(grads), state, weight=weight[0])
        self.accumulate = over(add, (specs, each, each), specs)
        self.flush = over(flush, (P(), specs), (P(), specs))

    def train(self, grads=GRADS):
        """(params, state) after all calls, and which of them were updates."""
        params, state, found = PARAMS, self.init(PARAMS), ""
        for g, weight in zip(grads, WEIGHTS, strict=True):
            params, state = self.update(params, state, g, weight)
            found += ".X"[int(state.updated)]
        return params, state, found


def adam():
    return optax.adam(1e-2)


def test_a_shard_map_for_each_call_gives_the_same_with_one_reduction_where_there_is_an_update():
    steps = Stepped(multi_steps(adam(), N, across="data"))
    params, state, found = steps.train()
    assert found == "..X..X"
    assert difference(JAX, params, alone(adam(), WINDOWS)) < 1e-6
    held = state.window.accumulated["w"]
    assert (held.shape, held.sharding.spec) == ((4, 8, 4), P(("data",)))
    reduced = collectives(steps.update, params, state, GRADS[0], WEIGHTS[0])
    assert [(c.kind, c.depth) for c in reduced] == [("all-reduce", 1)]


def test_the_two_halves_reduce_only_in_the_second():
    """The last window is shorter than N."""
    steps, windows = Stepped(multi_steps(adam(), N, across="data")), [range(3), range(3, 5)]
    params, state = PARAMS, steps.init(PARAMS)
    for calls in windows:
        for i in calls:
            state = steps.accumulate(state, GRADS[i], WEIGHTS[i])
        params, state = steps.flush(params, state)
    assert difference(JAX, params, alone(adam(), windows)) < 1e-6
    assert collectives(steps.accumulate, state, GRADS[0], WEIGHTS[0]) == []
    assert [(c.kind, c.depth) for c in collectives(steps.flush, params, state)] == [("all-reduce", 0)]


def poisoned(call, device):
    grads = [*GRADS]
    grads[call] = jax.tree.map(lambda g: g.at[device].set(jnp.nan), grads[call])
    return grads


@pytest.mark.parametrize(
    ("drop", "found", "windows", "counts"),
    [("microbatch", "..X..X", WINDOWS, [2, 1, 0]), ("window", ".....X", WINDOWS[1:], [1, 4 * N, 1])],
)
def test_what_one_device_drops_is_dropped_by_all(drop, found, windows, counts):
    """A micro-batch with its weight, or the whole window."""
    params, state, updates = Stepped(multi_steps(adam(), N, across="data", drop=drop)).train(poisoned(1, 2))
    assert updates == found
    assert difference(JAX, params, alone(adam(), windows, WEIGHTS.at[1, 2].set(0))) < 1e-6
    assert [int(c) for c in (state.updates, *state.dropped)] == counts


def test_specs_are_of_a_state_that_differs_between_devices():
    tx = multi_steps(adam(), 2)
    check_refused("state_specs is for funcga.multi_steps(..., across=)", jax_backend.state_specs, tx)


# --- a state that is saved in the middle of a window ----------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_a_state_goes_on_on_another_number_of_devices(count):
    """Saved on four devices after two calls of three: as it is on a number that divides four, merged on any."""
    tx = multi_steps(adam(), N, across="data")
    steps, params = Stepped(tx), PARAMS
    state = steps.init(params)
    for i in range(2):
        params, state = steps.update(params, state, GRADS[i], WEIGHTS[i])
    state = jax.tree.map(np.asarray, state)
    fewer = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count], axis_types=(AxisType.Auto,))
    merged = jax.tree.map(np.asarray, tx.merge([state], replicas=count))
    for found in [merged, state] if 4 % count == 0 else [merged]:
        # the last call has the rows of the fourth device alone, which goes to the first one
        specs = jax_backend.state_specs(tx)
        last = jax.tree.map(lambda g: jnp.concatenate([g[:1], *[jnp.zeros_like(g[:1])] * (count - 1)]), GRADS[2])
        weights = jnp.zeros(count).at[0].set(WEIGHTS[2, 0])

        def update(params, state, grads, weight):
            updates, state = tx.update(own(grads), state, params, weight=weight[0])
            return optax.apply_updates(params, updates), state

        each = P("data")
        step = jax.shard_map(update, mesh=fewer, in_specs=(P(), specs, each, each), out_specs=(P(), specs))
        after, left = jax.jit(step)(PARAMS, found, last, weights)
        expected = alone(adam(), [range(3)], WEIGHTS.at[2, 1:].set(0))
        assert difference(JAX, jax.device_put(after, jax.devices()[0]), expected) < 1e-6
        assert (int(left.updates), left.window.rejected.shape) == (1, (count,))


def test_what_is_merged_is_one_state_of_all_devices():
    tx = multi_steps(adam(), N, across="data")
    state = Stepped(tx).init(PARAMS)
    text = "merge was given states that are not one state of multi_steps(..., across=)"
    check_refused(text, tx.merge, [state, state])
    check_refused(text, tx.merge, [multi_steps(adam(), N).init(PARAMS)])


# --- gradients that are computed where they are folded -----------------------------------------------------------------

ROWS = jnp.asarray(rng(6).normal(size=(2 * N, 16, 8)), jnp.float32)  # of every call, those of all devices


def square(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def own_copy(params):
    return lax.pcast(params, "data", to="varying")


def computed(copy, check_vma=True, tx=None):
    """The params after two windows of gradients that shard_map computes."""
    tx = multi_steps(adam(), N, across="data") if tx is None else tx
    specs, devices = jax_backend.state_specs(tx), mesh()

    def step(params, state, x):
        grads = jax.grad(square)(copy(params), x)
        updates, state = tx.update(grads, state, params, weight=len(x))
        return optax.apply_updates(params, updates), state

    over = partial(jax.shard_map, mesh=devices, check_vma=check_vma)
    step = jax.jit(over(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)))
    params, state = PARAMS, jax.jit(over(tx.init, in_specs=P(), out_specs=specs))(PARAMS)
    for x in ROWS:
        params, state = step(params, state, x)
    return params


def whole_batches():
    params, state = PARAMS, adam().init(PARAMS)
    for window in ROWS.reshape(2, N * 16, 8):
        updates, state = adam().update(jax.grad(square)(params, window), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_the_devices_own_copy(check_vma):
    assert difference(JAX, computed(own_copy, check_vma), whole_batches()) < 1e-6


SUMMED = (
    '`grads{}` is the same on all devices along "data", so it is merged already: JAX sums the gradient of what does not '
    'differ between devices. Take the gradient of the device\'s own copy, jax.grad(loss)(jax.lax.pcast(params, "data", '
    'to="varying"), ...); or leave across= out, if it is merged as you want it.'
)


def test_gradients_that_jax_has_summed_are_refused():
    check_refused(SUMMED.format("['b']"), computed, lambda params: params)
    check_refused(SUMMED.format("['w']"), computed, lambda params: params | {"b": own_copy(params["b"])})


def test_gradients_that_are_merged_already_are_refused():
    tx = multi_steps(adam(), N, across="data")
    step = funcga.accumulate(jax.grad(square), 2, across="data")
    both = lambda params, x: tx.update(step(params, x), tx.init(params), params)[0]
    check_refused(SUMMED.format("['b']"), jax_backend.replicated(both, mesh()), PARAMS, ROWS[0])
    halves = lambda params, x: tx.flush(tx.accumulate(step(params, x), tx.init(params)), params)[0]
    check_refused(SUMMED.format("['b']"), jax_backend.replicated(halves, mesh()), PARAMS, ROWS[0])


UNMERGED = (
    'the step runs on every device along "data", in jax_backend.replicated, and has no across=: each device would have '
    'the fold of its own rows. Write across="data"; or across=() if the step merges in another way.'
)


@pytest.mark.parametrize(("half", "check_vma"), [("update", True), ("accumulate", False)])
def test_a_replicated_step_in_which_nothing_merges_is_refused(check_vma, half):
    tx = multi_steps(adam(), 1)

    def step(params, x):
        grads = jax.grad(square)(params, x)
        if half == "update":
            return tx.update(grads, tx.init(params), params)[0]
        return tx.flush(tx.accumulate(grads, tx.init(params)), params)[0]

    check_refused(UNMERGED, jax_backend.replicated(step, mesh(), check_vma=check_vma), PARAMS, ROWS[0])


def test_what_the_step_has_merged_needs_no_across():
    """By a fold of ours before it, or in another way, which across=() says."""
    plain, told = multi_steps(adam(), 1), multi_steps(adam(), 1, across=())
    fold = funcga.accumulate(jax.grad(square), 2, across="data")

    def by_hand(params, x):
        return lax.pmean(jax.grad(square)(own_copy(params), x), "data")

    expected = adam().update(jax.grad(square)(PARAMS, ROWS[0]), adam().init(PARAMS))[0]
    for tx, gradient in ((plain, fold), (told, by_hand)):
        step = lambda params, x, tx=tx, gradient=gradient: tx.update(gradient(params, x), tx.init(params), params)[0]
        updates = jax_backend.replicated(step, mesh())(PARAMS, ROWS[0])
        assert difference(JAX, updates, expected) < 1e-6
