"""The recipes of examples/ against what guides write by hand: equal where that is right, and by how much it is wrong."""

import copy
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

import funcga
import torch_backend
from benchmarks.torch_measure import Watch
from tests import handwritten
from tests.kits import TORCH
from tests.processes import processes
from tests.programs import beside_the_examples, example
from tests.torch_backend.wrapped.test_wrapped import Collectives

with beside_the_examples():
    from sentences import count_tokens, microbatch, summed_loss, window


@pytest.fixture
def double():
    """Modules and data in float64, in both frameworks."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def users_promotion():
    """Examples are written for JAX as it comes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def apart(left, right):
    """The largest difference."""
    pairs = zip(TORCH.leaves(list(left)), TORCH.leaves(list(right)), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


def tokenwise(reduction):
    """A criterion on the outputs for a padded micro-batch, and its labels."""
    return lambda out, labels: cross_entropy(out.flatten(0, 1), labels.flatten().long(), reduction=reduction)


def weights(module):
    return [p.detach() for p in module.parameters()]


# --- one device, and the end of the loader


def test_the_basic_loop(double):
    ours, theirs = example("basic_torch"), example("basic_torch").started()
    x, y = ours.data.tensors
    loader = list(zip(x.split(2), y.split(2), strict=True))
    handwritten.every_few(theirs, mse_loss, torch.optim.SGD(theirs.parameters(), lr=0.02), loader, 4)
    assert theirs.weight.item() == pytest.approx(2.04, abs=1e-13)
    assert ours.train(ours.started(), loader, 4).weight.item() == pytest.approx(2.04, abs=1e-13)
    jaxs = example("basic_jax")
    assert jaxs.weights(jaxs.split(jaxs.x, 2), 4)[-1] == pytest.approx(2.04, abs=1e-13)


def test_micro_batches_of_different_sizes(double):
    ours, theirs = example("basic_torch"), example("basic_torch").started()
    x, y = ours.data.tensors
    loader = list(zip(x.split(3), y.split(3), strict=True))
    assert ours.train(ours.started(), loader, 3).weight.item() == pytest.approx(2.04, abs=1e-13)
    handwritten.every_few(theirs, mse_loss, torch.optim.SGD(theirs.parameters(), lr=0.02), loader, 3)
    assert theirs.weight.item() == pytest.approx(2.3156, abs=1e-4)


def whole_windows(model, x, y, rows):
    """The gradients of each window, of so many rows, at once."""
    return [
        torch.autograd.grad(mse_loss(model(a), b), model.parameters())
        for a, b in zip(x.split(rows), y.split(rows), strict=True)
    ]


@pytest.mark.parametrize(("rows", "factor"), [(20, 0.5), (19, None)])
def test_the_end_of_the_loader(double, rows, factor):
    remainder = example("remainder_torch")
    model, x, y, loader = remainder.made(rows)
    *full, last = whole_windows(model, x, y, 8)

    *found, ours = remainder.gradients(model, loader, 4)  # an iterator: it has no length
    assert apart([*found, ours], [dict(enumerate(g)) for g in (*full, last)]) <= 1e-13

    hand, loader = handwritten.Recorded(model), list(zip(x.split(2), y.split(2), strict=True))
    handwritten.to_the_end(model, mse_loss, hand, loader, 4)
    assert apart(hand.gradients[:-1], full) <= 1e-13
    wrong = torch.cat([(a / b).flatten() for a, b in zip(hand.gradients[-1], last, strict=True)])
    if factor:
        assert torch.allclose(wrong, torch.full_like(wrong, factor), rtol=1e-12)
    else:
        assert (wrong - 1).abs().min() > 0.1


def test_a_count_that_goes_on_in_the_next_epoch(double):
    remainder = example("remainder_torch")
    model, x, y, _ = remainder.made(20)
    hand, loader = handwritten.Recorded(model), list(zip(x.split(2), y.split(2), strict=True))
    accumulator = handwritten.GradientAccumulator(model, mse_loss, hand, 4)
    for _ in range(2):
        accumulator.train_epoch(loader)
    ours = [[*grads.values()] for _ in range(2) for grads in remainder.gradients(model, loader, 4)]
    assert len(hand.gradients) == len(ours) == 6
    for found, expected in zip(ours, 2 * whole_windows(model, x, y, 8), strict=True):
        assert apart(found, expected) <= 1e-13
    first = [grad / 2 for grad in whole_windows(model, x[:4], y[:4], 4)[0]]  # half of two micro-batches
    assert apart(hand.gradients[3], first) <= 1e-13
    assert apart(hand.gradients[4], whole_windows(model, x[4:12], y[4:12], 8)[0]) <= 1e-13
    assert min(apart(a, b) for a, b in zip(hand.gradients[3:], ours[3:], strict=True)) > 0.1


def test_a_window_that_goes_on_in_the_next_epoch(double):
    remainder = example("remainder_torch")
    model, x, y, _ = remainder.made(20)
    loader = list(zip(x.split(2), y.split(2), strict=True))
    params, updates = remainder.over_epochs(model, loader, 4, epochs=2)
    handwritten.every_few(model, mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), loader, 4, epochs=2)
    assert updates == 5
    assert apart(params.values(), weights(model)) <= 1e-13


