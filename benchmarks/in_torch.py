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
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import torch_pairs_truth, torch_workloads
from benchmarks.cases import Case
from benchmarks.comparison import Figures, Group, about, compared
from benchmarks.registry import Contender, baseline, contenders, expected
from benchmarks.torch_measure import Watch, allocator_peak, cuda_peak
from benchmarks.torch_problem import Problem, Step
from benchmarks.truth import COLUMNS, Question, error, questions


def update(case: Case) -> Figures:
    """The figures of a case, or of one point of it; among ranks, this one's."""
    return compared(group_of(case, dist.group.WORLD), case.seconds)


def group_of(case: Case, ranks: dist.ProcessGroup | None) -> Group:
    """Its contenders on its workload, before anything is computed."""
    torch.manual_seed(0)
    count, rank = (ranks.size(), ranks.rank()) if ranks else (1, 0)
    workload = getattr(torch_workloads, case.workload)(case.n * count, case.value, case.device)
    n = len(workload.batch) // (workload.size * count)
    batch = workload.batch.chunk(count)[rank]
    found, left_out = contenders(case.setting, case.kind, case.only)
    found = [c for c in found if case.workload in (c.workloads or (case.workload,))]
    calls = {}
    for contender in found:
        module = workload.module if contender is found[-1] else copy.deepcopy(workload.module)
        step = contender.make(Problem(module, workload.loss, n, workload.size, group=ranks))
        calls[contender.key] = (_Compiled if case.setting == "torch_compiled" else _Call)(step, batch, ranks)
    parameters = list(workload.module.parameters())
    parameter_bytes = sum(p.nbytes for p in parameters)
    return Group(
        found,
        left_out,
        baseline(case.setting),
        calls,
        _gradients if ranks else _arrays,
        functools.partial(_structure, case, calls, parameter_bytes + batch.nbytes),
        {
            "n": n,
            "leaves": len(parameters),
            "parameters": sum(p.numel() for p in parameters),
            "parameter_bytes": parameter_bytes,
        },
        tolerance=3e-2 if parameters[0].dtype == torch.bfloat16 else 1e-4,
        agreed=functools.partial(_agreed, ranks),
        expected=expected(case.setting),
    )


class _Call:
    """One update, to its end on all ranks."""

    def __init__(self, step: Step, batch: torch.Tensor, ranks: dist.ProcessGroup | None) -> None:
        self.step, self.batch, self.ranks = step, batch, ranks

    def __call__(self) -> Any:
        result = self.step(self.batch)
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        if self.ranks is not None:
            dist.barrier(group=self.ranks)
        return result


class _Compiled(_Call):
    """The same; `graphs` is how many torch.compile has made for it so far."""

    graphs = 0

    def __call__(self) -> Any:
        before = _graphs()
        result = super().__call__()
        self.graphs += _graphs() - before
        return result


def _graphs() -> int:
    from torch._dynamo.utils import counters  # takes a second to import, in every process of eager code too

    return int(counters["stats"]["unique_graphs"])


def _gradients(result: Any) -> list[Any]:
    """Without the loss: by hand each rank has its own."""
    return _arrays(result)[1:]


def _arrays(result: Any) -> list[Any]:
    loss, grads = result
    return [_array(tensor) for tensor in (loss, *(grads[name] for name in sorted(grads)))]


def _array(tensor: torch.Tensor) -> Any:
    """float32, a copy: what an optimizer steps on is written to later."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", torch.float32, copy=True).numpy()


def _agreed(ranks: dist.ProcessGroup | None, rounds: int) -> int:
    if ranks is None:
        return rounds
    least = torch.tensor(rounds)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=ranks)
    return int(least)


def _structure(case: Case, calls: dict[str, _Call], of_all: int, key: str) -> Figures:
    if isinstance(call := calls[key], _Compiled):
        graphs = call.graphs
        peak, allocations = (allocator_peak if case.device == "cpu" else cuda_peak)(call)
        return {"peak_bytes": peak, "allocations": allocations, "compiles": graphs}
    # A thread of gloo lets go of what it has sent when it comes to it. Of 60 windows of FSDP2 one or two have a peak
    # that is 1.2 times as high, whoever drives it. The least of a few is that of the window itself.
    seen = min([_watched(call) for _ in range(1 if call.ranks is None else 5)], key=lambda watch: watch.bytes)
    return {
        "peak_bytes": seen.bytes + max(seen.kept - of_all, 0),  # FSDP2 keeps a part of the parameters
        "allocations": seen.allocations,
        "ops": seen.ops,
        "collectives": len(seen.collectives),
        "wire_bytes": seen.wire_bytes,
    }


def _watched(call: _Call) -> Watch:
    with Watch() as seen:
        call()
    return seen


def exactness(case: Case) -> Figures:
    """How far each contender is from the true gradient."""
    if case.setting == "torch_coupled":
        return torch_pairs_truth.asked(case)
    return asked(case, dist.group.WORLD)


def asked(case: Case, ranks: dist.ProcessGroup | None) -> Figures:
    """What comes of each question that applies to so many ranks, all of which take part."""
    found, left_out = contenders(case.setting, case.kind, case.only)
    figures = {c.key: {**about(c), "errors": dict.fromkeys(COLUMNS), "refused": {}} for c in found}
    for question in questions(ranks.size() if ranks else 1):
        for contender in found:
            where = figures[contender.key]
            try:
                where["errors"][question.column] = _error(contender, question, ranks, case.device)
            except (ValueError, RuntimeError, NotImplementedError) as refusal:
                where["refused"][question.column] = f"{type(refusal).__name__}: {refusal}"
    return {"left_out": left_out, "contenders": figures}


def _error(contender: Contender, question: Question, ranks: Any, device: str) -> float:
    if question.column in contender.hangs:
        raise RuntimeError("its ranks would wait for each other for ever")
    rank = ranks.rank() if ranks else 0
    module = (_Tokens if question.of_tokens else _Sum)(question, device)
    rows = torch.tensor(question.rows[rank], device=device).to(module.rows_dtype)
    weight = _predicted if question.of_tokens else None
    step = contender.make(Problem(module, _loss, question.n, question.size, weight, ranks))
    _, grads = step(rows)
    return error({name: _array(g) for name, g in grads.items()}, question)


def _predicted(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens[:, 1:] != 0).sum()


def _loss(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return module(rows)


class _Tokens(nn.Module):
    """The mean cross entropy over the tokens that are predicted."""

    rows_dtype = torch.int64

    def __init__(self, question: Question, device: str) -> None:
        super().__init__()
        self.embedding, self.linear = (
            nn.Parameter(torch.tensor(question.params[name], device=device)) for name in ("embedding", "linear")
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.embedding[tokens[:, :-1]] @ self.linear
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


class _Sum(nn.Module):
    """The mean over the rows of their weighted sums."""

    rows_dtype = torch.bfloat16

    def __init__(self, question: Question, device: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(question.params["w"], device=device, dtype=self.rows_dtype))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.w * rows).sum(-1).mean()


@contextlib.contextmanager
def started(case: Case) -> Iterator[None]:
    """The process as the case wants it: its threads and, if there are several, the group of its ranks."""
    if case.setting != "torch_ranks":
        yield
        return
    torch.set_num_threads(case.threads or max(1, (os.cpu_count() or 1) // case.ranks))
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        gc.collect()  # gloo may abort a process in which something still holds the group
        dist.destroy_process_group()
