"""Generated cases of wrapped modules: two processes against a loop by hand on one, in float64.

FUNCGA_FUZZ=1000 runs as many; a case that fails is named by its seed.
"""

import os
import random
import warnings
from dataclasses import dataclass

import torch
import torch.distributed.fsdp
from torch import nn

import funcga
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import WRAPPERS, ddp, fsdp1, fsdp1_flat, full, mesh_of
from torch_backend import module_value_and_grad

CASES = int(os.environ.get("FUNCGA_FUZZ", "40"))
# whether replicas of fully_shard may use different parameters
REDUCES_UNUSED = hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")
FOLDS = {
    "mean": funcga.mean(),
    "per_weight": funcga.per_weight(),
    "sum": funcga.sum(),
    "by_steps": funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps),
}


@dataclass(frozen=True)
class Case:
    """What is drawn from a seed."""

    seed: int
    wrapper: str
    fold: str
    n: int
    rows: tuple[int, int]
    sync: str
    weighs: str  # by rows, by a mask, by a number of the host's
    streams: bool
    has_aux: bool
    tied: bool
    frozen: bool
    unused: bool
    branch: bool


def drawn(seed):
    r = random.Random(seed)
    wrapper = r.choice([*WRAPPERS])
    is_ddp = wrapper in ("ddp", "ddp_views", "ddp_unused", "replicated")
    flat = wrapper in ("fsdp1", "fsdp1_flat")
    return Case(
        seed, wrapper, r.choice([*FOLDS]), r.randint(1, 4), (r.randint(1, 7), r.randint(1, 7)),
        r.choice(["last", "every"]), r.choice(["rows", "mask", "number"]), is_ddp and r.random() < 0.4,
        r.random() < 0.5, r.random() < 0.4, r.random() < 0.4 and not flat,
        r.random() < 0.4 and (wrapper == "ddp_unused" or not is_ddp),
        r.random() < 0.4 and wrapper in (("ddp_unused", "fsdp2") if REDUCES_UNUSED else ("ddp_unused",)),
    )  # fmt: skip


