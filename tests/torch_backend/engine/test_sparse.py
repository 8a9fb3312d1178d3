"""Gradients of sparse embeddings stay lists of rows: summed as such, coalesced once, and never of the table's size."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding

import funcga
import torch_backend
from funcga.observers import gradient_norms
from tests.processes import processes
from tests.programs import example

ROWS, WIDTH = 40, 3


class Model(nn.Module):
    """A table, and a layer behind it; `tied` also scores its rows, whose gradient is dense."""

    def __init__(self, rows=ROWS, sparse=True, dtype=torch.float64):
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, sparse=sparse, dtype=dtype)
        self.layer = nn.Linear(WIDTH, 1, dtype=dtype)

    def forward(self, ids, tied=False):
        hidden = self.table(ids).tanh()
        scores = hidden @ self.table.weight.T if tied else 0
        return self.layer(hidden)[..., 0].square().mean(1) + (scores.square().mean((1, 2)) if tied else 0)


def models(**options):
    torch.manual_seed(0)
    model = Model(**options)
    dense = Model(model.table.num_embeddings, sparse=False, dtype=model.table.weight.dtype)
    dense.load_state_dict(model.state_dict())
    return model, dense


def loss_fn(model, ids):
    return model(ids).mean()


def batch(rows=10, most=ROWS):
    return torch.randint(most, (rows, 4), generator=torch.Generator().manual_seed(1))


def check(grads, expected, is_sparse=True):
    """The gradients equal autograd's of dense tables, and that of the table has the rows that occur, once each."""
    table = grads["table.weight"]
    assert (table.layout is torch.sparse_coo) == is_sparse
    if is_sparse:
        assert table.is_coalesced()
        table = table.to_dense()
    torch.testing.assert_close({**grads, "table.weight": table}, dict(expected), rtol=1e-12, atol=1e-14)


def whole(dense, loss):
    names, params = zip(*dense.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads, strict=True)}


CASES = {
    "equal": {},
    "n=1": {"n": 1},
    "n=8, unequal": {"n": 8},
    "of weight 0": {"weight": lambda ids: (ids[:, 0] % 2).sum()},
    "per_weight": {"fold": funcga.per_weight()},
    "sum": {"fold": funcga.sum()},
    "by steps": {"fold": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps), "n": 5},
    "measured": {"observe": gradient_norms()},
    "drop": {"drop": "microbatch"},
    "drop a window": {"drop": "window"},
    "totals": {"totals": len},
}


@pytest.mark.parametrize("source", ["module", "function", "any function"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_a_list_of_rows(case, source):
    options, (model, dense), ids = {"n": 5, **CASES[case]}, models(), batch()
    loss = lambda model, ids, **totals: loss_fn(model, ids)
    if source == "module":
        gradient = torch_backend.module_value_and_grad(model, loss)
        args = (ids,)
    else:
        pure = torch_backend.pure_loss(model, loss)
        gradient = funcga.value_and_grad(pure)
        if source == "any function":
            gradient = lambda params, ids, **totals: funcga.value_and_grad(pure)(params, ids)
        args = (torch_backend.trainable(model), ids)
    step = funcga.accumulate(gradient, **options)
    for call in range(4):
        result = step(*args)
        grads = (result[0] if "observe" in options else result)[1]
        cut, weigh = ids.tensor_split(options["n"]), options.get("weight", len)
        losses = torch.stack([loss_fn(dense, part) for part in cut])
        weights = torch.tensor([float(weigh(part)) for part in cut])
        expected = {
            "per_weight": losses.sum() / weights.sum(),
            "sum": losses.sum(),
            "by steps": (weights * losses).sum() / len(cut),
        }.get(case, (weights * losses).sum() / weights.sum())
        check(grads, whole(dense, expected))
        if call == 1:  # as after an update of SparseAdam, and another batch
            with torch.no_grad():
                for each in (model, dense):
                    each.table.weight += 0.1
            ids = batch(12)
            args = (*args[:-1], ids)


def test_sums_that_torch_does_not_add_to_are_dense():
    model, dense = models()
    ids = batch()
    expected = whole(dense, loss_fn(dense, ids))
    gradient = torch_backend.module_value_and_grad(model, loss_fn)
    exact = funcga.accumulate(gradient, n=5, fold=funcga.reproducible(funcga.mean()))
    check(exact(ids)[1], expected, is_sparse=False)
    largest = funcga.accumulate(gradient, n=5, fold=(funcga.mean(), funcga.max()))
    table = largest(ids)[1]["table.weight"]
    assert table.layout is torch.strided
    of_each = [whole(dense, loss_fn(dense, part))["table.weight"] for part in ids.tensor_split(5)]
    torch.testing.assert_close(table, torch.stack(of_each).amax(0))


@pytest.mark.parametrize("by_autograd", [True, False])
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (3, 1, 2, 1)])
@pytest.mark.parametrize("tied", [(True,) * 4, (False, True, False, False), (True, False, False, True)])
def test_beside_dense_gradients_it_is_dense(tied, weights, by_autograd):
    """As of weights that are tied: in each micro-batch, or from the second one on."""
    model, dense = models()
    parts = [
        {"ids": part, "tied": is_tied, "weight": w}
        for part, is_tied, w in zip(batch(8).split(2), tied, weights, strict=True)
    ]
    loss = lambda model, part: model(part["ids"], part["tied"]).mean()
    gradient = torch_backend.module_value_and_grad(model, loss)
    grad_fn = gradient if by_autograd else lambda part: gradient(part)  # of any function the values are added
    in_axes = None if by_autograd else 0
    step = funcga.stream(grad_fn, weight=lambda part: part["weight"], in_axes=in_axes)
    for _ in range(3):
        losses = [w * loss(dense, part) for w, part in zip(weights, parts, strict=True)]
        check(step(parts)[1], whole(dense, sum(losses) / sum(weights)), is_sparse=False)


