"""`apply`: in both frameworks the update and the sum of before, through every transform of funcga's."""

import jax
import numpy as np
import optax
import pytest

import funcga
import jax_backend
import torch_backend
from funcga.transforms import Transform
from tests.kits import JAX, TORCH
from tests.problems import rng
from tests.test_errors import check_refused

# optax's own code promotes dtypes
standard = pytest.mark.usefixtures("as_users_write_it")
SHAPES = {"b": (4,), "w": (8, 4)}


def tree(seed, scale=1.0):
    r = rng(seed)
    return {name: (scale * r.normal(size=shape)).astype("float32") for name, shape in SHAPES.items()}


def descent(kit):
    """A transform of one's own, with momentum."""

    def update(grads, state, params=None):
        state = {name: 0.9 * state[name] + grads[name] for name in grads}
        return {name: -0.1 * momentum for name, momentum in state.items()}, state

    return Transform(lambda params: {name: kit.xp.zeros_like(leaf) for name, leaf in params.items()}, update)


def apply_updates(kit):
    return torch_backend.apply_updates if kit is TORCH else jax_backend.apply_updates


def equal(kit, left, right):
    pairs = zip(kit.backend.trees.flatten(left)[0], kit.backend.trees.flatten(right)[0], strict=True)
    return all(np.array_equal(kit.numpy(a), kit.numpy(b), equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize(("drop", "scaled"), [("microbatch", False), ("window", False), (None, True)])
def test_it_is_update_and_a_sum(kit, drop, scaled):
    inner = funcga.transforms.loss_scaled(descent(kit), init_scale=4.0) if scaled else descent(kit)
    tx = funcga.multi_steps(inner, 3, drop=drop)
    params = other = kit.arrays(tree(0))
    state = twin = tx.init(params)
    for call in range(8):
        grads = kit.arrays(tree(call + 1, scale=np.nan if call == 4 else 4.0))
        before, count = params, int(state.updates)
        params, state = funcga.transforms.apply(tx, grads, state, params, weight=call + 1)
        updates, twin = tx.update(grads, twin, other, weight=call + 1)
        other = apply_updates(kit)(other, updates)
        assert equal(kit, (params, state), (other, twin))
        if int(state.updates) == count:
            assert all(params[name] is before[name] for name in params)


@standard
def test_a_call_that_only_accumulates_inside_of_jit():
    tx = funcga.multi_steps(optax.adamw(0.1), 8)
    params = JAX.arrays(tree(0))
    params["b"] = -jax.numpy.zeros(4)
    state = tx.init(params)
    grads = JAX.arrays(tree(1))
    applied = jax.jit(lambda params, state: funcga.transforms.apply(tx, grads, state, params, weight=3))
    unchanged, after = applied(params, state)
    assert equal(JAX, jax.numpy.signbit(unchanged["b"]), np.ones(4, bool))
    assert equal(JAX, (unchanged, after), (params, tx.accumulate(grads, state, weight=3)))
    # given away, in the order of the results
    donating = jax.jit(
        lambda params, state: funcga.transforms.apply(tx, grads, state, params, weight=3), donate_argnums=(0, 1)
    )
    copies = jax.tree.map(jax.numpy.copy, (params, state))
    assert equal(JAX, donating(*copies), (params, after))
    assert all(leaf.is_deleted() for leaf in copies[0].values())


@standard
def test_with_optax_it_is_the_same_program():
    tx = optax.adamw(0.1)
    params = JAX.arrays(tree(0))
    state = tx.init(params)

    def summed(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    applied = lambda params, state, grads: funcga.transforms.apply(tx, grads, state, params)
    programs = [str(jax.make_jaxpr(step)(params, state, params)) for step in (applied, summed)]
    assert programs[0] == programs[1]


def test_a_larger_tree_keeps_what_is_not_trained():
    weights = JAX.arrays(tree(0))
    trained, frozen = {**weights, "frozen": None}, JAX.arrays(np.ones(3, "float32"))
    tx = funcga.multi_steps(optax.sgd(0.1), 1)
    grads, state = {**JAX.arrays(tree(1)), "frozen": None}, tx.init(trained)
    wanted, _ = funcga.transforms.apply(tx, grads, state, trained)
    for params, others in (({**weights, "frozen": frozen}, frozen), ({**weights, "frozen": "tanh"}, "tanh")):
        after, _ = funcga.transforms.apply(tx, grads, state, params)
        assert after["frozen"] is others
        assert equal(JAX, {**after, "frozen": None}, wanted)


def test_in_jax_nothing_is_given_away_but_by_jit():
    params, tx = JAX.arrays(tree(0)), optax.sgd(0.1)
    for transform in (tx, funcga.multi_steps(tx, 1, donate=True), funcga.transforms.loss_scaled(tx)):
        state = transform.init(params)
        calls = [funcga.transforms.apply(transform, params, state, params, donate=donate) for donate in (False, True)]
        assert equal(JAX, *calls)


def test_what_cannot_be():
    params, tx = JAX.arrays(tree(0)), optax.sgd(0.1)
    check_refused(
        "params are None, and apply returns what becomes of them: params, state = funcga.transforms.apply(tx, grads, state, params).",
        lambda: funcga.transforms.apply(tx, params, tx.init(params), None),
    )
    with pytest.raises(AttributeError, match="update"):
        funcga.transforms.apply(3, params, (), params)
