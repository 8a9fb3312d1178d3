"""What a window can do beside adding up: in_axes, aux, argnums, totals, drop, observe, and calls inside of transforms.

Each with `accumulate` and with `stream`, in both frameworks, in float64, and at each of four calls of one step.
"""

from functools import partial
from itertools import cycle, product

import jax
import numpy as np
import pytest
import torch

import funcga
from tests.core.sources import CUTS, bounds, four, parts, regression, rows_of, tokens
from tests.kits import TORCH, difference, dtypes

LIMIT = 1e-12
CUT = CUTS["n=5"]
ROWS = regression()


@pytest.fixture(autouse=True)
def in_float64(x64):
    with jax.numpy_dtype_promotion("standard"), np.errstate(invalid="ignore"):
        yield


@pytest.fixture(params=["accumulate", "stream"])
def window(request):
    """window(grad_fn, **options)(params, batch), where the batch is a dict that is cut into five."""

    def made(grad_fn, **options):
        if request.param == "accumulate":
            return funcga.accumulate(grad_fn, **CUT, **options)
        step = funcga.stream(grad_fn, **options)
        return lambda params, batch, **kwargs: step(params, parts(batch, CUT), **kwargs)

    return made


def problem(kit):
    params, batch = ROWS.arrays(kit)
    return params, batch, lambda params, batch: ROWS.loss(kit.xp, params, batch)


def of_rows(kit, loss, params, batch, kept):
    """The value and gradient of some rows, at once."""
    index = kit.arrays(np.array(kept, "int64"))
    return funcga.value_and_grad(loss)(params, {name: leaf[index] for name, leaf in batch.items()})


def cut_of(batch):
    return bounds(CUT, rows_of(batch))


def rows_without(batch, dropped):
    return [row for index, (a, b) in enumerate(cut_of(batch)) for row in range(a, b) if index not in dropped]


def calls(kit, make=regression):
    """(params, batch) of each call of a step."""
    return [problem.arrays(kit) for problem in four(make)]


def numbered(kit, batch, numbers):
    """The batch, and beside each row the number of its micro-batch."""
    of_rows = np.repeat(np.array(numbers, "float64"), [b - a for a, b in cut_of(batch)])
    return {**batch, "number": kit.arrays(of_rows)}


def loss_of(kit):
    return partial(ROWS.loss, kit.xp)


# -- what is differentiated, and what else comes out


def test_aux_beside_the_loss(kit, window):
    loss = loss_of(kit)
    with_aux = lambda params, batch: (
        loss(params, batch),
        {"rows": batch["x"] @ params["hidden"], "largest": batch["y"].max(), "n": 1},
    )
    aux = {"rows": funcga.concat(), "largest": funcga.max(), "n": funcga.sum()}
    for fold, gradient in (
        (((funcga.mean(), aux), funcga.mean()), funcga.value_and_grad(with_aux, has_aux=True)),
        ((funcga.mean(), aux), funcga.grad(with_aux, has_aux=True)),
    ):
        step = window(gradient, fold=fold)
        for params, batch in calls(kit):
            found, whole = step(params, batch), funcga.value_and_grad(loss)(params, batch)
            (value, extra), grads = found if len(found[0]) == 2 else ((None, found[1]), found[0])
            assert difference(kit, grads, whole[1]) <= LIMIT
            assert value is None or difference(kit, value, whole[0]) <= LIMIT
            assert difference(kit, extra["rows"], batch["x"] @ params["hidden"]) <= LIMIT
            assert kit is not TORCH or not any(leaf.requires_grad for leaf in extra.values())
            assert (float(extra["largest"]), int(extra["n"])) == (float(batch["y"].max()), 5)


def test_argnums(kit):
    """Of arguments that are passed whole, and of one that is split, whose gradient has its rows."""
    loss = lambda w, b, x, y: ((kit.xp.tanh(x @ w + b).sum(1) - y[:, 0]) ** 2).sum()
    fold = (funcga.sum(), (funcga.sum(), funcga.sum(), funcga.concat()))
    axes = (None, None, 0, 0)
    step = funcga.accumulate(funcga.value_and_grad(loss, argnums=(0, 1, 2)), 4, fold=fold, in_axes=axes)
    last = funcga.accumulate(funcga.grad(loss, argnums=-3), 4, fold=funcga.sum(), in_axes=axes)
    for params, batch in calls(kit):
        args = params["hidden"], params["bias"], batch["x"], batch["y"]
        whole = funcga.value_and_grad(loss, argnums=(0, 1, 2))(*args)
        assert difference(kit, step(*args), whole) <= LIMIT
        assert difference(kit, last(*args), whole[1][1]) <= LIMIT


