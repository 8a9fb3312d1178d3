"""coupled over replicas in torch: uneven rows and none at all, wrapped modules, and errors on one rank."""

import itertools

import pytest
import torch
from torch import nn

import funcga
from tests.coupled import losses
from tests.coupled.test_coupled_torch import Stopped, Towers, batch, infonce, loss_of, one_graph, summary_of
from tests.kits import TORCH, difference
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import (
    Collectives,
    ddp,
    ddp_unused,
    fsdp1,
    fsdp2,
    full,
    hsdp,
    replicated_by_fsdp,
)
from torch_backend import module_value_and_grad, trainable

LIMIT = 1e-12
# The rows of each rank, as where the next one begins.
LAYOUTS = {"two": [0, 8, 11], "none on the first": [0, 0, 5, 11], "none on the second": [0, 6, 6, 11]}


def own(tree, edges, group):
    """The rows of this rank."""
    start, end = edges[group.rank()], edges[group.rank() + 1]
    return {name: leaf[start:end] for name, leaf in tree.items()}


def table(group, edges):
    found = {}
    for name, options in itertools.product(losses.LOSSES, ({"n": 1}, {"microbatch_size": 2})):
        params, rows = losses.problem(TORCH, name)
        step = losses.step(TORCH, name, **options, across=group)
        for _ in range(2):  # again, with what was agreed on
            result = step(params, own(rows, edges, group))
        found[name, str(options)] = difference(TORCH, result, losses.expected(TORCH, name, params, rows))
    return found


@pytest.mark.parametrize("layout", ["two", "none on the first"])
def test_uneven_ranks_give_the_whole_batch(layout):
    edges = LAYOUTS[layout]
    for found in processes().run(table, edges, size=len(edges) - 1):
        assert max(found.values()) < LIMIT, found


# --- what is sent


def sent(group, name, n):
    params, rows = losses.problem(TORCH, name)
    step, edges = losses.step(TORCH, name, n, across=group), [0, 8, 11]
    for _ in range(2):
        step(params, own(rows, edges, group))
    with Collectives() as seen:
        step(params, own(rows, edges, group))
    return seen.names


# The header, of a few numbers, says what a reduction adds. Rows are gathered after their sizes, of which there are two:
# a message has a length.
REDUCED, GATHERED = ["allgather_", "allreduce_"], ["allgather_", "allgather_", "allgather_"]
SENT = {
    "InfoNCE": [*REDUCED, *GATHERED, *REDUCED],
    "VICReg": [*REDUCED, *REDUCED],
    "GRPO": [*REDUCED, "allgather_", *REDUCED],  # the totals come first; a header holds the summary, one number
}


@pytest.mark.parametrize("name", SENT)
def test_summaries_and_gradients_are_sent_once(name):
    for n in (1, 4):
        for names in processes().run(sent, name, n, size=2):
            assert names == SENT[name]


# --- wrapped modules

WRAPPERS = {f.__name__: f for f in (ddp, ddp_unused, fsdp1, fsdp2)}


