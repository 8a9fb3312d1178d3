"""totals= over replicas in torch: counted on all of them by one reduction more, before the first forward pass."""

import functools

import pytest
import torch
import torch.distributed as dist

import funcga
import torch_backend
from funcga import FuncgaError
from tests import objectives
from tests.kits import TORCH, difference
from tests.processes import processes
from tests.torch_backend.reduce.test_replicas import counted
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, made, mesh_of

LIMIT = 1e-12
# Where each rank's rows begin and end: one rank, two, three of which one has none, and four.
BOUNDS = [(0, 11), (0, 3, 11), (0, 0, 4, 11), (0, 5, 6, 6, 11)]


def problem():
    params, batch = objectives.rollouts()
    return TORCH.arrays(params), TORCH.arrays(batch)


def own_rows(group, bounds, batch):
    rank = dist.get_rank(group)
    return objectives.cut(batch, *bounds)[rank]


def merged(group, bounds):
    """The errors of every objective, and of one as a stream: each twice, as the first window learns what there is to send."""
    params, batch = problem()
    own, found = own_rows(group, bounds, batch), []
    for index, name in enumerate(objectives.OBJECTIVES):
        expected = objectives.expected(TORCH, name, params, batch)
        step = objectives.step(TORCH, name, 3 if index % 2 else 1, across=group)
        found += [difference(TORCH, step(params, own), expected) for _ in range(2)]
    expected = objectives.expected(TORCH, "CE + auxiliary", params, batch)
    step, rows = objectives.streaming(TORCH, "CE + auxiliary", across=group), len(own["mask"])
    window = objectives.cut(own, *range(0, rows, 2), rows) if rows else []
    return found + [difference(TORCH, step(params, window), expected) for _ in range(2)]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_uneven_replicas_give_the_whole_batch(bounds):
    assert max(map(max, processes().run(merged, bounds, size=len(bounds) - 1))) < LIMIT


def exact(group):
    totals = lambda x: {"tokens": len(x) * (2**24 + 1), "share": 0.5 * len(x)}
    seen = lambda w, x, *, totals: (w * x.sum(), totals)
    step = funcga.accumulate(
        funcga.grad(seen, has_aux=True), 2, fold=(funcga.sum(), funcga.max()), totals=totals, across=group
    )
    found = step(torch.ones(()), torch.ones(1 + dist.get_rank(group)))[1]
    return found["tokens"].dtype, found["tokens"].item(), found["share"].item()


def test_integers_are_added_exactly_over_replicas():
    assert processes().run(exact, size=3) == [(torch.int64, 6 * (2**24 + 1), 3.0)] * 3


def collectives_of(group, name):
    params, batch = problem()
    step = objectives.step(TORCH, name, 3, across=group)
    own, found = own_rows(group, (0, 4, 11), batch), []
    for _ in range(2):
        with counted() as sent:
            step(params, own)
        found.append([name for name, _ in sent])
    return found


def test_one_header_and_one_sum_more():
    once = ["allgather_", "allreduce_"]
    for first, warm in processes().run(collectives_of, "GRPO", size=2):
        assert warm == [*once, *once]
        assert first == [*["allgather_"] * 3, "allreduce_"] * 2  # what is folded is told once
    # A float and an integer cannot be added together.
    for _, warm in processes().run(collectives_of, "CE + auxiliary", size=2):
        assert warm == [*once, "allreduce_", *once]


def failing(group):
    """One replica cannot count its first window, which is left out on all of them; the next one is counted."""
    windows = []

    def totals(batch):
        if dist.get_rank(group) == 1 and len(windows) == 0:
            raise ZeroDivisionError("no tokens")
        return len(batch["x"])

    loss = lambda params, batch, *, totals: params["w"].sum() / totals
    step = funcga.accumulate(funcga.grad(loss), 2, fold=funcga.sum(), totals=totals, across=group)
    params, batch = problem()
    while len(windows) < 2:
        try:
            windows.append(step(params, batch)["w"][0, 0].item())
        except (ZeroDivisionError, FuncgaError) as error:
            windows.append(str(error))
    return windows


def test_a_window_that_one_replica_cannot_count_ends_on_all():
    (other, counted_there), (failed, counted_here) = processes().run(failing, size=2)
    assert failed == "no tokens"
    assert "rank 1 has raised an error in this window, and has nothing to merge" in other
    assert counted_there == counted_here == 4 / 22


# --- wrapped modules, which average over replicas of their own


def tokens_and_rows(module, x, y, mask, *, totals, scale=1):
    squares = scale * ((module(x) - y) ** 2).mean(-1)
    return (squares * mask).sum() / totals["tokens"].clamp(min=1) + 0.3 * squares[:, 0].sum() / totals["rows"]


def of_whole_batch(module, x, y, mask):
    squares = ((module(x) - y) ** 2).mean(-1)
    return (squares * mask).sum() / mask.sum() + 0.3 * squares[:, 0].mean()


