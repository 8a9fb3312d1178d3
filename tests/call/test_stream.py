"""`stream` and `windows`: the fold over micro-batches that arrive one by one."""

import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
import torch_backend
from tests import problems
from tests.kits import JAX, TORCH, difference, needs_cuda, no_synchronisation


def cut(batch, sizes):
    """The batch as tuples of that many rows each."""
    places = np.cumsum([0, *sizes])
    return [tuple(a[i:j] for a in batch) for i, j in itertools.pairwise(places)]


def test_windows_take_nothing_ahead(kit):
    taken = []
    items = lambda: (taken.append(k) or k for k in range(9))
    windows = funcga.windows(items(), 3)
    assert taken == []
    assert next(windows) == [0, 1, 2] == taken
    weigh = lambda k: kit.arrays(np.array(k + 1, "int32"))
    assert next(funcga.windows(items(), funcga.transforms.TargetWeight(3), weight=weigh)) == [0, 1]
    assert taken == [0, 1, 2, 0, 1]
    growing = funcga.windows(items(), lambda windows: 1 + windows)
    assert [next(growing), next(growing)] == [[0], [1, 2]]
    assert taken[5:] == [0, 1, 2]
    assert [*funcga.windows([], 3)] == [*funcga.windows([], [].__getitem__)] == []


@pytest.mark.parametrize(
    "schedule",
    [lambda k: 1 + k, lambda k: 1 + 0.6 * k, [1, 3, 2, 5].__getitem__],
    ids=["by one", "by a part", "a table"],
)
def test_windows_of_a_schedule_are_those_of_multi_steps(kit, schedule):
    """The table ends with the data, and the last window is whole or partial."""
    scheduled = lambda k: (
        kit.arrays(np.array(schedule(int(k)), "float32")) if isinstance(schedule(0), float) else schedule(int(k))
    )
    params, found = {"w": kit.arrays(np.zeros(1, "float32"))}, []
    tx = funcga.multi_steps(
        funcga.transforms.Transform(lambda params: (), lambda grads, state, params=None: (grads, state)), scheduled
    )
    state = tx.init(params)
    for k in range(11):
        _, state = tx.update(params, state, params)
        if tx.has_updated(state) or k == 10:
            found.append(k + 1 - sum(found))
    assert [*map(len, funcga.windows(range(11), scheduled))] == found
    assert sum(found) == 11
    # A window is full when it has at least as many.
    assert all(size - 1 < schedule(number) <= size for number, size in enumerate(found[:-1]))


def test_one_microbatch_is_held_at_a_time(kit):
    """When the next one is asked for, the one before is gone."""
    seen, alive = [], []

    def items():
        for k in range(5):
            alive.append(sum(ref() is not None for ref in seen))
            rows = kit.arrays(np.full(3, k, "float32"))
            seen.append(weakref.ref(rows))
            yield (rows,)
            del rows

    out = funcga.stream(lambda x: x.mean(), in_axes=0)(items())
    assert float(out) == 2
    assert alive == [0] * 5


def test_donates_the_accumulator_and_nothing_else(monkeypatch):
    carries = []
    original = jax.jit

    def spied(function, **options):
        jitted = original(function, **options)

        def call(*args):
            carries.append(jax.tree.leaves(args[options["donate_argnums"]]))
            return jitted(*args)

        return call if "donate_argnums" in options else jitted

    monkeypatch.setattr(jax, "jit", spied)
    params, batch, loss = problems.regression()
    params, batch = JAX.arrays(params), JAX.arrays(batch)
    step = funcga.stream(funcga.value_and_grad(loss))
    first = step(params, cut(batch, [6, 6]))
    second = step(params, cut(batch, [6, 6]))
    for leaf in jax.tree.leaves((params, batch, first, second)):
        assert not leaf.is_deleted()
    assert difference(JAX, first, second) == 0
    assert len(carries) == 4
    assert all(leaf.is_deleted() for carry in carries for leaf in carry if leaf.ndim > 0)


def test_micro_batches_are_moved_to_a_device(kit):
    device = torch.device("meta") if kit.name == "torch" else jax.devices()[1]
    x, seen = kit.arrays(np.arange(6, dtype="float32")), []

    def loss(x, label):
        seen.append((getattr(x, "device", None), label))
        return x.sum()

    step = funcga.stream(loss, in_axes=(0, None), fold=funcga.sum(), device=device)
    out = step([(x[:3], "a"), (x[3:], "b")])
    if kit.name == "torch":
        assert (out.device.type, [(d.type, name) for d, name in seen]) == ("meta", [("meta", "a"), ("meta", "b")])
        assert float(funcga.stream(loss, in_axes=(0, None), fold=funcga.sum(), device="cpu")([(x, "a")])) == 15
    else:
        assert (float(out), out.devices()) == (15, {device})


