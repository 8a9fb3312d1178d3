"""Models of flax (nnx and linen) and equinox as arguments: objects that hold arrays, and some of them their state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcga
from tests.kits import JAX, LIMITS, difference

nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
eqx = pytest.importorskip("equinox")
pytestmark = pytest.mark.usefixtures("as_users_write_it")


class Plain(nnx.Module):
    def __init__(self, rngs):
        dtype = jnp.result_type(float)
        self.first = nnx.Linear(3, 4, param_dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(4, 1, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))[:, 0]


class Net(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(4, param_dtype=jnp.result_type(float), rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(self.norm(self.first(x))))[:, 0]


class Tied(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.again = self.last


def loss(model, x, y):
    return ((model(x) - y) ** 2).mean()


by_flax = nnx.jit(nnx.value_and_grad(loss))  # compiled once for all tests


def batch(rows=8):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 3)))
    return x, x.sum(1)


def cut(x, y):
    return [(x[:3], y[:3]), (x[3:], y[3:])]


STEPS = {
    "accumulate": lambda g: funcga.accumulate(g, 3),
    "nnx.jit": lambda g: nnx.jit(funcga.accumulate(g, 3)),
    "jax.jit": lambda g: jax.jit(funcga.accumulate(g, 3)),
    "stream": lambda g: lambda model, x, y: funcga.stream(g)(model, cut(x, y)),
}


@pytest.mark.parametrize("kind", STEPS)
def test_gradients_of_nnx_are_those_of_the_whole_batch(kind, x64):
    model, (x, y) = Plain(nnx.Rngs(0)), batch()
    expected = by_flax(model, x, y)
    step = STEPS[kind](nnx.value_and_grad(loss))
    for _ in range(2):
        found = step(model, x, y)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert difference(JAX, found, expected) <= LIMITS["float64"]
        model.first.bias[...] = model.first.bias[...] + 1  # and the next call sees it
        expected = by_flax(model, x, y)


@pytest.mark.parametrize("kind", ["nnx.jit", "stream"])
def test_state_that_would_be_lost_is_refused(kind):
    model, (x, y) = Net(nnx.Rngs(0)), batch()
    before = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    with pytest.raises(funcga.FuncgaError) as error:
        STEPS[kind](nnx.value_and_grad(loss))(model, x, y)
    assert str(error.value) == (
        "grad_fn wrote to `Net.drop.rngs.count`, `Net.norm.mean`, `Net.norm.var`, which would be lost: every "
        "micro-batch would begin with the same state, and draw the same noise. Thread it: graph, params, state = "
        "nnx.split(module, nnx.Param, ...), in_axes=(None, funcga.CARRY, 0), a module that is nnx.merge(graph, params, "
        "state, copy=True), and nnx.state(module, nnx.Not(nnx.Param)) returned where the fold is funcga.carry()."
    )
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model, nnx.BatchStat)), strict=True))


def threaded(whose):
    """A step of parameters and state, as the refusal says to write it, and the loss that it accumulates."""
    graph, params, state = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def pure(params, state, x, y):
        module = nnx.merge(graph, params, state, copy=True)
        return loss(module, x, y), nnx.state(module, nnx.Not(nnx.Param))

    def of_nnx(params, state, x, y):  # which writes to the state that it was given
        module = nnx.merge(graph, params, state)
        value, grads = nnx.value_and_grad(loss)(module, x, y)
        return (value, nnx.state(module, nnx.Not(nnx.Param))), grads

    return {"funcga": funcga.value_and_grad(pure, has_aux=True), "nnx": of_nnx}[whose], params, state


@pytest.mark.parametrize(("kind", "whose"), [("accumulate", "nnx"), ("stream", "funcga")])
def test_state_that_is_threaded_is_that_of_a_loop_by_hand(kind, whose):
    gradient, params, state = threaded(whose)
    x, y = batch()
    options = {"in_axes": (None, funcga.CARRY, 0, 0), "fold": ((funcga.mean(), funcga.carry()), funcga.mean())}
    if kind == "accumulate":
        (value, after), grads = funcga.accumulate(gradient, microbatch_size=4, **options)(params, state, x, y)
        parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    else:
        parts = cut(x, y)
        (value, after), grads = funcga.stream(gradient, **options)(params, state, parts)
    by_hand = Net(nnx.Rngs(0))  # which writes to itself
    made = [(len(part[0]), by_flax(by_hand, *part)) for part in parts]
    mean = jax.tree.map(
        lambda *leaves: sum(w * a for (w, _), a in zip(made, leaves, strict=True)) / 8, *[m for _, m in made]
    )
    assert difference(JAX, (value, grads), mean) <= LIMITS["float32"]
    numbers = lambda tree: [
        jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in jax.tree.leaves(tree)
    ]
    expected = numbers(nnx.state(by_hand, nnx.Not(nnx.Param)))
    assert difference(JAX, numbers(after), expected) <= LIMITS["float32"]
    assert int(after["drop"]["rngs"]["count"][...]) == 2  # one mask for each micro-batch, not the same in all


@pytest.mark.parametrize("kind", ["accumulate", "stream"])
def test_variables_that_two_modules_share_are_refused(kind):
    with pytest.raises(funcga.FuncgaError) as error:
        STEPS[kind](nnx.value_and_grad(loss))(Tied(nnx.Rngs(0)), *batch())
    assert str(error.value) == (
        "`Tied.again.bias` and `Tied.last.bias` are one variable of nnx: a step makes its arguments anew, and the two "
        "would come apart. Split the module before, graph, params = nnx.split(module, nnx.Param), and make it inside "
        "of the loss: module = nnx.merge(graph, params)."
    )


def test_statistics_are_not_differentiated():
    module, (x, y) = Net(nnx.Rngs(0)), batch()
    del module.drop.rngs
    for params in (module, nnx.state(module), {"net": module}):
        with pytest.raises(funcga.FuncgaError) as error:
            funcga.accumulate(funcga.value_and_grad(loss), 2)(params, x, y)
        assert str(error.value).endswith(
            "norm.mean` is a BatchStat of nnx, which is state and not trained. Write nnx.value_and_grad(loss_fn), "
            "which differentiates nnx.Param alone, in place of funcga.value_and_grad(loss_fn)."
        ) or "['norm']['mean']` is a BatchStat" in str(error.value)
    plain = Plain(nnx.Rngs(0))
    found = funcga.accumulate(funcga.value_and_grad(loss), 2)(plain, x, y)
    assert difference(JAX, found, jax.value_and_grad(loss)(plain, x, y)) <= LIMITS["float32"]


@pytest.mark.filterwarnings("ignore:(?s).*Possibly assigning a JAX-transformed callable")  # for any that wraps another
@pytest.mark.parametrize("kind", ["accumulate", "jax.jit", "stream"])
def test_equinox(kind, x64):
    model, (x, y) = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0)), batch()
    mean_square = lambda model, x, y: ((jax.vmap(model)(x) - y) ** 2).mean()
    gradient = eqx.filter_value_and_grad(mean_square)
    step = STEPS[kind](gradient) if kind != "jax.jit" else eqx.filter_jit(funcga.accumulate(gradient, 3))
    assert difference(JAX, step(model, x, y), gradient(model, x, y)) <= LIMITS["float64"]


def test_a_batch_that_grad_fn_takes_apart():
    """A dict is the loss's own in every trace, as under jit."""

    def popping(w, batch, *, options):
        return (w * batch.pop("x")).mean() * options.pop("scale")

    step = funcga.accumulate(funcga.grad(popping), 3)
    x, options = jnp.arange(8.0), {"scale": 2.0}
    for kind in (step, jax.jit(step)):
        for _ in range(2):
            assert float(kind(jnp.float32(1), {"x": x}, options=options)) == 7
    assert options == {"scale": 2.0}


