"""`verify` names every planted mistake, and accuses no right loss."""

import inspect
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import funcga
import torch_backend
from funcga._verify import Verdict
from funcga._verify.causes import Cause
from tests import mistakes
from tests.kits import JAX, TORCH

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [(kit, name) for name, (kits, *_) in mistakes.MISTAKES.items() for kit in kits]
RIGHT = [(kit, name) for name, (kits, _) in mistakes.RIGHT.items() for kit in kits]


def verified(kit, made):
    grad_fn, args, options = made(kit)
    few = {"n": 2} if kit.name == "jax" else {}  # each n is compiled
    return funcga.verify(grad_fn, *args, **few | options)


@pytest.mark.parametrize(("kit", "name"), CASES, ids=[f"{kit.name}-{name}" for kit, name in CASES])
@pytest.mark.host
def test_a_mistake_is_named(kit, name):
    _, made, names, fix = mistakes.MISTAKES[name]
    verdict = verified(kit, made)
    assert [cause.name for cause in verdict.causes] == names, str(verdict)
    assert fix in verdict.causes[0].fix
    assert not verdict.ok


@pytest.mark.parametrize(("kit", "name"), RIGHT, ids=[f"{kit.name}-{name}" for kit, name in RIGHT])
@pytest.mark.host
def test_a_right_loss_is_not_accused(kit, name):
    verdict = verified(kit, mistakes.RIGHT[name][1])
    assert verdict.ok, str(verdict)
    assert not verdict.causes


@pytest.mark.parametrize("name", mistakes.DIVIDED)
def test_a_division_is_found_wherever_its_number_is(name):
    grad_fn, args = regress(loss=mistakes.DIVIDED[name], rows=5)
    keywords = {name: 4} if name == "accumulation_steps" else {}
    verdict = funcga.verify(grad_fn, *args, n=4, **keywords)
    assert [cause.fix for cause in verdict.causes] == [f"drop `/ {name.strip()}` from the loss"], str(verdict)


@pytest.mark.parametrize("case", mistakes.EQUAL_TO_N, ids=[case[2] for case in mistakes.EQUAL_TO_N])
def test_a_number_that_equals_n_is_a_note(case):
    loss, options, said = case
    grad_fn, args = regress(loss=loss)
    verdict = funcga.verify(grad_fn, *args, **options)
    assert verdict.ok, str(verdict)
    assert [note.partition(": ")[0] for note in verdict.notes] == [f"the whole loss has the factor {said}"]


def activated(h, kind):
    return {"linear": h, "rational": h / (1 + h**2), "square": h**2}[kind]