class Net(nn.Module):
    """Layers of which one may be tied to another, one frozen, one unused, and one used by some rows alone."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(case.seed)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen = nn.Linear(5, 5) if case.frozen else None
        self.unused = nn.Linear(2, 2) if case.unused else None
        self.branch = nn.Linear(5, 5) if case.branch else None
        self.tied = case.tied
        if case.frozen:
            self.frozen.requires_grad_(False)

    def forward(self, x):
        out = torch.tanh(self.second(torch.tanh(self.first(x))))
        out = torch.tanh(self.second(out)) if self.tied else out
        out = torch.tanh(self.frozen(out)) if self.frozen is not None else out
        if self.branch is not None and x[0, 0] > 0:
            out = torch.tanh(self.branch(out))
        return self.last(out)


def wrapped(group, case):
    net = Net(case).double()
    if case.wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net.last, mesh=mesh_of(group))
        return fully_shard(net, mesh=mesh_of(group))
    make = {"fsdp1": fsdp1, "fsdp1_flat": fsdp1_flat, "ddp": ddp}.get(case.wrapper, WRAPPERS[case.wrapper])
    return make(group, net)


def loss_of(case):
    def loss(module, x, y, mask):
        out = module(x)
        each = ((out - y) ** 2).mean(-1) * mask
        loss = each.sum() if case.fold == "per_weight" else each.sum() / mask.sum()
        return (loss, {"worst": out.abs().max(), "out": out, "rows": torch.tensor(len(x))}) if case.has_aux else loss

    return loss


def weight_of(case):
    return {"rows": None, "mask": lambda x, y, mask: mask.sum(), "number": lambda x, y, mask: 0.5 + len(x) % 3}[
        case.weighs
    ]


def batch_of(case, rank, window):
    """The rows of a replica, where a few count for nothing: at least one does, unless they weigh nothing then."""
    g = torch.Generator().manual_seed(1000 * case.seed + 10 * window + rank)
    rows = case.rows[(rank + window) % 2]
    x, y = (torch.randn(rows, k, generator=g, dtype=torch.float64) for k in (4, 3))
    mask = torch.ones(rows, dtype=torch.float64)
    if case.weighs == "mask" and case.fold in ("mean", "by_steps"):
        mask = (torch.rand(rows, generator=g) < 0.6).double()
    return x, y, mask


def by_hand(case, batches):
    """(value, gradients, aux) of a loop on one device over the micro-batches of all replicas."""
    net, loss, weigh = Net(case).double(), loss_of(case), weight_of(case)
    scaled = case.fold in ("mean", "by_steps")
    total, steps, value, outs = 0.0, 0, 0.0, []
    params = [p for p in net.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    for batch in batches:
        count = min(case.n, len(batch[0]))
        for micro in zip(*(t.tensor_split(count) for t in batch), strict=True):
            weight = float(len(micro[0]) if weigh is None else weigh(*micro))
            found = loss(net, *micro)
            found, aux = found if case.has_aux else (found, {"out": None})
            outs.append(aux["out"])
            total, steps = total + weight, steps + 1
            if scaled and not weight:
                continue
            grads = torch.autograd.grad(found, params, allow_unused=True)
            factor = weight if scaled else 1.0
            value = value + factor * found.detach()
            sums = [s if g is None else s + factor * g for s, g in zip(sums, grads, strict=True)]
    divisor = {"mean": total, "per_weight": total, "sum": 1.0, "by_steps": steps}[case.fold]
    out = torch.cat([o.detach() for o in outs]) if case.has_aux else None
    divided = lambda t: t / divisor if divisor else t * 0
    return divided(torch.as_tensor(value)), [divided(s) for s in sums], out


def error_of(group, case):
    module, fold = wrapped(group, case), FOLDS[case.fold]
    gradient = module_value_and_grad(module, loss_of(case), has_aux=case.has_aux, sync=case.sync)
    aux = {"worst": funcga.max(), "out": funcga.concat(), "rows": funcga.sum()}
    options = {"fold": ((fold, aux) if case.has_aux else fold, fold), "weight": weight_of(case)}
    streams = case.streams and case.sync == "last"
    step = funcga.stream(gradient, **options) if streams else funcga.accumulate(gradient, case.n, **options)
    errors = []
    for window in range(2):
        batches = [batch_of(case, rank, window) for rank in range(2)]
        own = batches[group.rank()]
        count = min(case.n, len(own[0]))
        micros = list(zip(*(t.tensor_split(count) for t in own), strict=True))
        found, grads = step(micros) if streams else step(*own)
        value, expected, out = by_hand(case, batches)
        if case.has_aux:
            found, extra = found
            assert extra["rows"] == len(out)
            errors += [(extra["out"] - out).abs().max(), (extra["worst"] - out.abs().max()).abs()]
        scale = max([1e-3, *(e.abs().max() for e in expected)])
        errors.append((found - value).abs())
        errors += [(a - b).abs().max() / scale for a, b in zip(full(module, grads), expected, strict=True)]
    assert all(p.grad is None for p in module.parameters())
    return max(float(e) if e == e else float("inf") for e in errors)


def run(group, seeds):
    """What went wrong: (case, error) of each seed."""
    wrong = []
    for seed in seeds:
        case = drawn(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*find_unused_parameters")  # as some cases use all of them
            error = error_of(group, case)
        if not error <= 1e-11:
            wrong.append((case, error))
    return wrong


def test_generated_cases_are_those_of_one_device():
    for start in range(0, CASES, 20):
        for wrong in processes(2).run(run, range(start, min(start + 20, CASES)), limit=120):
            assert wrong == []


def test_the_cases_differ():
    cases = [drawn(seed) for seed in range(40)]
    assert {case.wrapper for case in cases} == {*WRAPPERS}
    assert {case.fold for case in cases} == {*FOLDS}
    for name in ("streams", "has_aux", "tied", "frozen", "unused", "branch"):
        assert {getattr(case, name) for case in cases} == {False, True}