def test_batch_statistics_of_a_module():
    """Pooled over micro-batches, and the running ones after them, in a State as it came; against the whole batch."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norms = nnx.List([nnx.BatchNorm(5, momentum=0.0, rngs=rngs)])
            self.out = nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norms[0](x))

    graph, params, stats, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...)
    x = 3 + jax.random.normal(jax.random.key(0), (30, 5))

    def loss_fn(params, x):
        model = nnx.merge(graph, params, stats, rest, copy=True)
        loss = jnp.mean(model(x) ** 2)
        return loss, funcga.statistics.batch_moments(nnx.state(model, nnx.BatchStat), len(x))

    fold = ((funcga.mean(), funcga.pooled()), funcga.mean())
    (_, pooled), _ = funcga.accumulate(funcga.value_and_grad(loss_fn, has_aux=True), 4, fold=fold)(params, x)
    update = funcga.statistics.running_statistics
    for running in (update, jax.jit(update, static_argnames=("share", "unbiased"))):
        after = running(stats, pooled, share=0.1, unbiased=False)
        assert jax.tree.structure(after) == jax.tree.structure(stats)
        mean, variance = (after["norms"][0][name][...] for name in ("mean", "var"))
        exact = np.asarray(x, "float64")
        np.testing.assert_allclose(mean, 0.1 * exact.mean(0), rtol=1e-5)
        np.testing.assert_allclose(variance, 0.9 + 0.1 * exact.var(0), rtol=1e-5)
