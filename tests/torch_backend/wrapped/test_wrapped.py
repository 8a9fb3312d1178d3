"""Wrapped modules are driven as they want to be, and what comes out is the gradient of the whole batch on one device."""

import itertools
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcga
from tests.processes import Failed, processes
from torch_backend import module_value_and_grad

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-13}
# for each rank the micro-batches of one window, as (rows, tokens that count in each row); ragged in every way
WINDOWS = {
    1: [[(3, 5)], [(2, 1)], [(1, 4)], [(5, 2)]],
    2: [[(3, 5), (1, 2)], [(2, 1), (4, 3)], [(1, 4), (2, 2)], [(5, 2), (1, 1)]],
    3: [[(3, 5), (1, 2), (2, 4)], [(2, 1), (4, 3), (1, 5)], [(1, 4), (2, 2), (2, 1)], [(5, 2), (1, 1), (3, 3)]],
}


def made(dtype=torch.float32):
    """The same module everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6, 3), nn.Tanh()
    ).to(dtype)


def ddp(group, module, **options):
    return nn.parallel.DistributedDataParallel(module, process_group=group, **options)


def ddp_views(group, module):
    return ddp(group, module, gradient_as_bucket_view=True)


def ddp_unused(group, module):
    return ddp(group, module, find_unused_parameters=True)


def fsdp1(group, module, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        module, process_group=group, device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **{"use_orig_params": True, **options}
    )  # fmt: skip


def fsdp1_flat(group, module):
    return fsdp1(group, module, use_orig_params=False)


def mesh_of(group, shape=None):
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.tensor(dist.get_process_group_ranks(group))
    names = ("outer", "inner")
    return (
        DeviceMesh.from_group(group, "cpu")
        if shape is None
        else DeviceMesh("cpu", ranks.reshape(shape), mesh_dim_names=names)
    )


def fsdp2(group, module, mesh=None, **options):
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(group) if mesh is None else mesh
    fully_shard(module[2], mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def replicated(group, module):
    from torch.distributed._composable.replicate import replicate

    return replicate(module, process_group=group)


def replicated_by_fsdp(group, module):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, mesh=mesh_of(group))


WRAPPERS = {
    f.__name__: f for f in (ddp, ddp_views, ddp_unused, fsdp1, fsdp1_flat, fsdp2, replicated, replicated_by_fsdp)
}


def batches(window, rank, dtype):
    """The micro-batches of a rank: x, y and a mask of the tokens that count."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for rows, tokens in WINDOWS[window][rank]:
        x = torch.randn(rows, 5, 4, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randn(rows, 5, 3, generator=generator, dtype=torch.float64).to(dtype)
        found.append((x, y, (torch.arange(5) < tokens).expand(rows, 5)))
    return found


def loss_of(module, x, y, mask):
    """The mean over the tokens that count."""
    return ((module(x) - y) ** 2).mean(-1)[mask].mean()


def count(x, y, mask):
    return mask.sum()


def whole(window, dtype, size, loss_fn=loss_of):
    """The value and gradients of all ranks' batches at once, on one device."""
    module = made(dtype)
    x, y, mask = (
        torch.cat(parts) for parts in zip(*[b for r in range(size) for b in batches(window, r, dtype)], strict=True)
    )
    loss = loss_fn(module, x, y, mask)
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


@torch.no_grad()
def full(module, grads):
    """The gradients as they are on one device, in the order of the module's parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(module, FullyShardedDataParallel):
        return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads.values()]
    own = dict(module.named_parameters())
    before = {name: p.clone() for name, p in own.items()}
    for name, p in own.items():
        p.copy_(grads[name])
    with FullyShardedDataParallel.summon_full_params(module):
        found = [p.clone() for p in module.parameters()]
    for name, p in own.items():
        p.copy_(before[name])
    return found


def difference(left, right):
    scale = max(r.abs().max().item() for r in right)
    assert all(a.isfinite().all() for a in left)
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True)) / scale


def errors(module, result, value, expected):
    """How far a result is from what is expected, relatively: of the value and of the gradients."""
    assert result[0].isfinite()
    return abs(result[0] - value).item() / value.item(), difference(full(module, result[1]), expected)


def worst(function, *args, size=2):
    """The largest of all the errors that a function returns on any rank."""
    largest = lambda found: max(map(largest, found)) if isinstance(found, list | tuple) else found
    return largest(processes().run(function, *args, size=size))


# every wrapper, and two in the narrower dtype
KINDS = [*((wrapper, torch.float64) for wrapper in WRAPPERS), ("ddp", torch.float32), ("fsdp2", torch.float32)]


def equal_to_the_whole_batch(group, wrapper, dtype):
    module = WRAPPERS[wrapper](group, made(dtype))
    found = []
    for window in WINDOWS:
        value, expected = whole(window, dtype, group.size())
        own = batches(window, group.rank(), dtype)
        for sync in ("last", "every"):
            f = module_value_and_grad(module, loss_of, sync=sync)
            found.append(errors(module, funcga.stream(f, weight=count)(own), value, expected))
            if sync == "last":  # again, with what was worked out before
                found.append(errors(module, funcga.stream(f, weight=count)(iter(own)), value, expected))
    assert all(p.grad is None for p in module.parameters())
    return found


@pytest.mark.parametrize(("wrapper", "dtype"), KINDS)
def test_a_stream_is_equal_to_the_whole_batch(wrapper, dtype):
    assert worst(equal_to_the_whole_batch, wrapper, dtype) <= LIMITS[dtype]


def rows_of(rank, dtype, rows=None):
    """A batch of 7 rows on one rank and 4 on the other, or so."""
    generator = torch.Generator().manual_seed(rank)
    rows = 7 - 3 * rank % 5 if rows is None else rows
    pair = (torch.randn(rows, 4, generator=generator, dtype=torch.float64), torch.randn(rows, 3, generator=generator))
    return tuple(t.to(dtype) for t in pair)


def mean_square(module, x, y):
    return ((module(x) - y) ** 2).mean()


def whole_rows(size, dtype, loss_fn=mean_square, rows=None):
    module = made(dtype)
    x, y = (torch.cat(parts) for parts in zip(*[rows_of(r, dtype, rows) for r in range(size)], strict=True))
    loss = loss_fn(module, x, y)
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters()]


def every_n_is_equal(group, wrapper, dtype):
    module = WRAPPERS[wrapper](group, made(dtype))
    f = module_value_and_grad(module, mean_square)
    value, expected = whole_rows(group.size(), dtype)
    own = rows_of(group.rank(), dtype)
    found = [errors(module, funcga.accumulate(f, n)(*own), value, expected) for n in (1, 2, 3)]
    found.append(errors(module, funcga.accumulate(f, 2, in_axes=(0, 0))(*own), value, expected))
    return [*found, errors(module, f(*own), value, expected)]


@pytest.mark.parametrize(("wrapper", "dtype"), KINDS)
def test_accumulate_is_equal_for_every_n_and_called_alone(wrapper, dtype):
    assert worst(every_n_is_equal, wrapper, dtype) <= LIMITS[dtype]


# Meshes of two dimensions


def hybrid(group, module, ranks=None):
    from torch.distributed.fsdp import ShardingStrategy

    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    own = [pair for pair in pairs if pair is not dist.GroupMember.NON_GROUP_MEMBER]
    inner, outer = own
    return fsdp1((inner, outer), module, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def hsdp(group, module):
    return fsdp2(group, module, mesh=mesh_of(group, (2, 2)))


def two_dimensions(group, wrapper, sync):
    dtype = torch.float64
    module = {"hybrid": hybrid, "hsdp": hsdp}[wrapper](group, made(dtype))
    f = module_value_and_grad(module, loss_of, sync=sync)
    found = []
    for window in WINDOWS:
        value, expected = whole(window, dtype, group.size())
        step = funcga.stream(f, weight=count, across=group)
        found.append(errors(module, step(batches(window, group.rank(), dtype)), value, expected))
    return found


@pytest.mark.parametrize(
    ("wrapper", "sync"),
    [("hybrid", "last"), ("hybrid", "every"), ("hsdp", "last"), ("hsdp", "every"), ("hsdp", "outer")],
)
def test_meshes_of_two_dimensions(wrapper, sync):
    assert worst(two_dimensions, wrapper, sync, size=4) <= LIMITS[torch.float64]


# How often they synchronise


class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    """The names of the collectives that were called, as often as they were."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def reductions(group, wrapper, sync, n):
    module = {**WRAPPERS, "hsdp": hsdp}[wrapper](group, made())
    step = funcga.accumulate(module_value_and_grad(module, mean_square, sync=sync), n)
    own = rows_of(group.rank(), torch.float32)
    step(*own)  # the first builds buckets
    with Collectives() as counted:
        step(*own)
    names = [name for name in counted.names if "reduce" in name or "numbers" in name]
    return {name: names.count(name) for name in names}


# collectives of one synchronisation: DDP has one bucket, and each of two modules is wrapped by FSDP
ONCE = {
    "ddp": {"allreduce_": 1},
    "ddp_views": {"allreduce_": 1},
    "replicated": {"allreduce_": 1},
    "fsdp1": {"_reduce_scatter_base_": 2},
    "fsdp2": {"_reduce_scatter_base_": 2},
    "replicated_by_fsdp": {"allreduce_": 1},
}


@pytest.mark.parametrize("wrapper", ONCE)
def test_one_synchronisation_a_window_or_one_a_microbatch(wrapper):
    for sync, times in (("last", 1), ("every", 3)):
        for found in processes().run(reductions, wrapper, sync, 3, size=2):
            assert found == {name: k * times for name, k in ONCE[wrapper].items()}  # the loss and counts are gathered


@pytest.mark.parametrize(("sync", "scattered", "reduced"), [("last", 2, 2), ("outer", 6, 2), ("every", 6, 6)])
def test_the_outer_mesh_is_reduced_over_once(sync, scattered, reduced):
    for found in processes().run(reductions, "hsdp", sync, 3, size=4):
        assert found == {"_reduce_scatter_base_": scattered, "allreduce_": reduced}


# Nothing outside is changed


def flags(module):
    """What the wrappers keep of how they are driven."""
    found = []
    for m in module.modules():
        found += [getattr(m, name, None) for name in ("require_backward_grad_sync", "_sync_gradients")]
        if hasattr(m, "_get_fsdp_state"):
            state = m._get_fsdp_state()
            found += [(g.reduce_grads, g.all_reduce_grads) for g in state._fsdp_param_groups]
            found.append(state._state_ctx.is_last_backward)
    return found


def set_otherwise(module):
    """Flags that are not the default, as a user may leave them."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(False)
    if hasattr(module, "set_is_last_backward"):
        module.set_is_last_backward(False)


def local(tensors):
    """Copies of the shards on this rank."""
    return [getattr(tensor, "_local_tensor", tensor).clone() for tensor in tensors]


def results_of_two_calls(group, wrapper):
    module = WRAPPERS[wrapper](group, made())
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 3)
    x, y = rows_of(group.rank(), torch.float32)
    value, grads = step(x, y)
    before, params = local(grads.values()), dict(module.named_parameters())
    ours = [torch.ones_like(p) for p in params.values()]
    for p, own in zip(params.values(), ours, strict=True):
        p.grad = own  # the user's, which stays
    set_otherwise(module)
    flagged = flags(module)
    step(10 * x, y)
    kept = all(p.grad is own for p, own in zip(params.values(), ours, strict=True))
    kept = kept and all((own == 1).all() for own in local(ours))
    same = all(map(torch.equal, local(grads.values()), before))
    detached = not any(g.requires_grad for g in grads.values()) and not value.requires_grad
    return same, kept, detached, list(grads) == list(params), flags(module) == flagged


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_results_are_kept_and_so_are_grads_and_flags(wrapper):
    for found in processes().run(results_of_two_calls, wrapper, size=2):
        assert found == (True,) * 5


class Broken(Exception):
    pass


class BreaksBackward(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Broken


def after_exceptions(group, wrapper):
    """The errors of a window after one that has failed: before the forward pass, after it, or in the backward pass."""
    x, y = rows_of(group.rank(), torch.float32)
    value, expected = whole_rows(group.size(), torch.float32)
    found = []
    for where, k in (("before", 2), ("after", 3), ("backward", 2), ("backward", 3)):
        module, calls = WRAPPERS[wrapper](group, made()), [0] * 10  # which do not fail

        def loss_fn(module, x, y, where=where, k=k, calls=calls):
            calls.append(1)
            if len(calls) == k and where == "before":
                raise Broken
            out = module(x)
            if len(calls) == k and where == "after":
                raise Broken
            out = BreaksBackward.apply(out) if len(calls) == k and where == "backward" else out
            return ((out - y) ** 2).mean()

        step = funcga.accumulate(module_value_and_grad(module, loss_fn), 3)
        step(x, y)
        calls.clear()
        flagged = flags(module)
        with pytest.raises(Broken):
            step(x, y)
        assert flags(module) == flagged
        assert all(p.grad is None for p in module.parameters())
        found.append(errors(module, step(x, y), value, expected))
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_exception_leaves_nothing_behind(wrapper):
    assert worst(after_exceptions, wrapper) <= 1e-6


# Parameters that not every micro-batch uses


class Sometimes(nn.Module):
    """A part that only inputs with a mark go through."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.part, self.never = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)

    def forward(self, x):
        out = torch.tanh(self.always(x))
        return self.part(out) if x[0, 0] > 0 else out


def sometimes_batches(rank, marks):
    generator = torch.Generator().manual_seed(rank)
    found = []
    for mark in marks:
        x, y = torch.randn(2, 4, generator=generator), torch.randn(2, 3, generator=generator)
        x[:, 0] = mark
        found.append((x, y))
    return found


def sometimes(group, wrapper, marks, sync="last"):
    """The errors of the gradients where the part is used in the marked micro-batches."""
    module = Sometimes()
    if wrapper in ("ddp_unused", "ddp"):
        module.never.requires_grad_(wrapper == "ddp_unused")
        module = WRAPPERS[wrapper](group, module)
    elif wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(module.part, mesh=mesh_of(group))
        fully_shard(module, mesh=mesh_of(group))
    else:
        module = fsdp1(group, module)
    f = module_value_and_grad(module, mean_square, sync=sync)
    _, grads = funcga.stream(f)(sometimes_batches(group.rank(), marks))
    plain = Sometimes()
    for rank in range(group.size()):
        for x, y in sometimes_batches(rank, marks):
            (mean_square(plain, x, y) / group.size() / len(marks)).backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
    names = [name.replace("module.", "").replace("_fsdp_wrapped_", "") for name in grads]
    return difference(full(module, grads), [expected[name] for name in names])


@pytest.mark.parametrize(("wrapper", "marks", "sync"), [
    ("ddp_unused", (1, -1), "last"), ("ddp_unused", (-1, 1), "last"), ("ddp_unused", (-1, -1), "last"),
    ("ddp", (-1, 1), "last"), ("fsdp2", (1, -1), "last"), ("fsdp2", (-1, 1), "last"), ("fsdp1", (-1, 1), "last"),
    ("fsdp1", (1, -1), "every"),
])  # fmt: skip
def test_parameters_that_not_every_microbatch_uses(wrapper, marks, sync):
    assert worst(sometimes, wrapper, marks, sync) <= 1e-6


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        (
            "ddp",
            "the last micro-batch has no gradient for `module.part.0.weight`, `module.part.0.bias`, so that "
            "DistributedDataParallel did not synchronise, nor what earlier micro-batches had summed: it waits for every "
            "parameter in that backward pass. Use all parameters in every micro-batch, or wrap the module with "
            "find_unused_parameters=True.",
        ),
        (
            "fsdp1",
            "the last micro-batch does not use all of the module that is wrapped by FullyShardedDataParallel, and it "
            "synchronises only what that backward pass reaches. Use all wrapped parts in every micro-batch, or "
            'synchronise every one: module_value_and_grad(module, loss_fn, sync="every").',
        ),
    ],
)
def test_what_the_last_microbatch_does_not_synchronise_is_refused(wrapper, text):
    refused(text, sometimes, wrapper, (1, -1))


