"""coupled: the loss and the gradient of the whole batch, however it is cut, in both frameworks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcga
from funcga import CARRY
from tests.coupled import losses
from tests.kits import JAX, TORCH, difference
from tests.objectives import cut
from tests.test_errors import Loader, check_refused

# Sums of some hundred numbers in float64, in another order.
LIMIT = 1e-12
pytestmark = pytest.mark.usefixtures("x64", "as_users_write_it")


# --- every fold of a summary


def folded(xp, name, values, weights):
    """What a fold is, in words."""
    mean = lambda values: sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return {
        "rows": lambda: xp.concatenate(values),
        "columns": lambda: xp.concatenate(values, 1),
        "sum": lambda: sum(values),
        "per_weight": lambda: sum(values) / sum(weights),
        "squares": lambda: sum(v * v for v in values) / len(values),
        "mean": lambda: mean(values),
    }[name]()


OF_ROWS = {
    "rows": (funcga.concat(), lambda xp, h: h),
    "columns": (funcga.concat(axis=1), lambda xp, h: h.T),
    "sum": (funcga.sum(), lambda xp, h: h.sum()),
    "per_weight": (funcga.per_weight(), lambda xp, h: h.sum(0)),
    "squares": (  # a sum, whose terms are no linear function of the values
        funcga.Fold(
            funcga.Reducer(lambda xp, v, w: v * v, funcga.monoids.sum, kinds=("float",)), funcga.normalizers.by_steps
        ),
        lambda xp, h: h.mean(0),
    ),
    "mean": (funcga.mean(), lambda xp, h: h.T @ h / len(h)),
}  # fmt: skip


def positive(batch):
    return (batch["x"][:, 0] > -0.3).sum()


@pytest.mark.parametrize(("kit", "weigh"), [(TORCH, None), (TORCH, positive), (JAX, positive)])
def test_every_fold_of_a_summary(kit, weigh):
    """Beside integers, which have no gradient, and with weights of which one may be 0."""
    params, batch = losses.problem(kit, "InfoNCE")
    hidden = lambda params, batch: kit.xp.tanh(batch["x"] @ params["v"])
    summary_fn = lambda params, batch: (
        {name: of(kit.xp, hidden(params, batch)) for name, (_, of) in OF_ROWS.items()}, (batch["x"] > 0).sum()
    )  # fmt: skip

    def loss_fn(params, s):
        total = sum((k + 1) * kit.xp.tanh(s[0][name]).sum() for k, name in enumerate(OF_ROWS))
        return (1 + params["scale"] ** 2) * total * total / 100 + params["scale"] * s[1]

    pieces = cut(batch, *losses.bounds(11, 4))
    weights = [len(piece["x"]) if weigh is None else int(weigh(piece)) for piece in pieces]

    def whole(params):
        values = [summary_fn(params, piece) for piece in pieces]
        s = {name: folded(kit.xp, name, [value[0][name] for value in values], weights) for name in OF_ROWS}
        return loss_fn(params, (s, sum(value[1] for value in values)))

    fold = {name: fold for name, (fold, _) in OF_ROWS.items()}, funcga.sum()
    step = funcga.coupled(summary_fn, loss_fn, 4, fold=fold, weight=weigh)
    assert difference(kit, step(params, batch), losses.differentiated(kit, whole, params)) < LIMIT


# --- state that is threaded, weights of 0, and random keys


def test_state_is_threaded_once(kit):
    """A running mean, by which the next micro-batch is centred: a constant for the gradient, as in a loop."""
    params, batch = losses.problem(kit, "InfoNCE")
    stop = jax.lax.stop_gradient if kit is JAX else lambda x: x.detach()

    def summary_fn(params, state, batch):
        h = kit.xp.tanh(batch["x"] @ params["v"])
        return {"mean": (h - state["mean"]).mean(0), "rows": h - state["mean"]}, {
            "mean": stop(0.5 * state["mean"] + 0.5 * h.mean(0)),
            "steps": state["steps"] + 1,
        }

    def loss_fn(params, s):
        (summary, state), xp = s, kit.xp
        return xp.sin(summary["rows"] * summary["mean"]).sum() * params["scale"] + (state["mean"] ** 2).sum()

    fold = ({"mean": funcga.mean(), "rows": funcga.concat()}, funcga.carry())
    start = kit.arrays({"mean": np.zeros(losses.WIDTH), "steps": np.zeros((), "int32")})
    step = funcga.coupled(
        summary_fn, lambda params, s: (loss_fn(params, s), s[1]), 3, fold=fold, in_axes=(None, CARRY, 0), has_aux=True
    )
    edges, final = losses.bounds(11, 3), []

    def whole(params):
        state, summaries = start, []
        for piece in cut(batch, *edges):
            summary, state = summary_fn(params, state, piece)
            summaries.append(summary)
        weights = np.diff(edges).tolist()
        mean = sum(w * summary["mean"] for w, summary in zip(weights, summaries, strict=True)) / 11
        rows = kit.xp.concatenate([summary["rows"] for summary in summaries])
        final.append(state)
        return loss_fn(params, ({"mean": mean, "rows": rows}, state))

    (value, state), grads = step(params, start, batch)
    assert difference(kit, (value, grads), losses.differentiated(kit, whole, params)) < LIMIT
    whole(params)
    assert difference(kit, state, final[-1]) < LIMIT


@pytest.mark.parametrize("masked", [[0, 1, 2], [2]])
def test_micro_batches_of_weight_0_add_nothing(kit, masked):
    """Their summaries are NaN here, as a mean over no tokens is."""
    params, batch = losses.problem(kit, "InfoNCE", rows=9)
    mask = np.ones(9)
    for index in masked:
        mask[3 * index : 3 * index + 3] = 0
    batch = {"x": batch["x"], "mask": kit.arrays(mask)}

    def summary_fn(params, batch):
        h = kit.xp.tanh(batch["x"] @ params["v"])
        return (h * batch["mask"][:, None]).sum(0) / batch["mask"].sum()

    loss_fn = lambda params, s: (kit.xp.sin(s) * (1 + s)).sum() * params["scale"]
    step = funcga.coupled(summary_fn, loss_fn, 3, fold=funcga.mean(), weight=lambda batch: batch["mask"].sum())

    def whole(params):
        h = kit.xp.tanh(batch["x"] @ params["v"])
        s = (h * batch["mask"][:, None]).sum(0) / max(mask.sum(), 1)
        return (kit.xp.sin(s) * (1 + s)).sum() * params["scale"]

    assert difference(kit, step(params, batch), losses.differentiated(kit, whole, params)) < LIMIT


def test_keys_of_rows_are_drawn_from_alike():
    """In JAX noise comes of keys, which are split with the rows."""
    params, batch = losses.problem(JAX, "InfoNCE")
    keys = jax.random.split(jax.random.key(0), 11)

    def summary_fn(params, batch, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.6, (losses.WIDTH,)))(keys)
        of_microbatch = jax.random.normal(keys[0], (losses.WIDTH,))
        s = losses.LOSSES["InfoNCE"].summary(jnp, params, batch)
        return {"a": s["a"] * kept, "b": s["b"] + of_microbatch}

    loss_fn = lambda params, s: losses.LOSSES["InfoNCE"].loss(jnp, params, s)
    edges = losses.bounds(11, 3)
    pieces = [*zip(cut(batch, *edges), [keys[a:b] for a, b in itertools.pairwise(edges)], strict=True)]

    def whole(params):
        summaries = [summary_fn(params, *piece) for piece in pieces]
        return loss_fn(params, {name: jnp.concatenate([s[name] for s in summaries]) for name in "ab"})

    step = funcga.coupled(summary_fn, loss_fn, 3)
    assert difference(JAX, step(params, batch, keys), losses.differentiated(JAX, whole, params)) < LIMIT


# --- refusals


def refused(text, kit, summary_fn=None, loss_fn=None, call=None, n=2, **options):
    """That a step, made or called, is refused with this text."""
    summary_fn = summary_fn or (lambda w, x: x * w)
    loss_fn = loss_fn or (lambda w, s: (s * w).sum())
    make = lambda: funcga.coupled(summary_fn, loss_fn, n, **options)(
        *(call or (kit.arrays(np.ones(())), kit.arrays(np.ones((4, 3)))))
    )
    message = check_refused(text, make)
    assert message.count(". ") <= 2, message  # at most three sentences


REFUSALS = {
    "gradient function": (
        "it has no axis 0 for concat(axis=0) to collect along.",
        {"summary_fn": funcga.value_and_grad(lambda w, x: (w * x).sum())},
    ),
    "the wrong way around": (
        "or return one value for each example.",
        {"summary_fn": lambda w, x: (w * x).sum(), "loss_fn": lambda w, x: w * x},
    ),
    "similarities": (
        "compare rows with each other in the loss_fn of funcga.coupled.",
        {"summary_fn": lambda w, x: w * x @ x.T, "n": 3},
    ),
    "no function": ("summary_fn is 3", {"summary_fn": 3}),
    "argnums": ("argnums is 7", {"argnums": 7}),
    "both": ("both of n and microbatch_size were given. Say one: ", {"microbatch_size": 4}),
    "auto": ("n is 'auto'", {"n": "auto"}),
    "split": ("in_axes splits argument 1: parameters are passed whole", {"argnums": 1}),
    "loss without s": ("loss_fn does not use the summaries", {"loss_fn": lambda w, s: w * 2}),
    "not a scalar": ("the loss is ", {"loss_fn": lambda w, s: s * w}),
    "complex loss": ("a gradient is that of a scalar, a real number", {"loss_fn": lambda w, s: (s * w).sum() * 1j}),
    "a number": ("the loss is of type float", {"loss_fn": lambda w, s: 3.0}),
    "no pair": ("has_aux=True asks for a pair", {"has_aux": True}),
    "a pair": ("has_aux=True", {"loss_fn": lambda w, s: ((s * w).sum(), 1)}),
    "no float": ("its value depends on no float array of them", {"summary_fn": lambda w, x: x > 0}),
    "complex": ("summary_fn returns a complex array", {"summary_fn": lambda w, x: x * w * 1j}),
    "detached": ("the loss does not depend on `w`", {"summary_fn": lambda w, x: x + 0.0}),
    "mean of rows": ("grad_fn returned output as float64[2, 3] for ", {"call": "ragged", "fold": funcga.mean()}),
    "a window": ("the split arguments have different numbers of rows", {"call": "window"}),
    "a loader": ("A DataLoader is folded by stream.", {"call": "loader"}),
    "no prefix": ("the tree of folds is no prefix", {"fold": {"a": funcga.sum()}}),
    "carry": ("n, in_axes=(None, funcga.CARRY, 0)", {"fold": funcga.carry()}),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(kit, name):
    text, options = REFUSALS[name]
    if "call" in options:
        rows = lambda count: kit.arrays(np.ones((count, 3)))
        batch = {"ragged": rows(5), "window": [rows(2), rows(3)], "loader": Loader()}[options["call"]]
        options = {**options, "call": (kit.arrays(np.ones(())), batch)}
    refused(text, kit, **{"n": 2, **options})


def of_largest(kit):
    """That of max()."""
    return lambda value: value[None], lambda s: kit.xp.amax(s, 0), funcga.concat()


def of_variance(kit):
    """That of moments()."""
    return (
        lambda value: {"mean": value, "square": value**2},
        lambda s: s["square"] - s["mean"] ** 2,
        funcga.mean(),
    )


OWN = funcga.Monoid(lambda xp, like: xp.ones_like(like), lambda xp, a, b: a * b)
PRODUCT = funcga.Fold(funcga.Reducer(lambda xp, v, w: v, OWN, kinds=("float",)), funcga.normalizers.identity)
NO_SUMS = {
    "max": (funcga.max(), of_largest, lambda xp, values: xp.amax(values, 0)),
    "min": (funcga.min(), None, None),
    "logsumexp": (funcga.logsumexp(), None, None),
    "moments": (funcga.moments(), of_variance, lambda xp, values: xp.var(values, 0)),
    "ratio": (funcga.ratio(), None, None),
    "a monoid of your own": (PRODUCT, None, None),
    "a sum of bits": (funcga.reproducible(funcga.mean()), None, None),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_a_fold_that_is_no_sum_is_refused_with_what_to_write(kit, name):
    """And what is written instead is the fold."""
    fold, instead, of_values = NO_SUMS[name]
    text = (
        "Return value[None] from summary_fn, with fold=funcga.concat(), and combine the rows of s in loss_fn, such as"
    )
    refused(text, kit, fold={"a": fold, "b": funcga.sum()}, summary_fn=lambda w, x: dict.fromkeys("ab", x * w))
    if instead is None:
        return
    (returned, taken, fold), (params, batch) = instead(kit), losses.problem(kit, "InfoNCE", rows=9)
    value = lambda params, batch: kit.xp.tanh(batch["x"] @ params["v"]).mean(0)
    step = funcga.coupled(
        lambda params, batch: returned(value(params, batch)), lambda params, s: taken(s).sum(), 3, fold=fold
    )

    def whole(params):
        values = kit.xp.stack([value(params, piece) for piece in cut(batch, *losses.bounds(9, 3))])
        centred = values - values.mean(0)
        return ((centred**2).mean(0) if name == "moments" else of_values(kit.xp, values)).sum()

    assert difference(kit, step(params, batch), losses.differentiated(kit, whole, params)) < LIMIT


def test_a_summary_without_a_parameter_for_totals_raises_what_python_says(kit):
    call = kit.arrays(np.ones(())), kit.arrays(np.ones((4, 3)))
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'totals'"):
        funcga.coupled(lambda w, x: x * w, lambda w, s: s.sum(), 2, totals=len)(*call)


@pytest.mark.parametrize("loss_fn", [lambda s: s.sum(), lambda w, x, s: s.sum()])
def test_a_loss_of_other_parameters_raises_what_python_says(kit, loss_fn):
    call = kit.arrays(np.ones(())), kit.arrays(np.ones((4, 3)))
    with pytest.raises(TypeError, match=r"<lambda>\(\) (takes|missing) 1"):
        funcga.coupled(lambda w, x: x * w, loss_fn, 2)(*call)


@pytest.mark.parametrize("leaf", [3, len, np.arange(2)], ids=["int", "function", "integers"])
def test_frameworks_refuse_a_parameter_that_has_no_gradient(kit, leaf):
    params = {"w": kit.arrays(np.ones(())), "other": kit.arrays(leaf) if isinstance(leaf, np.ndarray) else leaf}
    functions = (lambda params, x: x * params["w"]), (lambda params, s: s.sum() * params["w"])
    with pytest.raises((TypeError, RuntimeError)):
        funcga.coupled(*functions, 2)(params, kit.arrays(np.ones((4, 3))))
