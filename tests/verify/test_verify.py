"""`verify` names every planted mistake, and accuses no right loss."""

import inspect
import json
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import funcga
import torch_backend
from tests import mistakes
from tests.kits import JAX, TORCH

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [(kit, name) for name, (kits, *_) in mistakes.MISTAKES.items() for kit in kits]
RIGHT = [(kit, name) for name, (kits, *_) in mistakes.RIGHT.items() for kit in kits]


def verified(kit, made):
    grad_fn, args, options = made(kit)
    few = {"n": 2} if kit.name == "jax" else {}  # each n is compiled
    return funcga.verify(grad_fn, *args, **few | options)


def regress(kit=TORCH, loss=mistakes.regression, rows=12):
    return mistakes.two_args(loss, rows=rows)(kit)[:2]


@pytest.mark.parametrize(("kit", "name"), CASES, ids=[f"{kit.name}-{name}" for kit, name in CASES])
@pytest.mark.host
def test_a_mistake_is_named(kit, name):
    _, made, names, fix = mistakes.MISTAKES[name]
    verdict = verified(kit, made)
    assert [cause.name for cause in verdict.causes] == names, str(verdict)
    assert fix in verdict.causes[0].fix
    assert not verdict.ok
    documented = " ".join(inspect.getdoc(funcga.verify).split())
    assert all(f'"{name}"' in documented for name in names)
    # Texts are short, and every word of theirs is filled in.
    for text in (verdict.causes[0].what, verdict.causes[0].evidence):
        assert len(re.findall(r"\.(?= [A-Z]|$)", text)) <= 3
        assert "{" not in text


@pytest.mark.parametrize(("kit", "name"), RIGHT, ids=[f"{kit.name}-{name}" for kit, name in RIGHT])
@pytest.mark.host
def test_a_right_loss_is_not_accused(kit, name):
    _, made, *notes = mistakes.RIGHT[name]
    verdict = verified(kit, made)
    assert verdict.ok, str(verdict)
    assert not verdict.causes
    assert all(note in verdict.notes[0] for note in notes)


@pytest.mark.parametrize("name", mistakes.DIVIDED)
def test_a_division_is_found_wherever_its_number_is(name):
    grad_fn, args = regress(loss=mistakes.DIVIDED[name], rows=5)
    keywords = {name: 4} if name == "accumulation_steps" else {}
    (cause,) = funcga.verify(grad_fn, *args, n=4, **keywords).causes
    assert cause.name == "divided by n"
    assert cause.fix.partition(",")[0] == f"drop `/ {name.strip()}` from the loss"


@pytest.mark.parametrize("case", mistakes.EQUAL_TO_N, ids=[case[2] for case in mistakes.EQUAL_TO_N])
def test_a_number_that_equals_n_is_a_note(case):
    loss, options, said = case
    verdict = funcga.verify(*regress(loss=loss)[:1], *regress()[1], **options)
    assert verdict.ok, str(verdict)
    assert [note.partition(": ")[0] for note in verdict.notes] == [f"the whole loss has the factor {said}"]


def test_a_verdict_of_a_mistake():
    grad_fn, args = regress(loss=mistakes.regression_sum)
    verdict = funcga.verify(grad_fn, *args, n=4)
    lines = str(verdict).splitlines()
    assert lines[:3] == ["Accumulation is NOT exact for this loss: 1 cause.", "", "1. sum under mean"]
    assert [line for line in lines if line.startswith("   Fix: fold=funcga.per_weight()")]
    assert [line for line in lines if line.startswith("   n = 4: 7.5e-01 at output")]
    with pytest.raises(AssertionError, match="sum under mean"):
        verdict.assert_exact()
    found = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
    assert found["ok"] is False
    assert found["causes"][0]["fix"] == verdict.causes[0].fix
    assert [(row["sizes"], row["ok"]) for row in found["rows"][:2]] == [([3, 3, 3, 3], False), ([8, 4], False)]
    assert funcga.verify(grad_fn, *args, n=4) == verdict  # of the same seed


def test_a_verdict_that_all_is_well():
    grad_fn, args = regress()
    verdict = funcga.verify(grad_fn, *args, n=(2, 5))
    verdict.assert_exact()
    assert str(verdict).splitlines()[0] == "Accumulation is exact for this loss."
    sizes = {row.split: row.sizes for row in verdict.rows}
    assert sizes == {"n = 2": (6, 6), "n = 5": (3, 3, 2, 2, 2), "uneven, permuted": (8, 4)}
    assert all(0 <= row.relative <= 1e-13 < row.limit == 1e-9 for row in verdict.rows)
    assert (verdict.dtype, verdict.notes, verdict.causes) == ("float64", (), ())


@pytest.mark.parametrize(("n", "splits"), [(1, ["n = 3"]), ((2, 1), ["n = 2"]), ((), ["n = 3"]), (13, ["n = 12"])])
def test_what_is_compared_where_n_is_1_or_too_large(n, splits):
    """As in `accumulate`, there are at most as many micro-batches as rows; one shows nothing."""
    verdict = funcga.verify(*regress()[:1], *regress()[1], n=n)
    assert [row.split for row in verdict.rows] == [*splits, "uneven, permuted"]


