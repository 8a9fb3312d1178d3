"""`coupled`: losses of the whole batch, from summaries of micro-batches, against the loss as a paper writes it.

At each of four calls of a step: at first, with other values, with another structure, and as at first.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcga
import torch_backend
from tests.core.sources import bounds
from tests.coupled import losses
from tests.kits import JAX, TORCH, difference

LIMIT = 1e-12  # sums of some hundred numbers in float64, in another order
pytestmark = pytest.mark.usefixtures("x64", "as_users_write_it")


CASES = [
    *((TORCH, name, cut) for name in losses.LOSSES for cut in ({"n": 1}, {"n": 3}, {"microbatch_size": 4})),
    *((JAX, name, {"n": 3}) for name in losses.LOSSES),  # each is a program to compile
    (JAX, "InfoNCE", {"n": 1}),
]


@pytest.mark.parametrize(("kit", "name", "cut"), CASES, ids=lambda part: getattr(part, "name", str(part)))
def test_any_cut_gives_the_whole_batch(kit, name, cut):
    calls = [losses.problem(kit, name, rows, seed) for rows, seed in ((11, 0), (11, 1), (12, 2), (11, 0))]
    before, step = kit.leaves(calls), losses.step(kit, name, **cut)
    results = [step(*args) for args in calls]
    for found, args in zip(results, calls, strict=True):
        assert difference(kit, found, losses.expected(kit, name, *args)) <= LIMIT
        if kit is TORCH:
            assert not any(leaf.requires_grad or leaf.grad is not None for leaf in (found[0], *found[1].values()))
    assert difference(kit, results[-1], results[0]) == 0
    for leaf, other in zip(kit.leaves(calls), before, strict=True):
        assert (leaf == other).all()


def test_weighed_summaries_argnums_and_aux(kit):
    """A mean of summaries by their tokens; the derivative by two arguments; and what else the loss returns."""
    summary = lambda w, shift, x: (kit.xp.tanh(x @ w) + shift).mean(0)
    weight = lambda x: (x[:, 0] > -0.5).sum()
    loss = lambda w, shift, mean: ((mean**2).sum() + shift * (w**2).sum(), {"mean": mean})
    step = funcga.coupled(
        summary, loss, 4, fold=funcga.mean(), weight=weight, in_axes=(None, None, 0), argnums=(0, 1), has_aux=True
    )
    for rows, seed in ((11, 0), (11, 1), (12, 2), (11, 0)):
        params, batch = losses.problem(kit, "InfoNCE", rows, seed)
        x, weighed = batch["x"], {"shift": params["bias"], "w": params["w"]}
        (value, aux), grads = step(weighed["w"], weighed["shift"], x)
        cut = [x[a:b] for a, b in bounds({"n": 4}, rows)]

        def whole(of, cut=cut):
            total = sum(weight(part) for part in cut)
            mean = sum(weight(part) * summary(of["w"], of["shift"], part) for part in cut) / total
            return loss(of["w"], of["shift"], mean)[0]

        expected = losses.differentiated(kit, whole, weighed)
        assert difference(kit, (value, {"shift": grads[1], "w": grads[0]}), expected) <= LIMIT
        assert aux["mean"].shape == (losses.WIDTH,)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return F.normalize(self.drop(self.norm(self.tower(x))), dim=-1)


def contrastive(scale, weight, s):
    logits = scale.exp() * s @ s.T
    return F.cross_entropy(logits, torch.arange(len(s))) + 0.3 * weight.square().sum()


@pytest.fixture
def towers():
    torch.manual_seed(0)
    return Towers().double(), torch.randn(11, 5, dtype=torch.float64)


def by_hand(module, x, n):
    """One graph over all micro-batches of a copy without hooks; and the copy, with its statistics as they are then."""
    module = copy.deepcopy(module)
    params = torch_backend.trainable(module)
    torch.manual_seed(9)
    s = torch.cat([module(part) for part in x.tensor_split(n)])
    value = contrastive(module.scale, module.tower.weight, s)
    grads = torch.autograd.grad(value, [*params.values()])
    return (value.detach(), dict(zip(params, grads, strict=True))), dict(module.named_buffers())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("way", ["module", "pure_loss"])
def test_modules_dropout_statistics_and_hooks(towers, way, n):
    """The second pass draws what the first one drew; statistics are written once; hooks see the whole gradient once."""
    module, x = towers
    if way == "module":
        summary = torch_backend.module_value_and_grad(module, lambda module, x: module(x))
        step = funcga.coupled(summary, lambda module, s: contrastive(module.scale, module.tower.weight, s), n)
    else:
        summary = torch_backend.pure_loss(module, lambda module, x: module(x))
        of_params = lambda params, s: contrastive(params["scale"], params["tower.weight"], s)
        by_params = funcga.coupled(summary, of_params, n)
        step = lambda x: by_params(torch_backend.trainable(module), x)
    expected = [by_hand(module, rows, n)[0] for rows in (x, 2 * x, x[:8])]
    for p in module.parameters():
        p.register_hook(lambda grad: 3 * grad)
    for rows, (value, grads) in zip((x, 2 * x, x[:8], x), [*expected, expected[0]], strict=True):
        before = {name: leaf.clone() for name, leaf in module.named_buffers()}
        after = by_hand(module, rows, n)[1]
        torch.manual_seed(9)
        found = step(rows)
        assert difference(TORCH, found, (value, {name: 3 * grad for name, grad in grads.items()})) <= LIMIT
        assert difference(TORCH, dict(module.named_buffers()), after if way == "module" else before) <= LIMIT
        assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in module.parameters())


def test_an_error_of_the_loss_leaves_nothing(towers):
    module, x = towers
    step = funcga.coupled(
        torch_backend.module_value_and_grad(module, lambda module, x: module(x)),
        lambda module, s: (_ for _ in ()).throw(KeyError("mine")), 3,
    )  # fmt: skip
    with pytest.raises(KeyError, match="mine"):
        step(x)
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in module.parameters())


def test_totals_and_fewer_rows_than_micro_batches(kit):
    summary = lambda w, x, *, totals: ((x @ w) ** 2).sum() / totals
    step = funcga.coupled(summary, lambda w, s: s**2, 7, fold=funcga.sum(), totals=len)
    for rows, seed in ((3, 0), (3, 1), (5, 2), (3, 0)):
        params, batch = losses.problem(kit, "InfoNCE", rows, seed)
        x, w = batch["x"], params["w"]
        of_whole = lambda of, x=x: (((x @ of["w"]) ** 2).sum() / len(x)) ** 2
        found = step(w, x)
        assert difference(kit, (found[0], {"w": found[1]}), losses.differentiated(kit, of_whole, {"w": w})) <= LIMIT