def test_a_later_call_may_have_other_names(kit):
    """Of leaves that are alike; the loss and the result have those of the call."""
    seen = []
    loss = lambda params, batch: (
        seen.append((*params, *batch)),
        (params[next(iter(params))] * batch[next(iter(batch))]).sum(),
    )[1]
    step, ones, rows = funcga.accumulate(funcga.grad(loss), 2), kit.arrays(np.ones(3)), kit.arrays(np.ones((4, 3)))
    for names in (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")):
        seen.clear()
        assert [*step({names[0]: ones}, {names[1]: rows})] == [names[0]]
        assert kit is not TORCH or {*seen} == {names}


def test_argnums_of_a_stream_that_has_other_fields(kit):
    """Counted from the last: another argument then."""
    step = funcga.stream(funcga.grad(lambda w, *xs: (w * xs[0] * xs[-1]).sum(), argnums=-2), fold=funcga.sum())
    w, x, y = (kit.arrays(np.full(3, value)) for value in (2.0, 3.0, 5.0))
    for fields, wanted in ((x,), 18.0), ((x,), 18.0), ((x, y), 20.0), ((x,), 18.0):
        found = step(w, [fields, fields])
        np.testing.assert_allclose(kit.numpy(found), np.full(3, wanted))


def test_in_axes_keyword_arguments_and_what_weight_gets(kit):
    seen = []
    gradient = lambda p, a, q, b, s, *, scale: (p * a.mean() * q * b["whole"].sum() * scale, s + b["x"].sum())
    step = funcga.accumulate(
        gradient, 4, in_axes=(None, 1, None, {"x": 1, "whole": None}, funcga.CARRY),
        weight=lambda *cut: seen.append([*map(len, (cut[0].T, cut[1]["x"].T))]) or len(cut[0].T),
        fold=(funcga.mean(), funcga.carry()),
    )  # fmt: skip
    one = kit.arrays(np.ones(()))
    for factor, lines in ((1, 2), (2, 2), (1, 3), (1, 2)):
        rows = np.arange(6.0 * lines).reshape(lines, 6)
        x, scale = kit.arrays(factor * rows), factor * 3 * one
        mean, total = step(one, x, 2 * one, {"x": x, "whole": x[:1, :1] + 1}, one, scale=scale)
        assert (float(mean), float(total)) == (factor**2 * rows.mean() * 2 * 3, 1 + factor * rows.sum())
    assert {*map(tuple, seen)} == {(2, 2), (1, 1)}


def test_a_parameter_that_the_loss_does_not_use_has_a_gradient_of_zeros(kit, window):
    loss, names = loss_of(kit), [*ROWS.params, "unused"]
    others = [
        (funcga.mean(), {**dict.fromkeys(names, funcga.mean()), "unused": fold})
        for fold in (funcga.moments(), funcga.max())
    ]
    for fold in (funcga.mean(), *others):
        step = window(funcga.value_and_grad(loss), fold=fold)
        for params, batch in calls(kit):
            _, grads = step({**params, "unused": kit.arrays(np.ones((2, 2)))}, batch)
            assert difference(kit, grads["hidden"], funcga.grad(loss)(params, batch)["hidden"]) <= LIMIT
            assert not any(leaf.any() for leaf in kit.leaves(grads["unused"]))


def test_folds_of_single_gradients(kit, window):
    """Beside sums that autograd adds, leaves that are folded otherwise, each by its own weight."""
    loss, fold = loss_of(kit), {"bias": funcga.max(), "hidden": funcga.sum(), "out": funcga.moments()}
    step = window(funcga.value_and_grad(loss), fold=(funcga.mean(), fold), weight=lambda batch: batch["number"][0])
    for params, batch in calls(kit):
        weights = [a + 1.0 for a, _ in cut_of(batch)]
        value, grads = step(params, numbered(kit, batch, weights))
        each = [funcga.grad(loss)(params, part) for part in parts(batch, CUT)]
        stacks = {name: np.stack([kit.numpy(grad[name]) for grad in each]) for name in fold}
        mean = np.average(stacks["out"], axis=0, weights=weights)
        wanted = {
            "bias": stacks["bias"].max(0), "hidden": stacks["hidden"].sum(0),
            "out": (mean, np.average((stacks["out"] - mean) ** 2, axis=0, weights=weights)),
        }  # fmt: skip
        assert difference(kit, grads, kit.arrays(wanted)) <= LIMIT
        losses = [float(loss(params, part)) for part in parts(batch, CUT)]
        np.testing.assert_allclose(float(value), np.average(losses, weights=weights))


# -- weights of zero


def test_no_weight_at_all_gives_zeros(kit, window):
    loss = loss_of(kit)
    nan = lambda params, batch: loss(params, batch) / 0
    for fold, fn in ((funcga.per_weight(), loss), (funcga.mean(), lambda *args: nan(*args) * 0)):
        gradient = funcga.value_and_grad(fn)
        opaque = lambda *args, gradient=gradient: gradient(*args)
        for grad_fn, weight in ((gradient, lambda batch: 0), (opaque, lambda batch: (batch["x"] > 1e9).sum())):
            step = window(grad_fn, fold=fold, weight=weight)
            for params, batch in calls(kit):
                assert not any(leaf.any() for leaf in kit.leaves(step(params, batch)))


def test_a_window_may_begin_with_nothing(kit, window):
    """The first micro-batch is NaN, and weighs nothing; with other values another one."""
    loss = loss_of(kit)
    gradient = funcga.value_and_grad(lambda *args: loss(*args) * (args[1]["number"][0] / args[1]["number"][0]))
    for grad_fn in (gradient, lambda *args: gradient(*args)):
        step = window(grad_fn, weight=lambda batch: batch["number"][0])
        for (params, rows), without in zip(calls(kit), [(0, 2), (1, 4), (0, 2), (0, 2)], strict=True):
            batch = numbered(kit, rows, [b - a if k not in without else 0 for k, (a, b) in enumerate(cut_of(rows))])
            wanted = of_rows(kit, loss, params, batch, rows_without(batch, without))
            assert difference(kit, step(params, batch), wanted) <= LIMIT


@pytest.mark.parametrize("fold", ["sum", "per_weight", "max"])
def test_a_weight_of_zero_leaves_out_nothing_that_is_not_weighed(kit, window, fold):
    loss = loss_of(kit)
    by_hand = {"sum": sum, "per_weight": lambda leaves: sum(leaves) / 3, "max": lambda leaves: np.max([*leaves], 0)}
    step = window(funcga.grad(loss), fold=getattr(funcga, fold)(), weight=lambda batch: batch["number"][0])
    for (params, batch), weights in zip(
        calls(kit), [[0, 1, 0, 2, 0], [3, 0, 0, 0, 0], *[[0, 1, 0, 2, 0]] * 2], strict=True
    ):
        found = step(params, numbered(kit, batch, weights))
        each = [kit.leaves(funcga.grad(loss)(params, part)) for part in parts(batch, CUT)]
        for leaf, leaves in zip(kit.leaves(found), zip(*each, strict=True), strict=True):
            np.testing.assert_allclose(leaf, by_hand[fold](leaves), rtol=1e-12)


# -- totals, drop, observe


def test_totals_are_those_of_the_window(kit, window):
    """A loss of two terms, each divided by its own count of the whole window."""
    summary = tokens(None).summary
    counts = lambda batch: {"tokens": (batch["labels"] != -100).sum(), "rows": len(batch["labels"])}

    def loss(params, batch, *, totals):
        of_tokens = summary(kit.xp, params, batch)[0] / totals["tokens"]
        return of_tokens + (params["table"][batch["ids"][:, 0]] ** 2).sum() / totals["rows"]

    step = window(funcga.value_and_grad(loss), fold=funcga.sum(), totals=counts)
    for params, batch in calls(kit, partial(tokens, None)):
        whole = funcga.value_and_grad(lambda *args: loss(*args, totals=counts(args[1])))(params, batch)
        assert difference(kit, step(params, batch), whole) <= LIMIT


def spoilt(kit):
    """The loss of rows; where a flag is 1 it is not finite, and where it is 2 the gradient of one leaf is not."""
    stopped = lambda x: x.detach() if kit is TORCH else jax.lax.stop_gradient(x)

    def loss(params, batch):
        kind, leaf = batch["flag"].sum(), params["bias"].sum()
        value = ROWS.loss(kit.xp, params, batch) + kit.xp.where(kind == 1, float("inf"), 0.0)
        zero = kit.xp.where(kind == 2, leaf - stopped(leaf), 1.0)
        return value + kit.xp.where(kind == 2, kit.xp.sqrt(zero), 0.0)

    return loss


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_what_is_not_finite_is_dropped_with_its_weight(kit, window, drop):
    loss, observe = spoilt(kit), funcga.dropped()
    step = window(funcga.value_and_grad(loss), drop=drop, observe=observe)
    for (kind, dropped), (params, batch) in zip(product((1, 2), ((), (1,), (0, 4))), cycle(calls(kit)), strict=False):
        flags = np.zeros(rows_of(batch))
        flags[[cut_of(batch)[index][0] for index in dropped]] = kind
        hot = {**batch, "flag": kit.arrays(flags)}
        found, counted = step(params, hot)
        wanted = of_rows(kit, loss, params, hot, rows_without(batch, dropped))
        if dropped and drop == "window":
            assert not any(leaf.any() for leaf in kit.leaves(found))
        else:
            assert difference(kit, found, wanted) <= LIMIT
        assert int(kit.numpy(counted)) == (5 if dropped and drop == "window" else len(dropped))


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_a_masked_micro_batch_costs_no_window_and_aux_need_not_be_finite(kit, window, drop):
    """It has no token, so that its mean is NaN; it weighs nothing, and is not dropped."""

    def loss(params, batch):
        values = ((batch["x"] @ params["hidden"]) ** 2).sum(1) * batch["mask"]
        return values.sum() / batch["mask"].sum(), {"mask": float("-inf") * batch["mask"].sum()}

    fold = (funcga.mean(), {"mask": funcga.max()}), funcga.mean()
    weight = lambda batch: batch["mask"].sum()
    step = window(funcga.value_and_grad(loss, has_aux=True), fold=fold, weight=weight, drop=drop)
    for (params, rows), masked in zip(calls(kit), (1, 3, 1, 1), strict=True):
        a, b = cut_of(rows)[masked]
        mask = np.ones(rows_of(rows))
        mask[a:b] = 0
        batch = {**rows, "mask": kit.arrays(mask)}
        (value, _), grads = step(params, batch)
        (whole, _), gradient = funcga.value_and_grad(loss, has_aux=True)(params, batch)
        assert difference(kit, (value, grads["hidden"]), (whole, gradient["hidden"])) <= LIMIT


@pytest.mark.parametrize("fold", ["per_weight", "sum"])
def test_observers_of_sums_see_means(kit, window, fold):
    """The loss is a sum over rows, as a share of all where they are summed."""
    loss = loss_of(kit)
    summed = lambda params, batch: loss(params, batch) * len(batch["x"]) / (batch["all"][0] if fold == "sum" else 1)
    step = window(funcga.value_and_grad(summed), fold=getattr(funcga, fold)(), observe=funcga.gradient_norms())
    for params, batch in calls(kit):
        rows = rows_of(batch)
        _, seen = step(params, {**batch, "all": kit.arrays(np.full(rows, float(rows)))})
        each = [kit.leaves(funcga.grad(loss)(params, part)) for part in parts(batch, CUT)]
        norms = [np.linalg.norm(np.concatenate([leaf.ravel() for leaf in leaves])) for leaves in each]
        np.testing.assert_allclose(kit.numpy(seen.microbatches), norms, rtol=1e-12)
        whole = np.concatenate([leaf.ravel() for leaf in kit.leaves(funcga.grad(loss)(params, batch))])
        np.testing.assert_allclose(float(seen.mean), np.linalg.norm(whole), rtol=1e-12)


# -- inside of transforms, and after errors


def test_a_step_is_differentiated(kit):
    """Also between calls that are not."""
    loss = loss_of(kit)
    step = funcga.accumulate(funcga.grad(loss), **CUT)
    norm = lambda gradient, batch: funcga.grad(lambda p: sum((g**2).sum() for g in gradient(p, batch).values()))
    for params, batch in calls(kit):
        assert difference(kit, norm(step, batch)(params), norm(funcga.grad(loss), batch)(params)) <= LIMIT
        assert difference(kit, step(params, batch), funcga.grad(loss)(params, batch)) <= LIMIT


def test_weights_under_vmap(kit):
    """A weight that differs between the examples stays on the device; also between calls outside of vmap."""
    loss = loss_of(kit)
    step = funcga.accumulate(
        funcga.value_and_grad(loss), **CUT, weight=lambda batch: (batch["flag"] * batch["number"]).sum()
    )
    vmap = torch.func.vmap if kit is TORCH else jax.vmap
    for params, rows in calls(kit):
        number, flags = np.zeros(rows_of(rows)), np.ones((2, rows_of(rows)))
        number[[a for a, _ in cut_of(rows)]] = [b - a for a, b in cut_of(rows)]
        flags[1, slice(*cut_of(rows)[1])] = 0
        batch = {**rows, "number": kit.arrays(number)}
        call = lambda flag, params=params, batch=batch: step(params, {**batch, "flag": flag})
        value, grads = vmap(call)(kit.arrays(flags))
        for example, dropped in ((0, ()), (1, (1,))):
            wanted = of_rows(kit, loss, params, batch, rows_without(batch, dropped))
            found = value[example], {name: leaf[example] for name, leaf in grads.items()}
            assert difference(kit, found, wanted) <= LIMIT
            assert difference(kit, call(kit.arrays(flags[example])), wanted) <= LIMIT


@pytest.mark.parametrize("which", [2, 13], ids=["first call", "third call"])
def test_a_step_is_as_good_as_new_after_an_error(kit, window, which):
    """In a first call, or in one whose structure is known."""
    params, batch, loss = problem(kit)
    runs, errors = [], []

    def fails(params, batch):
        runs.append(1)
        if len(runs) == which:
            raise KeyError("mine")
        return loss(params, batch)

    step = window(funcga.value_and_grad(fails))
    before = kit.leaves((params, batch))
    for args in [(params, batch)] * 3 + calls(kit):
        try:
            found = step(*args)
        except KeyError:
            errors.append(len(runs))
        else:
            assert difference(kit, found, funcga.value_and_grad(loss)(*args)) <= LIMIT
    assert errors == [which] if kit is TORCH else len(errors) <= 1  # JAX calls it once for each shape
    for leaf, other in zip(kit.leaves((params, batch)), before, strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_a_second_call_with_other_shapes_dtypes_and_numbers(kit):
    """What is kept between calls is used only where it fits."""
    step = funcga.accumulate(
        funcga.value_and_grad(lambda p, x, *, scale: ((p["w"] * x[:, None]) ** 2).mean() * scale), 3
    )
    x = np.arange(7.0)
    for w, scale in (
        (np.ones(2), 1),
        (np.ones(3), 2.0),
        (np.ones(3, "float32"), 2.0),
        (np.ones(2), 3),
        (np.ones(2), 1),
    ):
        for rows in (7, 5):
            value, grads = step({"w": kit.arrays(w)}, kit.arrays(x[:rows].astype(w.dtype)), scale=scale)
            np.testing.assert_allclose(float(value), (x[:rows] ** 2).mean() * scale, rtol=1e-6)
            assert (grads["w"].shape, str(grads["w"].dtype).split(".")[-1]) == (w.shape, str(w.dtype))


def test_parameters_of_another_dtype_under_the_same_loss(kit):
    """512 gradients of 1, which a sum in bfloat16 would lose after 256."""
    step = funcga.accumulate(funcga.grad(lambda p, x: (kit.cast(p["w"], "float64") * x).sum()), 512, fold=funcga.sum())
    for dtype in ("float32", "bfloat16", "float64"):
        grads = step({"w": kit.cast(kit.arrays(np.ones(())), dtype)}, kit.arrays(np.ones(512)))
        assert (dtypes(kit, grads), float(grads["w"])) == ([dtype], 512)


def test_fewer_rows_than_micro_batches(kit):
    loss = loss_of(kit)
    step = funcga.accumulate(funcga.value_and_grad(loss), 7)
    for (params, batch), rows in zip(calls(kit), (3, 3, 4, 3), strict=True):
        few = {name: leaf[:rows] for name, leaf in batch.items()}
        assert difference(kit, step(params, few), funcga.value_and_grad(loss)(params, few)) <= LIMIT


def test_windows_of_a_loader():
    assert [*funcga.windows(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    target = funcga.windows([0.1] * 21, funcga.transforms.TargetWeight(1.0), weight=lambda weight: weight)
    assert [*map(len, target)] == [10, 10, 1]
    assert [*map(len, funcga.windows([3, 1, 4, 2, 2, 2, 1], funcga.transforms.TargetWeight(5), weight=int))] == [
        3,
        3,
        1,
    ]


@pytest.mark.parametrize(
    "weight", [-1, float("nan"), float("inf"), "8", np.ones(2)], ids=["negative", "nan", "inf", "text", "rows"]
)
def test_a_weight_that_is_none_is_refused(kit, window, weight):
    params, batch, loss = problem(kit)
    with pytest.raises(funcga.FuncgaError, match="the weight of a micro-batch is"):
        window(funcga.value_and_grad(loss), weight=lambda batch: weight)(params, batch)