def refused_by_torch(params, x, y):
    if x.dtype == torch.float64:
        raise RuntimeError("!x INTERNAL ASSERT FAILED at 'a.cpp':1, please report a bug to PyTorch. Expected float")
    return mistakes.regression(params, x, y)


def test_the_precision_is_told():
    verdict = funcga.verify(*regress(loss=refused_by_torch)[:1], *regress()[1])
    assert verdict.dtype == "the arguments' own dtypes"
    assert verdict.notes[0] == "not in float64, in which the call raised RuntimeError: Expected float"
    assert verdict.rows[0].limit == 1e-4
    verdict = funcga.verify(*regress(loss=mistakes.bfloat16_inside)[:1], *regress()[1])
    assert (verdict.dtype, verdict.rows[0].limit) == ("float64", 8 * 2**-7)
    assert "differences below 6e-02 count as rounding" in verdict.notes[0]


def test_batch_norm_is_found_by_its_path():
    cause = verified(TORCH, mistakes.MISTAKES["BatchNorm1d"][1]).causes[0]
    assert "`1` (BatchNorm1d, in training mode)" in cause.evidence
    assert cause.fix.startswith("module.eval()")


@pytest.mark.parametrize("kit", [TORCH, JAX], ids=lambda kit: kit.name)
def test_a_loss_in_place_of_its_gradient(kit):
    _, args = regress(kit)
    verdict = funcga.verify(mistakes.regression, *args, n=2)
    assert (verdict.ok, verdict.gradients) == (True, False)
    assert str(verdict).startswith("The values agree, and no gradient was compared: see the note.")
    assert "funcga.verify(funcga.value_and_grad(loss_fn), ...)" in verdict.notes[-1]
    if kit is TORCH:
        assert funcga.verify(lambda *args: funcga.grad(mistakes.regression)(*args), *args, n=2).gradients
        scalar = torch.func.grad(lambda p, x: (p * x).mean())
        assert funcga.verify(scalar, torch.tensor(2.0), torch.randn(6)).gradients


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
        value = mistakes.regression(params, F.dropout(x, 0.5, draws or len(calls) == 1), y)
        return value * (factor if draws else 1) / mistakes.accumulation_steps

    grad_fn, (params, x, y) = regress(loss=loss)
    arrays = [*params.values(), x, y]
    before, drawn = [t.clone() for t in arrays], states()
    funcga.verify(grad_fn, params, x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, arrays, strict=True))
    assert states() == drawn
    assert mistakes.accumulation_steps == 4


def nan_in(args):
    params, x, y = args
    return params, x, torch.where(torch.arange(len(y)) == 1, torch.nan, y)


REFUSED = {
    "n is 0: it must be an int, at least 1": lambda g, a: funcga.verify(g, *a, n=0),
    "n is 'auto': it must be an int": lambda g, a: funcga.verify(g, *a, n="auto"),
    "the batch has 1 row, which cannot be split": lambda g, a: funcga.verify(g, a[0], a[1][:1], a[2][:1]),
    "output[0] of grad_fn is not finite for the whole batch (3": lambda g, a: funcga.verify(g, *nan_in(a)),
    "output[0] of grad_fn is not finite for the whole batch": lambda g, a: funcga.verify(g, a[0], a[1], a[2] + torch.inf),
    "the weight of a micro-batch is -12": lambda g, a: funcga.verify(g, *a, weight=lambda x, y: -len(x)),
    "weight is 3, which is no function": lambda g, a: funcga.verify(g, *a, weight=3),
    "grad_fn is None, which is no function": lambda g, a: funcga.verify(None, *a),
    "no array was found in": lambda g, a: funcga.verify(g, 1, 2),
    "the loss is float32[12], and": lambda g, a: funcga.verify(funcga.grad(lambda p, x, y: y * p["v"].sum()), *a),
    "the split arguments have different numbers of rows": lambda g, a: funcga.verify(g, a[0], a[1], a[2][:5]),
    "and this one brings its own": lambda g, a: funcga.verify(funcga.accumulate(torch_backend.module_value_and_grad(torch.nn.Linear(3, 1), lambda m, x: m(x).mean()), 2), a[1]),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_bad_input_is_refused(text):
    with pytest.raises(funcga.FuncgaError) as caught:
        REFUSED[text](*regress())
    assert text in str(caught.value)


def test_a_failure_that_nothing_explains_is_said():
    """A loss that refuses small batches."""

    def picky(params, x, y):
        if len(x) < 7:
            raise RuntimeError("too few rows\nfor this")
        return mistakes.regression(params, x, y)

    verdict = funcga.verify(*regress(loss=picky)[:1], *regress()[1], n=2)
    assert [cause.name for cause in verdict.causes] == ["not decomposable"]
    assert verdict.causes[0].evidence == "n = 2: it raised RuntimeError: too few rows"
    assert "it raised RuntimeError: too few rows" in str(verdict)
