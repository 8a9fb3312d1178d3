"""What the benchmarks of torch count, and who is right: facts that must not rot. No time is asserted."""

import warnings

import numpy as np
import pytest
import torch

from benchmarks import registry, truth
from benchmarks.cases import Case
from benchmarks.in_torch import asked, group_of
from tests.processes import processes

RIVALS = ("functional_loop", "naive_functional_loop", "weighed_loop", "wide_sums_loop", "funcga_functional")


def structure(case, ranks=None):
    """What is counted of each contender, after two calls."""
    group = group_of(case, ranks)
    for call in group.calls.values():
        for _ in range(2):
            call()
    return group.about, {key: group.structure(key) for key in group.calls}


def test_ours_makes_what_the_loop_makes():
    about, made = structure(Case("", "update", "torch", "tiny", n=3, only=("functional_loop",)))
    assert made["funcga"]["peak_bytes"] <= 1.01 * made["loop"]["peak_bytes"]
    assert made["funcga"]["ops"] <= made["loop"]["ops"] + about["leaves"] + 3
    assert made["funcga"]["allocations"] <= made["loop"]["allocations"] + about["leaves"] + 3
    assert made["funcga_functional"]["peak_bytes"] <= 1.01 * made["functional_loop"]["peak_bytes"]
    assert made["funcga_functional"]["ops"] <= 1.01 * made["functional_loop"]["ops"] + 3
    assert made["funcga"]["peak_bytes"] <= 0.7 * made["functional_loop"]["peak_bytes"]


def of_ranks(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return structure(Case("", "update", "torch_ranks", "tiny", n=2, ranks=2), group)


def test_one_reduction_an_update_of_the_gradients_bytes():
    (about, made), _ = processes().run(of_ranks, size=2)
    ddp, size = made["ddp"], about["parameter_bytes"]
    assert (ddp["collectives"], ddp["wire_bytes"]) == (1, size)
    assert made["funcga"]["collectives"] == 2  # a header, which says what is to be merged, and one reduction
    assert size < made["funcga"]["wire_bytes"] <= 1.002 * size  # the loss and the weights ride along
    assert made["funcga"]["peak_bytes"] <= 1.01 * ddp["peak_bytes"]
    assert ddp["peak_bytes"] > 2 * size  # gradients, and its buckets, which are kept
    assert made["funcga_bfloat16"]["wire_bytes"] <= 0.502 * size
    assert (made["ddp_every"]["collectives"], made["ddp_every"]["wire_bytes"]) == (2, 2 * size)
    # The header, in which the loss travels; and where every pass communicates, replicas meet once, and before each of the n = 2 backward passes.
    for wrapped, rival, more in (("funcga_ddp", "ddp", 1), ("funcga_fsdp2", "fsdp2", 1 + 2)):
        assert made[wrapped]["collectives"] == made[rival]["collectives"] + more
        assert made[wrapped]["wire_bytes"] <= made[rival]["wire_bytes"] + more * 0.002 * size


def test_who_is_right():
    errors = {
        key: c["errors"] for key, c in asked(Case("", "exactness", "torch", only=RIVALS), None)["contenders"].items()
    }
    for key in ("funcga", "funcga_functional"):
        right(errors[key], ("uneven tokens", "partial window", "bfloat16 sums"))
    for key in ("loop", "wide_sums_loop"):
        assert errors[key]["partial window"] == pytest.approx(1 - 5 / 8, abs=1e-6)
    for key in ("loop", "functional_loop", "naive_functional_loop", "wide_sums_loop"):
        assert errors[key]["uneven tokens"] == pytest.approx(by_micro_batch(truth.questions()[0]), abs=1e-6)
    for key in ("loop", "naive_functional_loop", "weighed_loop"):
        assert 0.6 < errors[key]["bfloat16 sums"] < 0.7
    right(errors["weighed_loop"], ("uneven tokens", "partial window"))
    right(errors["functional_loop"], ("partial window", "bfloat16 sums"))


def right(errors, columns):
    """To rounding: that of float32, and that of a result in bfloat16."""
    for column in columns:
        assert errors[column] <= (2**-8 if column == "bfloat16 sums" else 1e-6), column


def by_micro_batch(question, average=True):
    """The error of the mean of the micro-batches' own means."""
    parts = [
        truth.token_gradient(question.params, rows[i : i + question.size])
        for rows in question.rows for i in range(0, len(rows), question.size)
    ]  # fmt: skip
    return truth.error({name: np.mean([part[name] for part in parts], 0) for name in question.params}, question)


def asked_of_ranks(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return asked(Case("", "exactness", "torch_ranks", ranks=2), group)["contenders"]


def test_which_ranks_are_right():
    found, other = processes().run(asked_of_ranks, size=2)
    assert found == other
    errors = {key: c["errors"] for key, c in found.items()}
    right(errors["funcga"], truth.COLUMNS)
    right(errors["funcga_ddp"], ("uneven tokens", "partial window", "uneven ranks"))
    assert "bfloat16" in found["funcga_ddp"]["refused"]["bfloat16 sums"]
    right(errors["funcga_fsdp2"], ("uneven tokens", "partial window"))
    right(errors["ddp_weighed"], ("uneven tokens", "partial window", "uneven ranks"))
    assert errors["ddp"]["uneven ranks"] == pytest.approx(1 - 4 / (2 * 3), abs=1e-6)  # four come, six are divided by
    assert errors["ddp"]["partial window"] == errors["fsdp2"]["partial window"] == pytest.approx(1 - 5 / 8, abs=1e-6)
    assert errors["ddp"]["uneven tokens"] == pytest.approx(by_micro_batch(truth.questions(2)[0]), abs=1e-6)


def test_the_true_gradient_is_that_of_autograd():
    for question in truth.questions(2, even_shapes=True) + truth.questions(2):
        if question.of_tokens:
            leaves = {name: torch.tensor(p).double().requires_grad_() for name, p in question.params.items()}
            rows = torch.tensor(np.concatenate(question.rows))
            logits = leaves["embedding"][rows[:, :-1]] @ leaves["linear"]
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=0).backward()
            assert truth.error({name: leaf.grad.numpy() for name, leaf in leaves.items()}, question) <= 1e-14


def test_rivals_have_sources_and_ours_are_what_they_are_compared_with():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = registry.contenders("torch_ranks", "update")
    mine = {c.key for c in found if c.key.startswith("funcga") or c.key in ("transform", "update")}
    for contender in found:
        assert bool(contender.source) == bool(contender.against) == (contender.key not in mine)
        assert set(contender.against) <= mine
    assert registry.baseline("torch_ranks") in {c.key for c in found} - mine