def refused(text, function, *args, size=2):
    with pytest.raises(Failed) as failed:
        processes().run(function, *args, size=size)
    assert failed.value.errors == [("FuncgaError", text)] * size


# Weights and folds


class Unseen(torch.Tensor):
    """A weight that the host does not see, as one on a device."""


def nan_of_nothing(module, x, y, mask):
    """A mean that is NaN, and so is its gradient, where nothing counts."""
    return (((module(x) - y) ** 2).mean(-1) * mask).sum() / mask.sum()


def weighed(group, wrapper, kind):
    """Micro-batches of weight 0, the last one too, and on rank 1 no other."""
    module = WRAPPERS[wrapper](group, made(torch.float64))
    (x, y, mask), *_ = batches(1, 0, torch.float64)
    nothing = (x, y, torch.zeros_like(mask))
    own = [(x, y, mask), nothing] if group.rank() == 0 and kind != "all" else [nothing, nothing]
    seen = lambda x, y, mask: mask.sum()
    weight = seen if kind != "unseen" else lambda *batch: seen(*batch).as_subclass(Unseen)
    f = module_value_and_grad(module, nan_of_nothing)
    value, grads = funcga.stream(f, weight=weight)(own)
    plain = made(torch.float64)
    loss = nan_of_nothing(plain, x, y, mask)
    loss.backward()
    if kind == "all":
        return value.item(), max(g.abs().max().item() for g in full(module, grads))
    return abs(value - loss).item(), difference(full(module, grads), [p.grad for p in plain.parameters()])


