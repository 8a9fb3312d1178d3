"""Every source x every feature of a window, over replicas: what float64 autograd and NumPy make of all micro-batches."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import funcga
import torch_backend
from tests import oracle
from tests.kits import Unseen
from tests.processes import processes
from torch_backend import Replicas

LIMITS = {torch.float64: 1e-11, torch.float32: 5e-6}
# The rows of each of four ranks, window by window: with one rank they are those of the first. The second call sends
# without an agreement, and from the third one on ranks have nothing.
ROWS = ((5, 3, 6, 4), (4, 7, 1, 5), (3, 0, 0, 4), (6, 2, 5, 0))
NONE_AT_FIRST = ((0, 4, 0, 3), (4, 0, 5, 2), (2, 3, 1, 1))


@dataclass(frozen=True)
class Feature:
    fold: str = "mean"
    n: int | None = 3  # None: micro-batches of two rows
    streams: bool = False
    weighs: str = "tokens"
    rows: tuple = ROWS
    dtype: torch.dtype = torch.float64
    totals: bool = False
    drop: str | None = None
    replicas: tuple = ()  # options of Replicas


FEATURES = {
    "mean": Feature(),
    "per_weight": Feature("per_weight", n=4),
    "sum": Feature("sum", n=2, rows=NONE_AT_FIRST),
    "max": Feature("max", streams=True, weighs="rows"),
    "moments": Feature("moments"),
    "logsumexp": Feature("logsumexp", n=2, weighs="rows"),
    "by_steps": Feature("by_steps", weighs="number"),
    "stream": Feature(n=None, streams=True, rows=NONE_AT_FIRST),
    "of a size": Feature("per_weight", n=None),
    "float32": Feature("per_weight", dtype=torch.float32),
    "rows": Feature(weighs="rows", dtype=torch.float32),
    "weights of a device": Feature(weighs="unseen"),
    "tiny weights": Feature(weighs="tiny", streams=True),
    "small buckets": Feature(replicas=(("bucket_bytes", 64),)),
    "on a wide wire": Feature("sum", replicas=(("wire_dtype", torch.float64),), dtype=torch.float32),
    "totals": Feature("sum", totals=True),
    "totals of a stream": Feature("sum", totals=True, streams=True, rows=NONE_AT_FIRST),
    "drop a micro-batch": Feature(drop="microbatch", n=4, streams=True),
    "drop a window": Feature(drop="window", n=2),
}
OF_MODULES = [name for name in FEATURES if name not in ("by_steps", "logsumexp", "max", "moments")]
OF_OTHERS = [name for name in FEATURES if name not in ("small buckets", "on a wide wire", "tiny weights")]


def folds_of(name):
    by_steps = funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps)
    return by_steps if name == "by_steps" else getattr(funcga, name)()


def calls_of(feature):
    """(window, which values) of each call of a step: at first, with other values, other numbers of rows, as at first."""
    return [(0, 0), (0, 1), *((window, 1) for window in range(1, len(feature.rows))), (0, 0)]


def parameters(dtype, values=0):
    generator = torch.Generator().manual_seed(values)
    shapes = {"a": (5, 7), "b": (7,), "c": (7, 2), "rare": (3,)}
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    params = {name: draw(shape) for name, shape in shapes.items()}
    return {**params, "a": params["a"].T.contiguous().T}  # not contiguous


class Module(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        for name, leaf in parameters(dtype).items():
            self.register_parameter(name, nn.Parameter(leaf))

    def forward(self, loss, *batch, **kwargs):
        return loss(dict(self.named_parameters()), *batch, **kwargs)


def loss_of(feature, reentrant=None):
    """A sum over tokens, or their mean; only rows with many of them use one of the parameters. Flags spoil it."""

    def squares(a, b, c, x, y):
        return ((torch.tanh(x @ a + b) @ c - y) ** 2).sum(1)

    def loss(params, x, y, tokens, flags, totals=None):
        apply = squares if reentrant is None else lambda *args: checkpoint(squares, *args, use_reentrant=reentrant)
        each = apply(params["a"], params["b"], params["c"], x, y) * tokens
        value = each.sum() + (params["rare"].sum() * tokens[tokens > 4].sum() if (tokens > 4).any() else 0)
        if totals is not None:
            return value / totals["tokens"] + 0.3 * (params["b"].sum() * x).sum() / totals["rows"] + totals["half"] * 0
        value = value if feature.fold in ("per_weight", "sum") else value / tokens.sum()
        if feature.drop is None:
            return value
        b = params["b"].sum()
        broken = torch.where(flags.max() == 2, b - b.detach(), torch.ones_like(b)).sqrt()  # whose gradient is NaN
        return value + torch.where(flags.max() == 1, torch.inf, 0.0) + broken

    return loss


WEIGHTS = {
    "rows": None,
    "tokens": lambda x, y, tokens, flags: tokens.sum(),
    "unseen": lambda x, y, tokens, flags: tokens.sum().as_subclass(Unseen),
    "number": lambda x, y, tokens, flags: 0.5 + len(x) % 3,
    "tiny": lambda x, y, tokens, flags: 1e-30 * len(x),
}


def microbatches(feature, window, rank, values=0):
    """A replica's rows, and how they are cut. Some rows have no token, and some micro-batches none at all."""
    g = torch.Generator().manual_seed(2000 * values + 100 * window + rank)
    rows = feature.rows[window][rank]
    x, y = (torch.randn(rows, k, generator=g, dtype=torch.float64).to(feature.dtype) for k in (5, 2))
    tokens = torch.randint(1, 9, (rows,), generator=g)
    if feature.weighs in ("tokens", "unseen"):
        tokens = tokens * (torch.rand(rows, generator=g) < 0.7)
    flags = torch.zeros(rows, dtype=torch.int64)
    if feature.drop and rows and window > 0:
        flags[-1 if window % 2 else 0] = (rank == window % 2) * (1 + window % 2)
        tokens += 1
    whole = [x, y, tokens, flags]
    count = -(-rows // 2) if feature.n is None else min(feature.n, rows)
    cut = lambda leaf: leaf.split(2) if feature.n is None else leaf.tensor_split(count)
    return whole, [*zip(*map(cut, whole), strict=True)] if rows else []


def expected(feature, parts, values=0):
    """(the value, the gradients, how many are dropped) by autograd on each micro-batch, and a fold in NumPy."""
    params = {name: leaf.double().requires_grad_() for name, leaf in parameters(feature.dtype, values).items()}
    parts = [(x.double(), y.double(), tokens, flags) for x, y, tokens, flags in parts]
    weigh, loss, outputs, weights, dropped = WEIGHTS[feature.weighs], loss_of(feature), [], [], 0
    rows = sum(len(x) for x, *_ in parts)
    totals = {"tokens": sum(tokens.sum() for _, _, tokens, _ in parts), "rows": rows, "half": 0.5 * rows}
    for part in parts:
        if feature.drop and part[3].max():
            dropped += 1
            continue
        value = loss(params, *part, **({"totals": totals} if feature.totals else {}))
        grads = torch.autograd.grad(value, [*params.values()], allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params.values(), strict=True)]
        outputs.append([leaf.detach().numpy() for leaf in (value, *grads)])
        weights.append(float(len(part[0]) if weigh is None else weigh(*part)))
    if dropped and feature.drop == "window":
        dropped, zeros = len(parts), [p.detach().numpy() * 0 for p in params.values()]
        return [0, *zeros], dropped
    folds = ["mean" if feature.fold in ("max", "moments", "logsumexp") else feature.fold, *[feature.fold] * len(params)]
    leaves = [
        oracle.fold(fold, values, weights) for fold, values in zip(folds, zip(*outputs, strict=True), strict=True)
    ]
    return [part for leaf in leaves for part in (leaf if isinstance(leaf, tuple) else (leaf,))], dropped