@st.composite
def right_losses(draw):
    """(loss, params, batch, options) of NumPy arrays: a loss of some terms under the fold that is right for it."""
    rows, length, width = draw(st.integers(2, 17)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    depth = draw(st.integers(1, 3))
    r = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    floats = lambda *shape: r.normal(size=shape).astype(dtype)
    params = {f"w{i}": floats(width, width) for i in range(depth)} | {"bias": floats(width), "unused": floats(2)}
    lengths = r.integers(0, length + 1, rows)
    lengths[r.integers(rows)] = length
    batch = {
        "x": floats(rows, length, width) * draw(st.sampled_from([1e-3, 1, 1e2])),
        "y": floats(rows, length),
        "mask": (np.arange(length) < lengths[:, None]).astype(dtype),
        "side": floats(rows, width),
    }
    kinds = [draw(st.sampled_from(["linear", "rational", "square"])) for _ in range(depth)]
    kind = draw(st.sampled_from(["row mean", "token mean", "token sum", "row sum", "sum"]))
    scale = draw(st.sampled_from([1, 0.5, 0.25, 3, 1 / 3, 1e-9]))
    temperature = draw(st.sampled_from([1, 2, 4, 0.1]))
    penalty, side = draw(st.sampled_from([0, 1e-2, 10])), draw(st.booleans())

    def loss(params, batch):
        h = batch["x"]
        for i, kind_of in enumerate(kinds):
            h = activated(h @ params[f"w{i}"] + params["bias"], kind_of)
        each = ((h.sum(2) / temperature - batch["y"]) ** 2 * batch["mask"]).sum(1)
        if side and "token" not in kind:
            each = each + ((batch["side"] @ params["w0"]) ** 2).sum(1)
        if "sum" in kind:
            return scale * each.sum()
        total = each.sum() / (batch["mask"].sum() if kind == "token mean" else len(each))
        return scale * total + penalty * (params["w0"] ** 2).sum()

    count = lambda batch: batch["mask"].sum()
    options = {
        "row mean": {},
        "token mean": {"weight": count},
        "token sum": {"fold": funcga.per_weight(), "weight": count},
        "row sum": {"fold": funcga.per_weight()},
        "sum": {"fold": funcga.sum()},
    }[kind]
    n = draw(st.sampled_from([None, 2, 3, 4, rows, (2, rows)]))
    within = n if n is None or isinstance(n, tuple) else min(n, rows)
    return loss, params, batch, {**options, "n": within, "seed": draw(st.integers(0, 99))}


def check_right(kit, right, gradient):
    loss, params, batch, options = right
    if kit is JAX:
        options = options | {"n": 2}
    verdict = funcga.verify(gradient(loss), kit.arrays(params), kit.arrays(batch), **options)
    assert verdict.ok, str(verdict)
    assert not verdict.causes


QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@given(right_losses(), st.sampled_from([funcga.grad, funcga.value_and_grad]))
@settings(max_examples=220, **QUIET)
def test_no_right_loss_is_accused_in_torch(right, gradient):
    check_right(TORCH, right, gradient)


@pytest.mark.usefixtures("x64")
@given(right_losses(), st.sampled_from([funcga.grad, funcga.value_and_grad]))
@settings(max_examples=3, phases=[Phase.generate], **QUIET)
def test_no_right_loss_is_accused_in_jax(right, gradient):
    check_right(JAX, right, gradient)


def regress(kit=TORCH, loss=mistakes.regression, rows=12):
    return mistakes.two_args(loss, rows=rows)(kit)[:2]


def test_a_verdict_as_text():
    grad_fn, args = regress(loss=mistakes.regression_sum)
    verdict = funcga.verify(grad_fn, *args, n=4)
    lines = str(verdict).splitlines()
    assert lines[:3] == ["Accumulation is NOT exact for this loss: 1 cause.", "", "1. sum under mean"]
    assert [line for line in lines if line.startswith("   Fix: fold=funcga.per_weight()")]
    assert [line for line in lines if line.startswith("   n = 4: largest relative difference")]
    assert verdict.__rich__().plain == str(verdict)
    with pytest.raises(AssertionError, match="sum under mean"):
        verdict.assert_exact()


def test_a_verdict_that_all_is_well():
    grad_fn, args = regress()
    verdict = funcga.verify(grad_fn, *args, n=(2, 5))
    verdict.assert_exact()
    assert str(verdict).splitlines()[0] == "Accumulation is exact for this loss."
    assert [(row.split, row.sizes) for row in verdict.rows] == [
        ("n = 2", (6, 6)), ("n = 5", (3, 3, 2, 2, 2)), ("uneven, permuted", (8, 4)),
    ]  # fmt: skip
    assert all(0 <= row.relative <= 1e-13 < row.limit == 1e-9 for row in verdict.rows)
    assert (verdict.dtype, verdict.notes, verdict.causes) == ("float64", (), ())


def test_a_verdict_as_json():
    grad_fn, args = regress(loss=mistakes.regression_sum)
    for fold in (funcga.mean(), funcga.sum()):
        verdict = funcga.verify(grad_fn, *args, fold=fold)
        found = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
        assert found["ok"] is verdict.ok
        assert [cause["fix"] for cause in found["causes"]] == [cause.fix for cause in verdict.causes]
        assert [row["sizes"] for row in found["rows"][:2]] == [[4, 4, 4], [8, 4]]


def test_the_precision_is_told():
    frozen = torch.nn.Linear(3, 3)
    grad_fn, args = regress(loss=lambda p, x, y: mistakes.regression(p, frozen(x), y))
    verdict = funcga.verify(grad_fn, *args)
    assert verdict.dtype == "the arguments' own dtypes"
    assert verdict.notes[0].startswith("not in float64, in which the call raised RuntimeError: ")
    assert verdict.rows[0].limit == 1e-4
    grad_fn, args = regress(loss=mistakes.bfloat16_inside)
    verdict = funcga.verify(grad_fn, *args)
    assert (verdict.dtype, verdict.rows[0].limit) == ("float64", 8 * 2**-7)
    assert "differences below 6e-02 count as rounding" in verdict.notes[0]


def test_batch_norm_is_found_by_its_path():
    _, made, *_ = mistakes.MISTAKES["BatchNorm1d"]
    assert "`1` (BatchNorm1d, in training mode)" in verified(TORCH, made).causes[0].evidence


@pytest.mark.parametrize(
    ("name", "note"),
    [
        (
            "gradients that are rounding",
            "which may be nothing but rounding: these arguments cannot show whether the fold is right",
        ),
        ("a value that cancels", "though every gradient agrees. A difference this small often comes from rounding"),
    ],
)
def test_what_cannot_be_told_is_a_note(name, note):
    assert note in verified(TORCH, mistakes.RIGHT[name][1]).notes[0]


def cured():
    """(the mistake, the gradient function and options that its fix says, what is done with the result)."""
    terms = mistakes.terms
    root = lambda found: {key: grad / 12**0.5 for key, grad in found[1].items()}
    yield "a sum over a root", lambda p, x, y: terms(p, x, y).sum(), {"fold": funcga.sum()}, root
    by_value = lambda found: {key: grad / found[0] for key, grad in found[1].items()}
    yield "log of a mean", lambda p, x, y: terms(p, x, y).mean(), {}, by_value
    by_norm = lambda found: {key: grad / 2 / found[0] ** 0.5 for key, grad in found[1].items()}
    yield "a norm", lambda p, x, y: terms(p, x, y).sum(), {"fold": funcga.sum()}, by_norm


@pytest.mark.parametrize("cure", [*cured()], ids=lambda cure: cure[0])
def test_what_a_fix_says_is_exact(cure):
    """It is verified, and its result is the gradient of the loss that was meant, in float64."""
    name, loss, options, after = cure
    grad_fn, args, _ = mistakes.MISTAKES[name][1](TORCH)
    wide = {key: p.double().requires_grad_() for key, p in args[0].items()}, *(a.double() for a in args[1:])
    gradient = funcga.value_and_grad(loss)
    funcga.verify(gradient, *wide, **options).assert_exact()
    expected = torch.autograd.grad(grad_fn.loss_fn(*wide), [*wide[0].values()])
    found = after(funcga.accumulate(gradient, 3, **options)(*wide))
    for x, y in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def weights_of_classes(params, x, y):
    """Two means, one of them by weights that no expression of the batch counts."""
    each, weights = mistakes.terms(params, x, y), torch.exp(torch.sin(7 * y))
    return (each * weights).sum() / weights.sum() + ((x @ params["w"]) ** 2).mean()


def pairs_of_labels(params, x, y):
    """A mean over pairs of rows of two kinds, of which expressions of the batch count both."""
    scores, up = (x @ params["w"]).sum(1), y > 0
    return (((1 - scores[:, None] + scores) ** 2) * up[:, None] * ~up).sum() / (up.sum() * (~up).sum())


def test_counts_have_to_explain_several_means():
    grad_fn, (params, x, y) = regress(loss=weights_of_classes, rows=24)
    (cause,) = funcga.verify(grad_fn, params, x, y).causes
    assert cause.name == "batch statistics"
    assert "s: loss, n=8, fold=funcga.mean())" in cause.fix
    labels = 2 * (torch.arange(24) % 5 < 2).long() - 1
    (cause,) = funcga.verify(funcga.value_and_grad(pairs_of_labels), params, x, labels).causes
    assert cause.name == "batch statistics"


def test_a_batch_of_complex_numbers_alone():
    """Of which no expression counts anything but the rows."""
    x = torch.randn(12, 3, dtype=torch.complex128)
    gradient = funcga.grad(lambda w, x: ((x @ w.to(x.dtype)).abs() ** 2).mean())
    (cause,) = funcga.verify(gradient, torch.ones(3, dtype=torch.float64), x, fold=funcga.sum()).causes
    assert (cause.name, cause.fix) == ("mean under sum", "fold=funcga.mean()")


def test_the_weight_that_is_offered_cures():
    grad_fn, args, _ = mistakes.causal(TORCH)
    funcga.verify(grad_fn, *args, weight=lambda batch: (batch["labels"][:, 1:] != -100).sum()).assert_exact()


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)
def test_a_loss_in_place_of_its_gradient(kit):
    _, args = regress(kit)
    verdict = funcga.verify(mistakes.regression, *args, n=2)
    assert (verdict.ok, verdict.gradients, verdict.as_dict()["gradients"]) == (True, False, False)
    assert "exact" not in str(verdict)
    assert str(verdict).startswith("The values agree, and no gradient was compared: see the note.")
    assert "funcga.verify(funcga.value_and_grad(loss_fn), ...)" in verdict.notes[-1]
    by_hand = lambda *args: funcga.grad(mistakes.regression)(*args)
    assert funcga.verify(by_hand, *args, n=2).gradients
    scalar = funcga.verify(torch.func.grad(lambda p, x: (p * x).mean()), torch.tensor(2.0), torch.randn(6))
    assert scalar.gradients