def views_are_kept(group):
    """`.grad`s that are views of DDP's own buckets, as its backward passes leave them."""
    module = ddp(group, made(), gradient_as_bucket_view=True)
    step = funcga.stream(module_value_and_grad(module, loss_of), weight=count)
    own, found = batches(2, group.rank(), torch.float32), []
    for _ in range(3):
        module.zero_grad(set_to_none=True)
        loss_of(module, *own[0]).backward()
        before = [p.grad.clone() for p in module.parameters()]
        step(own)
        found.append(all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), before, strict=True)))
    return found


def test_grads_that_are_views_of_buckets_are_kept():
    assert processes().run(views_are_kept, size=2) == [[True] * 3] * 2


class Fails(Exception):
    pass


def begins_anew(group):
    """Uneven micro-batches, buffers, and an error on every replica; then all is as before."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    module, fails = ddp(group, net), []

    def loss(module, x):
        out = module(x)
        if fails:
            raise Fails
        return (out**2).mean()

    x = torch.randn(12, 4, dtype=torch.float64)[: 2 if group.rank() == 0 else 10]
    step = funcga.accumulate(module_value_and_grad(module, loss), microbatch_size=2)
    first = step(x)
    fails.append(True)
    with pytest.raises(Fails):
        step(x)
    fails.clear()
    return difference(step(x)[1].values(), first[1].values())


def test_buffers_are_synchronised_again_after_an_error():
    assert worst(begins_anew) <= 1e-13


def sparse(group):
    torch.manual_seed(0)
    module = ddp(group, nn.Sequential(nn.Embedding(6, 3, sparse=True)))
    rows = torch.tensor([[0, 1, 2, 1], [5, 5, 3, 0]])[group.rank()]
    step = funcga.accumulate(module_value_and_grad(module, lambda m, i: (m(i) ** 2).mean()), 2)
    plain = nn.Embedding(6, 3, _weight=module.module[0].weight.detach().clone())
    (plain(torch.tensor([0, 1, 2, 1, 5, 5, 3, 0])) ** 2).mean().backward()
    return difference(step(rows)[1].values(), [plain.weight.grad])


def test_sparse_gradients():
    assert worst(sparse) <= 1e-6


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_microbatch_without_weight_adds_nothing_not_even_nan(wrapper):
    for kind in ("seen", "unseen", "all"):
        assert worst(weighed, wrapper, kind) <= 1e-13


def by_steps():
    return funcga.Fold(funcga.reducers.weighted, funcga.normalizers.by_steps)


def aux_of(module, x, y):
    out = module(x)
    return ((out - y) ** 2).mean(), {
        "worst": (out - y).abs().max(),
        "rows": torch.tensor(len(x)),
        "count": len(x),
        "out": out,
        "none": None,
    }


AUX_FOLDS = {
    "worst": funcga.max(),
    "rows": funcga.sum(),
    "count": funcga.sum(),
    "out": funcga.concat(),
    "none": funcga.mean(),
}


def threaded(group):
    """A number that is threaded from one micro-batch to the next, and a keyword argument."""

    def loss_fn(module, count, x, y, *, factor):
        return factor * mean_square(module, x, y), count + len(x)

    module = WRAPPERS["ddp"](group, made())
    f = module_value_and_grad(module, loss_fn, has_aux=True)
    fold = ((funcga.mean(), funcga.carry()), funcga.mean())
    step = funcga.accumulate(f, 3, in_axes=(funcga.CARRY, 0, 0), fold=fold)
    (_, count), _ = step(torch.tensor(10), *rows_of(group.rank(), torch.float32, 5 + group.rank()), factor=1)
    streamed = funcga.stream(f, in_axes=(funcga.CARRY, 0, 0), fold=fold)
    (_, again), _ = streamed(torch.tensor(10), [rows_of(group.rank(), torch.float32)], factor=1)
    return count.item(), again.item()


def test_threaded_state_is_that_of_the_last_replica():
    assert processes().run(threaded, size=2) == [(16, 14)] * 2


# Precision


def half(group, wrapper, sync="last", dtype=torch.bfloat16, fold=None, n=2):
    """The relative error of a mean gradient, of a module that computes in 16 bits in some way."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    policies = {
        "fsdp2": lambda: fsdp2(
            group, made(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        ),
        "fsdp2 of 16 bits": lambda: fsdp2(
            group, made(dtype), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
        ),
        "fsdp2 reduces in 16 bits": lambda: fsdp2(group, made(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype)),
        "fsdp1": lambda: fsdp1(
            group, made(), mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        ),
        "ddp": lambda: ddp(group, made(dtype)),
    }
    module = policies[wrapper]()
    f = module_value_and_grad(module, lambda module, x, y: ((module(x).float() - y) ** 2).mean(), sync=sync)
    x, y = rows_of(group.rank(), dtype if "16" in wrapper or wrapper == "ddp" else torch.float32)
    step = funcga.accumulate(f, n, fold=funcga.mean() if fold is None else funcga.mean(dtype=fold))
    value, grads = step(x, y.float())
    loss, expected = whole_rows(group.size(), torch.float32)
    error = max(abs(value - loss).item(), difference([g.float() for g in full(module, grads)], expected))
    return error, [str(g.dtype) for g in grads.values()]


