"""The recipes of examples/ against what guides write by hand, where the examples themselves do not print that they are equal."""

import contextlib

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_

import funcga
import torch_backend
from tests.kits import TORCH
from tests.processes import processes
from tests.programs import beside_the_examples, example
from tests.torch_backend.wrapped.test_wrapped import Collectives

with beside_the_examples():
    from sentences import count_tokens, microbatch, summed_loss, window


@pytest.fixture
def double():
    """Modules and data in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


pytestmark = pytest.mark.usefixtures("as_users_write_it")


def apart(left, right):
    """The largest difference."""
    pairs = zip(TORCH.leaves(list(left)), TORCH.leaves(list(right)), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


def weights(module):
    return [p.detach() for p in module.parameters()]


# --- wrapped modules, and metrics of all replicas


def seeded():
    """The module of Accelerate's guide."""
    torch.manual_seed(0)
    return torch.nn.Linear(1, 2, bias=False)


def ddp(module):
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    return wrapped, lambda: module.weight.flatten().tolist()


def by_hand(model, criterion, optimizer, window, items, max_norm):
    """One update of DDP or FSDP: synchronised once, and divided by the tokens of all replicas."""
    for i, (inputs, targets) in enumerate(window):
        last, context = i == len(window) - 1, contextlib.nullcontext()
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        elif not last:
            context = model.no_sync()
        with context:
            loss = criterion(model(inputs), targets) * torch.distributed.get_world_size() / items
            loss.backward()
    clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def replicas(group):
    """By hand and ours: weights after one update, clipped to a norm of 1; and metrics."""
    fsdp, hand, found = example("fsdp_torch"), [], []
    micro = window(group.rank(), 2, n=2, size=4)
    items = sum(count_tokens(*m) for m in micro)
    torch.distributed.all_reduce(items)
    criterion = lambda out, labels: cross_entropy(out.flatten(0, 1), labels.flatten().long(), reduction="sum")
    for wrap in (ddp, fsdp.fsdp1, fsdp.fsdp2):
        model, read = wrap(seeded())
        sgd = torch.optim.SGD(model.parameters(), lr=0.08)
        by_hand(model, criterion, sgd, micro, items, max_norm=1.0)
        hand.append(read())
    trainer = example("ddp_torch").Trainer(seeded(), 1.0)
    trainer.update(micro)
    for wrap in (fsdp.fsdp1, fsdp.fsdp2):
        with Collectives() as counted:
            _, norm, read = fsdp.updated(wrap, max_norm=1.0)
        found.append((norm, read, counted.names.count("_reduce_scatter_base_")))
    model, _ = fsdp.fsdp2(seeded())
    gradient = torch_backend.module_value_and_grad(model, summed_loss)
    _, grads = funcga.stream(gradient, fold=funcga.per_weight(), weight=count_tokens)(micro)
    cut, _ = torch_backend.clip_grad_norm(1.0).update(grads, ())
    whole = cut["weight"].full_tensor().flatten().tolist()
    metrics = example("metrics_torch").train(seeded(), micro + micro[:1], 2, across=group)
    return hand, trainer.module.module.weight.flatten().tolist(), found, whole, metrics


def test_clipping_and_metrics_in_replicas():
    one, two = processes(2).run(replicas)
    assert one[:4] == two[:4]
    start = seeded().weight.flatten().tolist()
    (by_ddp, by_fsdp1, by_fsdp2), with_ddp, found, whole, _ = one
    assert by_ddp == pytest.approx(by_fsdp2, abs=1e-7)
    assert abs(by_fsdp1[0] - by_ddp[0]) == pytest.approx(0.0234, abs=1e-4)  # each rank by the norm of its shard
    assert with_ddp == pytest.approx(by_ddp, abs=1e-7)
    for norm, updated, reductions in found:
        assert norm == pytest.approx(3.875, abs=1e-3)
        assert updated == pytest.approx(by_ddp, abs=1e-7)
        assert reductions == 1
    assert (-0.08 * np.array(whole)).tolist() == pytest.approx(np.subtract(by_ddp, start).tolist(), abs=1e-7)

    micro = [microbatch(4 * i, 4) for i in range(4)]
    updates, epoch = example("metrics_torch").train(seeded(), micro + micro[:2], 4)
    for *_, metrics in (one, two):
        funcga.compare(metrics, (updates, epoch)).assert_close()
    assert [int(u["tokens"]) for u in updates] == [136, 36]
    assert epoch["loss"].item() == pytest.approx(sum(u["loss"] * u["tokens"] for u in updates).item() / 172)


# --- schedules


def scheduled(model, criterion, optimizer, scheduler, loader, steps, epochs, *, after):
    """The learning rate of every update; the scheduler is stepped after each "update" or "epoch"."""
    rates = []
    for _ in range(epochs):
        for i, (inputs, targets) in enumerate(loader):
            loss = criterion(model(inputs), targets) / steps
            loss.backward()
            if (i + 1) % steps == 0 or i + 1 == len(loader):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                optimizer.zero_grad()
                if after == "update":
                    scheduler.step()
        if after == "epoch":
            scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["update", "epoch"])
def test_schedules(double, kind):
    """By hand, and in both ways of the example: one of updates, and one of epochs written as one of updates."""
    ours = example("schedules_torch")
    for name in ("OneCycleLR", "CosineAnnealingLR") if kind == "update" else ("StepLR", "CosineAnnealingLR"):
        by_epoch, by_update = (None, ours.BY_UPDATE[name]) if kind == "update" else ours.BY_EPOCH[name]
        model, loader = ours.made()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = (by_epoch or by_update)(sgd)
        rates = scheduled(model, mse_loss, sgd, scheduler, loader[:8], ours.N, ours.EPOCHS, after=kind)
        expected = weights(model)

        model, _ = ours.made()
        options = {"by_epoch": by_epoch} if by_epoch else {"by_update": by_update}
        if kind == "update":
            assert apart(ours.transformed(model, loader[:8], by_update).values(), expected) <= 1e-13
        assert ours.stepped(model, loader[:8], **options) == rates
        assert apart(weights(model), expected) <= 1e-13


# --- running statistics


def test_the_decay_of_running_statistics(double):
    """Of micro-batches that are alike, n updates with momentum m are one with 1 - (1 - m)**n."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(108, 2)
    )
    ours, n = example("batchnorm_torch"), 4
    x, y = ours.data(6)
    x, y = x.repeat(n, 1, 1, 1), y.repeat(n)
    loop = ours.threaded(module, x, y, n)["1.running_mean"]
    slower = ours.merged(module, x, y, n)["1.running_mean"]
    module[1].momentum = 1 - (1 - module[1].momentum) ** n
    assert apart([ours.merged(module, x, y, n)["1.running_mean"]], [loop]) <= 1e-13
    assert apart([slower], [loop]) > 0.1 * loop.abs().max()


# --- a dynamic scale