class Deep(Towers):
    """Three parts, of which FSDP2 wraps the third."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 4)
        self.tower = nn.Sequential(self.first, nn.Tanh(), self.second)
        self.scale = nn.Parameter(torch.tensor([0.5]))  # FSDP2 has no scalars
        self.double()
        del self.first, self.second

    def __getitem__(self, index):
        return self.tower[index]


class Scaled(nn.Module):
    """A module whose output has the temperature, as CLIP of open_clip has."""

    def __init__(self):
        super().__init__()
        self.towers = Deep()

    def __getitem__(self, index):
        return self.towers[index]

    def forward(self, x, y):
        return self.towers(x), self.towers(y), self.towers.scale.sum().exp()


def scaled_summary(module, x, y):
    a, b, scale = module(x, y)
    return {"a": a, "b": b, "scale": scale.log()}


def scaled_loss(module, s):
    return infonce(s["scale"], s)


FOLD = {"a": funcga.concat(), "b": funcga.concat(), "scale": funcga.mean()}


def wrapped(group, wrapper, edges):
    plain, (x, y), found = Scaled(), batch(), []
    value = scaled_loss(plain, scaled_summary(plain, x, y))
    value.backward()
    start, end = edges[group.rank()], edges[group.rank() + 1]
    module = WRAPPERS[wrapper](group, Scaled())
    for n in (1, 3):
        step = funcga.coupled(module_value_and_grad(module, scaled_summary), scaled_loss, n, fold=FOLD)
        for _ in range(2):
            result = step(x[start:end], y[start:end])
        grads = [leaf.detach() for leaf in full(module, result[1])]
        found.append(difference(TORCH, [result[0], *grads], [value.detach(), *[p.grad for p in plain.parameters()]]))
    assert all(p.grad is None for p in module.parameters())
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_modules_with_uneven_rows_or_none(wrapper):
    edges = LAYOUTS["none on the second"]
    for found in processes().run(wrapped, wrapper, edges, size=len(edges) - 1):
        assert max(found) < LIMIT, found


def of_a_size(group, wrapper, frozen):
    """Micro-batches of two rows, of which the replicas have other numbers or none, and a frozen layer."""
    plain, (x, y), edges = Scaled(), batch(), [0, 8, 11, 11, 11]
    freeze = lambda module: [p.requires_grad_(False) for p in module.towers.tower[frozen].parameters()]
    if frozen is not None:
        freeze(plain)
    value = scaled_loss(plain, scaled_summary(plain, x, y))
    value.backward()
    module = Scaled()
    if frozen is not None:
        freeze(module)
    module = {**WRAPPERS, "hsdp": hsdp, "replicated_by_fsdp": replicated_by_fsdp, "buffers": with_a_buffer}[wrapper](
        group, module
    )
    options = {"microbatch_size": 2, "fold": FOLD}
    step = funcga.coupled(module_value_and_grad(module, scaled_summary), scaled_loss, **options)
    own = edges[group.rank()], edges[group.rank() + 1]
    for start, end in (own, own, (11 - own[1], 11 - own[0])):  # then the last rows are on the first
        result = step(x[start:end], y[start:end])
    grads = [leaf.detach() for leaf in full(module, result[1])]
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    if wrapper == "fsdp1":
        grads = [grad for grad, p in zip(grads, plain.parameters(), strict=True) if p.grad is not None]
    return difference(TORCH, [result[0], *grads], [value.detach(), *expected])


def with_a_buffer(group, module):
    """Which DDP broadcasts before the first forward pass of a window."""
    module.register_buffer("zero", torch.zeros(1))
    return ddp(group, module)


@pytest.mark.parametrize(
    ("wrapper", "size", "frozen"),
    [
        ("ddp", 3, 0), ("buffers", 3, None), ("fsdp2", 2, None), ("fsdp2", 3, 0), ("replicated_by_fsdp", 3, 2),
        ("fsdp1", 3, None), ("hsdp", 4, 0),
    ],
)  # fmt: skip
def test_replicas_have_other_numbers_of_micro_batches_and_frozen_layers(wrapper, size, frozen):
    assert max(processes().run(of_a_size, wrapper, frozen, size=size)) < LIMIT


def all_frozen_in_a_part(group):
    """FSDP1 has one flat parameter for each part, here of frozen ones alone."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    module, (x, y) = Scaled(), batch()
    module.towers.tower[0].requires_grad_(False)
    module = fsdp1(group, module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    loss, _ = funcga.coupled(module_value_and_grad(module, scaled_summary), scaled_loss, 3, fold=FOLD)(x, y)
    plain, twice = Scaled(), (torch.cat([x, x]), torch.cat([y, y]))
    return difference(TORCH, [loss], [scaled_loss(plain, scaled_summary(plain, *twice)).detach()])


def test_a_flat_parameter_that_is_frozen():
    assert max(processes().run(all_frozen_in_a_part, size=2)) < LIMIT


def weighing_nothing(group):
    """Two micro-batches a rank, of which one weighs nothing, and whose summary is then 0 / 0."""
    plain, (x, y) = Scaled(), batch(8)
    mask = torch.tensor([1.0, 1, 0, 0, 0, 0, 1, 1], dtype=torch.float64)

    def summary(module, x, y, mask):
        a, b, scale = module(x, y)
        return {"gap": ((a - b).square().mean(1) * mask).sum() / mask.sum(), "scale": scale.log()}

    loss = lambda module, s: s["gap"].log() * s["scale"]
    value = loss(plain, summary(plain, x, y, mask))
    value.backward()
    step = funcga.coupled(
        module_value_and_grad(ddp(group, Scaled()), summary),
        loss,
        2,
        fold=funcga.mean(),
        weight=lambda x, y, m: m.sum(),
    )
    own = slice(4 * group.rank(), 4 * group.rank() + 4)
    found, grads = step(x[own], y[own], mask[own])
    return difference(TORCH, [found, *grads.values()], [value.detach(), *[p.grad for p in plain.parameters()]])


def test_a_micro_batch_of_weight_0_may_be_nan():
    assert max(processes().run(weighing_nothing, size=2)) < LIMIT


def sent_by_wrapper(group, wrapper, n):
    module, (x, y) = WRAPPERS[wrapper](group, Scaled()), batch(8)
    step = funcga.coupled(module_value_and_grad(module, scaled_summary), scaled_loss, n, fold=FOLD)
    for _ in range(2):
        step(x, y)
    with Collectives() as seen:
        step(x, y)
    return seen.names


def test_ddp_reduces_once():
    for n in (2, 4):
        for names in processes().run(sent_by_wrapper, "ddp", n, size=2):
            # The first pass reduces the temperature and gathers rows. The second has DDP's one bucket, after the header.
            assert names == [*REDUCED, *GATHERED, "allgather_", "allreduce_"]


def uses_shards(group, wrapper, forward):
    """The text of the refusal of a loss that uses sharded parameters, outside of a forward pass or in one more."""
    module, (x, y) = WRAPPERS[wrapper](group, Deep()), batch()
    loss_fn = lambda module, s: infonce(module(x).sum() if forward else module.tower[0].weight.sum(), s)
    with pytest.raises(funcga.FuncgaError) as caught:
        funcga.coupled(module_value_and_grad(module, summary_of), loss_fn, 3)(x, y)
    return str(caught.value)


@pytest.mark.parametrize(("wrapper", "forward"), [("fsdp1", False), ("fsdp2", True)])
def test_a_loss_that_uses_shards_is_refused(wrapper, forward):
    for text in processes().run(uses_shards, wrapper, forward, size=2):
        assert "loss_fn uses parameters of the module itself, which " in text
        assert 'Let the module return what the loss needs of them, and summary_fn too, under mean(): fold={"x"' in text


# --- errors on one rank


def broken(group, where):
    """What three windows give; in the second one rank 1 fails, catches that, and goes on."""
    module, (x, y) = Towers(), batch()
    expected = one_graph(module, loss_of, x, y, 0, 11)
    calls, found = [], []

    def summary_fn(params, x, y):
        calls.append(1)
        if len(found) == group.rank() == 1 and len(calls) == where:
            raise Stopped("stopped")
        return summary_of(lambda x: torch.func.functional_call(module, params, (x,)), x, y)

    def loss_fn(params, s):
        if len(found) == group.rank() == 1 and where == "loss":
            raise Stopped("stopped")
        return infonce(params["scale"], s)

    step = funcga.coupled(summary_fn, loss_fn, 3, across=group)
    rows = slice(0, 7) if group.rank() == 0 else slice(7, 11)
    for _ in range(3):
        calls.clear()
        try:
            result = step(trainable(module), x[rows], y[rows])
            found.append(difference(TORCH, result, expected[:2]))
        except (Stopped, funcga.FuncgaError) as error:
            found.append(str(error))
    return found


# In the first pass, in the second one, and in the loss.
@pytest.mark.parametrize("where", [1, 4, "loss"])
def test_an_error_on_one_rank_reaches_the_others(where):
    first, second = processes().run(broken, where, size=2, limit=60)
    assert max(first[0], first[2], second[0], second[2]) < LIMIT
    assert second[1] == "stopped"
    assert "rank 1 has raised an error in this window" in first[1]


def broken_between_passes(group, wrapper):
    """The second window of a wrapped module, of which rank 1 raises an error after its first micro-batch."""
    (x, y), found, calls = batch(8), [], []
    plain = Scaled()
    value = scaled_loss(plain, scaled_summary(plain, x, y))
    value.backward()
    module = {**WRAPPERS, "buffers": with_a_buffer}[wrapper](group, Scaled())

    def weight(x, y):
        calls.append(1)
        if len(found) == group.rank() == 1 and len(calls) == 1 + (wrapper != "buffers"):
            raise Stopped("stopped")
        return len(x)

    gradient = module_value_and_grad(module, scaled_summary)
    step = funcga.coupled(gradient, scaled_loss, 2, fold=FOLD, weight=weight)
    own = slice(4 * group.rank(), 4 * group.rank() + 4)
    for _ in range(3):
        calls.clear()
        try:
            loss, grads = step(x[own], y[own])
            grads = [leaf.detach() for leaf in full(module, grads)]
            expected = [value.detach(), *[p.grad for p in plain.parameters()]]
            found.append(difference(TORCH, [loss, *grads], expected))
        except (Stopped, funcga.FuncgaError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "buffers"])
def test_an_error_between_passes_of_a_wrapped_module_reaches_the_others(wrapper):
    first, second = processes().run(broken_between_passes, wrapper, size=2, limit=60)
    assert max(first[0], first[2], second[0], second[2]) < LIMIT
    assert second[1] == "stopped"
    assert "rank 1 has raised an error in this window" in first[1]