def step_of(group, source, feature):
    """step(whole, parts, values) -> leaves, and how many were dropped."""
    fold = folds_of(feature.fold)
    value_fold = folds_of("mean") if feature.fold in ("max", "moments", "logsumexp") else fold
    options = {"fold": (value_fold, fold), "weight": WEIGHTS[feature.weighs]}
    options["across"] = Replicas(group, **dict(feature.replicas)) if feature.replicas else group
    if feature.totals:
        options["totals"] = lambda x, y, t, f: {"tokens": t.sum(), "rows": len(x), "half": 0.5 * len(x)}
    if feature.drop:
        options |= {"drop": feature.drop, "observe": funcga.dropped()}
    module = Module(feature.dtype) if source == "module" else None
    is_alike = source != "mixed" or dist.get_rank(group) % 2  # some ranks recompute what others do not
    loss = loss_of(feature, {"reentrant": True, "mixed": True}.get(source) if is_alike else None)
    if source == "module":
        gradient = torch_backend.module_value_and_grad(
            module, lambda module, *args, **kwargs: module(loss, *args, **kwargs)
        )
    else:
        gradient = funcga.value_and_grad(loss)
    if source == "func":
        transform = torch.func.grad_and_value(loss)
        gradient = lambda *args, **kwargs: transform(*args, **kwargs)[::-1]
    cut = {"microbatch_size": 2} if feature.n is None else {"n": feature.n}
    step = funcga.stream(gradient, **options) if feature.streams else funcga.accumulate(gradient, **cut, **options)

    def run(whole, parts, values):
        params = parameters(feature.dtype, values)
        args = (params,) if module is None else ()
        for name, leaf in params.items() if module is not None else ():
            module.get_parameter(name).data.copy_(leaf)
        result = step(*args, parts) if feature.streams else step(*args, *whole)
        result, dropped = result if feature.drop else (result, 0)
        return tree_leaves(result), int(dropped)

    return run


