"""`multi_steps` among optax's own: with every optimizer, inside and around combinators, and what a step costs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optax import contrib

import funcga
from funcga import multi_steps
from tests.kits import JAX, difference
from tests.problems import rng

# optax's own code promotes dtypes, and some of it is written for more than one release
standard = pytest.mark.usefixtures("as_users_write_it")
NAN = float("nan")


def tree(seed=0, dtype="float32", scale=1.0):
    r = rng(seed)
    shapes = {"b": (4,), "layer": {"w": (8, 4)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * r.normal(size=shape), dtype), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


PARAMS = tree()
GRADS = [tree(seed) for seed in range(1, 13)]
STACKED = jax.tree.map(lambda *leaves: jnp.stack(leaves), *GRADS)


def optaxs(tx, n):
    """optax.MultiSteps, as a transform that passes extra arguments on."""
    steps = optax.MultiSteps(tx, n)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


def train(tx, grads=GRADS, params=PARAMS, extra=lambda i, params: {}, jit=jax.jit):
    """(params, state) after a step with each of the gradients."""
    update, state = jit(tx.update), tx.init(params)
    for i, g in enumerate(grads):
        updates, state = update(g, state, params, **extra(i, params))
        params = optax.apply_updates(params, updates)
    return params, state


def same(left, right):
    """Whether two trees are equal, bit for bit and in dtypes."""
    pairs = list(zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in pairs)


# --- every optimizer of optax -----------------------------------------------------------------------------------------

NAMES = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw "
    "novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd sm3 yogi"
)
OPTIMIZERS = {name: partial(getattr(optax, name), 1e-2) for name in NAMES.split()}
OPTIMIZERS |= {
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)),
    "polyak_sgd": lambda: optax.polyak_sgd(1e-2),
    "lbfgs": lambda: optax.lbfgs(),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.zero_nans(), optax.adamw(1e-2)),
    "sam": lambda: contrib.sam(optax.sgd(1e-2), optax.sgd(0.1), sync_period=2),
    "mechanize": lambda: contrib.mechanize(optax.adam(1e-2)),
}
WITH_RATE = "acprop ademamix adopt galore madgrad muon schedule_free_adamw schedule_free_sgd simplified_ademamix"
WITHOUT = "cocob dadapt_adamw dog dowg momo momo_adam prodigy"
OPTIMIZERS |= {name: partial(getattr(contrib, name), 1e-2) for name in WITH_RATE.split()}
OPTIMIZERS |= {name: getattr(contrib, name) for name in WITHOUT.split()}


SOME = ("noisy_sgd", "lbfgs", "clipped", "sam")
EXTRA = {"polyak_sgd": ["value"], "momo": ["value"], "momo_adam": ["value"], "lbfgs": ["value", "grad", "value_fn"]}


def bowl(params):
    return sum(jnp.sum((leaf - 1) ** 2) for leaf in jax.tree.leaves(params))


def step_of(tx, extra):
    """A step with a noisy gradient of the bowl, for lax.scan."""

    def step(carry, noise):
        params, state = carry
        grads = jax.tree.map(lambda g, r: g + 0.1 * r, jax.grad(bowl)(params), noise)
        known = {"value": bowl(params), "grad": jax.grad(bowl)(params), "value_fn": bowl}
        updates, state = tx.update(grads, state, params, **{name: known[name] for name in extra})
        return (optax.apply_updates(params, updates), state), None

    return step


@standard
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:optax")
def test_the_state_of_every_optimizer_of_optax_can_be_scanned():
    """It has the same types after a step, which is what lax.scan asks of a carry."""
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    for name, make in OPTIMIZERS.items():
        tx = multi_steps(make(), 4)
        carry = jax.eval_shape(lambda tx=tx: (PARAMS, tx.init(PARAMS)))
        after, _ = jax.eval_shape(step_of(tx, EXTRA.get(name, [])), carry, GRADS[0])
        assert types(after) == types(carry), name


@standard
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:optax")
@pytest.mark.parametrize("name", SOME)
def test_an_optimizer_of_optax_does_what_it_does_in_optaxs_own_multisteps(name):
    found = []
    for steps in (multi_steps, optaxs):
        tx = steps(OPTIMIZERS[name](), 4)
        step = step_of(tx, EXTRA.get(name, []))
        found.append(lax.scan(step, (PARAMS, tx.init(PARAMS)), STACKED)[0][0])
    assert not same(found[1], PARAMS)
    assert difference(JAX, *found) < 2e-6


# --- inside and around optax's combinators ----------------------------------------------------------------------------

HALF = {"b": False, "layer": {"w": True}}
LABELS = {"b": "fast", "layer": {"w": "slow"}}
RATE = optax.linear_schedule(1e-2, 0.0, 5)
NESTED = {
    "around a chain": lambda steps: steps(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 4),
    "first in a chain": lambda steps: optax.chain(steps(optax.adam(1e-2), 4), optax.scale(0.5)),
    "in multi_transform": lambda steps: optax.multi_transform(
        {"fast": steps(optax.adam(1e-1), 2), "slow": steps(optax.sgd(1e-2), 4)}, LABELS
    ),
    "around masked": lambda steps: steps(optax.masked(optax.adam(1e-2), HALF), 4),
    "around inject_hyperparams": lambda steps: steps(optax.inject_hyperparams(optax.adam)(learning_rate=RATE), 4),
    "in apply_if_finite": lambda steps: optax.apply_if_finite(steps(optax.adam(1e-2), 4), 3),
    "in conditionally_transform": lambda steps: optax.conditionally_transform(
        steps(optax.adam(1e-2), 2), lambda step, **extra: step > 3
    ),
    "in itself": lambda steps: steps(steps(optax.adam(1e-2), 2), 3),
}


@standard
@pytest.mark.parametrize("name", NESTED)
def test_it_nests_as_optaxs_own_multisteps_does(name):
    params, _ = train(NESTED[name](multi_steps))
    expected, _ = train(NESTED[name](optaxs))
    assert not same(params, PARAMS)
    assert difference(JAX, params, expected) < 2e-6
    if name == "first in a chain":
        assert difference(JAX, train(NESTED[name](multi_steps), jit=lambda f: f)[0], expected) < 2e-6


def test_it_is_a_transform_of_optaxs_own_type():
    tx = multi_steps(optax.sgd(0.1), 2)
    init, update = tx
    assert isinstance(tx, optax.GradientTransformation)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert isinstance(tx, type(multi_steps(tx, 2)))
    assert same(init(PARAMS), tx.init(PARAMS))
    assert same(update(GRADS[0], init(PARAMS), PARAMS), tx.update(GRADS[0], tx.init(PARAMS), PARAMS))


@standard
def test_optaxs_tools_find_their_way_through_the_state():
    tx = optax.chain(optax.clip(1.0), multi_steps(optax.inject_hyperparams(optax.adam)(learning_rate=0.25), 4))
    state = tx.init(PARAMS)
    assert float(optax.tree_utils.tree_get(state, "learning_rate")) == 0.25
    state = optax.tree_utils.tree_set(state, learning_rate=jnp.float32(0.5))
    assert float(optax.tree_utils.tree_get(state, "learning_rate")) == 0.5
    assert int(optax.tree_utils.tree_get(state, "updates")) == 0

    names = jax.tree.map(lambda _: "param", PARAMS)
    mapped = optax.tree_utils.tree_map_params(
        tx, lambda _, name: name, state, names, transform_non_params=lambda _: "-"
    )
    assert mapped[1].window.accumulated == names
    assert mapped[1].inner.inner_state[0].mu == names
    assert mapped[1].offered == mapped[1].window.tally.steps == "-"


# --- what optax's own tests of MultiSteps check ------------------------------------------------------------------------


def test_has_updated_is_right_after_a_skip():
    tx = multi_steps(optax.sgd(1.0), 2, drop="microbatch")
    update, state, found = jax.jit(tx.update), tx.init(jnp.float32(0)), []
    for grad in (1, 2, NAN, NAN, 3, 4, NAN, 5):
        updates, state = update(jnp.float32(grad), state)
        found.append((float(updates), bool(tx.has_updated(state))))
    assert found == [(0, False), (-1.5, True), (0, False), (0, False), (0, False), (-3.5, True), (0, False), (-5, True)]


# --- when the inner optimizer runs -------------------------------------------------------------------------------------


def counting(calls):
    def update(grads, state, params=None):
        jax.debug.callback(lambda: calls.append(1))
        return grads, jax.tree.map(lambda count: count + 1, state)

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def test_the_inner_optimizer_runs_only_for_an_update():
    calls = []
    tx = multi_steps(counting(calls), 5)
    state = lax.scan(lambda s, g: tx.update(g, s)[::-1], tx.init(PARAMS), STACKED)[0]
    jax.effects_barrier()
    assert (len(calls), int(state.inner), int(state.offered)) == (2, 2, 2)


# --- what a step costs --------------------------------------------------------------------------------------------------


@standard
def test_one_program_serves_every_step():
    tx = multi_steps(optax.inject_hyperparams(optax.adam)(learning_rate=RATE), 3)
    update, state = jax.jit(tx.update, donate_argnums=1), tx.init(PARAMS)
    for g in GRADS:
        before, (_, state) = state, update(g, state, PARAMS)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.window.accumulated))
    assert update._cache_size() == 1


def costs(function, *args, donate=()):
    """(bytes accessed, bytes of temporaries) a parameter of four matrices, and the compiled program."""
    program = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    each = lambda amount: amount / (4 * 256 * 256)
    return each(program.cost_analysis()["bytes accessed"]), each(program.memory_analysis().temp_size_in_bytes), program


@standard
def test_a_step_without_an_update_only_adds():
    params = {rows: jnp.ones((rows, 256)) for rows in (160, 224, 288, 352)}  # XLA makes equal zeros once, and copies
    tx = multi_steps(optax.adam(1e-3), 8)
    state = tx.init(params)
    accessed, temporary, program = costs(tx.accumulate, params, state, donate=1)
    assert accessed < 12.01
    assert temporary < 0.01
    assert "while(" not in program.as_text()

    def with_zeros(grads, state):
        return tx.accumulate(grads, state), jax.tree.map(jnp.zeros_like, grads)

    accessed, temporary, _ = costs(with_zeros, params, state, donate=1)
    assert accessed < 16.01
    assert temporary < 0.01


@standard
def test_update_is_one_loop_of_at_most_one_turn_and_no_branch():
    params = {name: jnp.ones((256, 256)) for name in "abcd"}
    tx = multi_steps(optax.adam(1e-3), 8)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    _, _, program = costs(step, params, tx.init(params), params, donate=(0, 1))
    text = program.as_text()
    assert text.count(" while(") == 1
    assert " conditional(" not in text


@jax.numpy_dtype_promotion("standard")  # of optax's lookahead
def test_lookahead_is_outside():
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(3)})
    inside = multi_steps(optax.lookahead(optax.sgd(0.1), 3, 0.5), 2)
    with pytest.raises(funcga.FuncgaError, match="another structure than the state"):
        inside.update({"w": jnp.ones(3)}, inside.init(params), params)