@pytest.mark.parametrize(
    ("wrapper", "sync", "fold", "dtype"),
    [
        ("fsdp2", "last", None, "torch.float32"),
        ("fsdp2", "every", None, "torch.float32"),
        ("fsdp2 of 16 bits", "last", None, "torch.bfloat16"),
        ("fsdp2 reduces in 16 bits", "every", None, "torch.float32"),
        ("fsdp2 reduces in 16 bits", "last", "bfloat16", "torch.float32"),
        ("fsdp1", "every", None, "torch.float32"),
        ("fsdp1", "last", "bfloat16", "torch.float32"),
        ("ddp", "last", "bfloat16", "torch.bfloat16"),
    ],
)
def test_modules_that_compute_in_16_bits(wrapper, sync, fold, dtype):
    for error, found in processes().run(half, wrapper, sync, torch.bfloat16, fold, size=2):
        assert error <= 0.02
        assert set(found) == {dtype}


def many_small(group, dtype):
    """The error of 256 gradients alike, summed in the dtype that fully_shard reduces in."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = nn.Linear(1, 1, bias=False)
    fully_shard(
        module, mesh=mesh_of(group), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
    )
    f = module_value_and_grad(module, lambda module, x: module(x).float().sum())
    fold = funcga.sum(dtype="bfloat16" if dtype == torch.bfloat16 else None)
    _, grads = funcga.accumulate(f, 257, fold=fold)(torch.ones(257, 1))
    return grads["weight"].full_tensor().item()


def test_fully_shard_sums_in_its_reduce_dtype():
    assert processes().run(many_small, torch.float32, size=2) == [2 * 257] * 2
    assert processes().run(many_small, torch.bfloat16, size=2) == [2 * 256] * 2  # one more is lost


NARROW = "has gradients that {} sums in bfloat16 over the micro-batches, and the fold promises float32. {} Or say that bfloat16 is meant: funcga.mean(dtype='bfloat16')."


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        ("ddp", "`module.0.weight` " + NARROW.format("DistributedDataParallel", (
            "Keep the parameters in float32, with torch.autocast in loss_fn; or use fully_shard with "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32); or let funcga reduce: accumulate(funcga.value_and_grad("
            "torch_backend.pure_loss(module, loss_fn)), n, across=group), with the module that was wrapped."))),
        ("fsdp1", "`_fsdp_wrapped_module.0.weight` " + NARROW.format("FullyShardedDataParallel", (
            "Keep the parameters in float32 and write module_value_and_grad(module, loss_fn, sync=\"every\"), which "
            "sums shards in their dtype; or use fully_shard with MixedPrecisionPolicy(reduce_dtype=torch.float32)."))),
        ("fsdp2 reduces in 16 bits", "`0.weight` " + NARROW.format("fully_shard", (
            "Say that it sums in float32: fully_shard(module, mp_policy=MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16, reduce_dtype=torch.float32))."))),
    ],
)  # fmt: skip
def test_sums_of_16_bits_are_refused(wrapper, text):
    for n in (1, 2):
        refused(text, half, wrapper, "last", torch.bfloat16, None, n)


def half_loss(group, unseen):
    f = module_value_and_grad(ddp(group, made(torch.bfloat16)), mean_square)
    weight = lambda x, y: torch.tensor(257).as_subclass(Unseen if unseen else torch.Tensor)
    x, y = rows_of(0, torch.bfloat16)
    funcga.accumulate(f, 2, fold=funcga.mean(dtype="bfloat16"), weight=weight)(x, y)


@pytest.mark.parametrize(("unseen", "which"), [(False, "the weight 257"), (True, "a weight that is on the device")])
def test_a_loss_that_cannot_hold_the_weight_is_refused(unseen, which):
    text = (
        f"the loss is bfloat16[], which may not hold {which}. Return a loss in float32, computed from outputs in "
        f"float32: F.cross_entropy(module(x).float(), y)."
    )
    refused(text, half_loss, unseen, size=1)


# What the wrappers offer besides


def hooked(group):
    """A communication hook sees the buckets of the one synchronisation, and the result is as without it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    seen = []

    def hook(state, bucket):
        seen.append(1)
        return allreduce_hook(state, bucket)

    module = WRAPPERS["ddp"](group, made())
    module.register_comm_hook(group, hook)
    result = funcga.accumulate(module_value_and_grad(module, mean_square), 3)(*rows_of(group.rank(), torch.float32))
    return len(seen), max(errors(module, result, *whole_rows(2, torch.float32)))


def test_communication_hooks_go_on_working():
    for seen, error in processes().run(hooked, size=2):
        assert seen == 1
        assert error <= 1e-6


def static(group, sync):
    module = ddp(group, made(), static_graph=True)
    step = funcga.accumulate(module_value_and_grad(module, mean_square, sync=sync), 3)
    own, expected = rows_of(group.rank(), torch.float32), whole_rows(2, torch.float32)
    return max(max(errors(module, step(*own), *expected)) for _ in range(3))


def test_a_static_graph_synchronises_every_microbatch():
    assert worst(static, "every") <= 1e-6
    refused(
        "the module is wrapped by DistributedDataParallel with static_graph=True, which fails an internal assertion of "
        "torch when a backward pass does not synchronise. Leave static_graph out, or synchronise every micro-batch: "
        'module_value_and_grad(module, loss_fn, sync="every").',
        static, "last",
    )  # fmt: skip