def error_of(group, source, feature):
    step, errors, size, kept = step_of(group, source, feature), [], dist.get_world_size(group), []
    for window, values in calls_of(feature):
        of_ranks = [microbatches(feature, window, rank, values) for rank in range(size)]
        parts = [part for _, own in of_ranks for part in own]
        if not parts:
            continue
        found, dropped = step(*of_ranks[dist.get_rank(group)], values)
        assert all(map(torch.equal, *kept[-1])) if kept else True  # a result is the caller's own
        kept.append((found, [leaf.clone() for leaf in found]))
        wanted, count = expected(feature, parts, values)
        assert dropped == count, (window, dropped, count)
        scale = max(np.abs(w).max() for w in wanted) or 1
        for leaf, other in zip(found, wanted, strict=True):
            assert leaf.dtype == feature.dtype
            errors.append(float(np.abs(leaf.double().numpy() - other).max()) / scale)
    if feature.rows[0][0]:  # as at first: the first and the last call
        assert all(map(torch.equal, kept[0][1], kept[-1][1]))
    return max(error if error == error else float("inf") for error in errors)


def errors_of(group, source, names):
    found = {}
    for name in names:
        try:
            found[name] = error_of(group, source, FEATURES[name])
        except Exception as error:
            raise AssertionError(f"{source}: {name}") from error
    return found


SOURCES = {
    "engine": [*FEATURES],
    "engine, some": ["mean", "per_weight", "sum", "max", "stream", "rows", "small buckets", "totals", "drop a window"],
    "func": OF_OTHERS,
    "module": OF_MODULES,
    "reentrant": ["mean", "per_weight"],
    "mixed": ["mean", "small buckets"],
}


SIZES = [
    ("engine, some", 1),
    ("engine", 2),
    ("engine, some", 4),
    ("func", 2),
    ("module", 2),
    ("reentrant", 2),
    ("mixed", 2),
]


@pytest.mark.parametrize(("source", "size"), SIZES)
def test_every_feature_over_replicas(source, size):
    """All ranks have the same bits, too."""
    ranks = processes().run(errors_of, source, SOURCES[source], size=size)
    for found in ranks:
        assert {name: error for name, error in found.items() if not error <= LIMITS[FEATURES[name].dtype]} == {}


# -- exact sums


def exact_windows(group, shares):
    """The leaves of each window, whose micro-batches are those of these numbers."""
    feature = Feature(rows=tuple((3,) * 4 for _ in range(3)), n=3, dtype=torch.float32)
    pool = [part for window in range(3) for rank in range(4) for part in microbatches(feature, window, rank)[1]]
    fold = funcga.reproducible(funcga.mean())
    step = funcga.stream(funcga.value_and_grad(loss_of(feature)), fold=fold, weight=WEIGHTS["tokens"], across=group)
    own = shares[dist.get_rank(group) if group is not None else 0]
    return [tree_leaves(step(parameters(torch.float32), [pool[k] for k in order])) for order in own]