def test_a_step_inside_of_a_loss():
    """It is exact if and only if it is what torch.func makes of it, which knows that the step is differentiated."""
    loss = lambda w, x: ((x @ w) ** 2).mean()
    inner, (w, x) = funcga.accumulate(funcga.grad(loss), 1), (torch.randn(3), torch.randn(6, 3))
    outer = lambda w, x: loss(w - 0.1 * inner(w, x[:1]), x)
    right = torch.allclose(funcga.accumulate(funcga.grad(outer), 1)(w, x), torch.func.grad(outer)(w, x))
    names = {cause.name for cause in funcga.verify(funcga.grad(outer), w, x).causes}
    assert ("wrong gradient" in names) is not right


def test_a_straight_through_gradient_is_not_accused():
    """What the user cut off himself: differences of the loss disagree with it, and both ways agree."""
    rounded = lambda w: w + (w.round() - w).detach()
    frozen = lambda p, x, y: mistakes.regression({"w": rounded(p["w"]), "v": p["v"].detach()}, x, y)
    grad_fn, args = regress(loss=frozen)
    funcga.verify(grad_fn, *args).assert_exact()


def test_hooks_on_parameters_are_no_wrong_gradient():
    module = torch.nn.Linear(3, 1)
    module.weight.register_hook(lambda grad: 2 * grad)
    pure = torch_backend.pure_loss(module, lambda m, x: (m(x) ** 2).mean())
    try:
        verdict = funcga.verify(funcga.grad(pure), dict(module.named_parameters()), torch.randn(6, 3))
    except funcga.FuncgaError:  # hooks may be refused
        return
    assert "wrong gradient" not in {cause.name for cause in verdict.causes}


