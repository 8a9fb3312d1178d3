"""Exact sums over processes: the same bits, whatever the number of replicas and whoever folds which micro-batch."""

import pytest
import torch
import torch.distributed as dist

import funcga
from tests.processes import processes

SIZE, COUNT = 3, 12  # rows of a micro-batch, and micro-batches of a window


def problem():
    generator = torch.Generator().manual_seed(0)
    params = {
        "embedding": torch.randn(300, 160, generator=generator),  # larger than what is folded in one piece
        "w": torch.randn(160, 8, generator=generator).t().contiguous().t(),
        "scale": torch.randn((), generator=generator),
    }
    tokens = torch.randint(0, 300, (COUNT * SIZE, 5), generator=generator)
    counts = torch.randint(1, 6, (COUNT * SIZE,), generator=generator)
    return params, tokens, counts


def loss_fn(params, tokens, counts):
    """A mean over the tokens that count, and their number as another output."""
    mask = torch.arange(5) < counts[:, None]
    values = torch.tanh(params["embedding"][tokens] @ params["w"]).square().mean(-1) * params["scale"]
    return (values * mask).sum() / mask.sum(), mask.sum()


def window(order, fold=None, group=None):
    """The result of the micro-batches of these numbers."""
    params, tokens, counts = problem()
    exact = funcga.reproducible(funcga.mean()) if fold is None else fold
    step = funcga.stream(
        funcga.value_and_grad(loss_fn, has_aux=True),
        fold=((exact, funcga.sum()), exact),
        weight=lambda tokens, counts: counts.sum(),
        across=group,
    )
    microbatches = [(tokens[SIZE * k : SIZE * k + SIZE], counts[SIZE * k : SIZE * k + SIZE]) for k in order]
    (loss, total), grads = step(params, microbatches)
    return [loss, total, *grads.values()]


def windows(group, shares):
    return [window(order, group=group) for order in shares[dist.get_rank(group)]]


def shares_of(size, seeds):
    """For each rank the micro-batches of each window: another order, and another number of them, in each."""
    shares = [[] for _ in range(size)]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(COUNT, generator=generator).tolist()
        cuts = sorted(torch.randint(0, COUNT + 1, (size - 1,), generator=generator).tolist())
        for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, COUNT], strict=True)):
            shares[rank].append(order[start:stop])
    # A first window in which everybody has something, and then any.
    for rank in range(size):
        shares[rank].insert(0, [k for k in range(COUNT) if k % size == rank])
    return shares


@pytest.mark.parametrize("size", [1, 3, 4])
def test_any_number_of_replicas_has_the_same_bits(size):
    expected = window(range(COUNT))
    for results in processes().run(windows, shares_of(size, range(6)), size=size):
        for result in results:
            assert all(map(torch.equal, result, expected))


def test_any_order_has_the_same_bits_and_plain_sums_have_not():
    expected, plain = window(range(COUNT)), window(range(COUNT), funcga.mean())
    others = 0
    for seed in range(40):
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)).tolist()
        assert all(map(torch.equal, window(order), expected))
        if seed < 3:
            others += (window(order, funcga.mean())[3] != plain[3]).double().mean() / 3
    assert others > 0.3


def out_of_range(group):
    step = funcga.accumulate(lambda x: x, 1, in_axes=0, fold=funcga.reproducible(funcga.sum(), limit=8), across=group)
    rank = dist.get_rank(group)
    try:
        step(torch.full((2,), 100.0 * rank))
    except funcga.FuncgaError as error:
        first = str(error)
    return first, step(torch.full((2,), 1.0 + rank)).tolist()


def test_out_of_range_is_an_error_on_every_replica():
    for message, following in processes().run(out_of_range, size=2):
        assert "the result of output is not known" in message
        assert following == [3, 3]


def reduced_by_others(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    import torch_backend

    fold, x, messages = funcga.reproducible(funcga.mean()), torch.ones(4, 3), []
    w = distribute_tensor(torch.ones(3, 2), init_device_mesh("cpu", (1,)), [Replicate()])
    gradient = torch_backend.module_value_and_grad(
        DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group), lambda module, x: module(x).mean()
    )
    for step, args in (
        (funcga.accumulate(funcga.grad(lambda w, x: (x @ w.full_tensor()).mean()), 2, fold=fold), (w, x)),
        (funcga.accumulate(gradient, 2, fold=fold, in_axes=0), (x,)),
    ):
        try:
            step(*args)
        except funcga.FuncgaError as error:
            messages.append(str(error))
    return messages


def test_what_others_reduce_is_refused():
    ((of_mesh, of_module),) = processes().run(reduced_by_others, size=1)
    assert "reproducible() was given the DTensor float32[3, 2]" in of_mesh
    assert "the gradients' fold is no sum" in of_module