def shares_of(size, seed):
    """For each rank the micro-batches of each window: another order, and another number of them, in each."""
    r, shares = np.random.default_rng(seed), [[[*range(rank, 36, size)]] for rank in range(size)]
    for _ in range(4):
        order, cuts = r.permutation(36), np.sort(r.integers(0, 37, size - 1))
        for own, numbers in zip(shares, np.split(order, cuts), strict=True):
            own.append(numbers.tolist())
    return shares


@pytest.mark.parametrize("size", [1, 4])
def test_exact_sums_have_the_same_bits_on_any_number_of_replicas(size):
    (whole,) = exact_windows(None, [[[*range(36)]]])
    for results in processes().run(exact_windows, shares_of(size, size), size=size):
        assert all(all(map(torch.equal, result, whole)) for result in results)


def out_of_range(group):
    step = funcga.accumulate(lambda x: x, 1, in_axes=0, fold=funcga.reproducible(funcga.sum(), limit=8), across=group)
    with pytest.raises(funcga.FuncgaError, match="the result of output is not known"):
        step(torch.full((2,), 100.0 * dist.get_rank(group)))
    return step(torch.full((2,), 1.0 + dist.get_rank(group))).tolist()


def test_out_of_range_is_an_error_on_every_replica():
    assert processes().run(out_of_range, size=2) == [[3, 3]] * 2


# -- DTensors: each device has its rows of every micro-batch


def of_dtensors(group, placement, drop):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    feature = Feature(drop=drop, rows=((6, 6, 6, 6),) * 2)
    params = parameters(torch.float64)
    placed = {
        k: distribute_tensor(p, mesh, [Shard(0) if placement == "shard" else Replicate()]) for k, p in params.items()
    }
    whole = [torch.cat(parts) for parts in zip(*(microbatches(feature, 0, r)[0] for r in range(2)), strict=True)]
    whole[3][1] = 1  # of the first of two micro-batches, on the first device
    loss = lambda params, x, y, tokens, flags: (
        ((torch.tanh(x @ params["a"] + params["b"]) @ params["c"] - y) ** 2).sum(1).mean()
        + torch.where(flags.max() == 1, torch.inf, 0.0)
    )
    step = funcga.accumulate(funcga.value_and_grad(loss), 2, drop=drop)
    value, grads = step(placed, *(distribute_tensor(leaf, mesh, [Shard(0)]) for leaf in whole))
    kept = [3, 4, 5, 9, 10, 11] if drop == "microbatch" else range(12)
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    truth = loss(leaves, *(leaf[list(kept)] for leaf in whole[:3]), torch.zeros(1))
    truth.backward()
    scale = 0.0 if drop == "window" else 1.0
    assert all(grads[k].placements == p.placements for k, p in placed.items())
    pairs = [(value, truth), *((grads[k], leaves[k].grad) for k in "abc")]
    return max((a.full_tensor() - scale * b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(("placement", "drop"), [("replicate", "microbatch"), ("shard", "window")])
def test_dtensors_are_dropped_together(placement, drop):
    assert max(processes().run(of_dtensors, placement, drop, size=2)) <= 1e-12


# -- a replica without rows, and state


def without_rows(group):
    gradient = lambda w, seen, x: (w * x.sum(), seen + x.sum())
    options = {"fold": (funcga.sum(), funcga.carry()), "in_axes": (None, funcga.CARRY, 0), "across": group}
    step, came_in = funcga.accumulate(gradient, 2, drop="window", **options), torch.tensor(7.0, requires_grad=True)
    x = torch.full((0 if dist.get_rank(group) else 4,), torch.nan)
    value, seen = step(torch.ones(()), came_in, x)
    return float(value), float(seen), seen.requires_grad


def test_state_comes_back_as_it_came_in_on_a_replica_without_rows():
    assert processes().run(without_rows, size=2) == [(0, 7, False)] * 2
