"""Numbers are made where the arrays of a call are, wherever torch makes new tensors by default.

The default is the device without data, from which a wrong number would come silently, or on a machine with two devices the
other one. The oracle is the same call without a default.
"""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import funcga
import torch_backend
from tests import simulated
from tests.processes import processes
from torch_backend import from_optimizer

ROWS = 6


def drawn(device):
    """Parameters and a batch; some rows are masked."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator, device="cpu")
    params, mask = {"w": normal(4, 3), "b": normal(3)}, torch.tensor([1.0, 0, 1, 1, 0, 1], device="cpu")
    return tree_map(lambda leaf: leaf.to(device), (params, normal(ROWS, 4), mask))


def errors(params, x):
    return torch.tanh(x @ params["w"] + params["b"]).square().sum(1)


def summed(params, x, mask):
    return (errors(params, x) * mask).sum()


def averaged(params, x, mask):
    return summed(params, x, mask) / mask.sum()


def share(params, x, mask, *, totals):
    return summed(params, x, mask) / totals["rows"]


def rows(x, mask):
    return mask.sum()


class Model(nn.Module):
    def __init__(self, params, norm):
        super().__init__()
        self.of = nn.ParameterDict({name: leaf.clone() for name, leaf in params.items()})
        self.norm = nn.BatchNorm1d(4, device=params["w"].device) if norm else nn.Identity()

    def forward(self, x, mask):
        return averaged(self.of, self.norm(x), mask)


def model(device, norm=False):
    params, *batch = drawn(device)
    with torch.device(device):
        return Model(params, norm), batch


def accumulated(loss=averaged, made=funcga.value_and_grad, **options):
    return lambda device: funcga.accumulate(made(loss), 3, **options)(*drawn(device))


def streamed(device, **options):
    params, *batch = drawn(device)
    return funcga.stream(funcga.value_and_grad(averaged), **options)(
        params, [*zip(*[leaf.split(2) for leaf in batch], strict=True)]
    )


def windows(device):
    _, *batch = drawn(device)
    cut = [*zip(*[leaf.split(1) for leaf in batch], strict=True)]
    return [*funcga.windows(cut, funcga.transforms.TargetWeight(2.0), weight=rows)]


def of_numbers(device):
    """The gradient with respect to a Python number and a tensor of inference mode, which are copied."""
    with torch.inference_mode():
        params, x, mask = drawn(device)
    loss = lambda params, x, mask: averaged(params[0], x, mask) * params[1]
    return funcga.accumulate(funcga.grad(loss), 3, in_axes=(None, 0, 0))((params, 2.0), x.clone(), mask)


def folded(fold, weight=2.5):
    def run(device):
        params, _, mask = drawn(device)
        of = funcga.Accumulator(fold)
        one, other = of.update(of.init(params), params, weight), of.update(of.init(params), params, mask.sum())
        return of.finalize(of.merge(one, other)), one

    return run


def updated(make, n=2, by_hand=False, weight=None):
    def run(device):
        params, _, mask = drawn(device)
        tx = make(from_optimizer(torch.optim.AdamW, lr=0.1))
        state = tx.init(params)
        for k in range(4):
            grads = {name: (k + 1) * 0.1 * leaf for name, leaf in params.items()}
            given = mask.sum() if weight is None else weight
            if by_hand:
                state = tx.accumulate(grads, state, weight=given)
                params, state = (params, state) if k % 2 else tx.flush(state, params)
            else:
                params, state = funcga.transforms.apply(tx, grads, state, params, weight=given)
        merged = tx.merge([state]) if isinstance(tx, funcga.transforms.MultiSteps) else state
        return params, state, merged

    return run


def stepped(make, optimizer=torch.optim.AdamW, **options):
    def run(device):
        params, *_ = drawn(device)
        tx = make(from_optimizer(optimizer, **options))
        state = tx.init(params)
        for _ in range(2):
            params, state = funcga.transforms.apply(tx, params, state, params)
        return params, state

    return run


def scheduled(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def of_module(norm=False, made=torch_backend.module_value_and_grad, **options):
    def run(device):
        net, batch = model(device, norm)
        return funcga.accumulate(made(net, lambda net, *batch: net(*batch)), 3, **options)(*batch)

    return run


def pure(device):
    net, batch = model(device)
    loss = torch_backend.pure_loss(net, lambda net, *batch: net(*batch))
    return funcga.accumulate(funcga.value_and_grad(loss), 3)(torch_backend.trainable(net), *batch)


def coupled(fold, loss, summary=errors, **options):
    def run(device):
        params, x, mask = drawn(device)
        of = lambda params, x, mask: summary(params, x)
        return funcga.coupled(of, loss, 3, fold=fold, **options)(params, x, mask)

    return run


def coupled_of_module(device):
    net, (x, mask) = model(device, norm=True)
    gradient = torch_backend.module_value_and_grad(net, lambda net, x, mask: errors(net.of, net.norm(x)))
    return funcga.coupled(gradient, lambda net, of: of.std(), 3)(x, mask)


def planned(device):
    return funcga.plan(funcga.value_and_grad(averaged), *drawn(device)).peak_bytes


def planned_module(device):
    net, batch = model(device)
    gradient = torch_backend.module_value_and_grad(net, lambda net, *batch: net(*batch))
    return funcga.plan(gradient, *batch).peak_bytes


def verified(loss, **options):
    return lambda device: str(funcga.verify(funcga.value_and_grad(loss), *drawn(device), n=3, **options))


def watched(device):
    net, batch = model(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with funcga.watch(net, optimizer) as watch:
        for part in zip(*[leaf.split(2) for leaf in batch], strict=True):
            (net(*part) / 3).backward()
        optimizer.step()
    return str(watch)


def compared(device):
    params, *_ = drawn(device)
    return str(funcga.compare(params, {name: leaf * 1.5 for name, leaf in params.items()}))


def seeded(device):
    noisy = lambda params, x, mask: averaged(params, x + torch.rand_like(x), mask)
    params, *batch = drawn(device)
    step = funcga.accumulate(funcga.value_and_grad(torch_backend.seeded(noisy)), 3)
    return step(params, torch_backend.example_keys(0, torch.arange(ROWS, device="cpu")), *batch)


def collected(params, x, mask):
    return {"rows": errors(params, x), "max": errors(params, x).amax()}


EXACT, MULTI = funcga.reproducible, funcga.multi_steps
WEIGHED = {"fold": funcga.per_weight(), "weight": rows}
DOORS = {
    "accumulate": accumulated(),
    "accumulate, a weight": accumulated(summed, **WEIGHED),
    "accumulate, reproducible": accumulated(summed, fold=EXACT(funcga.per_weight()), weight=rows),
    "accumulate, totals": accumulated(
        share, fold=funcga.sum(), totals=lambda x, mask: {"rows": mask.sum(), "one": 1}
    ),
    "accumulate, observe": accumulated(observe=(funcga.gradient_noise(), funcga.gradient_norms(), funcga.dropped())),
    "accumulate, drop": accumulated(drop="microbatch", weight=rows),
    "accumulate, drop the window": accumulated(drop="window"),
    "accumulate, drop_if": accumulated(drop="microbatch", drop_if=lambda output: output[0] > 5),
    "accumulate, any function": accumulated(
        collected, lambda function: function, fold={"rows": funcga.concat(), "max": funcga.max()}
    ),
    "accumulate, any function, drop": accumulated(
        collected, lambda function: function, fold={"rows": funcga.sum(), "max": funcga.max()}, drop="microbatch"
    ),
    "stream": streamed,
    "stream, noise": lambda device: streamed(device, observe=funcga.gradient_noise(), drop="microbatch"),
    "windows": windows,
    "grad": lambda device: funcga.grad(averaged)(*drawn(device)),
    "grad, copied leaves": of_numbers,
    "value_and_grad": lambda device: funcga.value_and_grad(averaged)(*drawn(device)),
    "Accumulator": folded(funcga.mean()),
    "Accumulator, carry": folded(funcga.carry()),
    "Accumulator, moments": folded(funcga.moments()),
    "Accumulator, logsumexp": folded(funcga.logsumexp()),
    "Accumulator, max": folded(funcga.max()),
    "Accumulator, concat": folded(funcga.concat()),
    "Accumulator, reproducible": folded(EXACT(funcga.mean())),
    "multi_steps": updated(lambda tx: MULTI(tx, 2)),
    "multi_steps, host weights": updated(lambda tx: MULTI(tx, 2), weight=0.5),
    "multi_steps, halves": updated(lambda tx: MULTI(tx, 2), by_hand=True),
    "multi_steps, drop": updated(lambda tx: MULTI(tx, 2, drop="microbatch")),
    "multi_steps, drop the window": updated(lambda tx: MULTI(tx, 2, drop="window")),
    "multi_steps, observe": updated(lambda tx: MULTI(tx, 2, observe=funcga.gradient_noise())),
    "multi_steps, a target": updated(lambda tx: MULTI(tx, funcga.transforms.TargetWeight(7.0))),
    "multi_steps, a schedule": updated(lambda tx: MULTI(tx, lambda updates: updates + 1)),
    "multi_steps, reproducible": updated(lambda tx: MULTI(tx, 2, fold=EXACT(funcga.mean()))),
    "multi_steps, donate": updated(lambda tx: MULTI(tx, 2, donate=True), weight=3),
    "loss_scaled": updated(lambda tx: funcga.transforms.loss_scaled(MULTI(tx, 2))),
    "chain": stepped(lambda tx: torch_backend.chain(torch_backend.clip_grad_norm(1.0), tx)),
    "from_optimizer, SGD": stepped(lambda tx: tx, torch.optim.SGD, lr=0.1, momentum=0.9),
    "from_optimizer, fused": stepped(lambda tx: tx, fused=True),
    "module_value_and_grad": of_module(),
    "module_value_and_grad, statistics": of_module(norm=True),
    "module_value_and_grad, per_weight": of_module(**WEIGHED),
    "pure_loss": pure,
    "coupled, concat": coupled(funcga.concat(), lambda params, of: of.std() * params["b"].sum()),
    "coupled, mean": coupled(
        funcga.mean(), lambda params, of: of.log(), lambda params, x: errors(params, x).mean(), weight=rows
    ),
    "coupled, totals": coupled(
        funcga.sum(), lambda params, of: of.log(), lambda params, x: errors(params, x).sum(),
    ),
    "coupled, a module": coupled_of_module,
    "plan": planned,
    "plan, a module": planned_module,
    "verify": verified(averaged),
    "verify, a weight": verified(averaged, weight=rows),
    "verify, a fold": verified(summed, **WEIGHED),
    "watch": watched,
    "compare": compared,
    "seeded": seeded,
}  # fmt: skip


def assert_same(found, wanted):
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            assert one.device == other.device
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


@pytest.mark.parametrize("door", DOORS)
def test_where_new_tensors_lie_by_default_makes_no_difference(door):
    wanted = DOORS[door]("cpu")
    with torch.device("meta"):
        found = DOORS[door]("cpu")
    assert_same(found, wanted)


@pytest.mark.cuda
@pytest.mark.parametrize("door", DOORS)
def test_the_default_may_be_another_device(door):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    wanted = DOORS[door]("cuda:0")
    with torch.device("cuda:1"):
        found = DOORS[door]("cuda:0")
    assert_same(found, wanted)


@pytest.mark.simulated
@pytest.mark.parametrize("door", DOORS)
def test_a_device_by_default_is_waited_for_no_more_often(door):
    counts = []
    DOORS[door]("cuda:0")
    for default in ("cpu", "cuda:0"):
        with torch.device(default), simulated.Events() as events:
            DOORS[door]("cuda:0")
        counts.append((events.waits, events.copied.total()))
    assert counts[0] == counts[1]


def over_replicas(group, default):
    """Windows of all kinds, of both replicas: sums, numbers, rows and states travel."""
    with torch.device(default):
        params, x, mask = drawn("cpu")
        own = [leaf[: 2 * ROWS // 3] if group.rank() == 0 else leaf[2 * ROWS // 3 :] for leaf in (x, mask)]
        gradient = funcga.value_and_grad(averaged)
        found = [
            funcga.accumulate(gradient, 2, weight=rows, across=group)(params, *own),
            funcga.accumulate(gradient, 2, across=group, observe=funcga.gradient_noise(), drop="microbatch")(
                params, *own
            ),
            funcga.accumulate(
                lambda params, x, mask: {"rows": errors(params, x), "count": len(x)},
                2,
                fold={"rows": funcga.concat(), "count": funcga.sum()},
                across=group,
            )(params, *own),
            funcga.coupled(lambda params, x: errors(params, x), lambda params, of: of.std(), 2, across=group)(
                params, own[0]
            ),
            of_replica(group),
        ]
        for options in ({}, {"drop": "microbatch"}):
            tx = funcga.multi_steps(from_optimizer(torch.optim.SGD, lr=0.1), 2, across=group, **options)
            state = tx.init(params)
            for _ in range(2):
                updates, state = tx.update(params, state, params, weight=1 + group.rank())
            found += [updates, state]
        return found


def of_replica(group):
    net, batch = model("cpu")
    wrapped = nn.parallel.DistributedDataParallel(net, process_group=group)
    gradient = torch_backend.module_value_and_grad(wrapped, lambda net, *batch: net(*batch))
    return funcga.accumulate(gradient, 2, weight=rows)(*batch)


def test_replicas_make_their_numbers_on_the_host():
    wanted, found = (processes().run(over_replicas, default, size=2) for default in ("cpu", "meta"))
    assert_same(found, wanted)