def test_a_value_that_becomes_nan_is_state():
    calls = []

    def gradient(params, x, y):
        calls.append(1)
        value, grads = funcga.value_and_grad(mistakes.regression)(params, x, y)
        return (value, value * (float("nan") if len(calls) > 2 else 1)), grads

    verdict = funcga.verify(gradient, *regress()[1])
    assert [cause.name for cause in verdict.causes] == ["state"], str(verdict)


def test_batch_norm_comes_first_only_where_there_is_one():
    with_one, without = (verified(TORCH, mistakes.MISTAKES[name][1]) for name in ("BatchNorm1d", "load balancing"))
    assert [verdict.causes[0].fix.startswith("module.eval()") for verdict in (with_one, without)] == [True, False]


def refused_by_torch(params, x, y):
    if x.dtype == torch.float64:
        raise RuntimeError("!x INTERNAL ASSERT FAILED at 'a.cpp':1, please report a bug to PyTorch. Expected float")
    return mistakes.regression(params, x, y)


def test_a_note_leaves_out_where_torch_asserts():
    grad_fn, args = regress(loss=refused_by_torch)
    note = "not in float64, in which the call raised RuntimeError: Expected float"
    assert funcga.verify(grad_fn, *args).notes[0] == note


def test_carried_state_is_a_note():
    verdict = verified(TORCH, mistakes.RIGHT["state"][1])
    assert verdict.notes[0].startswith(
        "carried state, output[1]['mean'], is different after n micro-batches than after one"
    )


def states():
    """Where in its block of 624 words NumPy's generator is belongs to its state."""
    key, place = np.random.get_state()[1:3]
    return torch.get_rng_state().tolist(), key.tolist(), place, random.getstate()


@pytest.mark.parametrize("draws", [True, False], ids=["always", "at the first call alone"])
def test_nothing_is_changed(draws):
    """Also where what draws numbers is found by no two calls, since only the first one draws any."""
    calls = []

    def loss(params, x, y):
        if draws or not calls:
            factor = float(np.random.rand() + random.random())
        calls.append(1)
        return mistakes.regression(params, F.dropout(x, 0.5, draws or len(calls) == 1), y) * (factor if draws else 1)

    grad_fn, (params, x, y) = regress(loss=loss)
    arrays = [*params.values(), x, y]
    before, drawn = [t.clone() for t in arrays], states()
    funcga.verify(grad_fn, params, x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, arrays, strict=True))
    assert states() == drawn