def normalised(group):
    """BatchNorm's statistics after a window, and after the same loop written by hand."""

    def module():
        torch.manual_seed(0)
        return ddp(group, nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))

    x, y = rows_of(group.rank(), torch.float32, 6)
    driven, looped = module(), module()
    for _ in range(2):
        funcga.accumulate(module_value_and_grad(driven, mean_square), 3)(x, y)
        for i, pair in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
            if i < 2:
                with looped.no_sync():
                    mean_square(looped, *pair).backward()
            else:
                mean_square(looped, *pair).backward()
    return [torch.equal(a, b) for a, b in zip(driven.buffers(), looped.buffers(), strict=True)]


def test_buffers_are_updated_as_in_the_loop_by_hand():
    for found in processes().run(normalised, size=2):
        assert all(found)


def left_unsharded(group):
    """An evaluation leaves fully_shard's root unsharded; and a factor of the user's own."""
    module = WRAPPERS["fsdp2"](group, made())
    for part in (module, module[2]):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # as gloo can do no more
    own = rows_of(group.rank(), torch.float32)
    with torch.no_grad():
        module(own[0])
    result = funcga.accumulate(module_value_and_grad(module, mean_square), 2)(*own)
    return max(errors(module, result, *whole_rows(2, torch.float32)))


def test_fully_shard_after_an_evaluation_and_with_a_factor_of_its_own():
    assert worst(left_unsharded) <= 1e-6


def inside(group):
    """A module of which all parts are wrapped, and a frozen one that is not."""
    module = nn.Sequential(ddp(group, made()[:2]), nn.Linear(8, 8).requires_grad_(False), ddp(group, made()[2:]))
    assert sum(p.requires_grad for p in module.parameters()) == 6
    _, grads = funcga.accumulate(module_value_and_grad(module, mean_square), 2)(*rows_of(group.rank(), torch.float32))
    frozen = module[1]
    plain = nn.Sequential(made()[:2], frozen, made()[2:])
    for rank in range(2):
        x, y = rows_of(rank, torch.float32)
        (mean_square(plain, x, y) * len(x) / 11).backward()
    return list(grads)[:1], difference(list(grads.values()), [p.grad for p in plain.parameters() if p.requires_grad])


def test_wrapped_parts_of_a_module_and_frozen_parameters():
    for names, error in processes().run(inside, size=2):
        assert names == ["0.module.0.weight"]
        assert error <= 1e-6


# What is refused


def build(group, what):
    """Makes a gradient function that is refused."""
    from torch.distributed.fsdp import fully_shard

    if what == "mixed":
        module = nn.Sequential(ddp(group, nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2), mesh=mesh_of(group)))
    elif what == "uncovered":
        module = nn.Sequential(ddp(group, nn.Linear(2, 2)), nn.Linear(2, 2))
    elif what == "ignored":
        module = nn.Linear(2, 2)
        module = fully_shard(module, mesh=mesh_of(group), ignored_params={module.bias})
    else:
        module = WRAPPERS[what](group, made())
    module_value_and_grad(module, mean_square, sync="outer" if what in WRAPPERS else "last")


OUTER = (
    'sync="outer" was asked of {}, which has no outer mesh to all-reduce over. It is for fully_shard with a mesh of two '
    'dimensions (HSDP). Write sync="last", to synchronise once, or sync="every".'
)
APART = (
    "`{}` is trained and is not among what {} reduces, as only other parts of the module are wrapped, or it was ignored: "
    "replicas would drift apart. Wrap the whole module, or freeze it: parameter.requires_grad_(False)."
)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("ddp", OUTER.format("DistributedDataParallel")),
        ("fsdp1", OUTER.format("FullyShardedDataParallel")),
        ("fsdp2", OUTER.format("fully_shard")),
        ("replicated", OUTER.format("replicate")),
        ("replicated_by_fsdp", OUTER.format("replicate")),
        ("uncovered", APART.format("1.weight", "DistributedDataParallel")),
        ("ignored", APART.format("bias", "fully_shard")),
        (
            "mixed",
            "parts of the module are wrapped by DistributedDataParallel and fully_shard, which reduce gradients in "
            "different ways. Wrap all of it in one of them.",
        ),
    ],
)
def test_modules_that_are_not_driven(what, text):
    refused(text, build, what)


def call(group, what):
    """Calls a function in a way that is refused."""
    module = WRAPPERS["ddp"](group, made())
    f = module_value_and_grad(module, mean_square)
    x, y = rows_of(group.rank(), torch.float32)
    if what == "max":
        funcga.accumulate(f, 2, fold=funcga.max())(x, y)
    elif what == "two kinds":
        folds = dict.fromkeys(dict(module.named_parameters()), funcga.mean())
        funcga.accumulate(f, 2, fold=(funcga.mean(), {**folds, "module.0.bias": funcga.sum()}))(x, y)
    elif what == "across":
        funcga.accumulate(f, 2, across=dist.group.WORLD)(x, y)
    elif what == "auto":
        funcga.accumulate(f, "auto")
    elif what == "empty":
        funcga.stream(f)([])
    elif what == "constant":
        funcga.accumulate(module_value_and_grad(module, lambda module, x, y: x.sum()), 2)(x, y)
    elif what == "vmap":
        torch.func.vmap(f)(x, y)


PURE = "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn))"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "max",
            "the gradients' fold is no sum, and a module's own gradients are only added, in the backward "
            "pass. Fold them with funcga.mean(), per_weight() or sum(), and only the value otherwise: "
            f"fold=(funcga.max(), funcga.mean()). For any other fold of gradients use {PURE}, with the module not "
            "wrapped.",
        ),
        (
            "two kinds",
            "some gradients are weighed, as by funcga.mean(), and others are not, as by funcga.sum(): a module's own "
            "gradients come from one backward pass with one weight. Give all of them one of the two.",
        ),
        (
            "across",
            "across= names the ranks [0, 1, 2, 3], and the module is wrapped by DistributedDataParallel, which reduces "
            "over the ranks [0, 1]. Leave across= out: the wrapper knows its replicas.",
        ),
        (
            "auto",
            'n="auto" was given, and the gradient is that of a module in DDP, replicate or fully_shard: a window is '
            "replayed when memory runs out, and the other replicas or stages would hang. Say how many: "
            "accumulate(gradient, n=8), or the n of a plan of one rank.",
        ),
        (
            "empty",
            "there is no micro-batch on this replica, and grad_fn is that of a wrapped module or of a pipeline, which "
            "the processes run together: without a micro-batch there is nothing to run it on. Give every replica a "
            "micro-batch, one of weight 0 if need be, or let funcga reduce, for which a replica may have none: "
            f"stream({PURE}, across=group), with the module that was wrapped.",
        ),
        (
            "constant",
            "the loss does not depend on any parameter, so there is no backward pass for DistributedDataParallel to "
            "synchronise in. Return a loss that is computed from module(x), 0 times that if need be.",
        ),
        (
            "vmap",
            "module_value_and_grad runs .backward() on the module's own parameters, which can be neither compiled nor "
            f"transformed by torch.func. Compile the module, or loss_fn; inside of a transform use {PURE}.",
        ),
    ],
)
def test_calls_that_are_refused(what, text):
    refused(text, call, what)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_window_is_not_compiled(fullgraph):
    step = funcga.accumulate(module_value_and_grad(made(), mean_square), 2)
    with pytest.raises((funcga.FuncgaError, torch._dynamo.exc.Unsupported)) as error:
        torch.compile(step, fullgraph=fullgraph, backend="eager")(*rows_of(0, torch.float32))
    assert "which can be neither compiled nor transformed" in str(error.value) or fullgraph
    torch._dynamo.reset()


