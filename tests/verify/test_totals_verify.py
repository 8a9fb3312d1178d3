"""What `verify` says of several denominators: the line works as it is printed; and of totals that are wrong."""

import re

import pytest

import funcga
from tests import mistakes, objectives
from tests.kits import TORCH, difference

pytestmark = pytest.mark.usefixtures("x64", "as_users_write_it")


# --- the line that is printed


def row_sum(params, batch):
    return ((batch["x"].sum(1) @ params["w"]) ** 2).sum()


# For each the data, without some of it, and the sum of each term by what it is divided by.
SEVERAL = {
    "tokens and rows": ((), {"rows": row_sum, "tokens": mistakes.token_sum}),
    "without labels": (("labels", "lengths"), {"rows": row_sum, "tokens": mistakes.token_sum}),
    "a sum and rows": ((), {"rows": row_sum, "the": mistakes.token_sum}),
}
COUNTS = {"rows": lambda batch: len(batch["x"]), "tokens": lambda batch: batch["mask"].sum(), "the": lambda batch: 1}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_line_for_several_denominators_works(name):
    without, sums = SEVERAL[name]
    params, batch = mistakes.data(TORCH, dtype="float64")
    batch = {key: leaf for key, leaf in batch.items() if key not in without}

    def loss(params, batch):
        return sum(term(params, batch) / COUNTS[count](batch) for count, term in sums.items())

    found = funcga.verify(funcga.value_and_grad(loss), params, batch)
    assert [cause.name for cause in found.causes] == ["other normaliser"]

    # The line is taken apart as a reader does: the argument, and what the loss returns.
    pattern = r"totals=(lambda .*), fold=funcga.sum\(\); .* def loss_fn\(params, batch, \*, totals\), .* total, (.*)"
    totals, terms = re.fullmatch(pattern, found.causes[0].fix).groups()
    totals = eval(totals)

    def loss_fn(params, batch, *, totals):
        names = {f"{count}_sum": term(params, batch) for count, term in sums.items()}
        return eval(terms, {"totals": totals, **names})

    gradient = funcga.value_and_grad(loss_fn)
    verdict = funcga.verify(gradient, params, batch, fold=funcga.sum(), totals=totals, n=2)
    assert verdict.ok, str(verdict)
    step = funcga.accumulate(gradient, 5, fold=funcga.sum(), totals=totals)
    whole = funcga.accumulate(funcga.value_and_grad(loss), 1)(params, batch)
    assert difference(TORCH, step(params, batch), whole) < 1e-12


# --- steps with totals


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_losses_with_totals_are_exact(name):
    params, batch = TORCH.arrays(objectives.rollouts())
    totals = objectives.OBJECTIVES[name].totals
    verdict = funcga.verify(objectives.gradient(TORCH, name), params, batch, fold=funcga.sum(), totals=totals, n=(3, 7))
    # Only what may be 0 needs a word about it.
    assert [cause.name for cause in verdict.causes] == (["total of zero"] if "tokens" in totals(batch) else []), str(
        verdict
    )
    assert all(row.ok for row in verdict.rows)


def verified(kit, loss, totals, **options):
    params, batch = mistakes.data(kit, dtype="float64")
    return funcga.verify(
        funcga.value_and_grad(loss), params, batch, fold=funcga.sum(), totals=totals, **options
    )  # fmt: skip


def count_mask(batch):
    return {"tokens": batch["mask"].sum(), "rows": len(batch["x"])}


def test_a_loss_that_a_total_of_zero_spoils(kit):
    def loss(params, batch, *, totals):
        return mistakes.token_sum(params, batch) / totals["tokens"] + row_sum(params, batch) / totals["rows"]

    def guarded(params, batch, *, totals):
        tokens = totals["tokens"].clip(min=1)
        return mistakes.token_sum(params, batch) / tokens + row_sum(params, batch) / totals["rows"]

    def selected(params, batch, *, totals):
        """The value is guarded, and its gradient is not: 0 times infinity."""
        tokens = totals["tokens"]
        return kit.xp.where(tokens > 0, mistakes.token_sum(params, batch) / tokens, 0 * tokens)

    for bad in (loss, selected) if kit is TORCH else (selected,):  # JAX compiles each
        verdict = verified(kit, bad, count_mask)
        assert [cause.name for cause in verdict.causes] == ["total of zero"]
        assert verdict.causes[0].fix == "totals['tokens'].clip(min=1) in its place in the loss"
    verified(kit, guarded, count_mask).assert_exact()


TOKENS = lambda batch: batch["mask"].sum()


@pytest.mark.parametrize(("fold", "weight"), [(funcga.mean(), TOKENS), (funcga.per_weight(), None)])
def test_a_loss_that_its_totals_and_the_fold_divide(fold, weight):
    """Every n gives the same under per_weight(), which divides even the whole batch twice."""
    params, batch = mistakes.data(TORCH, dtype="float64")
    loss = lambda params, batch, *, totals: mistakes.token_sum(params, batch) / totals["tokens"]
    gradient = funcga.value_and_grad(loss)
    verdict = funcga.verify(gradient, params, batch, fold=fold, weight=weight, totals=count_mask)
    fixes = {cause.name: cause.fix for cause in verdict.causes}
    assert {*fixes} - {"total of zero"} == {"divided twice"}
    assert "fold=funcga.sum()," in fixes["divided twice"]
    expected = funcga.value_and_grad(mistakes.token_mean)(params, batch)
    cured, wrong = (
        funcga.accumulate(gradient, 3, totals=count_mask, **options)(params, batch)
        for options in ({"fold": funcga.sum()}, {"fold": fold, "weight": weight})
    )
    assert difference(TORCH, cured, expected) < 1e-12
    assert difference(TORCH, wrong, expected) > 0.1


def test_totals_that_divide_nothing_go_with_a_mean():
    """They may be statistics of the batch."""
    params, batch = mistakes.data(TORCH, dtype="float64")
    totals = lambda batch: {"x": batch["x"].sum(), "rows": len(batch["x"])}

    def loss(params, batch, *, totals):
        return (((batch["x"] - totals["x"] / totals["rows"]).sum(1) @ params["w"]) ** 2).mean()

    funcga.verify(funcga.value_and_grad(loss), params, batch, totals=totals, n=(3, 5)).assert_exact()


def test_a_total_that_depends_on_the_cut():
    loss = lambda params, batch, *, totals: mistakes.token_sum(params, batch) / (1 + totals["share"])
    verdict = verified(TORCH, loss, lambda batch: {"share": batch["mask"].mean()})
    assert verdict.causes[0].name == "totals not additive"
    assert verdict.causes[0].fix.startswith("count in totals=, with .sum() or len()")


def test_a_mean_beside_totals_is_found():
    loss = lambda params, batch, *, totals: mistakes.token_mean(params, batch) + 0 * totals["rows"]
    assert [cause.name for cause in verified(TORCH, loss, count_mask).causes] == ["mean under sum"]
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'totals'"):
        verified(TORCH, mistakes.token_sum, count_mask)