def batch_of_tokens():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(11, 5, size, generator=generator, dtype=torch.float64) for size in (4, 3))
    lengths = torch.randint(1, 6, (11,), generator=generator)
    return x, y, torch.arange(5) < lengths[:, None]


TOTALS = {"totals": lambda x, y, mask: {"tokens": mask.sum(), "rows": len(x)}, "fold": funcga.sum()}


def wrapped(group, kind, bounds, n):
    batch, rank = batch_of_tokens(), dist.get_rank(group)
    expected = torch_backend.module_value_and_grad(made(torch.float64), of_whole_batch)(*batch)
    module = made(torch.float64)
    if kind == "hsdp":
        module = WRAPPERS["fsdp2"](group, module, mesh=mesh_of(group, (2, 2)))
    elif kind != "unwrapped":
        module = WRAPPERS[kind](group, module)
    gradient = torch_backend.module_value_and_grad(module, tokens_and_rows)
    across = {"across": group} if kind == "unwrapped" else {}
    step = funcga.accumulate(gradient, n, **TOTALS, **across)
    own = [x[bounds[rank] : bounds[rank + 1]] for x in batch]
    errors = []
    for _ in range(2):
        value, grads = step(*own)
        pairs = zip(grads.values(), expected[1].values(), strict=True)
        whole = [gathered(group, gradient, like) for gradient, like in pairs]
        errors.append(difference(TORCH, (value, whole), (expected[0], [*expected[1].values()])))
    return max(errors)


def gathered(group, gradient, like):
    """The whole gradient: of a DTensor, or of the pieces that FSDP1 leaves on each rank."""
    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor()
    pieces = [None] * dist.get_world_size(group)
    dist.all_gather_object(pieces, gradient, group=group)
    return torch.cat([piece.flatten() for piece in pieces])[: like.numel()].view_as(like)


@pytest.mark.parametrize("bounds", [(0, 3, 11), (0, 0, 4, 11)])
@pytest.mark.parametrize("kind", ["unwrapped", "ddp", "fsdp1", "fsdp2", "replicated"])
def test_a_wrapped_module_counts_over_its_own_replicas(kind, bounds):
    assert max(processes().run(wrapped, kind, bounds, 3, size=len(bounds) - 1)) < LIMIT


def streamed_module(group, bounds):
    batch, rank = batch_of_tokens(), dist.get_rank(group)
    expected = torch_backend.module_value_and_grad(made(torch.float64), of_whole_batch)(*batch)
    module = WRAPPERS["ddp"](group, made(torch.float64))
    step = funcga.stream(torch_backend.module_value_and_grad(module, tokens_and_rows), **TOTALS)
    window = [tuple(x[i : i + 2] for x in batch) for i in range(bounds[rank], bounds[rank + 1], 2)]
    window[-1] = tuple(x[: bounds[rank + 1] - bounds[rank] - 2 * (len(window) - 1)] for x in window[-1])
    value, grads = step(window)
    return difference(TORCH, (value, [*grads.values()]), (expected[0], [*expected[1].values()]))


def test_a_stream_over_a_wrapped_module():
    assert max(processes().run(streamed_module, (0, 3, 11), size=2)) < LIMIT


def around(group):
    module = WRAPPERS["ddp"](group, made(torch.float64))
    gradient = functools.partial(torch_backend.module_value_and_grad(module, tokens_and_rows), scale=2)
    try:
        funcga.accumulate(gradient, 2, **TOTALS)(*batch_of_tokens())
    except FuncgaError as error:
        return str(error)


def test_a_function_around_the_gradient_of_a_wrapped_module_is_refused():
    for text in processes().run(around, size=2):
        assert (
            "averages every micro-batch over the replicas of DistributedDataParallel, where a sum is asked for" in text
        )


@pytest.mark.parametrize("bounds", [(0, 3, 4, 8, 11), (0, 0, 0, 4, 11)])
def test_a_mesh_of_two_dimensions_counts_over_all_of_it(bounds):
    """Also where all replicas that share shards have no row."""
    assert max(processes().run(wrapped, "hsdp", bounds, 3, size=4)) < LIMIT


# --- DTensors


def of_dtensors(group, n):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    params, batch = TORCH.arrays(objectives.rollouts(rows=12))
    expected = objectives.expected(TORCH, "CE + auxiliary", params, batch)
    mesh = mesh_of(group)
    placed = {"w": distribute_tensor(params["w"], mesh, [Replicate()])}
    rows = {name: distribute_tensor(leaf, mesh, [Shard(0)]) for name, leaf in batch.items()}
    value, grads = objectives.step(TORCH, "CE + auxiliary", n)(placed, rows)
    return difference(TORCH, (value.full_tensor(), grads["w"].full_tensor()), (expected[0], expected[1]["w"]))


def test_a_batch_of_dtensors():
    assert max(processes().run(of_dtensors, 3, size=2)) < LIMIT