def test_the_end_of_the_loader_in_jax(double):
    basic = example("basic_jax")
    loader = basic.split(jnp.linspace(0.0, 5.0, 22), 2)
    *_, before, after = basic.weights(loader, 4)
    rows = [np.concatenate(parts) for parts in zip(*loader[8:], strict=True)]
    gradient = jax.jit(jax.grad(basic.loss_fn))
    exact = -0.02 * gradient(before, *rows)
    assert abs(after - before - exact) <= 1e-13
    hand = -0.02 * sum(gradient(before, *micro) / 4 for micro in loader[8:])
    assert abs(hand - 0.75 * exact) <= 1e-13


# --- samples of different lengths

RIGHT, NAIVE = [0.0953, 0.4337], [0.0775, 0.4514]


def seeded(dtype=torch.float64):
    """The module of Accelerate's guide: made in float32, as that is where its figures come from."""
    torch.manual_seed(0)
    return torch.nn.Linear(1, 2, bias=False, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_sentences_of_different_lengths(size):
    ours, model = example("variable_length_torch"), seeded(torch.float32)
    loader = [microbatch(i, min(size, 8 - i)) for i in range(0, 8, size)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.08)
    handwritten.fetched_ahead(model, tokenwise("sum"), sgd, loader, len(loader))
    assert model.weight.flatten().tolist() == pytest.approx(RIGHT, abs=6e-5)
    for loss, how in ((summed_loss, {"fold": funcga.per_weight()}), (ours.mean_loss, {})):
        found = ours.trained(iter(loader), loss, weight=count_tokens, **how)
        assert apart([found], [model.weight.flatten()]) <= 1e-7


def test_the_average_of_means_is_another_one():
    ours, model = example("variable_length_torch"), seeded(torch.float32)
    loader = list(ours.one_by_one(4))
    handwritten.every_few(model, tokenwise("mean"), torch.optim.SGD(model.parameters(), lr=0.08), loader, 2)
    assert model.weight.flatten().tolist() == pytest.approx(NAIVE, abs=6e-5)
    found = ours.trained(loader, ours.mean_loss, weight=count_tokens)
    assert apart([found], [model.weight.flatten()]) == pytest.approx(0.0178, abs=1e-4)


def one_at_a_time():
    for first in range(0, 8, 2):
        tokens, labels = microbatch(first, 2)
        there = weakref.ref(tokens)
        yield tokens, labels
        del tokens, labels
        assert there() is None


@pytest.mark.parametrize("by_sum", [True, False])
def test_nothing_is_fetched_ahead(by_sum):
    ours, model = example("variable_length_torch"), seeded(torch.float32)
    loss, how = (summed_loss, {"fold": funcga.per_weight()}) if by_sum else (ours.mean_loss, {})
    found = ours.trained(one_at_a_time(), loss, weight=count_tokens, **how)
    assert found.tolist() == pytest.approx(RIGHT, abs=6e-5)

    loader, sgd = list(ours.one_by_one(2)), torch.optim.SGD(model.parameters(), lr=0.08)
    handwritten.fetched_ahead(model, tokenwise("sum"), sgd, loader, 2)
    found = ours.trained(one_at_a_time(), loss, updates=2, n=2, weight=count_tokens, **how)
    assert apart([found], [model.weight.flatten()]) <= 1e-6


def test_windows_are_lists():
    """Which hold the inputs of all their micro-batches."""
    with pytest.raises(AssertionError):
        list(funcga.windows(one_at_a_time(), 2))


@pytest.mark.parametrize("n", [2, 8])
def test_sentences_in_jax(n):
    ours = example("variable_length_jax")
    by_sum = ours.trained(ours.summed_loss, n, fold=funcga.per_weight(), weight=ours.count_tokens)
    by_mean = ours.trained(ours.mean_loss, n, weight=ours.count_tokens)
    assert by_sum.tolist() == pytest.approx(RIGHT, abs=6e-5)
    assert by_mean.tolist() == pytest.approx(RIGHT, abs=6e-5)
    naive = ours.trained(ours.mean_loss, n, weight=lambda *_: 1)
    assert float(abs(naive - by_sum).max()) == pytest.approx({2: 0.0178, 8: 0.0286}[n], abs=1e-4)


# --- wrapped modules, and metrics of all replicas


def ddp(module):
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    return wrapped, lambda: module.weight.flatten().tolist()


def replicas(group):
    """Weights: by hand averaged, and with the tokens of all; and driven by funcga. Rows of two updates, and metrics."""
    rank, micro = torch.distributed.get_rank(), window(torch.distributed.get_rank(), 2, n=2, size=4)
    items = sum(count_tokens(*m) for m in micro)
    torch.distributed.all_reduce(items)
    fsdp, naive, right = example("fsdp_torch"), [], []
    for wrap in (ddp, fsdp.fsdp1, fsdp.fsdp2):
        for found, criterion, total in ((naive, tokenwise("mean"), None), (right, tokenwise("sum"), items)):
            model, read = wrap(seeded(torch.float32))
            sgd = torch.optim.SGD(model.parameters(), lr=0.08)
            handwritten.in_replicas(model, criterion, sgd, micro, total)
            found.append(read())
    trainer = example("ddp_torch").Trainer(seeded(torch.float32), 10.0)
    rows = [trainer.update(micro)[1]]
    ours = [trainer.module.module.weight.flatten().tolist(), *(fsdp.updated(w)[2] for w in (fsdp.fsdp1, fsdp.fsdp2))]
    rows.append(trainer.update([microbatch(16, 4), microbatch(20, 1)] if rank == 0 else [microbatch(21, 2)])[1])
    metrics = example("metrics_torch").train(seeded(torch.float32), micro + micro[:1], 2, across=group)
    return naive, right, ours, rows, metrics


def test_replicas():
    one, two = processes(2).run(replicas)
    assert one[:4] == two[:4]
    naive, right, ours, rows, _ = one
    for wrapped in range(3):
        assert right[wrapped] == pytest.approx([0.2117, 0.3172], abs=6e-5)
        assert ours[wrapped] == pytest.approx(right[wrapped], abs=1e-7)
        assert abs(naive[wrapped][0] - right[wrapped][0]) == pytest.approx(0.0495, abs=1e-4)
    assert rows == [16, 7]  # by hand both are 2 replicas x 2 micro-batches x 4 rows
    alone = example("metrics_torch")
    window = [microbatch(4 * i, 4) for i in range(4)]
    updates, epoch = alone.train(seeded(torch.float32), window + window[:2], 4)
    for found in (one[4], two[4]):
        funcga.compare(found, (updates, epoch)).assert_close()
    assert [int(u["tokens"]) for u in updates] == [136, 36]


def clipped(group):
    """Weights after an update that is clipped to a norm of 1: by hand, and ours with norms and the reductions."""
    fsdp, hand, found = example("fsdp_torch"), [], []
    micro = window(group.rank(), 2, n=2, size=4)
    items = sum(count_tokens(*m) for m in micro)
    torch.distributed.all_reduce(items)
    for wrap in (ddp, fsdp.fsdp1, fsdp.fsdp2):
        model, read = wrap(seeded(torch.float32))
        sgd = torch.optim.SGD(model.parameters(), lr=0.08)
        handwritten.in_replicas(model, tokenwise("sum"), sgd, micro, items, max_norm=1.0)
        hand.append(read())
    trainer = example("ddp_torch").Trainer(seeded(torch.float32), 1.0)
    trainer.update(micro)
    for wrap in (fsdp.fsdp1, fsdp.fsdp2):
        with Collectives() as counted:
            _, norm, read = fsdp.updated(wrap, max_norm=1.0)
        found.append((norm, read, counted.names.count("_reduce_scatter_base_")))
    model, _ = fsdp.fsdp2(seeded(torch.float32))
    gradient = torch_backend.module_value_and_grad(model, summed_loss)
    _, grads = funcga.stream(gradient, fold=funcga.per_weight(), weight=count_tokens)(micro)
    cut, _ = torch_backend.clip_grad_norm(1.0).update(grads, ())
    whole = cut["weight"].full_tensor().flatten().tolist()
    return hand, trainer.module.module.weight.flatten().tolist(), found, whole


def test_clipping_in_replicas():
    one, two = processes(2).run(clipped)
    assert one == two
    start = seeded(torch.float32).weight.flatten().tolist()
    (by_ddp, by_fsdp1, by_fsdp2), with_ddp, found, whole = one
    assert by_ddp == pytest.approx(by_fsdp2, abs=1e-7)
    assert abs(by_fsdp1[0] - by_ddp[0]) == pytest.approx(0.0234, abs=1e-4)  # each rank by the norm of its shard
    assert with_ddp == pytest.approx(by_ddp, abs=1e-7)
    for norm, weights, reductions in found:
        assert norm == pytest.approx(3.875, abs=1e-3)
        assert weights == pytest.approx(by_ddp, abs=1e-7)
        assert reductions == 1
    assert (-0.08 * np.array(whole)).tolist() == pytest.approx(np.subtract(by_ddp, start).tolist(), abs=1e-7)


# --- what is done to the gradient of a window


def test_clipping_after_accumulation(double):
    ours, ends = example("clipping_torch"), []
    start, x, y = ours.made()
    loader = list(zip(x.split(2), y.split(2), strict=True))
    for each in (False, True):
        model = copy.deepcopy(start)
        sgd = torch.optim.SGD(model.parameters(), lr=ours.LR)
        norms = handwritten.clipped(model, mse_loss, sgd, loader, 4, ours.MAX_NORM, each=each)
        ends.append((weights(model), norms))
    (right, norms), (wrong, _) = ends
    model = copy.deepcopy(start)
    assert ours.stepped(model, loader, 4) == pytest.approx(norms, abs=1e-13)
    assert min(norms) > ours.MAX_NORM
    assert apart(weights(model), right) <= 1e-13
    assert apart(ours.transformed(start, loader, 4).values(), right) <= 1e-13
    assert apart(wrong, right) == pytest.approx(0.0090, abs=1e-4)


def test_clipping_and_schedule_in_jax(double):
    ours = example("clip_and_schedule_jax")
    tx = optax.chain(ours.clip, ours.sgd)
    expected = ours.whole(tx)
    found, state = ours.trained(funcga.multi_steps(tx, ours.N))
    assert abs(found - expected).max() <= 1e-13
    assert state.updates == 9

    @jax.jit
    def update(params, state, window):
        grads = [ours.clip.update(jax.grad(ours.loss_fn)(params, *micro), ())[0] for micro in window]
        updates, state = tx.update(sum(grads) / len(grads), state)
        return optax.apply_updates(params, updates), state

    params, state = ours.start, tx.init(ours.start)
    for _ in range(ours.EPOCHS):
        for first in range(0, 20, 2 * ours.N):
            rows = [slice(i, i + 2) for i in range(first, min(first + 2 * ours.N, 20), 2)]
            params, state = update(params, state, [(ours.x[r], ours.y[r]) for r in rows])
    assert float(abs(params - expected).max()) == pytest.approx(0.5151, abs=1e-4)


def by_hand(schedules, make, epochs, after, loader=slice(8)):
    model, whole = schedules.made()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(sgd)
    rates = handwritten.scheduled(model, mse_loss, sgd, scheduler, whole[loader], schedules.N, epochs, after=after)
    return rates, weights(model)


@pytest.mark.parametrize("name", ["OneCycleLR", "CosineAnnealingLR"])
def test_a_schedule_of_updates(double, name):
    schedules = example("schedules_torch")
    make, (model, loader) = schedules.BY_UPDATE[name], schedules.made()
    rates, expected = by_hand(schedules, make, schedules.EPOCHS, after="update")
    params = schedules.transformed(model, loader[:8], make)
    assert schedules.stepped(model, loader[:8], by_update=make) == rates
    assert apart(weights(model), expected) <= 1e-13
    assert apart(params.values(), expected) <= 1e-13


def test_a_schedule_of_micro_batches(double):
    schedules = example("schedules_torch")
    cosine, one_cycle = schedules.BY_UPDATE["CosineAnnealingLR"], schedules.BY_UPDATE["OneCycleLR"]
    right, _ = by_hand(schedules, cosine, 2, after="update")
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before"):  # which torch sees itself
        wrong, _ = by_hand(schedules, cosine, 2, after="microbatch")
    assert right == pytest.approx([0.1, 0.0983, 0.0933, 0.0854], abs=1e-4)
    assert wrong == pytest.approx([0.0854, 0.0371, 0.0017, 0.0146], abs=1e-4)  # through after 3 of 12 updates
    with pytest.raises(ValueError, match="Tried to step 13 times"), pytest.warns(UserWarning, match="before"):
        by_hand(schedules, one_cycle, 2, after="microbatch")


def test_a_schedule_for_too_few_updates(double):
    schedules = example("schedules_torch")
    planned = schedules.EPOCHS * (schedules.MICROBATCHES // schedules.N)  # 8, of 12
    cosine = partial(schedules.BY_UPDATE["CosineAnnealingLR"], T_max=planned)
    rates, _ = by_hand(schedules, cosine, schedules.EPOCHS, "update", loader=slice(10))
    assert rates[8] == pytest.approx(0, abs=1e-9)
    assert rates[11] > 0.03  # it goes up again
    one_cycle = partial(schedules.BY_UPDATE["OneCycleLR"], total_steps=planned)
    with pytest.raises(ValueError, match="Tried to step 9 times"):
        by_hand(schedules, one_cycle, schedules.EPOCHS, "update", loader=slice(10))
    model, loader = schedules.made()
    rates = schedules.stepped(model, loader, by_update=schedules.BY_UPDATE["CosineAnnealingLR"])
    assert len(rates) == 12
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR"])
def test_a_schedule_of_epochs(double, name):
    schedules = example("schedules_torch")
    by_epoch, by_update = schedules.BY_EPOCH[name]
    model, loader = schedules.made()
    params = schedules.transformed(model, loader, by_update)
    rates = schedules.stepped(model, loader, by_epoch=by_epoch)
    cosine = [0.1 * (1 + np.cos(np.pi * epoch / 4)) / 2 for epoch in range(4)]
    expected = {"StepLR": [0.1, 0.05, 0.025, 0.0125], "CosineAnnealingLR": cosine}[name]
    assert rates == pytest.approx(np.repeat(expected, 3).tolist(), rel=1e-13)
    assert rates == by_hand(schedules, by_epoch, schedules.EPOCHS, "epoch", loader=slice(10))[0]
    assert apart(params.values(), weights(model)) <= 1e-13


# --- memory


@pytest.fixture
def quick(monkeypatch):
    """A search that collects no garbage, of which the other tests have made much."""
    monkeypatch.setattr("funcga._accumulate.gc.collect", lambda: 0)


def test_memory_that_runs_out_in_the_middle(double, quick):
    adaptive = example("adaptive_torch")
    model, x, y = adaptive.made(48)
    whole = torch.autograd.grad(mse_loss(model(x), y), model.parameters())
    memory = adaptive.Memory(48)
    loss_fn = torch_backend.pure_loss(model, memory.loss)
    step = funcga.accumulate(funcga.grad(loss_fn), n="auto")
    for room in (48, 12, 5):
        memory.rows = room
        assert apart(step(dict(model.named_parameters()), x, y).values(), whole) <= 1e-13


def test_memory_that_runs_out_by_hand(double):
    adaptive = example("adaptive_torch")
    model, x, y = adaptive.made(48)
    hand, memory, seen = handwritten.Recorded(model), adaptive.Memory(48), []

    def criterion(model, inputs, targets):
        seen.append(len(inputs))
        memory.rows = 5 if len(seen) in (1, 6) else 8
        return memory.loss(model, inputs, targets)

    handwritten.adaptive(model, criterion, hand, list(zip(x.split(8), y.split(8), strict=True)))
    single, twice = hand.gradients  # of six batches: 0 and 5 did not fit, and 4 is lost with 5
    of = lambda rows: torch.autograd.grad(mse_loss(model(x[rows]), y[rows]), model.parameters())
    assert apart(single, of(slice(8, 16))) <= 1e-13
    assert apart(twice, [2 * grad for grad in of(slice(16, 32))]) <= 1e-13


def test_a_batch_size_that_is_wanted(double):
    adaptive = example("adaptive_torch")
    model, x, y = adaptive.made(160)
    params, sizes = adaptive.target_batches(model, zip(x.split(24), y.split(24), strict=True), rows=64)
    assert sizes == [72, 72, 16]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
        sgd.zero_grad()
        mse_loss(model(a), b).backward()
        sgd.step()
    assert apart(params.values(), weights(model)) <= 1e-13
    hand = funcga.windows(x.split(24), handwritten.accumulation_steps(64, 24))
    assert [sum(map(len, window)) for window in hand] == [48, 48, 48, 16]


def test_memory_in_jax(double, quick):
    adaptive, sizes = example("adaptive_jax"), []
    gradient = jax.jit(jax.grad(adaptive.loss_fn))
    step = funcga.accumulate(jax.grad(adaptive.with_room_for(20, sizes)), n="auto")
    found = step(adaptive.start, adaptive.x, adaptive.y)
    assert abs(found - gradient(adaptive.start, adaptive.x, adaptive.y)).max() <= 1e-13
    assert max(sizes) == 16

    loader = [(adaptive.x[i : i + 10], adaptive.y[i : i + 10]) for i in range(0, 50, 10)]
    w, updates = adaptive.target_batches(loader, 24)
    expected = adaptive.start
    for rows in (slice(0, 30), slice(30, 50)):
        expected = expected - 0.1 * gradient(expected, adaptive.x[rows], adaptive.y[rows])
    assert updates == 2
    assert abs(w - expected).max() <= 1e-13


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_checkpoints(double, kind, monkeypatch):
    ours, kinds = example("checkpointing_torch"), []
    original = ours.checkpoint
    monkeypatch.setattr(ours, "checkpoint", lambda *args, **how: kinds.append(how) or original(*args, **how))
    peaks = []
    for which, n in (("no", 1), ("no", 8), (kind, 8)):
        with Watch() as outside:
            grads, kept = ours.gradients(which, n)
        peaks.append(kept)
        assert kept < outside.bytes < kept + 600_000  # which counts the module and the batch as well
        if n == 1:
            whole = grads
    assert len(kinds) >= 6 * 8
    assert apart(grads.values(), whole.values()) <= 1e-13
    assert {how["use_reentrant"] for how in kinds} == {kind == "reentrant"}
    torch.manual_seed(0)
    model, x, y = ours.Net(16, kind), torch.randn(1024, 16), torch.randn(1024, 16)
    hand = handwritten.Recorded(model)
    handwritten.every_few(model, mse_loss, hand, list(zip(x.split(128), y.split(128), strict=True)), 8)
    assert apart(grads.values(), hand.gradients[0]) <= 1e-13
    once, accumulated, both = peaks
    assert accumulated <= once / 6
    assert both <= accumulated / 2


def test_a_checkpoint_of_the_batch_itself():
    layer, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.warns(UserWarning, match="Gradients will be None"):
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    assert not out.requires_grad
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.weight.grad.abs().max() > 0


def test_checkpoints_in_jax():
    ours = example("checkpointing_jax")
    (whole, most), (_, accumulated), (grads, both) = (
        ours.gradients(layer, n) for layer, n in ((ours.layer, 1), (ours.layer, 8), (jax.checkpoint(ours.layer), 8))
    )
    funcga.compare(grads, whole).assert_close()
    assert accumulated < most / 4
    assert both < accumulated / 2


def test_sums_of_16_bits():
    ours, w = example("bfloat16_torch"), torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    for x in torch.ones(1024, dtype=torch.bfloat16):
        (w * x).sum().backward()
    assert w.grad.item() == 256
    assert ours.sum_of_ones(1024) == 1024


def test_autocast():
    ours = example("bfloat16_torch")
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(16, 4), torch.randn(64, 16), torch.randn(64, 4)
    found = {}
    for enabled in (True, False):
        model.zero_grad()
        for a, b in zip(x.split(8), y.split(8), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = mse_loss(model(a).float(), b) / 8
            loss.backward()
        found[enabled] = [p.grad.clone() for p in model.parameters()]
    grads = ours.gradients(model, x, y, 8)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    assert apart(grads.values(), found[True]) <= 1e-6
    assert apart(grads.values(), found[False]) > 1e-4


def normalised():
    """A module of the recipe."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten(), torch.nn.Linear(108, 2)
    )


def test_running_statistics(double):
    ours, module, hand, n = example("batchnorm_torch"), normalised(), normalised(), 4
    x, y = ours.data()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for rows in np.array_split(np.arange(len(x)), n):
        hand(x[rows])
    threaded, frozen, merged = (way(module, x, y, n) for way in (ours.threaded, ours.frozen, ours.merged))
    for name, expected in hand.named_buffers():
        assert apart([threaded[name]], [expected]) <= 1e-13
        assert apart([frozen[name]], [before[name]]) == 0
        assert min(apart([merged[name]], [other[name]]) for other in (threaded, frozen)) > 0.05


def test_the_decay_of_running_statistics(double):
    """Of micro-batches that are alike, n updates with momentum m are one with 1 - (1 - m)**n."""
    ours, module = example("batchnorm_torch"), normalised()
    (x, y), n = ours.data(6), 4
    x, y = x.repeat(n, 1, 1, 1), y.repeat(n)
    loop = ours.threaded(module, x, y, n)["1.running_mean"]
    slower = ours.merged(module, x, y, n)["1.running_mean"]
    module[1].momentum = 1 - (1 - module[1].momentum) ** n
    assert apart([ours.merged(module, x, y, n)["1.running_mean"]], [loop]) <= 1e-13
    assert apart([slower], [loop]) > 0.1 * loop.abs().max()


# --- outputs and metrics


@pytest.mark.parametrize("size", [1, 8, 19, 30])
def test_a_forward_pass_in_chunks(double, size):
    ours = example("microbatched_forward_torch")
    model, inputs, targets = ours.made()
    loss, outputs = handwritten.in_chunks(model, cross_entropy, inputs, targets, size)
    (value, found), grads = ours.forward_in_chunks(model, inputs, targets, size)
    assert value.item() == pytest.approx(loss, abs=1e-13)
    assert apart([found, ours.predictions(model, inputs, size)], [outputs] * 2) <= 1e-13
    assert apart(grads.values(), [p.grad for p in model.parameters()]) <= 1e-13


def test_chunks_of_which_rows_are_left_out(double):
    ours = example("microbatched_forward_torch")
    model, inputs, targets = ours.made()
    targets[: len(targets) // 2] = -100
    whole = cross_entropy(model(inputs), targets)
    expected = torch.autograd.grad(whole, model.parameters())
    hand, _ = handwritten.in_chunks(model, cross_entropy, inputs[8:], targets[8:], 4)  # a chunk without labels is NaN
    (value, _), grads = ours.forward_in_chunks(model, inputs, targets, len(inputs) // 2 + 1)
    assert value.item() == pytest.approx(whole.item(), abs=1e-13)
    assert apart(grads.values(), expected) <= 1e-13
    assert abs(hand - whole.item()) > 0.01


def test_a_window_that_is_saved_by_hand():
    model, x = torch.nn.Linear(2, 1), torch.ones(1, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(x) / 2).sum().backward()
    saved = copy.deepcopy((model.state_dict(), sgd.state_dict()))
    resumed = torch.nn.Linear(2, 1)
    resumed.load_state_dict(saved[0])
    again = torch.optim.SGD(resumed.parameters(), lr=0.1)
    again.load_state_dict(saved[1])
    for module, optimizer in ((model, sgd), (resumed, again)):
        (module(x) / 2).sum().backward()
        optimizer.step()
    assert torch.allclose(resumed.weight - model.weight, torch.tensor(0.05))  # the half of an update


def test_metrics(double):
    ours, model = example("metrics_torch"), seeded()
    loader = [microbatch(2 * i, 2) for i in range(10)]
    updates, epoch = ours.train(copy.deepcopy(model), loader, 4)

    hand, found = handwritten.Metrics(4), []
    for tokens, labels in loader:
        total, counts = ours.loss_and_counts(model, tokens, labels)
        found.append(hand.update((total / counts["tokens"]).item(), counts["right"].item(), counts["tokens"].item()))
    (loss, accuracy) = found[3]  # before an update changes the module
    assert [i for i, each in enumerate(found) if each] == [3, 7]  # nothing of the last window
    whole, counts = ours.loss_and_counts(model, *microbatch(0, 8))
    assert updates[0]["loss"].item() == pytest.approx((whole / 36).item(), abs=1e-13)
    assert updates[0]["right"] / updates[0]["tokens"] == accuracy == counts["right"].item() / 36
    assert abs(loss - whole.item() / 36) == pytest.approx(0.1025, abs=1e-4)

    assert [int(u["tokens"]) for u in updates] == [36, 100, 74]
    mean = sum(u["loss"] * u["tokens"] for u in updates) / 210
    assert epoch["loss"].item() == pytest.approx(mean.item(), abs=1e-13)
    assert (int(epoch["right"]), int(epoch["tokens"])) == (sum(int(u["right"]) for u in updates), 210)
    of_means = sum(u["loss"] for u in updates) / 3
    assert abs(of_means - mean).item() == pytest.approx(0.1145, abs=1e-4)


def test_metrics_in_jax(double):
    ours = example("metrics_jax")
    (loss, metrics), grads = ours.step(ours.params, ours.x, ours.labels)
    (whole, expected), full = jax.jit(ours.gradient)(ours.params, ours.x, ours.labels)
    assert abs(loss - whole) <= 1e-13
    assert abs(grads - full).max() <= 1e-13
    assert abs(metrics["logits"] - expected["logits"]).max() <= 1e-13
    right, rows = expected["accuracy"].tolist()
    assert (rows, float(metrics["accuracy"])) == (19, pytest.approx(right / 19, rel=1e-6))
    chunks = [slice(0, 8), slice(8, 16), slice(16, 19)]
    mean = jax.jit(ours.loss_and_metrics)
    naive = sum(mean(ours.params, ours.x[c], ours.labels[c])[0] for c in chunks) / 3
    assert float(abs(naive - whole)) == pytest.approx(0.0342, abs=1e-4)


# --- is it the same as one large batch?


def test_accumulation_against_one_large_batch(double):
    ours = example("comparison_torch")
    model, inputs, targets = ours.made()
    hand = partial(handwritten.difference, model, cross_entropy, (inputs, targets))
    cut = lambda sizes: list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
    assert hand(cut([4, 4, 4, 4])) <= 1e-13
    assert hand(cut([7, 5, 4])) == pytest.approx(0.0335, abs=1e-4)
    report = ours.difference(model, inputs, targets, [7, 5, 4])
    report.assert_close()
    assert max(row.absolute for row in report.rows) <= 1e-13

    ours.verdict(model, inputs, targets).assert_exact()
    over_batches = funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)
    assert [c.name for c in ours.verdict(model, inputs, targets, fold=over_batches).causes] == ["by steps"]
    batchnorm = ours.made(torch.nn.BatchNorm1d(8))
    assert [c.name for c in ours.verdict(*batchnorm).causes] == ["batch statistics"]
    hidden = handwritten.difference(batchnorm[0], cross_entropy, batchnorm[1:], [(inputs, targets)] * 2)
    assert hidden <= 1e-13


# --- mixed precision, learning rates and noise


def by_grad_scaler(loader, guard):
    """The scale, the parameters, norms and learning rates of the loop that is written by hand."""
    ours = example("mixed_precision_torch")
    model = ours.network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14 * ours.N, growth_interval=ours.INTERVAL)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    args = adamw, scaler, loader, ours.N, ours.MAX_NORM, ours.schedule(adamw)
    norms, rates = handwritten.mixed(model, cross_entropy, *args, guard=guard)
    return scaler.get_scale() / ours.N, weights(model), norms, rates


def test_mixed_precision():
    ours = example("mixed_precision_torch")
    loader = list(ours.loader())
    scale, expected, norms, rates = by_grad_scaler(loader[:44], guard=True)
    assert norms[3] == float("inf")  # the window that is skipped
    assert min(norms) > ours.MAX_NORM
    stepped, functional = list(ours.stepped(2.0**14)), list(ours.functional(2.0**14))
    for found, limit in ((stepped, 0), (functional, 2e-7)):
        assert found[10][0] == scale
        assert apart(found[10][1].values(), expected) <= limit
    assert [norm for *_, norm in stepped[:11]] == norms
    assert apart(functional[11][1].values(), stepped[11][1].values()) <= 2e-7

    _, _, norms, _ = by_grad_scaler(loader, guard=True)  # the last window by hand: half of its gradient
    assert norms[11] == pytest.approx(stepped[11][2] / 2, rel=1e-6)

    _, wrong, _, rushed = by_grad_scaler(loader[:44], guard=False)
    assert rates[4:] == rushed[3:-1]  # an update less, and the schedule goes on
    assert rates[3] == rates[4] != rushed[4]
    assert apart(wrong, expected) > 1e-3


def test_clipping_what_is_scaled():
    """The gradient is cut to a norm of 0.1, and then divided by the scale: nothing is learned."""
    ours = example("mixed_precision_torch")
    moved = []
    for unscale in (True, False):
        model, before = ours.network(), weights(ours.network())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        window = list(ours.loader())[: ours.N]
        handwritten.mixed(model, cross_entropy, sgd, scaler, window, ours.N, 0.1, unscale=unscale)
        moved.append(sum((a - b).norm() ** 2 for a, b in zip(weights(model), before, strict=True)).sqrt().item())
    assert moved[0] == pytest.approx(0.1, rel=1e-3)
    assert 0 < moved[1] < 1e-5


@pytest.mark.parametrize("growth_interval", [1, 3])
def test_the_scale_of_windows_that_are_good_or_not(growth_interval):
    """optax has no GradScaler: that of torch is asked."""
    pattern = [True, True, False, False] + [True] * 7 + [False] + [True] * 8
    parameter = torch.zeros(1, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    sgd = torch.optim.SGD([parameter], lr=0.1)
    tx = funcga.transforms.loss_scaled(optax.sgd(0.1), growth_interval=growth_interval)
    params, update = jnp.zeros(1), jax.jit(tx.update)
    state = tx.init(params)
    for good in pattern:
        grad = 1.0 if good else float("inf")
        scaler.scale(torch.ones(())).item()
        parameter.grad = torch.tensor([grad * scaler.get_scale()])
        scaler.step(sgd)
        scaler.update()
        updates, state = update(grad * state.scale * jnp.ones(1), state, params)
        params = optax.apply_updates(params, updates)
        assert float(state.scale) == scaler.get_scale()
        assert float(params[0]) == pytest.approx(parameter.item(), abs=1e-6)
    assert int(state.skipped) == 3


def test_learning_rates(double):
    ours = example("learning_rate_torch")
    updates = list(ours.train())
    rows = [rows for rows, *_ in updates]
    assert rows == [32, 32, 16] * 2
    planned = handwritten.adjusted_lr(ours.LR, ours.BASE, 8, 4)  # by hand, whatever comes
    hand = [ours.warmed_up(planned, update) for update in range(6)]
    found = [lr for _, _, lr, _ in updates]
    assert hand == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4], rel=1e-12)
    assert found == pytest.approx([0.1, 0.175, 0.15, 0.325, 0.4, 0.2], rel=1e-12)
    assert planned == 2 * funcga.transforms.linear_scaling(ours.LR, ours.BASE, rows[-1])

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    batches = [torch.cat(parts) for parts in zip(*ours.epoch(), strict=True)]
    for x, y, lr, weight in zip(
        *(2 * part.split(32) for part in batches), found, [w for *_, w in updates], strict=True
    ):
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        sgd.zero_grad()
        mse_loss(model(x), y).backward()
        sgd.step()
        assert apart([model.weight.detach()], [weight]) <= 1e-13


def test_dropout_by_example():
    ours, loss = example("dropout_torch"), example("dropout_torch").loss_by_example
    whole = ours.gradients(loss, 1)
    torch.manual_seed(3)  # of the order
    for found in (ours.gradients(loss, 3), ours.gradients(loss, 4), ours.streamed(loss)):
        assert apart([found], [whole]) <= 1e-6 * whole.abs().max()
    for found in (ours.gradients(loss, 4, epoch=1), ours.streamed(loss, epoch=1)):
        assert apart([found], [whole]) > 0.1 * whole.abs().max()
    drawn = [torch_backend.sampled(torch.rand, ours.keys_of(torch.arange(ours.ROWS), epoch)) for epoch in (0, 1)]
    assert len({*torch.cat(drawn).tolist()}) == 2 * ours.ROWS
    again = [torch_backend.example_keys(0, torch.arange(ours.ROWS)) for _epoch in (0, 1)]  # by hand, without the epoch
    assert torch.equal(*again)


def test_dropout_by_example_in_jax():
    ours = example("dropout_jax")
    step, order = funcga.stream(ours.by_example, weight=lambda keys, x, y: len(x)), jnp.arange(ours.ROWS)
    whole = jax.jit(ours.by_example)(ours.params, ours.keys_of(order, 0), ours.x, ours.y)["in"]
    shuffled, later = (step(ours.params, ours.microbatches(order[::-1], epoch))["in"] for epoch in (0, 1))
    assert abs(shuffled - whole).max() <= 1e-6 * abs(whole).max()
    assert abs(later - whole).max() > 0.1 * abs(whole).max()


def test_a_key_that_is_threaded():
    ours, key = example("dropout_jax"), jax.random.key(0)
    found, masks, following = ours.with_threads(4)(ours.params, key, ours.x, ours.y)
    gradient, total = jax.jit(jax.grad(ours.loss_fn)), 0
    for rows in np.split(np.arange(ours.ROWS), 4):  # by hand
        key, own = jax.random.split(key)
        kept = jax.random.uniform(own, (4, 32)) >= ours.RATE
        assert jnp.array_equal(masks[rows], kept)
        total += gradient(ours.params, kept, ours.x[rows], ours.y[rows])["in"] / 4
    assert abs(found["in"] - total).max() <= 1e-6 * abs(total).max()
    assert (following == key).all()


def test_a_seed_in_every_micro_batch_drops_the_same():
    kept = []
    for _ in range(2):  # by hand
        torch.manual_seed(0)
        kept.append(torch.nn.functional.dropout(torch.ones(4, 32)) > 0)
    assert torch.equal(*kept)
    dropped = torch_backend.seeded(lambda _, x: torch.nn.functional.dropout(x) > 0)
    keys = torch_backend.example_keys(0, torch.arange(8))
    first, second = (dropped(None, part, torch.ones(4, 32)) for part in keys.split(4))
    assert not torch.equal(first, second)