def test_a_table_that_some_micro_batches_do_not_use():
    model, dense = models()
    parts = [
        {"ids": part, "used": used} for part, used in zip(batch(8).split(2), (False, True, False, True), strict=True)
    ]
    loss = lambda model, part: model(part["ids"]).mean() if part["used"] else model.layer.weight.square().sum()
    step = funcga.stream(torch_backend.module_value_and_grad(model, loss), weight=lambda part: 1)
    expected = whole(dense, sum(loss(dense, part) for part in parts) / 4)
    for _ in range(3):
        check(step(parts)[1], expected)


@pytest.mark.parametrize("options", [{}, {"weight": lambda ids: int(ids.sum()) % 7 + 1}])
def test_nothing_has_the_size_of_the_table(options):
    torch.manual_seed(0)
    model = Model(rows=10**6, dtype=torch.float32)
    optimizer = torch.optim.SparseAdam([model.table.weight])
    step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), n=4, **options)
    ids = batch(most=10**6)
    largest_of = example("recommender_torch").Largest
    for _ in range(2):  # a first call, and a warm one; the optimizer makes its moments before the second
        with largest_of([*model.parameters()]) as largest:
            _, grads = step(ids)
        assert 0 < largest.bytes < 10_000
        torch_backend.assign_grads(model, grads)
        optimizer.step()
    moments = filter(torch.is_tensor, optimizer.state[model.table.weight].values())
    with largest_of([*model.parameters(), *moments]) as largest:
        optimizer.step()
    assert largest.bytes < 10_000


def test_sparse_adam_trains_as_after_a_loop_by_hand():
    model, _ = models()
    by_hand, updates = copy.deepcopy(model), 5
    ours, theirs = (torch.optim.SparseAdam([each.table.weight], lr=0.1) for each in (model, by_hand))
    step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), n=5)
    for update in range(updates):
        ids = (batch() + update) % ROWS
        _, grads = step(ids)
        torch_backend.assign_grads(model, grads)
        ours.step()
        by_hand.zero_grad()
        for part in ids.tensor_split(5):
            (loss_fn(by_hand, part) / 5).backward()
        theirs.step()
    torch.testing.assert_close(model.table.weight, by_hand.table.weight, rtol=1e-12, atol=0)


def test_a_parameter_of_a_function_and_a_result_of_its_own():
    """The result of one call is not written to by the next, and no other gradient has its memory."""
    params = {"w": torch.randn(ROWS, WIDTH, dtype=torch.float64)}
    loss = lambda params, ids: embedding(ids, params["w"], sparse=True).square().sum((1, 2)).mean()
    step = funcga.accumulate(funcga.value_and_grad(loss), n=5)
    first = step(params, batch())[1]["w"]
    before = first.to_dense().clone()
    second = step(params, batch())[1]["w"]
    torch.testing.assert_close(second.to_dense(), before)
    first._values().zero_()
    torch.testing.assert_close(second.to_dense(), before)
    new = torch_backend.apply_updates(params, {"w": -0.1 * second})
    torch.testing.assert_close(new["w"], params["w"] - 0.1 * before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", ["module", "function"])
def test_halves_are_summed_in_float32(dtype, source):
    model, _ = models(dtype=dtype)
    loss = lambda model, ids: (model.table(ids).float() ** 2).sum() / len(ids)
    ids = torch.zeros(1024, 1, dtype=torch.long)
    if source == "module":
        step, args = funcga.accumulate(torch_backend.module_value_and_grad(model, loss), n=1024), (ids,)
    else:
        pure = torch_backend.pure_loss(model, loss)
        step, args = funcga.accumulate(funcga.value_and_grad(pure), n=1024), (torch_backend.trainable(model), ids)
    table = step(*args)[1]["table.weight"]
    assert table.dtype == dtype
    torch.testing.assert_close(table.to_dense()[0], 2 * model.table.weight[0].detach())


def test_a_summary_and_its_loss_may_both_use_the_table():
    """`coupled`: rows from the summary, and a penalty on the whole table from the loss."""
    model, dense = models()
    summary, penalized = lambda m, ids: m(ids), lambda m, s: s.var() + 0.1 * m.table.weight.square().sum()
    step = funcga.coupled(torch_backend.module_value_and_grad(model, summary), penalized, n=3)
    ids = batch()
    for _ in range(2):
        check(step(ids)[1], whole(dense, penalized(dense, dense(ids))), is_sparse=False)
    without = funcga.coupled(torch_backend.module_value_and_grad(model, summary), lambda m, s: s.var(), n=3)
    check(without(ids)[1], whole(dense, dense(ids).var()))


def test_verify_compares_them():
    model, _ = models()
    pure = torch_backend.pure_loss(model, loss_fn)
    assert funcga.verify(funcga.value_and_grad(pure), torch_backend.trainable(model), batch(), n=3).ok


def merged(group):
    model, dense = models()
    ids = batch(12)
    own = ids[:7] if group.rank() == 0 else ids[7:]
    step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), n=3, across=group)
    for _ in range(2):
        check(step(own)[1], whole(dense, loss_fn(dense, ids)), is_sparse=False)
    pure = torch_backend.pure_loss(model, loss_fn)
    gradient = lambda params, ids: funcga.value_and_grad(pure)(params, ids)
    step = funcga.accumulate(gradient, n=3, across=group)
    check(step(torch_backend.trainable(model), own)[1], whole(dense, loss_fn(dense, ids)), is_sparse=False)


def test_replicas_merge_dense_sums():
    processes().run(merged, size=2)