def test_a_module_that_is_compiled_is_driven():
    module = torch.compile(made(torch.float64), backend="eager")
    result = funcga.accumulate(module_value_and_grad(module, mean_square), 3)(*rows_of(0, torch.float64))
    assert max(errors(module, result, *whole_rows(1, torch.float64))) <= 1e-13
    torch._dynamo.reset()


def test_arguments_that_are_refused():
    for args, options, text in (
        (
            (mean_square, made()),
            {},
            "module_value_and_grad was given function as its module. Pass the module, then the loss",
        ),
        ((made(), 3), {}, "loss_fn is 3, which is no function. Pass loss_fn"),
        (
            (made(), mean_square),
            {"sync": "never"},
            "sync is 'never'. Write sync=\"last\", to synchronise once a window",
        ),
        (
            (made(), mean_square),
            {"sync": "outer"},
            'sync="outer" was asked of a module that is not wrapped, which has no',
        ),
    ):
        with pytest.raises(funcga.FuncgaError) as error:
            module_value_and_grad(*args, **options)
        assert str(error.value).startswith(text)
    assert list(module_value_and_grad(made(), mean_square).__signature__.parameters) == ["x", "y"]
    with pytest.raises(funcga.FuncgaError, match="the stream is empty: there is no micro-batch"):
        funcga.stream(module_value_and_grad(made(), mean_square))([])


# Parts of one module that are wrapped unlike each other


def deep(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def parted(group, wrapper, ranks):
    """A module of two parts, the second one over other ranks, or over the same in another group."""
    other = [dist.new_group(pair) for pair in ranks][group.rank() % len(ranks)]
    module = deep()
    if wrapper == "ddp":
        module = nn.Sequential(ddp(group, module[:2]), ddp(other, module[2:]))
    elif wrapper == "fsdp1":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*NO_SHARD")  # as it says of one rank
            module = nn.Sequential(fsdp1(group, module[:2]), fsdp1(other, module[2:]))
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(module[2], mesh=mesh_of(other))
        fully_shard(module, mesh=mesh_of(group))
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 2)
    x, y = rows_of(group.rank(), torch.float64)
    _, grads = step(x, y)
    return difference(full(module, grads), whole_of(deep(), 2))


def whole_of(module, size, loss_fn=mean_square, cut=lambda rank, x: x):
    """The gradients of the rows of all ranks at once, on one device."""
    parts = [[cut(rank, t) for t in rows_of(rank, torch.float64)] for rank in range(size)]
    loss_fn(module, *map(torch.cat, zip(*parts, strict=True))).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_parts_in_different_groups_of_the_same_ranks(wrapper):
    assert worst(parted, wrapper, [[0, 1]]) <= 1e-13


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_parts_over_different_replicas_are_refused(wrapper):
    with pytest.raises(Failed) as failed:
        processes(2).run(parted, wrapper, [[0], [1]])
    name = {"ddp": "DistributedDataParallel", "fsdp1": "FullyShardedDataParallel", "fsdp2": "fully_shard"}[wrapper]
    for rank, (kind, text) in enumerate(failed.value.errors):
        ranks = ["[0, 1]", f"[{rank}]"]
        first, second = ranks if f"ranks {ranks[0]} and" in text else ranks[::-1]
        assert (kind, text) == (
            "FuncgaError",
            f"parts of the module are wrapped by {name} over different replicas, the ranks {first} and {second}, so "
            f"there is no one set of replicas to weigh micro-batches over. Give every part the same process group or "
            f"mesh; or let funcga reduce: accumulate({PURE}, n, across=group), with the module that was wrapped.",
        )


STOCK = {"mean": funcga.mean(), "sum": funcga.sum()}


def divided(group, sync, fold):
    from torch.distributed.fsdp import fully_shard

    fold = STOCK[fold]
    module, found = deep(), []
    for part in (module[0], module[2], module):
        fully_shard(part, mesh=mesh_of(group)).set_force_sum_reduction_for_comms(True)
    x, y = rows_of(group.rank(), torch.float64)
    step = funcga.accumulate(module_value_and_grad(module, mean_square, sync=sync), 2, fold=fold)
    for factor in (None, 1.0, 3.0):  # of one part alone
        if factor is not None:
            module[2].set_gradient_divide_factor(factor)
        found.append(local(step(x, y)[1].values()))
    whole = local(
        funcga.accumulate(module_value_and_grad(fsdp2(group, deep()), mean_square), 2, fold=fold)(x, y)[1].values()
    )
    return max(difference(each, whole) for each in found)


@pytest.mark.parametrize(("sync", "fold"), [("last", "mean"), ("every", "sum")])
def test_a_part_that_divides_by_a_factor_of_its_own(sync, fold):
    assert worst(divided, sync, fold) <= 1e-13


