"""Every wrapper x every feature of a window: the replicas together give what a loop by hand gives on one device."""

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import funcga
from tests.kits import Unseen
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import FOLDS, WRAPPERS, full, hybrid, mesh_of
from torch_backend import module_value_and_grad

LIMITS = {torch.float32: 2e-6, torch.float64: 1e-11}
# whether replicas of fully_shard may use different parameters
REDUCES_UNUSED = hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params")


@dataclass(frozen=True)
class Feature:
    """A step; the rows that each replica has, window by window; and what the module is made of."""

    rows: tuple = ((7, 4, 1, 3), (3, 5, 2, 6))
    n: int | None = 3  # None: micro-batches of two rows
    fold: str = "mean"
    weighs: str = "rows"
    streams: bool = False
    alone: bool = False  # the gradient function is called by itself
    aux: bool = False
    sync: str = "last"
    totals: bool = False
    drop: str | None = None
    nans: bool = False  # all rows of micro-batches that weigh nothing are NaN
    parts: tuple = ()


ROWS_OF_NONE = ((3, 1, 5, 2), (0, 7, 5, 0), (7, 0, 0, 3), (0, 0, 5, 2))
FEATURES = {
    "n=1": Feature(n=1),
    "n=3": Feature(aux=True),
    "every micro-batch synchronises": Feature(sync="every", aux=True),
    "of a size": Feature(n=None, sync="every"),
    "called by itself": Feature(alone=True),
    "stream": Feature(streams=True, weighs="tokens"),
    "uneven stream": Feature(n=None, streams=True),
    "weights of the host": Feature(weighs="number"),
    "weights of a device": Feature(weighs="unseen", n=4),
    "masked": Feature(weighs="tokens", n=5, rows=((5, 6, 5, 7),) * 2),
    "masked NaN": Feature(weighs="tokens", n=5, rows=((5, 6, 5, 7), (3, 0, 5, 2)), nans=True, parts=("normed",)),
    "masked NaN of a device": Feature(weighs="unseen", n=5, rows=((5, 6, 5, 7),) * 2, nans=True, parts=("normed",)),
    "masked NaN, every": Feature(weighs="tokens", n=None, sync="every", nans=True, parts=("normed",), drop="window"),
    "per_weight": Feature(fold="per_weight", weighs="tokens"),
    "sum": Feature(fold="sum", sync="every"),
    "sum, last": Feature(fold="sum"),
    "by_steps": Feature(fold="by_steps", weighs="number"),
    "fewer rows than micro-batches": Feature(rows=ROWS_OF_NONE, n=4, aux=True),
    "fewer rows, summed": Feature(rows=ROWS_OF_NONE, n=4, fold="sum", sync="every"),
    "fewer rows, of a size": Feature(rows=ROWS_OF_NONE, n=None),
    "totals": Feature(fold="sum", totals=True),
    "totals of replicas without rows": Feature(fold="sum", totals=True, rows=ROWS_OF_NONE),
    "totals of a stream": Feature(fold="sum", totals=True, streams=True),
    "drop": Feature(drop="window"),
    "tied": Feature(parts=("tied",)),
    "frozen": Feature(parts=("frozen",)),
    "unused": Feature(parts=("unused",)),
    "branch": Feature(parts=("branch",), rows=((7, 7, 7, 7),) * 4, n=2),
    "branch, every": Feature(parts=("branch",), rows=((7, 7, 7, 7),) * 2, n=2, sync="every"),
}
# Of the second form of a wrapper, and in float32: what is summed, and when, is the same.
FEATURES_OF_TWINS = [
    "n=3", "every micro-batch synchronises", "uneven stream", "weights of a device", "per_weight", "sum, last", "by_steps",
    "fewer rows than micro-batches", "fewer rows, summed", "drop", "tied", "masked NaN",
]  # fmt: skip
FEATURES_OF_A_MESH = [
    "every micro-batch synchronises",
    "stream",
    "fewer rows than micro-batches",
    "totals",
    "outer",
    "masked NaN",
]


def features_of(wrapper, dtype):
    if wrapper in ("hybrid", "hsdp"):
        outer = {"outer": Feature(sync="outer", streams=True, weighs="tokens")} if wrapper == "hsdp" else {}
        return {name: {**FEATURES, **outer}[name] for name in FEATURES_OF_A_MESH if name in {**FEATURES, **outer}}
    if wrapper in ("ddp_views", "fsdp1_flat", "replicated") or dtype is torch.float32:
        return {name: FEATURES[name] for name in FEATURES_OF_TWINS}
    left_out = {"ddp": {"unused"}, "fsdp1": {"frozen"}}.get(wrapper, set())
    if wrapper not in ("ddp_unused", "fsdp2") or (wrapper == "fsdp2" and not REDUCES_UNUSED):
        left_out |= {"branch", "branch, every"}
    return {name: feature for name, feature in FEATURES.items() if name not in left_out}


