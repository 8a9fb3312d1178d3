"""Training that is stopped on four processes and goes on with two: bitwise the run that was not stopped.

    python examples/elastic_torch.py

A window has 12 micro-batches. Four processes fold 2 each and are stopped in the middle of it; two others load what they
have saved, and fold the last 4. One process folds all of them, in another order. With `funcga.reproducible` all
parameters have the same bits. With plain sums, the last line, they do not: float addition depends on the grouping.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import funcga
import torch_backend

SIZE, COUNT, UPDATES = 4, 12, 5  # rows of a micro-batch, micro-batches of a window, windows
STOPPED_IN, STOPPED_AFTER = 2, 8  # the window, and how many of its micro-batches are folded by then


def loss_fn(params, x, y):
    """The mean over a micro-batch."""
    return (torch.tanh(x @ params["w1"]) @ params["w2"] - y).square().mean()


def microbatch(update, k):
    """The k-th micro-batch of a window. Its rows, and so its gradient, are the same wherever it is folded."""
    generator = torch.Generator().manual_seed(COUNT * update + k)
    x = torch.randn(SIZE, 16, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def transform(fold, group):
    """AdamW, once for each window. The window ends where `flush` is called, so n only has to be large enough."""
    adam = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-2)
    return funcga.multi_steps(adam, COUNT, fold=fold, across=group)


def folded(tx, state, params, update, numbers, group):
    """The state with this replica's share of the micro-batches of these numbers."""
    for k in numbers[dist.get_rank(group) :: dist.get_world_size(group)]:
        grads = funcga.grad(loss_fn)(params, *microbatch(update, k))
        state = tx.accumulate(grads, state, weight=SIZE)
    return state


def train(group, fold, numbers, start=None, stop=None):
    """(params, state) after all windows, or in the middle of one where training is to `stop`."""
    tx = transform(fold, group)
    generator = torch.Generator().manual_seed(0)
    params = {"w1": torch.randn(16, 32, generator=generator) / 4, "w2": torch.randn(32, 1, generator=generator) / 6}
    update, params, state = (0, params, tx.init(params)) if start is None else start
    left = numbers if start is None else numbers[STOPPED_AFTER:]
    while update < UPDATES:
        if update == stop:
            return params, folded(tx, state, params, update, left[:STOPPED_AFTER], group)
        state = folded(tx, state, params, update, left, group)
        updates, state = tx.flush(state, params)
        params = torch_backend.apply_updates(params, updates)
        update, left = update + 1, numbers
    return params, state


def process(rank, count, folder, fold, name):
    """One process of the part of the run that is called "stopped", "resumed" or "straight"."""
    folder = Path(folder)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / name), count), rank=rank, world_size=count)
    group, start, numbers = dist.group.WORLD, None, list(range(COUNT))
    if name == "resumed":
        start = torch.load(folder / "checkpoint.pt", weights_only=False)
    if name == "straight":
        numbers.reverse()
    params, state = train(group, fold, numbers, start, STOPPED_IN if name == "stopped" else None)
    if name == "stopped":
        states = [None] * count
        dist.all_gather_object(states, state)
        if rank == 0:  # one state of all that was folded, for any number of processes
            torch.save((STOPPED_IN, params, transform(fold, group).merge(states)), folder / "checkpoint.pt")
    elif rank == 0:
        torch.save(params, folder / f"{name}.params.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    """Both runs, with exact sums and with plain ones."""
    torch.set_num_threads(1)
    for called, fold in (("exact", funcga.reproducible(funcga.mean())), ("plain", funcga.mean())):
        with tempfile.TemporaryDirectory() as folder:
            for name, count in (("stopped", 4), ("resumed", 2), ("straight", 1)):
                mp.start_processes(process, args=(count, folder, fold, name), nprocs=count, start_method="fork")
            resumed, straight = (torch.load(f"{folder}/{name}.params.pt") for name in ("resumed", "straight"))
        same = all(torch.equal(resumed[name], straight[name]) for name in straight)
        print(f"{called} sums: 4 processes, then 2, and 1 process that was not stopped: the same bits: {same}")


if __name__ == "__main__":
    main()