def nested_half(group, wrapper):
    """One part of the module reduces in 16 bits, and the whole of it does not."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

    module = deep(torch.float32)
    if wrapper == "fsdp1":
        options = {"process_group": group, "device_id": torch.device("cpu"), "use_orig_params": True}
        policy = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        module[4] = FullyShardedDataParallel(module[4], mixed_precision=policy, **options)
        module = FullyShardedDataParallel(module, **options)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(module[2], mesh=mesh_of(group), mp_policy=policy)
        fully_shard(module, mesh=mesh_of(group))
    loss = lambda module, x, y: ((module(x).float() - y) ** 2).mean()
    funcga.accumulate(module_value_and_grad(module, loss), 2)(*rows_of(group.rank(), torch.float32))


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_a_part_that_sums_in_16_bits_is_refused(wrapper):
    with pytest.raises(Failed) as failed:
        processes(2).run(nested_half, wrapper)
    for kind, text in failed.value.errors:
        assert kind == "FuncgaError"
        assert {"2", "4"} & {*text.split("`")[1].split(".")}
        assert "sums in bfloat16 over the micro-batches, and the fold promises float32" in text


def folds_apart(group, wrapper):
    fold = by_steps() if group.rank() else funcga.mean()
    step = funcga.accumulate(
        module_value_and_grad(WRAPPERS[wrapper](group, made()), mean_square), 2, fold=(funcga.mean(), fold)
    )
    step(*rows_of(group.rank(), torch.float32))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_folds_of_gradients_that_differ_between_replicas_are_found_out(wrapper):
    with pytest.raises(Failed) as failed:
        processes(2).run(folds_apart, wrapper)
    for kind, text in failed.value.errors:
        assert kind == "FuncgaError"
        assert "reduced by the module's wrapper (weighted, by_weight) on rank 0 and" in text
        assert "reduced by the module's wrapper (weighted, by_steps) on rank 1" in text


# What does not belong to the module


class Trainer:
    """Where no closure shows what the loss uses."""

    def __init__(self, critic):
        self.critic, self.late = critic, False

    def adversarial(self, module, x, y):
        loss = mean_square(module, x, y)
        return loss + self.critic(module(x)).mean() if self.late else loss

    def features(self, module, x, y):
        return mean_square(module, self.critic(x), y)


def closing_over(group, wrapper, how):
    """Whether the `.grad`s of another module, and of a tensor, are as before, and the error of the gradients."""
    torch.manual_seed(1)
    shapes = (4, 4) if how == "features" else (3, 1)
    critic, temperature = nn.Linear(*shapes).double(), torch.ones((), dtype=torch.float64, requires_grad=True)
    trainer = Trainer(critic)
    losses = {
        "closure": lambda module, x, y: (critic(module(x)) * temperature).mean(),
        "adversarial": trainer.adversarial,
        "features": trainer.features,
    }
    module = deep() if wrapper == "plain" else WRAPPERS[wrapper](group, deep())
    loss_fn, kept = losses[how], []
    step = funcga.accumulate(module_value_and_grad(module, loss_fn), 3)
    for before in (None, torch.ones_like(critic.weight)):
        critic.weight.grad = before
        for trainer.late in (False, True, True):
            x, y = rows_of(group.rank(), torch.float64, 6)
            _, grads = step(x, y)
            kept.append(critic.weight.grad is before and critic.bias.grad is None and temperature.grad is None)
            kept.append(before is None or bool((before == 1).all()))
    size = 1 if wrapper == "plain" else 2
    plain, parts = deep(), [rows_of(r, torch.float64, 6) for r in (range(2) if size > 1 else [group.rank()])]
    loss_fn(plain, *map(torch.cat, zip(*parts, strict=True))).backward()
    return all(kept), difference(full(module, grads), [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_grads_of_what_the_loss_closes_over_stay(wrapper):
    for how in ("closure", "adversarial", "features"):
        for kept, error in processes().run(closing_over, wrapper, how, size=2):
            assert kept
            assert error <= 1e-12


def taking_turns(group, wrapper):
    """The `.grad`s of tensors of which each micro-batch uses another, in graphs of one form."""
    others = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(3)]
    in_turn = itertools.cycle(others)
    loss_fn = lambda module, x, y: mean_square(module, x, y) * next(in_turn)
    module = WRAPPERS[wrapper](group, deep())
    funcga.accumulate(module_value_and_grad(module, loss_fn), 3)(*rows_of(group.rank(), torch.float64, 6))
    return [other.grad is None for other in others]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_grads_stay_of_what_one_micro_batch_alone_uses(wrapper):
    assert processes(2).run(taking_turns, wrapper) == [[True] * 3] * 2


def unsynchronised(module):
    """A context in which backward passes do not synchronise, as users write it."""
    if hasattr(module, "no_sync"):
        return module.no_sync()
    module.set_requires_gradient_sync(False)
    return nullcontext()


def left_over(group, wrapper):
    """A backward pass of the user's that waits, a call, and the pass that ends the user's window."""
    module, x, y = WRAPPERS[wrapper](group, deep()), *rows_of(group.rank(), torch.float64)
    with unsynchronised(module):
        mean_square(module, x, y).backward()
    _, grads = funcga.accumulate(module_value_and_grad(module, mean_square), 2)(x, y)
    error = difference(full(module, grads), whole_of(deep(), group.size()))
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(True)
    mean_square(module, x, y).backward()
    own = {name: p.grad for name, p in module.named_parameters()}
    twice = deep()
    for rank in range(group.size()):
        for _ in range(2):
            (mean_square(twice, *rows_of(rank, torch.float64)) / group.size()).backward()
    return error, difference(full(module, own), [p.grad for p in twice.parameters()])


@pytest.mark.parametrize("wrapper", ["ddp", "ddp_views", "replicated", "fsdp2", "replicated_by_fsdp"])
def test_sums_of_the_user_that_wait_are_neither_folded_nor_lost(wrapper):
    assert worst(left_over, wrapper) <= 1e-12


@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp1_flat"])
def test_sums_that_fsdp1_keeps_unsharded_are_refused(wrapper):
    refused(
        "the module is wrapped by FullyShardedDataParallel and has gradients of a .backward() in no_sync(), which "
        "would be reduced along with those of this call. First end that window by a backward pass outside of "
        "no_sync(), or drop it: module.zero_grad().",
        left_over,
        wrapper,
    )


# Replicas with fewer rows than micro-batches


def few_rows(group, wrapper, sync, fold):
    """The errors where ranks have fewer rows than micro-batches, or none; an auxiliary maximum and rows too."""
    module = WRAPPERS[wrapper](group, deep())
    f = module_value_and_grad(module, aux_of, has_aux=True, sync=sync)
    step = funcga.accumulate(f, 4, fold=((STOCK[fold], AUX_FOLDS), STOCK[fold]))
    found = []
    for rows in ((3, 1), (3, 2), (7, 5), (0, 7), (7, 0), (0, 3)):
        parts = [[t[: rows[rank]] for t in rows_of(rank, torch.float64, 7)] for rank in range(2)]
        (_, extra), grads = step(*parts[group.rank()])
        plain = deep()
        x, y = map(torch.cat, zip(*parts, strict=True))
        if fold == "mean":
            mean_square(plain, x, y).backward()
        else:  # the sum of the micro-batches' means
            for a, b in parts:
                count = max(1, min(4, len(a)))
                for pair in zip(a.tensor_split(count), b.tensor_split(count), strict=True):
                    if len(pair[0]):
                        mean_square(plain, *pair).backward()
        assert extra["rows"] == extra["count"] == len(extra["out"]) == len(x)  # a Python number is summed, too
        assert extra["none"] is None
        found.append(difference(full(module, grads), [p.grad for p in plain.parameters()]))
        found.append((extra["worst"] - (plain(x) - y).abs().max()).abs().item())
    with pytest.raises(funcga.FuncgaError, match="no replica has a micro-batch to fold"):
        step(*[t[:0] for t in rows_of(0, torch.float64, 7)])
    return found


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_replica_with_fewer_rows_than_micro_batches_or_none(wrapper):
    assert worst(few_rows, wrapper, "last", "mean") <= 1e-12
    assert worst(few_rows, wrapper, "every", "sum") <= 1e-12


class Counts(nn.Module):
    """A layer that counts the rows that it has seen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.rows += len(x)
        return self.linear(x)


def rows_counted(group):
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(Counts(), mesh=mesh_of(group))
    funcga.accumulate(module_value_and_grad(module, mean_square), 4)(
        *rows_of(group.rank(), torch.float32, [8, 2][group.rank()])
    )
    return module.rows.item()


def test_a_replica_that_keeps_step_leaves_buffers_alone():
    assert processes(2).run(rows_counted) == [8, 2]


def no_rows_of_a_mesh(group):
    """The error where both replicas of one inner group, and then one of each, have no row."""
    module = fsdp2(group, made(torch.float64), mesh_of(group, (2, 2)))
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 2)
    found = []
    for empty in ((0, 1), (1, 2)):
        parts = [[t[: 0 if rank in empty else 5] for t in rows_of(rank, torch.float64, 5)] for rank in range(4)]
        _, grads = step(*parts[group.rank()])
        plain = made(torch.float64)
        mean_square(plain, *map(torch.cat, zip(*parts, strict=True))).backward()
        found.append(difference(full(module, grads), [p.grad for p in plain.parameters()]))
    return max(found)