def test_no_variable_of_the_loss_is_changed():
    frozen = mistakes.divided_by_global.__globals__["accumulation_steps"]
    verified(TORCH, mistakes.MISTAKES["/ n, a global"][1])
    assert mistakes.accumulation_steps == frozen == 4


def test_the_same_seed_gives_the_same_verdict():
    made = mistakes.MISTAKES["uneven tokens, -100"][1]
    first, second = (verified(TORCH, made) for _ in range(2))
    assert first == second


def nan_in(args):
    params, x, y = args
    return params, x, torch.where(torch.arange(len(y)) == 1, torch.nan, y)


REFUSED = {
    "n is 1: verify compares": lambda g, a: funcga.verify(g, *a, n=1),
    "n is (2, 1): verify compares": lambda g, a: funcga.verify(g, *a, n=(2, 1)),
    "n is (): verify compares": lambda g, a: funcga.verify(g, *a, n=()),
    "n is 0: it must be at least 1": lambda g, a: funcga.verify(g, *a, n=0),
    "n is 'auto': it must be an int": lambda g, a: funcga.verify(g, *a, n="auto"),
    "n=13 micro-batches were asked of a batch of 12 rows": lambda g, a: funcga.verify(g, *a, n=13),
    "the batch has 1 row, which cannot be split": lambda g, a: funcga.verify(g, a[0], a[1][:1], a[2][:1]),
    "the argument at [2] of the call is float32[12] with 1 NaN": lambda g, a: funcga.verify(g, *nan_in(a)),
    "output[0] of grad_fn is not finite for the whole batch": lambda g, a: funcga.verify(g, a[0], a[1], a[2] + torch.inf),
    "the weight of a micro-batch is -12": lambda g, a: funcga.verify(g, *a, weight=lambda x, y: -len(x)),
    "weight is 3, which is no function": lambda g, a: funcga.verify(g, *a, weight=3),
    "grad_fn is None, which is no function": lambda g, a: funcga.verify(None, *a),
    "no array was found in": lambda g, a: funcga.verify(g, 1, 2),
    "loss_fn returned float32[12], and": lambda g, a: funcga.verify(funcga.grad(lambda p, x, y: y * p["v"].sum()), *a),
    "the split arguments have different numbers of rows": lambda g, a: funcga.verify(g, a[0], a[1], a[2][:5]),
    "and this one brings its own": lambda g, a: funcga.verify(torch_backend.module_value_and_grad(torch.nn.Linear(3, 1), lambda m, x: m(x).mean()), a[1]),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_bad_input_is_refused(text):
    with pytest.raises(funcga.FuncgaError) as caught:
        REFUSED[text](*regress())
    assert text in str(caught.value)


def test_the_documented_names_are_those_that_are_given():
    documented = " ".join(inspect.getdoc(funcga.verify).split())
    given = {name for _, _, names, _ in mistakes.MISTAKES.values() for name in names}
    assert all(f'"{name}"' in documented for name in given)
    assert len(given) >= 17


def test_a_failure_that_nothing_explains_is_said():
    """A loss that refuses small batches."""

    def picky(params, x, y):
        if len(x) < 7:
            raise RuntimeError("too few rows\nfor this")
        return mistakes.regression(params, x, y)

    grad_fn, args = regress(loss=picky)
    verdict = funcga.verify(grad_fn, *args, n=2)
    assert [cause.name for cause in verdict.causes] == ["not decomposable"]
    assert verdict.causes[0].evidence == "n = 2: it raised RuntimeError: too few rows"
    assert "it raised RuntimeError: too few rows" in str(verdict)


def always(ok):
    cause = () if ok else (Cause("uneven tokens", "", "", ""),)
    return lambda *args, **kwargs: Verdict(ok, cause, (), "float64")


def test_the_tables_have_teeth(monkeypatch):
    """A verify that says of every loss that it is right is rejected by each mistake, one that accuses by each other."""
    monkeypatch.setattr(funcga, "verify", always(True))
    for kit, name in CASES:
        with pytest.raises(AssertionError):
            test_a_mistake_is_named(kit, name)
    monkeypatch.setattr(funcga, "verify", always(False))
    for kit, name in RIGHT:
        with pytest.raises(AssertionError):
            test_a_right_loss_is_not_accused(kit, name)
    with pytest.raises(AssertionError):
        check_right(TORCH, (mistakes.regression_sum, {}, (), {}), lambda loss: loss)
