"""`verify` of a step of `coupled`: the right ones pass, and each planted mistake is named, in both frameworks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import funcga
import torch_backend
from tests.coupled import losses
from tests.kits import JAX, TORCH

pytestmark = pytest.mark.usefixtures("one_thread", "x64", "as_users_write_it")


# --- right ones


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_right_step_is_not_accused(name):
    verdict = funcga.verify(losses.step(TORCH, name, 3), *losses.problem(TORCH, name))
    # One divides by a number of tokens that may be 0.
    assert {cause.name for cause in verdict.causes} <= {"total of zero"}, str(verdict)
    assert verdict.ok == (name != "CE + auxiliary")
    assert not verdict.notes
    assert [row.split for row in verdict.rows] == ["n = 3", "uneven, permuted"]
    assert max(row.relative for row in verdict.rows) < 1e-12


def data(kit=TORCH):
    """(params, x, y) with labels of some rows, and lengths of each."""
    r = np.random.default_rng(1)
    params = {"w": r.normal(size=(3, 4)), "scale": np.array(0.3)}
    return kit.arrays(params), kit.arrays(r.normal(size=(12, 3))), kit.arrays(r.integers(1, 5, 12))


def both(params, x, y):
    h = x @ params["w"]
    return {"a": torch.tanh(h), "b": h / (1 + h * h)}


def contrastive(params, s, labels=None):
    """The mean of what each row has against all others, with its own at `labels`."""
    logits = s["a"] @ s["b"].T * torch.exp(params["scale"])
    labels = torch.arange(len(logits)) if labels is None else labels
    return torch.log(torch.exp(logits).sum(1)).mean() - logits[labels, labels].sum() / len(logits)


def squares(params, s):
    return sum((v**2).sum() for v in s.values())


def neighbours(params, s):
    return (s["a"][1:] * s["b"][:-1]).mean()


def halves(params, s):
    half = len(s["a"]) // 2
    return ((s["a"][:half].mean(0) - s["a"][half:].mean(0)) ** 2).sum()


def largest(params, x, y):
    return {"top": torch.amax(x @ params["w"], 0)[None]}


RIGHT = {
    "a maximum": (largest, lambda p, s: (torch.amax(s["top"], 0) ** 2).sum(), {}),
    "tokens": (lambda p, x, y: {"h": (x @ p["w"] * y[:, None]).sum(0) / y.sum()}, squares, {"fold": funcga.mean(), "weight": lambda x, y: y.sum()}),
    "several": (lambda p, x, y: {"h": x @ p["w"], "rows": x.sum(0), "y": y}, lambda p, s: (s["h"].T @ s["h"]).sum() + (s["h"] * s["y"][:, None]).sum(), {"fold": {"h": funcga.concat(), "rows": funcga.sum(), "y": funcga.concat()}}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_another_right_step_is_not_accused(name):
    summary, loss, options = RIGHT[name]
    verdict = funcga.verify(funcga.coupled(summary, loss, 3, **options), *data())
    assert verdict.ok, str(verdict)
    assert not verdict.notes


def views(params, s):
    """Two views of each example, one below the other."""
    half = len(s["a"]) // 2
    first, second = s["a"][:half], s["a"][half : 2 * half]
    return ((first - second) ** 2).mean() + (first + second).exp().mean().log()


@pytest.mark.parametrize("loss", [neighbours, halves, views])
def test_a_loss_of_the_order_is_exact_with_a_note(loss):
    verdict = funcga.verify(funcga.coupled(both, loss, 3), *data())
    assert verdict.ok, str(verdict)
    assert verdict.notes[0].startswith("the loss depends on the order of the rows, which concat() keeps: it is exact")


def test_what_the_step_says_is_what_is_verified():
    """Auxiliary results, other arguments and axes; a step of one micro-batch is cut into three."""
    params, x, _ = data()
    summary_fn = lambda x, params, temperature: {"a": x.T @ params["w"] * temperature}
    loss_fn = lambda params, s: ((s["a"] @ s["a"].T).exp().mean().log(), s["a"])
    step = funcga.coupled(summary_fn, loss_fn, 1, in_axes=(1, None, None), argnums=1, has_aux=True)
    verdict = funcga.verify(step, x.T, params, 0.5)
    assert verdict.ok, str(verdict)
    assert verdict.rows[0].split == "n = 3"
    assert [row.split for row in funcga.verify(step, x.T, params, 0.5, n=(2, 5)).rows[:2]] == ["n = 2", "n = 5"]
    sized = funcga.coupled(summary_fn, loss_fn, microbatch_size=5, in_axes=(1, None, None), argnums=1, has_aux=True)
    assert funcga.verify(sized, x.T, params, 0.5).rows[0].sizes == (4, 4, 4)


# --- mistakes


def module_step(*layers, loss=lambda params, s: (s @ s.T).exp().mean().log()):
    torch.manual_seed(0)
    module = torch.nn.Sequential(*layers)
    summary_fn = torch_backend.pure_loss(module, lambda m, x, y: m(x))
    step = funcga.coupled(summary_fn, loss, 3)
    _, x, y = data()
    module.double()
    return step, ({name: p.detach() for name, p in module.named_parameters()}, x, y)


def normalised(params, x, y):
    h = x @ params["w"]
    return {"a": h - h.mean(0), "b": h}


def labelled(rows):
    return lambda params, s: contrastive(params, s, torch.arange(rows))


def entropy(rows):
    """As people write it: an error wherever the number of rows is another one."""
    return lambda params, s: (
        torch.log(torch.exp(s["a"] @ s["b"].T).sum(1)) - torch.arange(rows) * s["a"].sum(1)
    ).mean()


def positions(params, x, y):
    return {"a": x @ params["w"] + torch.arange(4)[:, None]}


def shifted(params, x, y):
    h = x @ params["w"]
    return {"a": h * torch.cumsum(x[:, :1], 0)}


def counted():
    calls = []

    def summary(params, x, y):
        calls.append(1)
        return {"a": x @ params["w"] * len(calls)}

    return summary


def masked(params, x, y):
    return {"h": (x @ params["w"] * y[:, None]).sum(0) / y.sum()}


mean_of = lambda p, x, y: {"h": (x @ p["w"]).mean(0)}
sum_of = lambda p, x, y: {"h": (x @ p["w"]).sum(0)}
variance_of = lambda p, x, y: {"h": ((x @ p["w"]) ** 2).mean(0) - (x @ p["w"]).mean(0) ** 2}
rows_of = lambda p, x, y: {"h": x @ p["w"]}

# (summary, loss, options, the cause, what is in its text, what is in its fix)
MISTAKES = {
    "a mean under sum()": (mean_of, squares, {"fold": funcga.sum()}, "mean under sum", "The summary is a mean, and sum()", "fold=funcga.mean()"),
    "a sum under mean()": (sum_of, squares, {"fold": funcga.mean()}, "sum under mean", "The summary is a sum over rows", "fold=funcga.sum()"),
    "a mean under concat()": (mean_of, squares, {}, "wrong fold", "under another fold micro-batches give that of the whole batch", "fold=funcga.mean()"),
    "tokens under concat()": (masked, squares, {}, "wrong fold", "", "fold=funcga.mean(), weight=lambda x, y: y.sum()"),
    "a maximum under mean()": (lambda p, x, y: {"h": (x @ p["w"]).max(0).values}, squares, {"fold": funcga.mean()}, "batch statistics", "", "compute the rest in loss_fn"),
    "tokens without weight=": (masked, squares, {"fold": funcga.mean()}, "uneven tokens", "The summary is a mean over items", "weight=lambda x, y: y.sum()"),
    "a variance": (variance_of, squares, {"fold": funcga.mean()}, "batch statistics", "summary['h'] depends on statistics", "(h ** 2).mean(0)"),
    "a normalisation": (normalised, contrastive, {}, "batch statistics", "summary['a'] depends on statistics", "loss_fn"),
    "rows under mean()": (rows_of, squares, {"fold": funcga.mean(), "n": 4}, "per-example output", "summary['h'] has a row for each example", "fold=funcga.concat()"),
    "the number of a micro-batch, in loss_fn": (both, entropy(4), {}, "fixed rows", "works with 4 rows, and not with 12: summary_fn or loss_fn has", "arange(len(logits))"),
    "the number of a micro-batch, in summary_fn": (positions, squares, {}, "fixed rows", "works with 4 rows, and not with 12: summary_fn or loss_fn has", "a micro-batch of any size"),
    "the number of the batch": (both, entropy(12), {}, "fixed rows", "works with 12 rows, and not with 4: summary_fn or loss_fn has", "arange(len(logits))"),
    "labels of some rows alone": (both, labelled(8), {}, "fixed rows", "the first 8 rows apart", "arange(len(logits))"),
    "labels of this batch alone": (both, labelled(12), {}, "fixed rows", "", "arange(len(logits))"),
    "a position": (shifted, squares, {}, "row order", "The summary depends on the order", "as data"),
    "a counter": (counted(), squares, {}, "state", "", "funcga.CARRY"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.host
def test_a_mistake_is_named(name):
    summary, loss, options, cause, text, fix = MISTAKES[name]
    verdict = funcga.verify(funcga.coupled(summary, loss, **{"n": 3} | options), *data())
    assert [each.name for each in verdict.causes] == [cause], str(verdict)
    assert text in verdict.causes[0].what
    assert fix in verdict.causes[0].fix


def test_the_line_that_is_given_cures():
    weight = {"weight": lambda x, y: y.sum(), "fold": funcga.mean()}
    for summary, options in ((mean_of, {"fold": funcga.mean()}), (sum_of, {"fold": funcga.sum()}), (masked, weight)):
        funcga.verify(funcga.coupled(summary, squares, 3, **options), *data()).assert_exact()


def test_batch_norm_is_named():
    step, args = module_step(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    (cause,) = funcga.verify(step, *args).causes
    assert (cause.name, "`1` (BatchNorm1d, in training mode)" in cause.what) == ("batch statistics", True)
    assert "module.eval()" in cause.fix


@pytest.mark.parametrize("where", ["summary_fn", "loss_fn"])
def test_dropout_is_randomness(where):
    drop = lambda params, s: (F.dropout(s, 0.5) @ s.T).exp().mean().log()
    layers = [torch.nn.Linear(3, 4), torch.nn.Dropout(0.5)]
    step, args = module_step(*layers) if where == "summary_fn" else module_step(layers[0], loss=drop)
    assert [cause.name for cause in funcga.verify(step, *args).causes] == ["randomness"]


def test_a_key_that_is_passed_whole_is_randomness():
    def summary_fn(params, key, x):
        return x @ params["w"] * jax.random.bernoulli(key, 0.5, (len(x), 1))

    step = funcga.coupled(summary_fn, lambda params, s: jnp.log(jnp.exp(s @ s.T).mean()), 3, in_axes=(None, None, 0))
    params, x, _ = data(JAX)
    (cause,) = funcga.verify(step, params, jax.random.key(0), x).causes
    assert cause.name == "randomness"
    assert cause.what.startswith("The summary draws random numbers by a row's position")


def test_totals_that_do_not_add_up():
    summary_fn = lambda params, x, *, totals: (x @ params["w"]).sum(0) / totals["rows"]
    step = lambda totals: funcga.coupled(
        summary_fn, lambda params, s: (s**2).sum(), 3, fold=funcga.sum(), totals=totals
    )
    params, x, _ = data()
    funcga.verify(step(lambda x: {"rows": len(x)}), params, x).assert_exact()
    verdict = funcga.verify(step(lambda x: {"rows": len(x) ** 0.5}), params, x)
    assert "totals not additive" in [cause.name for cause in verdict.causes]


def test_a_step_is_verified_with_what_it_brings():
    step, args = funcga.coupled(both, contrastive, 3), data()
    for option in ({"fold": funcga.sum()}, {"weight": len}, {"in_axes": (None, 0, 0)}, {"totals": len}):
        with pytest.raises(funcga.FuncgaError, match="a step of `coupled` brings its own"):
            funcga.verify(step, *args, **option)
    module = torch.nn.Linear(3, 4).double()
    gradient = torch_backend.module_value_and_grad(module, lambda m, x, y: m(x))
    of_module = funcga.coupled(gradient, lambda m, s: (s @ s.T).mean(), 3)
    with pytest.raises(funcga.FuncgaError, match="this one brings its own"):
        funcga.verify(of_module, *args[1:])


SUM_OVER = lambda p, x, y: {"h": ((x @ p["w"]) ** 2).sum(0) / y.sum().clamp(min=1)}
NOTHING = torch.tensor([3, 0, 2, 1, 4, 0, 1, 2, 0, 1, 0, 2])


@pytest.mark.parametrize(
    "options", [{}, {"fold": funcga.mean()}, {"fold": funcga.mean(), "weight": lambda x, y: y.sum()}]
)
def test_a_summary_over_a_count_that_may_be_0(options):
    """As the weight of a mean the count would leave out what rows without it have."""
    params, x, _ = data()
    cause = funcga.verify(funcga.coupled(SUM_OVER, squares, 3, **options), params, x, NOTHING).causes[0]
    line, _, rest = cause.fix.partition(". ")
    assert line == "fold=funcga.per_weight(), weight=lambda x, y: y.sum()"
    assert rest.startswith("Return the sum from the summary")
    summed = lambda p, x, y: {"h": ((x @ p["w"]) ** 2).sum(0)}
    step = funcga.coupled(summed, squares, 12, **options | eval(f"dict({line})", {"funcga": funcga}))
    funcga.verify(step, params, x, NOTHING).assert_exact()
    expected = funcga.grad(lambda p: squares(p, SUM_OVER(p, x, NOTHING)))(params)
    funcga.compare(step(params, x, NOTHING)[1], expected).assert_close()