class Net(nn.Module):
    """Layers of which one may be tied to another, one frozen, one unused, and one used by some micro-batches alone; or a
    first step that has no derivative at a row of zeros."""

    def __init__(self, parts):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.tied, self.normed = "tied" in parts, "normed" in parts
        self.frozen = nn.Linear(5, 5).requires_grad_(False) if "frozen" in parts else None
        self.unused = nn.Linear(2, 2) if "unused" in parts else None
        self.branch = nn.Linear(5, 5) if "branch" in parts else None

    def forward(self, x):
        if self.normed:
            out = self.first(x)
            x = x + (out / out.norm(dim=1, keepdim=True)).square()[:, :4] + x.abs().sum(1, keepdim=True).log()
        out = torch.tanh(self.second(torch.tanh(self.first(x))))
        out = torch.tanh(self.second(out)) if self.tied else out
        out = torch.tanh(self.frozen(out)) if self.frozen is not None else out
        if self.branch is not None and len(x) and x[0, 0] > 0:
            out = torch.tanh(self.branch(out))
        return self.last(out)


def wrapped(group, wrapper, net):
    from torch.distributed.fsdp import fully_shard

    if wrapper in ("fsdp2", "hsdp"):
        mesh = mesh_of(group, (2, 2) if wrapper == "hsdp" else None)
        fully_shard(net.last, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    return {**WRAPPERS, "hybrid": hybrid}[wrapper](group, net)


def loss_of(feature):
    def loss(module, x, y, mask, totals=None):
        out = module(x)
        squares = ((out - y) ** 2).mean(-1) * mask
        if totals is not None:
            return squares.sum() / totals["tokens"] + 0.3 * (out[:, 0] ** 2).sum() / totals["rows"]
        value = squares.sum() if feature.fold == "per_weight" else squares.sum() / mask.sum()
        numbers = {k: k * value for k in range(4)}  # more than there is room for in a header
        aux = {"worst": out.abs().max(), "out": out, "rows": len(x), "none": None, **numbers}
        return (value, aux) if feature.aux else value

    return loss


WEIGHTS = {
    "rows": None,
    "tokens": lambda x, y, mask: mask.sum(),
    "unseen": lambda x, y, mask: mask.sum().as_subclass(Unseen),
    "number": lambda x, y, mask: 0.5 + len(x) % 3,
}


def calls_of(feature):
    """(window, factor of the parameters) of each call of a step: at first, with other values, other rows, as at first."""
    return [(0, 1.0), (0, 2.0), *((window, 2.0) for window in range(1, len(feature.rows))), (0, 1.0)]


def microbatches(feature, window, rank, dtype, factor):
    """Those of a replica. Where they are weighed by tokens, some rows have none, and some micro-batches too."""
    g = torch.Generator().manual_seed(100 * int(factor) + 10 * window + rank)
    rows = feature.rows[window][rank]
    x, y = (torch.randn(rows, k, generator=g, dtype=torch.float64) for k in (4, 3))
    mask = torch.ones(rows, dtype=torch.float64)
    if feature.weighs in ("tokens", "unseen") or feature.totals:
        mask = (torch.rand(rows, generator=g) < 0.6).double()
    if feature.drop and window == 1 and rank == 1 and not feature.nans:
        x[-1, 0] = float("inf")
    whole = [x.to(dtype), y.to(dtype), mask.to(dtype)]
    count = -(-rows // 2) if feature.n is None else min(1 if feature.alone else feature.n, rows)
    cut = lambda leaf: leaf.split(2) if feature.n is None else leaf.tensor_split(count)
    parts = [*zip(*map(cut, whole), strict=True)] if rows else []
    for x, _, mask in parts if feature.nans else ():
        x[:] = x if mask.sum() else float("nan")
    return whole, parts


def scale(module, factor):
    """As an update changes the values of parameters, each rank those that it has."""
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(factor)


def by_hand(feature, parts, factor):
    """(value, gradients, outputs) of a loop in float64 over the micro-batches of all replicas."""
    net, loss, weigh = Net(feature.parts).double(), loss_of(feature), WEIGHTS[feature.weighs]
    scale(net, factor)
    parts = [[leaf.double() for leaf in part] for part in parts]
    totals = {"tokens": sum(mask.sum() for *_, mask in parts), "rows": sum(len(x) for x, *_ in parts)}
    scaled, kwargs = feature.fold in ("mean", "by_steps"), {"totals": totals} if feature.totals else {}
    params = [p for p in net.parameters() if p.requires_grad]
    total, value, outs, sums = 0.0, 0.0, [], [torch.zeros_like(p) for p in params]
    for part in parts:
        weight = float(len(part[0]) if weigh is None else weigh(*part))
        found = loss(net, *part, **kwargs)
        found, aux = found if feature.aux else (found, {"out": torch.zeros(0, 3)})
        outs.append(aux["out"].detach())
        total += weight
        if scaled and not weight:
            continue
        factor = weight if scaled else 1.0
        grads = torch.autograd.grad(found, params, allow_unused=True)
        value = value + factor * found.detach()
        sums = [s if g is None else s + factor * g for s, g in zip(sums, grads, strict=True)]
    divisor = {"mean": total, "per_weight": total, "sum": 1.0, "by_steps": len(parts)}[feature.fold]
    return value / divisor, [s / divisor for s in sums], torch.cat(outs)


def error_of(group, wrapper, feature, dtype):
    module, fold = wrapped(group, wrapper, Net(feature.parts).to(dtype)), FOLDS[feature.fold]
    gradient = module_value_and_grad(module, loss_of(feature), has_aux=feature.aux, sync=feature.sync)
    aux = {"worst": funcga.max(), "out": funcga.concat(), "rows": funcga.sum(), "none": funcga.mean()}
    aux |= dict.fromkeys(range(4), fold)
    options = {"fold": ((fold, aux) if feature.aux else fold, fold), "weight": WEIGHTS[feature.weighs]}
    if feature.totals:
        options["totals"] = lambda x, y, mask: {"tokens": mask.sum(), "rows": len(x)}
    if feature.drop:
        options["drop"] = feature.drop
    if wrapper == "hsdp":
        options["across"] = group
    cut = {"microbatch_size": 2} if feature.n is None else {"n": feature.n}
    stepped = funcga.stream(gradient, **options) if feature.streams else funcga.accumulate(gradient, **cut, **options)
    step, errors, before = gradient if feature.alone else stepped, [], 1.0
    for window, factor in calls_of(feature):
        scale(module, factor / before)  # by powers of two, which rounds nothing
        before = factor
        if not any(feature.rows[window][: group.size()]):
            with pytest.raises(funcga.FuncgaError, match="no replica has a micro-batch to fold"):
                step(*microbatches(feature, window, group.rank(), dtype, factor)[0])
            continue
        of_ranks = [microbatches(feature, window, rank, dtype, factor) for rank in range(group.size())]
        whole, own = of_ranks[group.rank()]
        found, grads = step(own) if feature.streams else step(*whole)
        value, expected, out = by_hand(feature, [part for _, parts in of_ranks for part in parts], factor)
        if feature.drop and window == 1 and not feature.nans:
            value, expected = torch.zeros(()), [torch.zeros_like(g) for g in expected]
        if feature.aux:
            found, extra = found
            assert (extra["rows"], extra["none"]) == (len(out), None)
            errors += [(extra[k] - k * value).abs() for k in range(4)]
            errors += [(extra["out"] - out).abs().max(), (extra["worst"] - out.abs().max()).abs()]
        largest = max([1e-3, *(e.abs().max() for e in expected)])
        errors.append((found - value).abs())
        errors += [(a - b).abs().max() / largest for a, b in zip(full(module, grads), expected, strict=True)]
    assert all(p.grad is None for p in module.parameters())
    return max(float(e) if e == e else float("inf") for e in errors)


def errors_of(group, wrapper, dtype):
    found = {}
    for name, feature in features_of(wrapper, dtype).items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*find_unused_parameters")  # as some use all of them
            try:
                found[name] = error_of(group, wrapper, feature, dtype)
            except Exception as error:
                raise AssertionError(f"{wrapper}: {name}") from error
    return found


KINDS = [(wrapper, torch.float64) for wrapper in [*WRAPPERS, "hybrid", "hsdp"]]
KINDS += [("ddp", torch.float32), ("fsdp2", torch.float32)]


@pytest.mark.parametrize(("wrapper", "dtype"), KINDS)
def test_every_feature_is_the_loop_by_hand(wrapper, dtype):
    for found in processes().run(errors_of, wrapper, dtype, size=4 if wrapper in ("hybrid", "hsdp") else 2):
        assert {name: error for name, error in found.items() if not error <= LIMITS[dtype]} == {}
