"""The cases of torch: every contender is given a module of its own."""

import contextlib
import copy
import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from benchmarks import torch_workloads
from benchmarks.cases import Case
from benchmarks.comparison import Figures, Group, compared
from benchmarks.registry import baseline, contenders
from benchmarks.torch_measure import Watch, allocator_peak
from benchmarks.torch_problem import Problem, Step


def update(case: Case) -> Figures:
    """The figures of a case, or of one point of it; among ranks, this one's."""
    torch.manual_seed(0)
    ranks = dist.group.WORLD if dist.is_initialized() else None
    workload = getattr(torch_workloads, case.workload)(case.n, case.value, case.device)
    found, left_out = contenders(case.setting, case.kind, case.only)
    batch = workload.batch if ranks is None else workload.batch.chunk(ranks.size())[ranks.rank()]
    calls = {}
    for contender in found:
        module = copy.deepcopy(workload.module)
        step = contender.make(Problem(module, workload.loss, case.n, workload.size, group=ranks))
        calls[contender.key] = _Call(step, batch)
    parameters = list(workload.module.parameters())
    group = Group(
        found,
        left_out,
        baseline(case.setting),
        calls,
        _arrays,
        functools.partial(_structure, case, calls),
        {
            "n": case.n,
            "leaves": len(parameters),
            "parameters": sum(p.numel() for p in parameters),
            "parameter_bytes": sum(p.nbytes for p in parameters),
        },
        tolerance=3e-2 if parameters[0].dtype == torch.bfloat16 else 1e-4,
        agreed=_agreed,
    )
    return compared(group, case.seconds)


class _Call:
    """One update, to its end on all ranks; `graphs` is how many torch.compile has made for it so far."""

    def __init__(self, step: Step, batch: torch.Tensor) -> None:
        self.step, self.batch, self.graphs = step, batch, 0

    def __call__(self) -> Any:
        before = counters["stats"]["unique_graphs"]
        result = self.step(self.batch)
        self.graphs += counters["stats"]["unique_graphs"] - before
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        return result


def _arrays(result: Any) -> list[Any]:
    loss, grads = result
    own = [getattr(grads[name], "_local_tensor", grads[name]) for name in sorted(grads)]
    return [tensor.detach().double().cpu().numpy() for tensor in (loss, *own)]


def _agreed(rounds: int) -> int:
    if not dist.is_initialized():
        return rounds
    least = torch.tensor(rounds)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def _structure(case: Case, calls: dict[str, _Call], key: str) -> Figures:
    if case.setting == "torch_compiled":
        peak, allocations = allocator_peak(calls[key]) if case.device == "cpu" else (None, None)
        return {"peak_bytes": peak, "allocations": allocations, "compiles": calls[key].graphs}
    with Watch() as seen:
        calls[key]()
    return {
        "peak_bytes": seen.bytes,
        "allocations": seen.allocations,
        "ops": seen.ops,
        "collectives": len(seen.collectives),
        "wire_bytes": seen.wire_bytes,
    }


@contextlib.contextmanager
def started(case: Case) -> Iterator[None]:
    """The process as the case wants it: its threads and, if there are several, the group of its ranks."""
    if case.setting != "torch_ranks":
        yield
        return
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.ranks))
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        gc.collect()  # gloo may abort a process in which something still holds the group
        dist.destroy_process_group()