def test_replicas_of_two_dimensions_without_any_row():
    assert max(processes().run(no_rows_of_a_mesh, size=4)) <= 1e-12


def no_rows_of_a_size(group, wrapper):
    """The error where rank 0 has no row, and micro-batches have a size and not a number."""
    module = WRAPPERS[wrapper](group, made(torch.float64))
    step = funcga.accumulate(module_value_and_grad(module, mean_square), microbatch_size=2)
    _, grads = step(*rows_of(1, torch.float64, [0, 7][group.rank()]))
    plain = made(torch.float64)
    mean_square(plain, *rows_of(1, torch.float64, 7)).backward()
    return difference(full(module, grads), [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_a_replica_without_any_row_need_not_know_how_many_microbatches_there_are(wrapper):
    assert worst(no_rows_of_a_size, wrapper) <= 1e-12


def empty_streams(group, wrapper):
    """What each rank sees in three windows, where the stream of rank 0 is empty in the second one."""
    module = WRAPPERS[wrapper](group, made(torch.float64))
    step = funcga.stream(module_value_and_grad(module, mean_square))
    found = []
    for window in range(3):
        parts = [rows_of(2 * window + rank, torch.float64, 3) for rank in range(2)]
        plain = made(torch.float64)
        mean_square(plain, *map(torch.cat, zip(*parts, strict=True))).backward()
        try:
            _, grads = step([] if window == 1 and group.rank() == 0 else [parts[group.rank()]])
            found.append(difference(full(module, grads), [p.grad for p in plain.parameters()]))
        except funcga.FuncgaError as error:
            found.append(str(error).split(",")[0])
    return found


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_an_empty_stream_ends_the_window_on_every_replica(wrapper):
    (*empty, last), (*other, last_of_other) = processes(2).run(empty_streams, wrapper)
    assert max(empty[0], other[0], last, last_of_other) <= 1e-12
    assert (empty[1], other[1]) == (
        "there is no micro-batch on this replica",
        "rank 0 has raised an error in this window",
    )


def wrapped_late(group, wrapper, called):
    """A step of a module, or of what wraps a part of it, that is made before the wrapper."""
    module = made()
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 2)
    if called:
        step(*rows_of(0, torch.float32))
    WRAPPERS[wrapper](group, module)
    step(*rows_of(0, torch.float32))


@pytest.mark.parametrize(
    ("wrapper", "name", "how", "called"),
    [("fsdp2", "FSDPSequential", "fully_shard", False), ("replicated", "DDPSequential", "replicate", True)],
)
def test_a_module_that_is_wrapped_after_its_step_was_made(wrapper, name, how, called):
    refused(
        f"module_value_and_grad was given a {name} that nothing wrapped, and now it is wrapped by {how}: the step "
        "would miss parameters, and would not reduce their gradients over the replicas. Wrap the module first, and "
        "then make the step: accumulate(module_value_and_grad(module, loss_fn), n).",
        wrapped_late,
        wrapper,
        called,
    )


def part_wrapped_late(group):
    from torch.distributed.fsdp import fully_shard

    module = made()
    step = funcga.stream(module_value_and_grad(module, mean_square))
    fully_shard(module[2], mesh=mesh_of(group))
    step([rows_of(0, torch.float32)])


def no_rows_and_state(group):
    """What is threaded, and the module's buffer, where the last rank has no row."""
    counting = ddp(group, Counts())
    f = module_value_and_grad(counting, lambda m, seen, x, y: (mean_square(m, x, y), seen + len(x)), has_aux=True)
    step = funcga.accumulate(
        f, 2, in_axes=(funcga.CARRY, 0, 0), fold=((funcga.mean(), funcga.carry()), funcga.mean())
    )  # fmt: skip
    (_, seen), _ = step(torch.zeros(()), *rows_of(0, torch.float32, [6, 0][group.rank()]))
    return seen.item(), counting.module.rows.item()


def test_a_replica_without_any_row_threads_the_state_of_the_others():
    first, second = processes(2).run(no_rows_and_state)
    assert first == (6.0, 6)
    assert second == (6.0, 0)


def synchronised_statistics(group):
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3)), mesh=mesh_of(group))
    funcga.accumulate(module_value_and_grad(module, mean_square), 2)(torch.zeros(0, 4), torch.zeros(0, 3))


def inside_of_join(group):
    from torch.distributed.algorithms.join import Join

    module = WRAPPERS["ddp"](group, made())
    step = funcga.accumulate(module_value_and_grad(module, mean_square), 2)
    with Join([module]):
        step(*rows_of(group.rank(), torch.float32))


def past_the_wrapper(group):
    """A loss that closes over the module which was wrapped, as the script had it before."""
    inside = made()
    step = funcga.accumulate(
        module_value_and_grad(WRAPPERS["ddp"](group, inside), lambda _, *b: mean_square(inside, *b)), 2
    )
    step(*rows_of(group.rank(), torch.float32))


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        (
            inside_of_join,
            "the module is wrapped by DistributedDataParallel and was called inside of Join, which answers for replicas "
            "that have run out of data, and knows nothing of the counts that funcga merges. Leave Join out: replicas may "
            "have different numbers of micro-batches, one of weight 0 where there is no more data.",
        ),
        (
            past_the_wrapper,
            "DistributedDataParallel has reduced nothing in the last backward pass: loss_fn does not call it, but perhaps "
            "the module inside of it, that it closes over, whose gradients would differ from replica to replica. Call the "
            "module that loss_fn is given: lambda module, x, y: F.mse_loss(module(x), y).",
        ),
        (
            part_wrapped_late,
            "module_value_and_grad was given a Sequential that nothing wrapped, and now the part `2` of it is wrapped by "
            "fully_shard: the step would miss parameters, and would not reduce their gradients over the replicas. Wrap "
            "the module first, and then make the step: accumulate(module_value_and_grad(module, loss_fn), n).",
        ),
        (
            synchronised_statistics,
            "this replica has fewer micro-batches than others, and the module has a SyncBatchNorm layer: rows that stand "
            "in for the missing ones would count in the statistics of all replicas. Give every replica equally many "
            "micro-batches.",
        ),
    ],
)  # fmt: skip
def test_what_would_go_wrong_is_refused(scenario, text):
    refused(text, scenario)


def test_a_loss_that_does_not_use_the_module():
    module, other, x = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1), torch.randn(4, 3)
    for loss in (lambda _, x: other(x).mean(), lambda module, x: module(x).detach().square().mean()):
        with pytest.raises(
            funcga.FuncgaError, match="the loss does not depend on any parameter of the module: nothing"
        ):
            funcga.accumulate(module_value_and_grad(module, loss), 2)(x)
    masked = module_value_and_grad(module, lambda module, x: x.sum() * 0)
    _, gradients = funcga.accumulate(masked, 2)(x)
    assert not any(gradient.any() for gradient in gradients.values())