def test_a_device_of_jax_by_its_name():
    x, device = jnp.arange(6.0), jax.devices()[1]
    step = funcga.stream(lambda x: x.sum(), in_axes=0, fold=funcga.sum(), device="cpu:1")
    assert (float(step([x[:3], x[3:]])), step([np.ones(2)]).devices()) == (15, {device})
    with pytest.raises(IndexError):
        funcga.stream(lambda x: x.sum(), in_axes=0, device="cpu:9")([x])


@needs_cuda
@pytest.mark.parametrize("pinned", [True, False])
def test_micro_batches_are_copied_ahead(pinned):
    params = {"w": torch.randn(512, 512, device="cuda")}
    batches = [torch.randn(64, 512) for _ in range(12)]
    batches = [b.pin_memory() for b in batches] if pinned else batches
    gradient = funcga.value_and_grad(lambda p, x: (torch.tanh(x @ p["w"]) ** 2).mean())
    moved = funcga.stream(gradient, device="cuda")(params, batches)
    there = funcga.stream(gradient)(params, [b.cuda() for b in batches])
    assert difference(TORCH, moved, there) == 0
    if pinned:
        with no_synchronisation():
            funcga.stream(gradient, device="cuda")(params, batches)


@pytest.mark.parametrize(
    ("n", "weight", "text"),
    [
        (funcga.transforms.TargetWeight(4), None, "weight is None, and n is TargetWeight(weight=4): windows of a number of micro-batches weigh nothing, and others need to know what one weighs. Write funcga.windows(loader, funcga.transforms.TargetWeight(256), weight=lambda x, y: len(x)), and give weight= to stream as well."),
        (4, len, "weight is <built-in function len>, and n is 4: windows of a number of micro-batches weigh nothing, and others need to know what one weighs. Write funcga.windows(loader, funcga.transforms.TargetWeight(256), weight=lambda x, y: len(x)), and give weight= to stream as well."),
        (lambda windows: 0, None, "the schedule of n returned 0 after 0 updates: it must be a number of micro-batches, at least 1, or a 0-d array of one."),
        (lambda windows: True, None, "the schedule of n returned True after 0 updates: it must be a number of micro-batches, at least 1, or a 0-d array of one."),
        (0, None, "n is 0: it must be an int, at least 1. Write n=8, a function of the number of updates, or funcga.transforms.TargetWeight(1_000_000)."),
        ("8", None, "n is '8': it must be an int, at least 1. Write n=8, a function of the number of updates, or funcga.transforms.TargetWeight(1_000_000)."),
        (funcga.transforms.TargetWeight(4), lambda item: -1, "the weight of a micro-batch is -1; it must be finite and at least 0, such as the number of rows or tokens in it."),
        (funcga.transforms.TargetWeight(lambda updates: 0), lambda item: 1, "the target weight is 0: it must be a finite number above 0, such as the tokens of one update, funcga.transforms.TargetWeight(1_000_000); or a function of the number of updates that returns one."),
    ],
)  # fmt: skip
def test_windows_of_a_target_refuse(n, weight, text):
    with pytest.raises(funcga.FuncgaError) as error:
        list(funcga.windows([1, 2], n, weight=weight))
    assert str(error.value) == text


def test_a_target_may_grow():
    assert [*funcga.windows([5, 5], funcga.transforms.TargetWeight(4), weight=lambda item: item)] == [[5], [5]]
    growing = funcga.transforms.TargetWeight(lambda updates: 2 + 2 * updates)
    assert [*map(len, funcga.windows([1] * 10, growing, weight=lambda rows: rows))] == [2, 4, 4]


class Opaque:
    """A micro-batch that is no tree, as a batch of graphs of torch_geometric."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("totals", [None, lambda batch: len(batch.x)])
@pytest.mark.parametrize("of_module", [True, False])
def test_micro_batches_may_be_objects(totals, of_module):
    """The parameters say which framework it is, also those of a module."""
    module = torch.nn.Linear(3, 1).double()
    xs = [torch.randn(rows, 3).double() for rows in (4, 2)]
    loss = lambda module, batch, totals=6: module(batch.x).square().sum() / totals
    gradient, leading = torch_backend.module_value_and_grad(module, loss), ()
    if not of_module:
        gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss))
        leading = (torch_backend.trainable(module),)
    options = {} if totals is None else {"totals": totals}
    step = funcga.stream(gradient, fold=funcga.sum(), **options)
    value, grads = step(*leading, [Opaque(x) for x in xs])
    expected = module(torch.cat(xs)).square().mean()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grads["weight"], torch.autograd.grad(expected, module.weight)[0])
