"""A model whose layers are on two devices, as of those who put them there by hand: the numbers of one device."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import funcga
import torch_backend
from tests.processes import processes
from torch_backend import from_optimizer

pytestmark = pytest.mark.cuda

ONE, TWO = ("cpu", "cpu"), ("cuda:0", "cuda:1")


@pytest.fixture(autouse=True, scope="module")
def two_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")


def arguments(devices):
    """Parameters on both devices, and a batch on the first one, some rows of which are masked."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(shape, generator=generator)
    first, second = devices
    params = {
        "a": drawn(3, 4).to(first), "b": drawn(4).to(first), "c": drawn(4, 2).to(second), "d": drawn(2).to(second)
    }  # fmt: skip
    return params, drawn(8, 3).to(first), torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1]).to(first)


def errors(params, x):
    """The error of each row, on the second device."""
    hidden = torch.tanh(x @ params["a"] + params["b"]).to(params["c"].device)
    return (hidden @ params["c"] + params["d"]).square().sum(1)


def summed(params, x, mask):
    of_rows = errors(params, x)
    return (of_rows * mask.to(of_rows.device)).sum()


def averaged(params, x, mask):
    return summed(params, x, mask) / mask.sum().to(params["d"].device)


def share(params, x, mask, *, totals):
    return summed(params, x, mask) / totals["rows"].to(params["d"].device)


def rows(x, mask):
    return mask.sum()


def noisy(params, x, mask):
    return summed(params, x + torch.rand_like(x), mask) + (torch.rand_like(params["d"]) * params["d"]).sum()


def coupled_mean(devices):
    summary = lambda params, x, mask: {"mean": errors(params, x).mean(), "weights": params["a"].sum() * x.mean()}
    loss = lambda params, of: of["mean"] * of["weights"].to(of["mean"].device)
    return funcga.coupled(summary, loss, 4, fold=funcga.mean(), weight=rows)(*arguments(devices))


def accumulator(devices):
    params, _, mask = arguments(devices)
    of = funcga.Accumulator(funcga.mean())
    one, other = of.update(of.init(params), params, mask.sum()), of.update(of.init(params), params, 2 * mask.sum())
    return of.finalize(of.merge(one, other))


class Model(torch.nn.Module):
    def __init__(self, params):
        super().__init__()
        self.of = torch.nn.ParameterDict({name: leaf.clone() for name, leaf in params.items()})

    def forward(self, x, mask):
        return averaged(self.of, x, mask)


def of_module(devices, **options):
    params, *batch = arguments(devices)
    gradient = torch_backend.module_value_and_grad(Model(params), lambda model, x, mask: model(x, mask))
    return funcga.accumulate(gradient, 4, **options)(*batch)


def accumulated(loss, **options):
    return lambda devices: funcga.accumulate(funcga.value_and_grad(loss), 4, **options)(*arguments(devices))


def multi_steps(make):
    def run(devices):
        params, _, mask = arguments(devices)
        tx = make(from_optimizer(torch.optim.AdamW, lr=0.1))
        state = tx.init(params)
        for k in range(4):
            grads = {name: (k + 1) * 0.1 * leaf for name, leaf in params.items()}
            updates, state = tx.update(grads, state, params, weight=(k + 1) * mask.sum())
        return updates

    return run


WEIGHED = {"fold": funcga.per_weight(), "weight": rows}
EXACT = funcga.reproducible
CASES = {
    "per_weight": accumulated(summed, **WEIGHED),
    "totals": accumulated(share, fold=funcga.sum(), totals=lambda x, mask: {"rows": mask.sum()}),
    "drop, a weight": accumulated(averaged, drop="microbatch", weight=rows),
    "noise, drop": accumulated(averaged, observe=funcga.gradient_noise(), drop="microbatch"),
    "max, a module": lambda devices: of_module(devices, fold=(funcga.max(), funcga.mean()), weight=rows),
    "reproducible": accumulated(summed, fold=EXACT(funcga.per_weight()), weight=rows),
    "compiled": lambda devices: accumulated(torch.compile(averaged, backend="aot_eager"), weight=rows)(devices),
    "coupled, a mean": coupled_mean,
    "Accumulator": accumulator,
    "multi_steps, reproducible": multi_steps(lambda tx: funcga.multi_steps(tx, 4, fold=EXACT(funcga.mean()))),
    "scaled multi_steps": multi_steps(lambda tx: funcga.transforms.loss_scaled(funcga.multi_steps(tx, 4))),
    "clip": multi_steps(
        lambda tx: funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(1.0), tx), 4)
    ),
}  # fmt: skip


def close(found, wanted):
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_two_devices_have_the_numbers_of_one(case):
    wanted = CASES[case](ONE)
    for _ in range(2):
        found = CASES[case](TWO)
        close(found, wanted)
    if case in ("per_weight", "drop, a weight", "reproducible", "compiled"):  # gradients are where the parameters are
        of_params = {name: leaf.device for name, leaf in arguments(TWO)[0].items()}
        assert {name: grad.device for name, grad in found[1].items()} == of_params


def test_noise_of_both_devices_is_seeded():
    params, *batch = arguments(TWO)
    step = funcga.accumulate(funcga.value_and_grad(torch_backend.seeded(noisy)), 4)
    keys, found = torch_backend.example_keys(0, torch.arange(8)), []
    for _ in range(2):
        before = torch.cuda.get_rng_state_all()
        found.append(step(params, keys, *batch))
        assert [*map(torch.equal, before, torch.cuda.get_rng_state_all())] == [True, True]
        for device in TWO:
            torch.rand(3, device=device)
    funcga.compare(*found, rtol=0, atol=0).assert_close()


def _merged(group):
    params, *batch = arguments(TWO)
    own = [leaf.chunk(2)[group.rank()] for leaf in batch]
    step = funcga.accumulate(funcga.value_and_grad(summed), 2, across=group, **WEIGHED)
    step(params, *own)
    return tree_map(lambda leaf: leaf.cpu(), step(params, *own))


@pytest.mark.simulated
def test_replicas_on_the_same_two_devices():
    for found in processes(2, "simulated").run(_merged):
        close(found, CASES["per_weight"](ONE))
